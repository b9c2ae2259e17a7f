"""What is read from one message of the model: its final words, its reasoning and its tool calls."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Schemas = Mapping[str, Mapping[str, Any]]
"""Tool name -> JSON schema of its parameters."""

MOST_CALLS = 256
"""Calls and mistakes that are read in one message, because the event loop waits for the reader and
for the result of each. The rest of the message is one mistake."""


def new_call_id(number: int) -> str:
    """Id of a call whose format has none: nine letters and digits, as Mistral's templates ask."""
    return f"call{number:05}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    """A tool call that could be read. Its tool may not exist and its arguments may not fit."""

    name: str

    arguments: dict[str, Any]
    """JSON values: no NaN, no infinity, no half of a surrogate pair."""

    text: str
    """The call as the model wrote it, for records."""

    call_id: str | None = None
    """The model's own id of the call, if its format has one, as Kimi's `functions.name:0`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMistake:
    """An attempt to call a tool that cannot be read."""

    problem: str
    """One line which the model reads."""

    text: str
    """The attempt as the model wrote it, for records."""

    is_open: bool = False
    """Whether the attempt goes to the end of the message without its closing marker. If the
    message was cut by a token limit, so was the attempt."""

    name: str = ""
    """Name of the tool, if it could be read."""


Attempt = ParsedCall | CallMistake


def too_many(rest: str) -> CallMistake:
    """What follows after `MOST_CALLS`."""
    return CallMistake(problem=f"at most {MOST_CALLS} calls are read in one message", text=rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of the model, in parts."""

    content: str
    """The model's final words: without reasoning, calls and markers; stripped."""

    reasoning: str
    """The thoughts, stripped; several are joined by a line break."""

    calls: tuple[Attempt, ...]
    """In the order in which they were written."""

    is_open: bool = False
    """Whether the message ends inside its reasoning: there are no final words."""


class CallFormat(Protocol):
    """The form in which a family of models writes tool calls."""

    @property
    def name(self) -> str:
        """Name of the format in `multi_turn.format`: verl's, or vLLM's where verl has none."""
        ...

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Control tokens at which the engine must stop, besides the normal end of a message."""
        ...

    def parse(self, text: str, schemas: Schemas, *, in_reasoning: bool = False) -> Message:
        """The parts of one message. Raises for no text.

        Args:
            text: one message of the model, decoded with its special tokens. The token that ended
                the message may be there or not.
            schemas: tool name -> JSON schema of its parameters. Formats that write values without
                quotes need the schemas to tell the number 5 from the text "5".
            in_reasoning: whether the prompt ended inside a thought, as with `<think>\\n`.
        """
        ...
