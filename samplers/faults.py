"""Errors of a mixture, and how groups and sessions ended. Imports no verl."""

from collections.abc import Mapping
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOutcome:
    """How a session of a finished group ended."""

    is_trained: bool
    """Whether it has a token with mask 1."""

    is_judged: bool
    """Whether its reward counts."""

    is_solved: bool
    fault: str | None
    """Tool and error, if it was lost."""

    reward: float
    info: Mapping[str, Any]
    """verl's `reward_extra_info`."""
