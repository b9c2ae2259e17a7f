"""Where a turn ends and what it asks for: tags in the model's own text.

Pure text and token counts: no verl, no I/O. The cut falls on a token boundary, because a token that
was sampled is kept whole or dropped whole.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from agent_loop.compat import StrEnum
from config.schema import TAG_FIELDS, ToolConfig
from samplers.rows.sources.math import boxed_answer

Decode = Callable[[Sequence[int]], str]


class ActionKind(StrEnum):
    """What a turn can ask for; a loop of one's own may use words of its own besides."""

    CODE = "code"
    SEARCH = "search"
    ANSWER = "answer"
    MALFORMED = "malformed"
    """An attempt that cannot be read; `content` says what is wrong, and the model reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One thing that a turn asks for."""

    kind: str
    """An `ActionKind`, or the name of a tool."""

    content: str
    """What stands between the tags."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Named arguments, where the language has them."""

    is_open: bool = False
    """Whether `content` is all the rest of the turn: where that was cut short, so is this."""


class Language(Protocol):
    """How a model asks for things: tags, or ReAct's lines."""

    @property
    def stop_texts(self) -> list[str]:
        """Texts behind which nothing of a turn is needed: the engine may stop there."""
        ...

    def find_end(self, text: str) -> int:
        """Index just past the end of a turn in `text`, or -1 when it ends nowhere in it."""
        ...

    def actions(self, text: str) -> list[Action]:
        """What a turn, cut at its end, asks for; the answer is the last. Empty: nothing."""
        ...


@dataclass(frozen=True, kw_only=True)
class Tags:
    """Start and end tag of each action a loop allows."""

    pairs: Mapping[str, tuple[str, str]]
    """Action kind -> its tags; `ActionKind.ANSWER` ends the trajectory."""

    max_actions: int = 1
    """Actions that one turn may ask for; an answer ends it in any case."""

    answer_boxed: bool = False
    r"""Whether the last `\boxed{...}` of a turn without any tagged action is its answer."""

    @classmethod
    def from_config(
        cls,
        config: ToolConfig,
        kinds: Sequence[str],
        own: Mapping[str, tuple[str, str]] | None = None,
        **options: Any,
    ) -> "Tags":
        """The tags of `kinds`, as configured.

        Args:
            config: the run's tags.
            kinds: what a loop allows.
            own: tags of a loop's own kinds.
            options: `max_actions`, `answer_boxed`.
        """
        own = own or {}
        return cls(
            pairs={
                kind: own[kind]
                if kind in own
                else (getattr(config, f"{kind}_start_tag"), getattr(config, f"{kind}_end_tag"))
                for kind in kinds
            },
            **options,
        )

    @cached_property
    def _closing(self) -> re.Pattern[str]:
        return re.compile("|".join(re.escape(end) for _, end in self.pairs.values()))

    @cached_property
    def _kind_of(self) -> dict[str, str]:
        return {end: kind for kind, (_, end) in self.pairs.items()}

    @property
    def stop_texts(self) -> list[str]:
        """Closing tags; where a turn may hold several actions, that of the answer only."""
        return [
            end
            for kind, (_, end) in self.pairs.items()
            if self.max_actions == 1 or kind == ActionKind.ANSWER
        ]

    def find_end(self, text: str) -> int:
        """Just past the answer's closing tag, the last that `max_actions` allows, or the last."""
        end = -1
        for count, match in enumerate(self._closing.finditer(text), start=1):
            end = match.end()
            if count >= self.max_actions or self._kind_of[match.group()] == ActionKind.ANSWER:
                break
        return end

    def actions(self, text: str) -> list[Action]:
        """The content before each closing tag, white space around it removed."""
        found: list[Action] = []
        begin = 0
        for match in self._closing.finditer(text):
            kind = self._kind_of[match.group()]
            start = self.pairs[kind][0]
            at = text.rfind(start, begin, match.start())
            if at < 0:
                found.append(Action(kind=ActionKind.MALFORMED, content=f"no opening tag of {kind}"))
            else:
                content = text[at + len(start) : match.start()].strip()
                found.append(Action(kind=kind, content=content))
            begin = match.end()
            if len(found) >= self.max_actions or found[-1].kind == ActionKind.ANSWER:
                break
        if not found and self.answer_boxed and (boxed := boxed_answer(text)) is not None:
            found = [Action(kind=ActionKind.ANSWER, content=boxed)]
        return found


def cut_at_end(
    token_ids: Sequence[int], text: str, language: Language, decode: Decode
) -> int | None:
    """How many tokens of a turn to keep: up to and with the one that completes its end.

    Args:
        token_ids: (t,) as the engine returned them.
        text: their decoding.
        language: says where the turn ends.
        decode: token ids -> text, special tokens kept.

    Returns:
        Tokens to keep, None when the turn ends nowhere in its text. A token that holds the end's
        last character and more is kept whole: it was sampled as one.
    """
    end = language.find_end(text)
    if end < 0:
        return None
    wanted = text[:end]
    if not decode(token_ids[:-1]).startswith(wanted):
        return len(token_ids)  # as an engine that stops at the tag leaves it
    low, high = 1, len(token_ids) - 1
    while low < high:
        middle = (low + high) // 2
        if decode(token_ids[:middle]).startswith(wanted):
            high = middle
        else:
            low = middle + 1
    return low


def stop_token_ids(texts: Sequence[str], encode: Callable[[str], list[int]]) -> list[int]:
    """Those texts that are one token each, so that any engine can stop there."""
    encoded = [encode(text) for text in texts]
    return [ids[0] for ids in encoded if len(ids) == 1]


def fill_tags(template: str, config: ToolConfig) -> str:
    """A prompt with the configured tags in place of their names in braces."""
    for name in TAG_FIELDS:
        template = template.replace(f"{{{name}}}", getattr(config, name))
    return template


def all_tags(config: ToolConfig) -> list[str]:
    """Every tag and marker of the configuration, in the order of its fields."""
    return [getattr(config, name) for name in TAG_FIELDS]
