"""Where a turn ends and what it asks for: tags in the model's own text.

Pure text and token counts: no verl, no I/O. The cut falls on a token boundary, because a token that
was sampled is kept whole or dropped whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agent_loop.compat import StrEnum
from config.schema import TAG_FIELDS, ToolConfig

Decode = Callable[[Sequence[int]], str]


class ActionKind(StrEnum):
    """What a turn can ask for."""

    CODE = "code"
    SEARCH = "search"
    ANSWER = "answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """The content between an action's tags."""

    kind: ActionKind
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """Start and end tag of each action a loop allows, and the markers around a tool's result."""

    pairs: dict[ActionKind, tuple[str, str]]
    start_state_marker: str
    end_state_marker: str

    @classmethod
    def from_config(cls, config: ToolConfig, kinds: Sequence[ActionKind]) -> "Tags":
        """The tags of `kinds`, as configured."""
        return cls(
            pairs={
                kind: (
                    getattr(config, f"{kind.value}_start_tag"),
                    getattr(config, f"{kind.value}_end_tag"),
                )
                for kind in kinds
            },
            start_state_marker=config.start_state_marker,
            end_state_marker=config.end_state_marker,
        )

    @property
    def end_tags(self) -> list[str]:
        """Closing tags: a turn ends at the first of them."""
        return [end for _, end in self.pairs.values()]


def find_end(text: str, tags: Tags) -> int:
    """Index just past the first closing tag in `text`, or -1 when there is none."""
    ends = [(at, at + len(tag)) for tag in tags.end_tags if (at := text.find(tag)) >= 0]
    return min(ends)[1] if ends else -1


def cut_at_end_tag(token_ids: Sequence[int], tags: Tags, decode: Decode) -> int:
    """How many tokens of a turn to keep: up to and with the one that completes a closing tag.

    Args:
        token_ids: (t,) as the engine returned them.
        tags: the tags of this loop.
        decode: token ids -> text, special tokens kept.

    Returns:
        Tokens to keep, t when no closing tag is there. A token that holds the tag's last character
        and more is kept whole: it was sampled as one.
    """
    if find_end(decode(token_ids), tags) < 0:
        return len(token_ids)
    low, high = 1, len(token_ids)
    while low < high:
        middle = (low + high) // 2
        if find_end(decode(token_ids[:middle]), tags) >= 0:
            high = middle
        else:
            low = middle + 1
    return low


def parse_action(text: str, tags: Tags) -> Action | None:
    """The action that a turn's text asks for: the content before its first closing tag.

    Args:
        text: one turn, cut at its closing tag.
        tags: the tags of this loop.

    Returns:
        The action, with white space around its content removed; None when no closing tag has its
        opening tag before it.
    """
    first: tuple[int, Action] | None = None
    for kind, (start, end) in tags.pairs.items():
        end_at = text.find(end)
        start_at = text.rfind(start, 0, end_at) if end_at >= 0 else -1
        if start_at >= 0 and (first is None or end_at < first[0]):
            content = text[start_at + len(start) : end_at].strip()
            first = (end_at, Action(kind=kind, content=content))
    return first[1] if first else None


def stop_token_ids(tags: Tags, encode: Callable[[str], list[int]]) -> list[int]:
    """Closing tags that are one token each, so that the engine itself can stop there."""
    encoded = [encode(tag) for tag in tags.end_tags]
    return [ids[0] for ids in encoded if len(ids) == 1]


def all_tags(config: ToolConfig) -> list[str]:
    """Every tag and marker of the configuration, in the order of its fields."""
    return [getattr(config, name) for name in TAG_FIELDS]
