"""What a step asks of engines, agent loop workers and TransferQueue, estimated from the config;
and what a rate limit or a worker cannot carry.

Pure arithmetic: nothing is measured here. Some numbers are in no config (`MEAN_SHARE`, `TOKEN_S`,
`TURN_CPU_S`, `TOKEN_CPU_S`); `StepLoad.lines` prints them with the estimate.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agent_loop.calls.limiter import rate_of, reachable_per_minute
from agent_loop.loop_settings import most_open_requests
from cluster.placement import need_of
from config.lookup import at
from config.schema import TOOL_CONFIG, MixedConfig, ToolConfig
from verl_mixed.checks.config.algorithm import has_reference, is_count
from verl_mixed.checks.config.batches import StoredRows, stored_rows
from verl_mixed.checks.finding import Finding, warning
from verl_mixed.run.sections import section_of

_ROLLOUT = "actor_rollout_ref.rollout"
WORKERS_KEY = f"{_ROLLOUT}.agent.num_workers"

LEAST_WORKERS = 8
"""verl's default."""

MOST_PER_WORKER = 2048
"""Trajectories that one event loop serves at once with a lag below 100 ms
(`python -m benchmarks.agent_loop --latency`)."""

MEAN_SHARE = 0.5
"""Assumed mean length of a response, as a share of its limit."""

TOKEN_S = 0.02
"""Assumed seconds in which an engine decodes a token of each of its trajectories."""

TURN_CPU_S = 0.002
TOKEN_CPU_S = 1e-6
"""CPU seconds of an agent loop worker for a turn and for each of its tokens. The same benchmark
measures 1.8 ms for a turn of 512 tokens and 10 ms for one of 8,192, without the queue."""


def loop_workers(config: Mapping[str, Any]) -> int | None:
    """Agent loop workers of a run.

    Without a number in the config: 8, or one for each node, or so many that none holds more than
    `MOST_PER_WORKER` trajectories at once, whichever is most. None if a number is wrong.
    """
    if (given := at(config, WORKERS_KEY)) is not None:
        return given if is_count(given) else None
    rows, need = stored_rows(config), need_of(config)
    if rows is None or need is None:
        return None
    separate = at(config, "trainer.v1.trainer_mode") == "mixed_separate_async"
    nodes = sum(at(config, f"{pool}.nnodes") for pool in ("trainer", *[_ROLLOUT] * separate))
    return max(LEAST_WORKERS, nodes, math.ceil(rows.trajectories / MOST_PER_WORKER))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """The load of one step. Every source counts with the most trajectories a prompt."""

    rows: StoredRows
    prompt_length: int
    """Largest length of a prompt."""

    response_length: int
    """Largest length of a response."""

    turns: int
    """Most generations of a trajectory."""

    workers: int
    engines: int
    max_num_seqs: int
    """Requests that an engine decodes at once, if it has as many."""

    passes: int
    """Times that training processes read the rows of a step."""

    capacity: int | None
    """Rows that TransferQueue may hold; None: no limit."""

    @property
    def trajectories(self) -> int:
        """Of one step."""
        return self.rows.prompts * self.rows.per_prompt

    def tokens(self, share: float = MEAN_SHARE) -> float:
        """Of one step, if responses have this share of their limit."""
        return self.trajectories * (self.prompt_length + share * self.response_length)

    def row_bytes(self, share: float = MEAN_SHARE) -> float:
        """Of a row in TransferQueue, if its response has this share of its limit."""
        return self.rows.bytes_of(self.prompt_length, share * self.response_length)

    @property
    def per_worker(self) -> int:
        """Trajectories that an agent loop worker holds at once."""
        return math.ceil(self.rows.trajectories / self.workers)

    @property
    def open_per_worker(self) -> int:
        """Requests that an agent loop worker has open at an engine; its others wait."""
        return most_open_requests(self.max_num_seqs, self.workers)

    @property
    def decoded_per_engine(self) -> int:
        """Requests that an engine decodes at once; its others wait in its queue."""
        return min(self.max_num_seqs, self.workers * self.open_per_worker)

    @property
    def turns_per_s(self) -> float:
        """Turns that all engines finish in a second."""
        at_once = min(self.rows.trajectories, self.engines * self.decoded_per_engine)
        return at_once / (self._turn_tokens * TOKEN_S)

    @property
    def worker_load(self) -> float:
        """Share of a core that an agent loop worker needs."""
        cpu_s = TURN_CPU_S + self._turn_tokens * TOKEN_CPU_S
        return self.turns_per_s / self.workers * cpu_s

    @property
    def _turn_tokens(self) -> float:
        return max(1.0, MEAN_SHARE * self.response_length / self.turns)

    def lines(self) -> Iterator[str]:
        """The estimate in words."""
        rows, at_once = self.rows, self.rows.trajectories
        mean, most = self.row_bytes(), self.row_bytes(1.0)
        limit = "no limit" if self.capacity is None else f"a limit of {self.capacity:,}"
        yield (
            f"a step: {rows.prompts:,} prompts x {rows.per_prompt} = {self.trajectories:,} "
            f"trajectories, {_number(self.tokens())} tokens, at most {_number(self.tokens(1.0))}"
        )
        yield (
            f"at once: {at_once:,} trajectories ({rows.ahead:g} batches ahead of the step, "
            f"{rows.validation:,} in a validation)"
        )
        yield (
            f"engines: {self.engines:,}, for {math.ceil(at_once / self.engines):,} trajectories "
            f"each; an engine takes {self.workers * self.open_per_worker:,} requests at once "
            f"({self.open_per_worker:,} from each agent loop worker, where the others wait) and "
            f"decodes {self.decoded_per_engine:,} of them (max_num_seqs); "
            f"{self.turns_per_s:,.1f} turns a second in all"
        )
        yield (
            f"agent loop workers: {self.workers:,}, for {self.per_worker:,} trajectories each (an "
            f"event loop serves {MOST_PER_WORKER:,}); {self.turns_per_s / self.workers:,.1f} turns "
            f"a second each, {self.worker_load:.1%} of a core"
        )
        yield (
            f"{rows}; {limit}; {_bytes(rows.rows * mean)} of memory, at most "
            f"{_bytes(rows.rows * most)}"
        )
        traffic = self.trajectories * (1 + self.passes)
        yield (
            f"through TransferQueue: {_bytes(traffic * mean)} a step, at most "
            f"{_bytes(traffic * most)}: a row is written once and read {self.passes} times"
        )
        yield (
            f"assumed: prompts as long as their limit; responses {MEAN_SHARE:.0%} of theirs, in "
            f"{self.turns} turns; {1e3 * TOKEN_S:g} ms a token in an engine; "
            f"{1e3 * TURN_CPU_S:g} ms of CPU a turn and {1e6 * TOKEN_CPU_S:g} us a token in a "
            "worker; no images, texts and routes of experts"
        )


