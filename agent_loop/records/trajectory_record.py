"""The record of a trajectory: one type from the agent loop to metrics, audit, viewer and files.

Three writers fill it, in this order:

1. The agent loop writes how the trajectory went (`agent_loop.turns.turn_loop.Rollout.record`), and
   what it shares with the session (`agent_loop.turn_agent_loop.judged_outputs`).
2. The trainer adds the trajectory's place in the batch and its verdict
   (`agent_loop.training.trained_batch.read_trajectories`).
3. For trajectories that are written to a file or compared, the trainer adds the texts, the tokens
   and what the optimizer saw (`read_whole` there).

Between 1 and 2 verl's TransferQueue holds the record in two columns: `to_columns` and
`from_columns` convert it. A line of `trajectories/<step>.jsonl` holds a whole record: `line_of`
writes it and `read_line` reads it, also where an older release wrote it. A field that an older
release did not write has its default.
"""

import hashlib
import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from agent_loop.records.run_folder import decoded, plain, read_typed
from config.compat import StrEnum
from samplers.uid import group_of, session_of

Natural = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
"""Small enough that sums fit in SQLite's integers and in JavaScript's numbers."""

COMMON_PARTS = ("score", "acc", "format", "infra_error", "loop_error")
"""Parts that every reward has. verl gets only these, because it stacks the parts of all sources."""


class StopReason(StrEnum):
    """Why a trajectory ended; every trajectory has exactly one."""

    ANSWERED = "answered"
    NO_ACTION = "no_action"
    MAX_TURNS = "max_turns"
    RESPONSE_BUDGET = "response_budget"
    DEADLINE = "deadline"
    INFRA_ERROR = "infra_error"


TRUNCATED = frozenset({StopReason.MAX_TURNS, StopReason.RESPONSE_BUDGET})
"""The model used up its own turns or tokens. `mixed.on_truncated` says whether such a trajectory is
trained."""


class Segment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Consecutive tokens of one author within the response; in a file a list of its four fields."""

    author: str
    """`model` or `tool`. Tokens that the template puts around a result are of the author `tool`."""

    start: Natural
    """Index of the first token in the response."""

    length: Natural
    text: str
    """The text of the tokens, for people. It is never tokenised again."""


class Turn(msgspec.Struct, kw_only=True, gc=False):
    """One request to the engine, and the calls that its answer asked for."""

    generate_s: float = 0.0
    tools_s: float = 0.0
    tokens: int = 0
    """Sampled tokens that were kept."""

    min_global_steps: int | None = None
    """Version of the oldest weights that sampled a token: the step that made these weights. All
    tokens of the turn count as sampled by them. None if the engine did not answer."""

    max_global_steps: int | None = None
    """Version of the newest; larger if the weights changed while the engine generated."""

    request: int | None = None
    """Number of the engine's request among those of the session, from 1; None: not recorded."""

    read_tokens: int | None = None
    """Tokens of the request's prompt; None: not recorded, because a loop of this project reuses all
    tokens of its earlier requests."""

    reused_tokens: int | None = None
    """Those of `read_tokens` that earlier requests of the session had."""

    misfit: str | None = None
    """Why the message has not the form that an agent's request demanded (a JSON schema, a call,
    strict arguments); empty: it has; None: none was demanded."""


class Call(msgspec.Struct, kw_only=True, gc=False):
    """One action that was run."""

    turn: int
    """From 1."""

    action: str
    arguments: str = ""
    """What the model wrote."""

    status: str = "cancelled"
    """ok; rejected (a mistake of the model); unavailable (a fault of the infrastructure); failed
    (an error in the code of the loop); or cancelled (by a deadline, or a fault of another call)."""

    tool: str = ""
    latency_s: float = 0.0
    limiter_wait_s: float = 0.0
    server_wait_s: float = 0.0
    """Seconds that it waited for a server that was away or overloaded, also if it was lost or
    cancelled."""

    attempts: int = 0
    """HTTP requests; 0 if none was needed, as for a cached result."""

    error: str | None = None
    reward: float | None = None
    """Reward of a step of an environment; None of any other action."""

    ends: bool = False
    """Whether the environment said that the trajectory is over."""

    unread: str | None = None
    """The result, if the trajectory ended with it, so that the model did not read it."""


_TEXTS_OF_CALL = ("arguments", "error", "unread")


