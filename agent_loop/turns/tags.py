"""Tags: finds the end of a turn, and the actions that the turn asks for, in the model's text.

Pure functions of text and token ids: no verl, no I/O. A turn is cut between two tokens, because a
sampled token is kept or dropped as a whole.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from config.compat import StrEnum
from config.schema import TAG_FIELDS, ToolConfig
from samplers.rows.boxed import boxed_answer

Decode = Callable[[Sequence[int]], str]


class ActionKind(StrEnum):
    """Kinds of actions. A loop of a user may have further kinds, which are plain strings."""

    CODE = "code"
    SEARCH = "search"
    ANSWER = "answer"
    MALFORMED = "malformed"
    """An action that cannot be read; `content` says why, and the model reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    kind: str
    """An `ActionKind`, or the name of a tool."""

    content: str
    """Text between the tags."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Named arguments, if the language has them."""

    is_open: bool = False
    """Whether `content` goes to the end of the turn. If the turn was cut, so was `content`."""

    is_message: bool = False
    """Of an answer: whether it is free text, because no tags and no box hold it."""


class Language(Protocol):
    """The form in which a model writes actions: tags, or ReAct's lines."""

    @property
    def stop_texts(self) -> list[str]:
        """Texts after which the engine may stop, because the turn ends there."""
        ...

    def find_end(self, text: str) -> int:
        """Index after the end of the turn in `text`; -1 if the turn does not end in it."""
        ...

    def actions(self, text: str, *, is_whole: bool = True) -> list[Action]:
        """Actions of a turn that was cut at its end. If one is the answer, it is the last.

        Args:
            is_whole: whether the turn has an end; else a limit of tokens cut it.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Tags:
    """Start and end tags of the actions that a loop allows."""

    pairs: Mapping[str, tuple[str, str]]
    """Action kind -> its tags; `ActionKind.ANSWER` ends the trajectory."""

    max_actions: int = 1
    """Actions that one turn may ask for; an answer always ends the turn."""

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
        """The tags of the actions `kinds`, from `own` or else from the config; `options` are
        other fields of the class."""
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
        """Closing tags. If a turn may have several actions, only the answer's."""
        return [
            end
            for kind, (_, end) in self.pairs.items()
            if self.max_actions == 1 or kind == ActionKind.ANSWER
        ]

    def find_end(self, text: str) -> int:
        """Index after the closing tag that ends the turn: the first that is the answer's, the one
        with number `max_actions`, or else the last."""
        end = -1
        for count, match in enumerate(self._closing.finditer(text), start=1):
            end = match.end()
            if count >= self.max_actions or self._kind_of[match.group()] == ActionKind.ANSWER:
                break
        return end

    def actions(self, text: str, *, is_whole: bool = True) -> list[Action]:
        """An action for each closing tag, with the text before the tag, stripped."""
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


def held_answer(text: str, tags: Tags) -> str | None:
    r"""The text between the answer tags, else that in the last `\boxed{}`."""
    tagged = tags.actions(text)
    if tagged and tagged[-1].kind == ActionKind.ANSWER:
        return tagged[-1].content
    return boxed_answer(text)


def cut_at_end(
    token_ids: Sequence[int], text: str, language: Language, decode: Decode
) -> int | None:
    """Number of tokens of a turn to keep: up to the token that completes the end of the turn.

    Args:
        token_ids: (t,) as the engine returned them.
        text: the text of `token_ids`.
        decode: token ids -> text, with special tokens.

    Returns:
        Tokens to keep; None if the turn does not end in its text. If the last token has characters
        after the end, it is kept whole, because it was sampled as one token.
    """
    end = language.find_end(text)
    if end < 0:
        return None
    wanted = text[:end]
    if not decode(token_ids[:-1]).startswith(wanted):
        return len(token_ids)  # the usual case: the engine stopped at the tag

    def is_enough(count: int) -> bool:
        return decode(token_ids[:count]).startswith(wanted)

    return bisect_left(range(len(token_ids) - 1), True, lo=1, key=is_enough)


def first_end(text: str, stops: Sequence[str]) -> int:
    """Index after the stop text that ends first in `text`; -1 if it has none of them."""
    return min((at + len(each) for each in stops if (at := text.find(each)) >= 0), default=-1)


def stop_token_ids(texts: Sequence[str], encode: Callable[[str], list[int]]) -> list[int]:
    """Token ids of the texts that are one token each: every engine can stop at those."""
    encoded = [encode(text) for text in texts]
    return [ids[0] for ids in encoded if len(ids) == 1]


def fill_tags(template: str, config: ToolConfig) -> str:
    """A prompt in which names in braces, as `{code_start_tag}`, are replaced by the tags."""
    for name in TAG_FIELDS:
        template = template.replace(f"{{{name}}}", getattr(config, name))
    return template


def all_tags(config: ToolConfig) -> list[str]:
    return [getattr(config, name) for name in TAG_FIELDS]
