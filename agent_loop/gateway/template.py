"""Renders an agent's messages as tokens with the policy's chat template. No verl."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from agent_loop.gateway.wire import WireError
from agent_loop.turns.codec import HFCodec
from agent_loop.turns.native import messages_of, plain_word
from agent_loop.turns.tool_messages import CallId, CannotContinue, Render, ToolMessages, written

LONG_TOKEN = 16
"""Characters of a token in the mean of a text: no text has more. A longer conversation is refused
before it is rendered, which would take the event loop a second for each megabyte."""

MAX_TOOL_LISTS = 64
"""Tool lists whose glue is kept; an agent may send another list with each request."""

Messages = Sequence[Mapping[str, Any]]
Tools = list[dict[str, Any]]


class ChatTemplate:
    """The template of one policy.

    Args:
        tokens: messages and tools -> the tokens of a prompt; it may raise anything, because a
            template is a program.
        render: tools -> the same as text, for any messages.
        codec: of the tokenizer.
        marks: texts of the tokenizer's marks. Messages without any need no second look.
        most_tokens: of a prompt and its response.
    """

    def __init__(
        self,
        tokens: Callable[[list[dict[str, Any]], Tools | None], list[int]],
        render: Callable[[Tools], Render],
        codec: HFCodec,
        marks: Sequence[str],
        most_tokens: int,
    ) -> None:
        self._tokens, self._render, self._codec = tokens, render, codec
        self._marks = [msgspec.json.encode(text)[1:-1] for text in marks]
        self._most_characters = LONG_TOKEN * most_tokens
        self._glue: dict[bytes, ToolMessages] = {}

    def prompt_ids(self, messages: Messages, tools: Tools) -> list[int]:
        """The tokens of a whole prompt.

        Raises:
            WireError: the template refuses the messages.
        """
        self._check_length(messages, tools)
        try:
            shaped = [self._message(each, tools) for each in messages]
            if not self._may_have_marks([messages, tools]):
                return self._tokens(shaped, tools or None)
            tags = _Tags(self._codec, [shaped, tools])
            tagged = [tags.put(each, each["role"] not in ("user", "tool")) for each in shaped]
            tagged_tools = tags.put(tools, True)
            if not tags.has_put:
                return self._tokens(shaped, tools or None)
            text = self._render(tagged_tools)(tagged, True)
            return self._codec.encode_parts(tags.parts(text))
        except Exception as error:  # a template may raise anything
            own: BaseException = error
            while own.__context__ is not None:  # verl tries again with a message of its own
                own = own.__context__
            reason = " ".join(str(own).split())
            raise WireError(
                f"the chat template of the policy refuses these messages: {reason}",
                param="messages",
            ) from error

    def glue_ids(
        self, said: Mapping[str, Any], new: Messages, tools: Tools, last_id: int, thinks: bool
    ) -> list[int]:
        """The tokens of new messages after the model's message `said`, which ends with the token
        `last_id`, and the beginning of the model's next message.

        Args:
            thinks: whether the messages so far have a thought, which the template must keep.

        Raises:
            CannotContinue: the template cannot add these messages.
        """
        self._check_length(new, [])
        asked = said.get("tool_calls") or []
        results, others = new[: len(asked)], new[len(asked) :]
        roles = [message["role"] for message in (*results, *others)]
        if roles[: len(asked)] != ["tool"] * len(asked) or "tool" in roles[len(asked) :]:
            raise CannotContinue("the results are not those of the calls")
        if "assistant" in roles:
            raise CannotContinue("an assistant's message may have calls and reasoning")
        by_id = {call["id"]: call for call in asked}
        answered = [by_id.get(message.get("tool_call_id")) for message in results]
        if None in answered or len({call["id"] for call in answered if call}) < len(asked):
            answered = asked  # a client that renames ids: by their order
        calls = [
            CallId(plain_word(call["function"]["name"], "unknown"), plain_word(call["id"], "call"))
            for call in answered
            if call
        ]
        glue = self._glue_of(tools).glue(calls, roles[len(asked) :], thinks)
        contents = (message["content"] for message in new)
        texts = map(written, contents, glue.writings)
        return glue.around([self._codec.encode_plain(text) for text in texts], last_id)

    def _glue_of(self, tools: Tools) -> ToolMessages:
        key = msgspec.json.encode(tools)
        if key not in self._glue:
            if len(self._glue) >= MAX_TOOL_LISTS:
                self._glue.clear()
            self._glue[key] = messages_of(self._render(tools), self._codec)
        return self._glue[key]

    def _check_length(self, messages: Messages, tools: Tools) -> None:
        characters = len(msgspec.json.encode([messages, tools]))
        if characters > self._most_characters:
            raise WireError(
                f"messages and tools have {characters} bytes, more than "
                f"{self._most_characters}, which no context of the policy holds",
                code="context_length_exceeded",
                param="messages",
            )

    def _may_have_marks(self, value: Any) -> bool:
        """Whether a text in the value may have a mark: a tokenizer normalises what is not ASCII."""
        encoded = msgspec.json.encode(value)
        is_odd = bool(self._marks) and not encoded.isascii()
        return is_odd or any(mark in encoded for mark in self._marks)

    def _message(self, message: Mapping[str, Any], tools: Tools) -> dict[str, Any]:
        """A message whose calls have their arguments in the template's form."""
        own = dict(message)
        if not own.get("tool_calls"):
            return own
        as_text = self._glue_of(tools).takes_text_arguments
        calls = [call["function"] for call in own["tool_calls"]]
        arguments = [
            json.dumps(call["arguments"], ensure_ascii=False)
            if as_text and not isinstance(call["arguments"], str)
            else call["arguments"]
            for call in calls
        ]
        own["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": given}}
            for call, given in zip(own["tool_calls"], arguments, strict=True)
        ]
        return own