class TokenValues(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A number for each token with mask 1, in the order of the response (t,)."""

    sum: float
    """In double precision."""

    hash: str
    """BLAKE2b of 8 bytes, as hex, over the numbers as little-endian float32."""

    values: list[float] | None = None
    """The numbers, with `mixed.trajectory_token_values`."""

    @classmethod
    def of(cls, numbers: Any, *, whole: bool) -> "TokenValues | None":
        """The values of a tensor or an array (t,); None without a token."""
        own = np.asarray(numbers, dtype="<f4")
        if not len(own):
            return None
        return cls(
            sum=float(own.sum(dtype=np.float64)),
            hash=hashlib.blake2b(own.tobytes(), digest_size=8).hexdigest(),
            values=own.tolist() if whole else None,
        )


class TrajectoryRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A sequence of tokens that was trained: a trajectory, or one of the rows of its session."""

    # --- by the trainer: the row's place, verdict and effect ----------------------------------

    step: Natural | None = None
    """Training step, from 1."""

    key: str = ""
    """verl's key, `<uid>_<session>_<index>`."""

    source: str = ""
    row_id: str = ""
    draw: int = 0
    """Number of prompts of its source that were drawn before its own."""

    reward: float = 0.0
    acc: float = 0.0
    """1 or more: the trajectory solved its prompt."""

    advantage: float | None = None
    """Mean over the tokens in the loss; None without one."""

    update: Natural | None = None
    """Number of the optimizer update of the step that it was in, from 1. With several
    `actor.ppo_epochs` it is in this update of each epoch."""

    old_log_probs: TokenValues | None = None
    """Log-probs of the policy before the step, in nats, that the loss used: the trainer's, or the
    engine's with `algorithm.rollout_correction.bypass_mode`."""

    importance: TokenValues | None = None
    """Weights of the importance correction (`algorithm.rollout_correction.rollout_is`), after the
    cut at the threshold; None without a correction."""

    session_share: float | None = None
    """The row's share of its session's tokens, by which its loss is weighted; None where no session
    of the batch has several rows, and for losses that need no weight."""

    prompt_tokens: Natural | None = None
    response_tokens: Natural | None = None

    # --- by the trainer, from verl's columns: the tokens, arrays there and lists elsewhere ------

    prompt_ids: Sequence[int] = []  # (P,)
    response_ids: Sequence[int] = []  # (T,)
    response_mask: Sequence[int] = []  # (T,)
    log_probs: Sequence[float] = []  # (T,)
    """Of the engine, in nats; 0.0 where the mask is 0."""

    # --- by the agent loop ---------------------------------------------------------------------

    stop_reason: str = ""
    """One of `StopReason`."""

    turns: list[Turn] = []
    calls: list[Call] = []
    fault: str | None = None
    """The fault or the deadline that ended the trajectory; None if it was not lost."""

    fault_tool: str = ""
    """What failed: a tool, `engine`, `math_verify`, `reward` or `loop`. After a deadline, what the
    trajectory waited for longest: a name of `agent_loop.watchdog.Activity.waits_for`, for example
    `engine`, `limiter`, `server` or `start`, the time before its first turn."""

    loop_error: str | None = None
    """Traceback of what the loop itself raised."""

    weight_versions: tuple[int, int] | None = None
    """Oldest and newest version of the weights that sampled its turns; None without a turn."""

    cause: str = ""
    """Why this row began, where a session has several: for example `compaction`."""

    temperature: float | None = None
    """At which its tokens were sampled, if the agent chose it; None: the source's."""

    reward_parts: dict[str, Any] = {}
    """`COMMON_PARTS`, and the reward's own; the same for all rows of a session."""

    state_masking: bool = True
    """False (an ablation): the tokens of tools are in the loss too."""

    on_truncated: str = "train"
    """`mixed.on_truncated` of the source: `train` or `mask`."""

    rows: Natural | None = None
    """Rows of its session; None: not recorded."""

    requests: Natural | None = None
    """Requests of its session to the engine; None: not recorded."""

    parent: Natural | None = None
    """Place among the rows of its session of the row out of which it began."""

    trained_tokens: Natural | None = None
    """Tokens with mask 1."""

    loop_lag_s: float | None = None
    """99th percentile of how late its worker's event loop ran meanwhile."""

    # --- by the agent loop: texts, which travel in a column of their own ------------------------

    answer: str | None = None
    """From the model's own text; None without one."""

    engine_turns: list[list[int]] = []
    """Token ids as the engine returned them, a list per turn with an answer, before any cut."""

    segments: list[Segment] = []
    """The authors of the response, without gaps."""

    @property
    def uid(self) -> str:
        """Of its group."""
        return group_of(self.key)

    @property
    def session(self) -> str:
        """Name of its session."""
        return session_of(self.key)

    @property
    def request(self) -> int | None:
        """Number of its first request to the engine in its session."""
        return min((t.request for t in self.turns if t.request is not None), default=None)

    @property
    def is_lost(self) -> bool:
        """Whether a fault or a deadline ended it, so that it is not trained and in no baseline.

        Release 1.0.0 trained trajectories that a deadline ended; its records have no fault there.
        """
        return self.fault is not None

    @property
    def is_judged(self) -> bool:
        """Whether its reward counts: it is not lost and has a sampled token. It is also in its
        group's baseline, unless it is masked because it was truncated."""
        return not self.is_lost and any(turn.tokens for turn in self.turns)

    @property
    def why_masked(self) -> str | None:
        """Why all tokens have mask 0: `lost`, or `truncated` (with `mixed.on_truncated=mask`); None
        if the sampled tokens are trained."""
        if self.is_lost:
            return "lost"
        is_masked = self.on_truncated == "mask" and self.stop_reason in TRUNCATED
        return "truncated" if is_masked else None

    @property
    def lost_to(self) -> str:
        """Tool and error of a lost trajectory."""
        return f"tool={self.fault_tool}, last error: {self.fault}"


# --- verl's columns -------------------------------------------------------------------------------


def to_columns(record: TrajectoryRecord) -> tuple[dict[str, Any], bytes]:
    """A record of an agent loop as TransferQueue moves it.

    Returns:
        (facts, texts). The facts, plain values whose size grows with turns and calls, are
        `extra_fields["mixed"]`: the trainer reads those of every row. The texts and the tokens of
        the engine are packed in a column of bytes, 3 to 5 for a token: the trainer reads those of
        the few rows that it writes or compares.
    """
    facts = msgspec.to_builtins(record, enc_hook=plain)
    texts = {name: facts.pop(name, None) for name in ("answer", "engine_turns", "segments")}
    # A checkpoint holds these columns, and a later release reads them: no class is pickled.
    texts["calls"] = [
        {name: call.pop(name, None) for name in _TEXTS_OF_CALL} for call in facts.get("calls", ())
    ]
    return facts, pickle.dumps(texts, protocol=pickle.HIGHEST_PROTOCOL)


def from_columns(facts: Mapping[str, Any]) -> TrajectoryRecord:
    """The record without its texts. The facts of release 1.0.0 in a checkpoint have them.

    Raises:
        ValueError: a value is of the wrong kind.
    """
    return msgspec.convert(facts, TrajectoryRecord)


def add_texts(record: TrajectoryRecord, packed: bytes) -> None:
    """Add what `to_columns` packed."""
    texts = pickle.loads(packed)  # written by an agent loop worker of the same run
    record.answer = texts["answer"]
    record.engine_turns = texts["engine_turns"] or []
    record.segments = msgspec.convert(texts["segments"] or [], list[Segment])
    record.calls = [
        msgspec.structs.replace(call, **{k: v for k, v in own.items() if v is not None})
        for call, own in zip(record.calls, texts["calls"], strict=True)
    ]


# --- files ----------------------------------------------------------------------------------------

_EMPTY = msgspec.structs.asdict(TrajectoryRecord())
"""A line has every field, also those that have their default."""

LATER = (
    *("rows", "requests", "trained_tokens", "loop_lag_s", "weight_versions"),
    *("update", "old_log_probs"),
)
"""Fields that some older release did not write, and that each row with a token to train has."""


def line_of(record: TrajectoryRecord) -> bytes:
    """A record as a line of a trajectory file, with its newline."""
    line = _EMPTY | msgspec.to_builtins(record, enc_hook=plain)
    text = json.dumps(line, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="replace") + b"\n"  # a tool may write half a character


def read_line(line: bytes) -> TrajectoryRecord:
    """The record of a line.

    Raises:
        ValueError: the line is no record; the message says why.
    """
    record = decoded(line, TrajectoryRecord)
    if record.step is None or not record.key:  # every release wrote them
        raise ValueError("it has no step or no key")
    return record


def read_file(path: Path) -> tuple[list[TrajectoryRecord], list[str]]:
    """The records of a trajectory file, and its problems, as `read_typed`."""
    return read_typed(path, read_line)


def absent_fields(records: Iterable[TrajectoryRecord], among: Iterable[str] = LATER) -> set[str]:
    """Fields that no record with a token to train has."""
    absent = set(among)
    for record in records:
        if any(record.response_mask):
            absent = {name for name in absent if getattr(record, name) is None}
    return absent
