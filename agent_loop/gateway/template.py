"""Renders an agent's messages as tokens with the policy's chat template. No verl."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from agent_loop.gateway.chains import Messages
from agent_loop.gateway.wire import WireError
from agent_loop.turns.call_formats.json_values import shown
from agent_loop.turns.codec import TokenCodec, as_plain_text
from agent_loop.turns.native import plain_word
from agent_loop.turns.tool_messages import CallId, CannotContinue, Render, ToolMessages, written

LONG_TOKEN = 16
"""Characters of a token in the mean of a text: no text has more. A longer conversation is refused
before it is rendered, which would take the event loop a second for each megabyte."""

MAX_TOOL_LISTS = 64
"""Tool lists whose glue is kept; an agent may send another list with each request."""

Tools = list[dict[str, Any]]


class ChatTemplate:
    """The template of one policy.

    Args:
        tokens: messages and tools -> the tokens of a prompt; it may raise anything, because a
            template is a program.
        render: tools -> the same as text, for any messages.
        codec: of the tokenizer.
        end_ids: tokens at which the engine stops.
        control: texts of the control tokens, which an agent's messages cannot bring in.
        most_tokens: of a prompt and its response.
    """

    def __init__(
        self,
        tokens: Callable[[list[dict[str, Any]], Tools | None], list[int]],
        render: Callable[[Tools], Render],
        codec: TokenCodec,
        end_ids: frozenset[int],
        control: Sequence[str],
        most_tokens: int,
    ) -> None:
        self._tokens, self._render, self._codec = tokens, render, codec
        self._end_ids, self._control = end_ids, control
        self._control_json = [msgspec.json.encode(text)[1:-1] for text in control]
        self._most_characters = LONG_TOKEN * most_tokens
        self._glue: dict[bytes, ToolMessages] = {}

    def prompt_ids(self, messages: Messages, tools: Tools) -> list[int]:
        """See `chains.PromptTemplate`."""
        self._check_length(messages, tools)
        try:
            plain = [self._message(each, tools) for each in messages]
            return self._tokens(plain, self._without_control(tools) or None)
        except Exception as error:  # a template may raise anything
            own: BaseException = error
            while own.__context__ is not None:  # verl tries again with a message of its own
                own = own.__context__
            reason = " ".join(str(own).split())
            raise WireError(
                f"the chat template of the policy refuses these messages: {reason}"
                f"{_text_arguments(messages)}",
                param="messages",
            ) from error

    def glue_ids(
        self, said: Mapping[str, Any], new: Messages, tools: Tools, last_id: int, thinks: bool
    ) -> list[int]:
        """See `chains.PromptTemplate`."""
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
        ids = [] if last_id == glue.end_id else [glue.end_id]
        ids += glue.pieces[0]
        for message, writing, piece in zip(new, glue.writings, glue.pieces[1:], strict=True):
            ids += self._codec.encode_plain(written(message["content"], writing))
            ids += piece
        return ids

    def _glue_of(self, tools: Tools) -> ToolMessages:
        key = msgspec.json.encode(tools)
        if key not in self._glue:
            if len(self._glue) >= MAX_TOOL_LISTS:
                self._glue.clear()
            render = self._render(self._without_control(tools))
            self._glue[key] = ToolMessages(render, self._codec.encode, self._end_ids)
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

    def _without_control(self, value: Any) -> Any:
        """The value with no text of a control token in any of its texts."""
        encoded = msgspec.json.encode(value)  # looking through it is faster than through the value
        return self._plain(value) if any(text in encoded for text in self._control_json) else value

    def _plain(self, value: Any) -> Any:
        if isinstance(value, str):
            return as_plain_text(value, self._control)
        if isinstance(value, Mapping):
            return {self._plain(name): self._plain(each) for name, each in value.items()}
        return [self._plain(each) for each in value] if isinstance(value, list) else value

    def _message(self, message: Mapping[str, Any], tools: Tools) -> dict[str, Any]:
        """A message without control tokens, whose calls have their arguments in the template's
        form."""
        own = self._without_control(message)
        if not own.get("tool_calls"):
            return dict(own)
        own = dict(own)
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


def _text_arguments(messages: Messages) -> str:
    """Names the calls whose arguments are no JSON object, which many templates refuse."""
    called = [call["function"] for each in messages for call in each.get("tool_calls") or ()]
    odd = [f"{each['name']}({shown(each['arguments'])})" for each in called
           if isinstance(each["arguments"], str)]  # fmt: skip
    return f"; tool_calls: arguments that are no JSON object: {', '.join(odd[:3])}" if odd else ""