class _Tags:
    """Tags beside the marks that an agent's messages have, so that they are found in what the
    template makes of them.

    The marks of a user's message and of a result are all tagged, those of other texts if they are
    special: an agent may explain `<tool_call>` in a system message, or send back `<think>`. The tag
    is after a mark, or before one at the end of a text, because a template may look at how a text
    begins and ends, as Qwen3's does for `<tool_response>`. It has the length of the mark.

    Args:
        value: all messages and tools.
    """

    def __init__(self, codec: HFCodec, value: Any) -> None:
        self._codec, self.has_put = codec, False
        whole, self._tag = msgspec.json.encode(value).decode(), "qztagqz"
        while self._tag in whole:
            self._tag += "z"

    def put(self, value: Any, special_only: bool) -> Any:
        """The value with tags in all its texts."""
        if isinstance(value, str):
            return self._text(value, special_only)
        if isinstance(value, list):
            return [self.put(each, special_only) for each in value]
        if isinstance(value, Mapping):
            items = value.items()
            return {self.put(name, True): self.put(each, special_only) for name, each in items}
        return value

    def parts(self, text: str) -> list[str]:
        """A text without its tags; the second part, the fourth and so on are the tagged marks."""
        first, *rest = re.split(rf"{self._tag}(\d+)([ab])", text)
        parts = [first]
        for length, kind, after in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
            count = int(length)
            if kind == "a":  # the tag is after its mark
                before = parts.pop()
                parts += [before[:-count], before[-count:], after]
            else:
                parts += [after[:count], after[count:]]
        return parts

    def _text(self, text: str, special_only: bool) -> str:
        parts, done, last = list[str](), 0, len(text.rstrip())
        for start, end in self._codec.marks(text, special_only=special_only):
            parts += [text[done:start], text[start:end]]
            kind = "b" if end >= last else "a"
            parts.insert(len(parts) - (kind == "b"), f"{self._tag}{end - start}{kind}")
            done, self.has_put = end, True
        return "".join([*parts, text[done:]])
