"""Dialogues in the chat template: native tool calls, and messages as the steps of an environment.

`NativeDialogue` reads the calls of a turn (`agent_loop.turns.call_formats`) and writes their
results as the template does (`agent_loop.turns.tool_messages`). A message without calls is the
answer, or a step, which a message of the user answers. One instance serves one trajectory. No verl,
no torch.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from agent_loop.turns.call_formats import FORMATS, CallFormat, CallMistake, Message
from agent_loop.turns.call_formats.message import Schemas, new_call_id
from agent_loop.turns.codec import TokenCodec
from agent_loop.turns.tags import Action, ActionKind, Tags, first_end, held_answer, stop_token_ids
from agent_loop.turns.tool_messages import CallId, Glue, Render, ToolMessages

STEP = "step"
"""Kind of the action that is a message without calls; its content is the text."""

_PLAIN = re.compile(r"[\w.:/-]{1,256}")

_PROMPT_END = 8
"""Tokens of the prompt's end that may open a thought."""

THOUGHTS = (
    *(("<think>", "</think>"), ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]")),
    *(("<|channel>thought", "<channel|>"), ("<|channel|>analysis<|message|>", "<|end|>")),
)
"""Beginning and end of a thought in the formats."""


@dataclass(frozen=True)
class TextFormat:
    """The format of a model without tools: a thought at the beginning, and words."""

    name: str = "text"
    stop_texts: tuple[str, ...] = ()

    def parse(self, text: str, schemas: Schemas, *, in_reasoning: bool = False) -> Message:
        """A thought that does not end takes the whole message."""
        del schemas
        words = text.strip()
        for start, end in THOUGHTS:
            if words.startswith(start) or (in_reasoning and end in words):
                thought, _, rest = words.partition(end)
                return Message(content=rest.strip(), reasoning=thought, calls=())
        content, reasoning = ("", words) if in_reasoning else (words, "")
        return Message(content=content, reasoning=reasoning, calls=())


TEXT = TextFormat()


class NativeDialogue:
    """A `Language`, and the glue around the results of the calls that it read last.

    Args:
        call_format: reads the calls; `TEXT` if there are no tools.
        schemas: tool -> JSON schema of its arguments.
        messages: the template's glue around results.
        codec: of the tokenizer.
        answer_tags: tags around the answer within the last message, if the model writes them; None
            if a message without calls is a step of an environment.
        max_calls: calls of one message that are run; further ones are mistakes.
        in_reasoning: whether the prompt's end opens a thought.
    """

    def __init__(
        self,
        call_format: CallFormat,
        schemas: Mapping[str, Mapping[str, Any]],
        messages: ToolMessages,
        codec: TokenCodec,
        answer_tags: Tags | None,
        *,
        max_calls: int,
        in_reasoning: bool = False,
    ) -> None:
        self._format, self._schemas, self._messages = call_format, schemas, messages
        self._codec, self._answer_tags = codec, answer_tags
        self._max_calls, self._in_reasoning = max_calls, in_reasoning
        self._called: list[CallId] = []
        """The calls of the last turn that was read."""

        self._count = 0
        """Calls of earlier turns."""

    @property
    def stop_texts(self) -> list[str]:
        """Control tokens of the format, after which the engine stops."""
        return list(self._format.stop_texts)

    def find_end(self, text: str) -> int:
        """Index after the first control token of `stop_texts`."""
        return first_end(text, self._format.stop_texts)

    def actions(self, text: str, *, is_whole: bool = True) -> list[Action]:
        """The calls of a message, or its answer or step; none if it has neither. A call that the
        model drafts in a thought is none, also if a limit of tokens cut the thought."""
        self._called = []
        if not is_whole and self._thinks_on(text):
            return []
        message = self._format.parse(text, self._schemas, in_reasoning=self._in_reasoning)
        if not message.calls:
            return [] if message.is_open or not message.content else [self._said(message.content)]
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

    def _said(self, content: str) -> Action:
        """What a message without calls is."""
        if self._answer_tags is None:
            return Action(kind=STEP, content=content, is_open=True)
        held = held_answer(content, self._answer_tags)
        return Action(
            kind=ActionKind.ANSWER,
            content=content if held is None else held,
            is_open=True,
            is_message=held is None,
        )

    def _thinks_on(self, text: str) -> bool:
        """Whether a thought begins in a text, or before it, and does not end in it."""
        if self._in_reasoning and not any(end in text for _, end in THOUGHTS):
            return True
        return any(text.rfind(start) > text.rfind(end) for start, end in THOUGHTS)

    def glue(self, count: int) -> Glue:
        """Results in tool messages, or the answer to a step in a message of the user, and the
        beginning of the next assistant's message."""
        glue = self._messages.glue(self._called, () if self._called else ("user",))
        assert len(glue.writings) == count, (glue, count)
        self._in_reasoning = opens_thought(self._codec.decode(glue.pieces[-1]))
        return glue


def end_ids_of(codec: TokenCodec) -> frozenset[int]:
    """Tokens at which the engine stops: at the end of a message, or after a call of a format."""
    stops = [text for each in FORMATS.values() for text in each.stop_texts]
    return codec.end_ids | frozenset(stop_token_ids(stops, codec.encode))


def messages_of(render: Render, codec: TokenCodec) -> ToolMessages:
    """The glue of a chat template, the same for `verl-mixed check` and a run."""
    return ToolMessages(render, codec.encode, end_ids_of(codec))


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
