"""Errors, and what records say of trajectories: faults and trained tokens. Imports no verl."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


class SourceStarved(RuntimeError):
    """A source cannot fill its quota. Ray sends this error to processes that do not import verl."""


class RecipeError(ValueError):
    """The recipe cannot have the mixture; the message lists every problem.

    Args:
        problems: one sentence each.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("cannot train this mixture:\n" + "\n".join(f"- {p}" for p in problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFaults:
    """The lost trajectories of one finished group, trained or not."""

    source: str
    trajectories: int
    faults: tuple[str, ...] = ()
    """The fault of each lost trajectory."""


def fault_of(record: Mapping[str, Any]) -> str:
    """Tool and error of a lost trajectory, from its record (`turns.record.record_of`)."""
    return f"tool={record['fault_tool']}, last error: {record['fault']}"


def trained_tokens_of(
    records: Mapping[str, Mapping[str, Any]], masks_of: Callable[[list[str]], Iterable[Any]]
) -> dict[str, int]:
    """Key of a trajectory -> its tokens with mask 1, from its record.

    Args:
        records: by key. Those that an earlier release left in a checkpoint lack the number.
        masks_of: reads the masks of some trajectories; called for those, if there are any.
    """
    counts = {key: record.get("trained_tokens") for key, record in records.items()}
    if older := [key for key, count in counts.items() if count is None]:
        masks = zip(older, masks_of(older), strict=True)
        counts |= {key: int(mask.sum()) for key, mask in masks}
    return {key: int(count or 0) for key, count in counts.items()}
