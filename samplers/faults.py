"""Trajectories of a group that were lost to faults. Imports no verl."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class SourceStarved(RuntimeError):
    """A source cannot fill its quota. Ray sends this error to processes that do not import verl."""


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
