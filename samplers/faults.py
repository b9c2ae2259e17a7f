"""What a group lost to faults of the infrastructure or of its loop. Pure; no verl."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class SourceStarved(RuntimeError):
    """A source cannot fill its quota. Defined apart from the buffer that raises it, because Ray
    carries it to processes that cannot import verl's buffer first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFaults:
    """One finished group, trained or not."""

    source: str
    trajectories: int
    faults: tuple[str, ...] = ()
    """What ended each trajectory that was lost."""


def fault_of(record: Mapping[str, Any]) -> str:
    """Tool and error of a lost trajectory, from its record (`turn_loop.record_of`)."""
    return f"tool={record['fault_tool']}, last error: {record['fault']}"
