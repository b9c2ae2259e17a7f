"""A line of a trajectory file, as the trainer writes it, read into typed values."""

import json
from typing import Annotated, Any, TypeVar

import msgspec

from agent_loop.turns.trajectory import why_masked
from agent_loop.turns.turn_loop import Call, Turn
from samplers.uid import group_of, session_of

_Natural = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
"""Small enough that sums fit in SQLite's integers and in JavaScript's numbers."""


class IndexEntry(msgspec.Struct):
    """The fields of a line that the index needs; the decoder skips the others."""

    step: _Natural
    key: str
    source: str
    row_id: str
    reward: float
    acc: float
    stop_reason: str
    segments: list[tuple[str, _Natural, _Natural, str]]
    turns: list[Turn]
    calls: list[Call]
    advantage: float | None = None
    fault: str | None = None
    on_truncated: str = "train"
    state_masking: bool = True
    rows: _Natural | None = None
    requests: _Natural | None = None
    cause: str = ""
    parent: _Natural | None = None

    @property
    def why_masked(self) -> str | None:
        """`lost`, `truncated`, or None if the trajectory is trained."""
        return why_masked(msgspec.structs.asdict(self))

    @property
    def group(self) -> str:
        """uid of its group."""
        return group_of(self.key)

    @property
    def session(self) -> str:
        """Name of its session, in which it is a row."""
        return session_of(self.key)

    @property
    def request(self) -> int | None:
        """Number of its first request to the engine in its session."""
        return min((t.request for t in self.turns if t.request is not None), default=None)


class Record(IndexEntry):
    """All fields of a line."""

    draw: int = 0
    prompt_ids: list[int] = []
    response_ids: list[int] = []
    response_mask: list[int] = []
    log_probs: list[float] = []
    answer: str | None = None
    fault_tool: str = ""
    loop_error: str | None = None
    engine_turns: list[list[int]] = []
    reward_parts: dict[str, Any] | None = None
    weight_versions: tuple[int, int] | None = None


Kind = TypeVar("Kind", bound=IndexEntry)


def read_line(line: bytes, kind: type[Kind]) -> Kind:
    """The fields of `kind` of one line of a trajectory file.

    Raises:
        ValueError: the line is not a trajectory; the message says why.
    """
    try:
        try:
            return msgspec.json.decode(line, type=kind)
        except msgspec.ValidationError:
            raise
        except ValueError:
            # Python's json writes NaN and lone surrogates, and only Python's json reads them
            return msgspec.convert(json.loads(line), kind)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