def step_load(config: Mapping[str, Any]) -> StepLoad | None:
    """The load of a step of a resolved config; None if a number that it needs is wrong."""
    rows, workers, engines = stored_rows(config), loop_workers(config), _engines(config)
    numbers = [
        at(config, key)
        for key in (
            "data.max_prompt_length",
            "data.max_response_length",
            f"{_ROLLOUT}.multi_turn.max_assistant_turns",
            f"{_ROLLOUT}.max_num_seqs",
        )
    ]
    if rows is None or workers is None or engines is None or not all(map(is_count, numbers)):
        return None
    prompt_length, response_length, turns, max_num_seqs = numbers
    old_log_probs = not at(config, "algorithm.rollout_correction.bypass_mode")
    return StepLoad(
        rows=rows,
        prompt_length=prompt_length,
        response_length=response_length,
        turns=turns,
        workers=workers,
        engines=engines,
        max_num_seqs=max_num_seqs,
        passes=1 + old_log_probs + has_reference(config),
        capacity=at(config, "transfer_queue.backend.SimpleStorage.total_storage_size"),
    )


def _engines(config: Mapping[str, Any]) -> int | None:
    """Engines of a run; None if a number is wrong."""
    separate = at(config, "trainer.v1.trainer_mode") == "mixed_separate_async"
    pool = _ROLLOUT if separate else "trainer"
    gpus = [at(config, f"{pool}.{key}") for key in ("nnodes", "n_gpus_per_node")]
    sizes = [
        at(config, f"{_ROLLOUT}.{kind}_parallel_size", 1)
        for kind in ("tensor_model", "data", "pipeline_model")
    ]
    if not all(map(is_count, (*gpus, *sizes))):
        return None
    return max(1, math.prod(gpus) // math.prod(sizes))


def worker_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """More agent loop workers than a rollout server has slots for."""
    workers, max_num_seqs = loop_workers(config), at(config, f"{_ROLLOUT}.max_num_seqs")
    if workers is None or not is_count(max_num_seqs):
        return
    if workers > (most := most_open_requests(max_num_seqs, 1)):
        yield (
            f"{WORKERS_KEY}={workers}: a rollout server takes {most} requests at once beside "
            f"verl's control calls, fewer than one from each worker; set it to {most} or less"
        )


def load_warnings(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Agent loop workers that hold more trajectories than an event loop serves."""
    load = step_load(config)
    if load is not None and load.per_worker > MOST_PER_WORKER:
        needed = math.ceil(load.rows.trajectories / MOST_PER_WORKER)
        yield warning(
            "agent loop workers",
            f"{WORKERS_KEY}={load.workers}: up to {load.per_worker:,} trajectories at once in each "
            f"worker, whose event loop serves {MOST_PER_WORKER:,} without a lag",
            f"set it to null, or to {needed} or more",
        )


def rate_warnings(config: Mapping[str, Any]) -> Iterator[Finding]:
    """A rate of tool calls that their distance in time does not allow."""
    mixed, _ = section_of(MixedConfig, at(config, "mixed", {}), "mixed")
    tools, _ = section_of(ToolConfig, at(config, TOOL_CONFIG, {}), TOOL_CONFIG)
    if mixed is None or tools is None or not tools.enable_global_rate_limit:
        return
    try:
        per_minute = rate_of(tools, mixed).per_minute
    except ValueError:
        return  # the check of sources reports it
    interval, wanted = tools.request_interval, tools.rate_limit_per_minute
    if (most := reachable_per_minute(per_minute, interval)) < per_minute:
        yield warning(
            "rate limit",
            f"{TOOL_CONFIG}.rate_limit_per_minute={wanted:g} cannot be reached: calls that are "
            f"request_interval={interval:g} s apart are {most:,.6g} a minute at most",
            f"set TOOL_REQUEST_INTERVAL={_floor(60 / per_minute):g} or less, or "
            f"RATE_LIMIT_PER_MINUTE={_floor(most):g}",
        )


def _floor(value: float) -> float:
    """Three digits of a number, rounded down."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return math.floor(value / unit * (1 + 1e-12)) * unit


def _number(value: float) -> str:
    return f"{value / 1e6:,.1f}M" if value >= 1e6 else f"{value:,.0f}"


def _bytes(value: float) -> str:
    return f"{value / 1e9:,.1f} GB" if value >= 1e9 else f"{value / 1e6:,.0f} MB"
