"""Native tool calls: a model asks for tools in the format of its own chat template.

`NativeDialogue` reads the calls of a turn (`agent_loop.turns.call_formats`) and writes their
results as the template does (`agent_loop.turns.tool_messages`). A message without calls is the
answer. One instance serves one trajectory. No verl, no torch.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from agent_loop.turns.call_formats import CallFormat, CallMistake
from agent_loop.turns.call_formats.message import new_call_id
from agent_loop.turns.codec import TokenCodec
from agent_loop.turns.observation_style import RenderedResults, fit
from agent_loop.turns.tags import Action, ActionKind, Tags, first_end, held_answer
from agent_loop.turns.tool_messages import CallId, ToolMessages, written

_PLAIN = re.compile(r"[\w.:/-]{1,256}")


_PROMPT_END = 8
"""Tokens of the prompt's end that may open a thought."""

THOUGHTS = (
    *(("<think>", "</think>"), ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]")),
    *(("<|channel>thought", "<channel|>"), ("<|channel|>analysis<|message|>", "<|end|>")),
)
"""Beginning and end of a thought in the formats."""


class NativeDialogue:
    """A `Language` and an `ObservationStyle` in one.

    Args:
        call_format: reads the calls.
        schemas: tool -> JSON schema of its arguments.
        messages: the template's glue around results.
        codec: of the tokenizer.
        answer_tags: tags around the answer within the last message, if the model writes them.
        max_calls: calls of one message that are run; further ones are mistakes.
        max_length: tokens of one result; None: as many as fit.
        in_reasoning: whether the prompt's end opens a thought.
    """

    def __init__(
        self,
        call_format: CallFormat,
        schemas: Mapping[str, Mapping[str, Any]],
        messages: ToolMessages,
        codec: TokenCodec,
        answer_tags: Tags,
        *,
        max_calls: int,
        max_length: int | None = None,
        in_reasoning: bool = False,
    ) -> None:
        self._format, self._schemas, self._messages = call_format, schemas, messages
        self._codec, self._answer_tags = codec, answer_tags
        self._max_calls, self._max_length = max_calls, max_length
        self._in_reasoning = in_reasoning
        self._called: list[CallId] = []
        """The calls of the last turn that was read."""

        self._count = 0
        """Calls of earlier turns."""

    # --- Language ---------------------------------------------------------------------------------

    @property
    def stop_texts(self) -> list[str]:
        """Control tokens of the format, after which the engine stops."""
        return list(self._format.stop_texts)

    def find_end(self, text: str) -> int:
        """Index after the first control token of `stop_texts`."""
        return first_end(text, self._format.stop_texts)

    def actions(self, text: str, *, is_whole: bool = True) -> list[Action]:
        """The calls of a message, or its answer; none if it has neither. A call that the model
        drafts in a thought is none, also if a limit of tokens cut the thought."""
        if not is_whole and self._thinks_on(text):
            return []
        message = self._format.parse(text, self._schemas, in_reasoning=self._in_reasoning)
        if not message.calls:
            if message.is_open or not message.content:
                return []
            held = held_answer(message.content, self._answer_tags)
            content = message.content if held is None else held
            return [
                Action(
                    kind=ActionKind.ANSWER, content=content, is_open=True, is_message=held is None
                )
            ]
        self._called = []
        found: list[Action] = []
        for number, call in enumerate(message.calls):
            name = call.name or "unknown"
            call_id = (None if isinstance(call, CallMistake) else call.call_id) or (
                new_call_id(self._count + number)
            )
            self._called.append(
                CallId(plain_word(name, "unknown"), plain_word(call_id, new_call_id(number)))
            )
            if isinstance(call, CallMistake):
                problem, is_open = call.problem, call.is_open
            elif number >= self._max_calls:
                problem, is_open = f"at most {self._max_calls} tool calls in one message", False
            elif name in (ActionKind.ANSWER, ActionKind.MALFORMED):
                problem, is_open = f"no tool {name!r}", False
            else:
                found.append(Action(kind=name, content=call.text, arguments=call.arguments))
                continue
            found.append(Action(kind=ActionKind.MALFORMED, content=problem, is_open=is_open))
        self._count += len(found)
        return found

    def _thinks_on(self, text: str) -> bool:
        """Whether a thought begins in a text, or before it, and does not end in it."""
        if self._in_reasoning and not any(end in text for _, end in THOUGHTS):
            return True
        return any(text.rfind(start) > text.rfind(end) for start, end in THOUGHTS)

    # --- ObservationStyle -------------------------------------------------------------------------

    async def show(
        self, turn_text: str, results: Sequence[str], ids: Sequence[int], room: int
    ) -> RenderedResults | None:
        """The results in tool messages, and the beginning of the next assistant's message."""
        glue = self._messages.glue(self._called)
        end = [] if ids[-1] == glue.end_id else [glue.end_id]
        space = left = room - glue.length - len(end)
        limit = most = self._max_length
        while left >= 0:
            cut = await fit(results, self._codec, left, most)
            if cut is None:
                return None
            inner = [
                own
                if writing == "plain"
                else self._codec.encode_plain(written(self._codec.decode(own), writing))
                for own, writing in zip(cut, glue.writings, strict=True)
            ]
            used, longest = sum(map(len, inner)), max(map(len, inner), default=0)
            if limit is not None and most is not None and longest > limit and most > 1:
                most = max(1, most - (longest - limit))  # written as JSON, it is longer
            elif used > space:
                left -= used - space
            else:
                token_ids = [*end, *glue.pieces[0]]
                for own, piece in zip(inner, glue.pieces[1:], strict=True):
                    token_ids += [*own, *piece]
                self._in_reasoning = opens_thought(self._codec.decode(glue.pieces[-1]))
                return RenderedResults(token_ids=token_ids, text=self._codec.decode(token_ids))
        return None


def plain_word(word: str, other: str) -> str:
    """A name or an id for the template, whose text is tokenised with control tokens: the word, or
    `other` if it has characters that no name has."""
    return word if _PLAIN.fullmatch(word) else other


def prompt_opens_thought(codec: TokenCodec, prompt_ids: Sequence[int]) -> bool:
    """As `opens_thought`, of a whole prompt."""
    return _end_opens_thought(codec, tuple(prompt_ids[-_PROMPT_END:]))


@lru_cache(1024)
def _end_opens_thought(codec: TokenCodec, end: tuple[int, ...]) -> bool:
    return opens_thought(codec.decode(end))  # prompts have few ends


def opens_thought(text: str) -> bool:
    """Whether a template's text before a generation opens a thought, in which the model goes on."""
    return text.rstrip().endswith(tuple(start for start, _ in THOUGHTS))
