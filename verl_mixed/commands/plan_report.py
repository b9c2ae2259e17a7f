"""What a mixture will do, before it runs: prompts, passes over the data, tool calls, and a diff.

Arithmetic over the config and the row counts: nothing is started, and neither Ray nor torch is
imported. Numbers of tool calls are upper bounds, see `ToolLoad`; what a run really did is told by
`verl-mixed report`.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agent_loop.rewards import default_reward, runs_programs
from agent_loop.tools.limiter import rate_of
from config.lookup import at, files_at
from config.schema import TOOL_CONFIG, ConfigError, MixedConfig, ToolConfig, load_section
from samplers.mixture_plan import MixturePlan
from verl_mixed.checks.preflight import mixture_problems
from verl_mixed.run.audit import plan_of, rows_of

_BATCH = "data.train_batch_size"
_STEPS = "trainer.total_training_steps"
_N = "actor_rollout_ref.rollout.n"
_TURNS = "actor_rollout_ref.rollout.multi_turn.max_assistant_turns"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePlan:
    """One source over a run. Prompts that replace failed or filtered ones are not in it."""

    rows: int | None
    """Rows in the training files; None where they are not known, and so all that needs them."""

    ratio: dict[int, float]
    """Steps trained before -> share of the batch, linear in between. One entry (0) for a constant
    ratio; where any source has a schedule, every source has all its knots."""

    counts: tuple[int, ...]
    """(K,) prompts in each of the first batches."""

    prompts_per_step: float
    """Mean over the run."""

    rollout_n: int
    """Trajectories per prompt; for `remax` one more than are trained."""

    trajectories_per_step: float
    """Mean over the run."""

    max_turns: int
    """Generations per trajectory, the answer among them."""

    steps_per_pass: float | None
    """Steps in which every row comes once, at the mean of the run; None where none is drawn."""

    prompts: int
    """Prompts over the run."""

    passes: float | None
    """How often each row comes over the run, on average."""

    exhausted_at_step: int | None
    """The step that draws the last row not yet seen, from 1; None when the run ends before."""

    tool_calls: int
    """Most calls over the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLoad:
    """What the limiter has to let through when every trajectory uses all its turns.

    Upper bounds on the calls of turns: the last generation is the answer, so a trajectory makes at
    most `max_turns - 1` calls (and 1 is counted where that is 0). Retries, replaced prompts,
    validation and rewards that run programs (`rewards_that_call`) come on top.
    """

    calls: int
    """Over the run."""

    calls_per_step: int
    """In the step that has most."""

    limited: bool
    """`enable_global_rate_limit`."""

    per_minute: float
    burst: int
    request_interval_s: float

    added_s_per_step: float
    """Least time in which the limiter lets the calls of one step pass, its burst unused before."""

    longest_wait_s: float
    """Longest wait of one call, all trajectories of the step calling at the same moment."""

    timeout_s: float
    """What a call may take, waiting for the limiter included."""

    carries: bool
    """Whether no call needs to wait past its timeout, which would end it as `infra_error`."""

    rewards_that_call: tuple[str, ...]
    """Sources whose reward makes a call for each hidden test of a program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """A mixture over a run."""

    batch_size: int
    steps: int
    sources: dict[str, SourcePlan]
    """By name, those that take part."""

    left_out: tuple[str, ...]
    """Sources with ratio 0."""

    exhausted: tuple[str, ...]
    """Sources whose first pass ends within the run, in the order in which that happens."""

    tools: ToolLoad

    rows_unknown: str | None
    """Why rows are not known; None where they are."""

    fingerprint: dict[str, Any]
    """What a checkpoint of the stream is compared by: `MixturePlan.description`, `sizes` None where
    rows are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDiff:
    """This plan beside another."""

    name: str
    """The other's file."""

    this: PlanReport
    other: PlanReport
    fields: tuple[str, ...]
    """Fields of the fingerprint that differ."""

    resumable: bool | None
    """Whether a run of the one goes on as the other with `mixed.on_change=refuse`; None where rows
    are not known and nothing else differs."""


# --- computing ------------------------------------------------------------------------------------


def report_of(
    config: Mapping[str, Any], *, batches: int, rows_unknown: str | None = None
) -> PlanReport:
    """The plan of a composed config.

    Args:
        config: the resolved run config.
        batches: how many batches to list.
        rows_unknown: why the data files are not to be looked into.

    Raises:
        ConfigError: everything that is wrong with mixture, numbers and rows.
    """
    if problems := mixture_problems(config, data=rows_unknown is None):
        raise ConfigError(problems)
    rows = rows_of(files_at(config, "data.train_files")) if rows_unknown is None else None
    return make_report(config, rows, batches=batches, rows_unknown=rows_unknown)


def make_report(
    config: Mapping[str, Any],
    rows: Mapping[str, int] | None,
    *,
    batches: int,
    rows_unknown: str | None = None,
) -> PlanReport:
    """As `report_of`, from row counts.

    Args:
        rows: source -> rows; None where they are not known.

    Raises:
        ConfigError, ValueError: the mixture is impossible.
    """
    mixed = load_section(MixedConfig, at(config, "mixed", {}), "mixed")
    tools = load_section(ToolConfig, at(config, TOOL_CONFIG, {}), TOOL_CONFIG)
    batch_size, steps, common_n, common_turns = _whole(config, (_BATCH, _STEPS, _N, _TURNS))
    plan = plan_of(config, dict.fromkeys(mixed.ratios, 1) if rows is None else rows)
    length = steps * batch_size
    due, drawn = plan.due(length), plan.counts_between(0, length)
    counts = [plan.counts(index) for index in range(batches)]
    ratio = _ratios(mixed)
    sources: dict[str, SourcePlan] = {}
    ends: dict[str, int] = {}  # source -> prompts of the stream until its first pass is through
    for name in plan.sources:
        own, size = mixed.sources[name], None if rows is None else plan.sizes[name]
        n, turns = own.rollout_n or common_n, own.max_turns or common_turns
        n += at(config, "algorithm.adv_estimator") == "remax"
        if size is not None and drawn[name] >= size:
            ends[name] = _prompts_until(plan, name, size, length)
        per_step = float(due[name] / steps)
        sources[name] = SourcePlan(
            rows=size,
            ratio=ratio[name],
            counts=tuple(batch[name] for batch in counts),
            prompts_per_step=per_step,
            rollout_n=n,
            trajectories_per_step=per_step * n,
            max_turns=turns,
            steps_per_pass=size / per_step if size is not None and per_step else None,
            prompts=drawn[name],
            passes=drawn[name] / size if size is not None else None,
            exhausted_at_step=math.ceil(ends[name] / batch_size) if name in ends else None,
            tool_calls=drawn[name] * n * _calls(turns),
        )
    return PlanReport(
        batch_size=batch_size,
        steps=steps,
        sources=sources,
        left_out=tuple(sorted(mixed.sources.keys() - mixed.ratios.keys())),
        exhausted=tuple(sorted(ends, key=lambda name: ends[name])),
        tools=_tool_load(plan, sources, steps, tools, mixed),
        rows_unknown=rows_unknown,
        fingerprint=plan.description() | ({} if rows is not None else {"sizes": None}),
    )


def _whole(config: Mapping[str, Any], keys: Sequence[str]) -> list[int]:
    values = {key: at(config, key) for key in keys}
    problems = [
        f"{key}={value!r}: want a whole number >= 1"
        for key, value in values.items()
        if not isinstance(value, int) or isinstance(value, bool) or value < 1
    ]
    if problems:
        raise ConfigError(problems)
    return list(values.values())


def _ratios(mixed: MixedConfig) -> dict[str, dict[int, float]]:
    """source -> step -> share as asked for, at the knots of all schedules."""
    schedules = {name: mixed.sources[name].schedule for name in mixed.ratios}
    steps = sorted({0}.union(*schedules.values()))
    at_step: dict[str, list[float]] = {
        name: np.interp(steps, sorted(own), [own[step] for step in sorted(own)]).tolist()
        for name, own in schedules.items()
    }
    totals = [math.fsum(ratios) for ratios in zip(*at_step.values(), strict=True)]
    return {
        name: {
            step: ratio / total for step, ratio, total in zip(steps, ratios, totals, strict=True)
        }
        for name, ratios in at_step.items()
    }


def _prompts_until(plan: MixturePlan, name: str, draws: int, most: int) -> int:
    """Prompts of the stream after which a source was drawn so often; it is after `most`."""
    return bisect_left(range(most), draws, key=lambda i: plan.counts_between(0, i)[name])


def _calls(max_turns: int) -> int:
    return max(1, max_turns - 1)


def _tool_load(
    plan: MixturePlan,
    sources: Mapping[str, SourcePlan],
    steps: int,
    tools: ToolConfig,
    mixed: MixedConfig,
) -> ToolLoad:
    names = list(sources)
    trajectories = np.array([sources[name].rollout_n for name in names])
    calls = trajectories * [_calls(sources[name].max_turns) for name in names]
    counts = np.array([list(plan.counts(step).values()) for step in range(steps)])  # (steps, S)
    calls_per_step = int((counts @ calls).max())
    at_once = int((counts @ trajectories).max())
    queued = max(0, calls_per_step - tools.burst)
    apart = max(0, calls_per_step - 1) * tools.request_interval
    limited = tools.enable_global_rate_limit
    per_minute = rate_of(tools, mixed).per_minute
    waits_s = max(
        min(at_once, queued) * 60 / per_minute,
        min(at_once, calls_per_step - 1) * tools.request_interval,
    )
    return ToolLoad(
        calls=sum(source.tool_calls for source in sources.values()),
        calls_per_step=calls_per_step,
        limited=limited,
        per_minute=per_minute,
        burst=tools.burst,
        request_interval_s=tools.request_interval,
        added_s_per_step=max(queued * 60 / per_minute, apart) if limited else 0.0,
        longest_wait_s=waits_s if limited else 0.0,
        timeout_s=tools.timeout,
        carries=not limited or waits_s <= tools.timeout,
        rewards_that_call=tuple(
            name
            for name in names
            if runs_programs(mixed.sources[name].reward or default_reward(name))
        ),
    )


# --- another plan ---------------------------------------------------------------------------------


def other_report(
    path: Path, config: Mapping[str, Any], *, batches: int, rows_unknown: str | None = None
) -> PlanReport:
    """The plan of another file.

    Args:
        path: a resolved config, such as `runs/<experiment>/config.yaml`, or a mixture with
            `sources:`, which is put into `config`.
        config: the resolved config that a mixture is put into.
        batches: how many batches to list.
        rows_unknown: why the data files of `config` are not to be looked into.

    Raises:
        ConfigError: everything that is wrong with it, each line with the file's name.
    """
    try:
        other = _read(path)
        if "sources" in other:
            other = _with_mixture(config, other)
        elif not isinstance(at(other, "mixed.sources"), Mapping):
            raise ConfigError(
                [
                    "neither `sources:` nor `mixed.sources` in it; name a mixture or a "
                    "run's config.yaml"
                ]
            )
        else:
            rows_unknown = None
        rows = None
        if rows_unknown is None:
            try:
                rows = rows_of(files_at(other, "data.train_files"))
            except ValueError as error:  # its data may be gone, its ratios are there all the same
                rows_unknown = str(error).splitlines()[0]
        return make_report(other, rows, batches=batches, rows_unknown=rows_unknown)
    except ValueError as error:
        raise ConfigError([f"{path}: {line}" for line in str(error).splitlines()]) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OSError, UnicodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError([f"cannot be read: {' '.join(str(error).split())}"]) from error
    return {str(key): value for key, value in values.items()} if isinstance(values, dict) else {}


def _with_mixture(config: Mapping[str, Any], mixture: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with another mixture, and the files that its sources name."""
    ours, theirs = _files_of(at(config, "mixed", {})), _files_of(mixture)
    common = [file for file in files_at(config, "data.train_files") if file not in ours]
    return {
        **config,
        "mixed": {**at(config, "mixed", {}), **mixture},
        "data": {**at(config, "data", {}), "train_files": list(dict.fromkeys([*common, *theirs]))},
    }


def _files_of(mixture: Mapping[str, Any]) -> list[str]:
    sources = at(mixture, "sources", {})
    return [
        file
        for source in (sources.values() if isinstance(sources, Mapping) else ())
        if isinstance(source, Mapping)
        for file in files_at(source, "files")
    ]


def compare(name: str, this: PlanReport, other: PlanReport) -> PlanDiff:
    """Where two plans differ.

    Args:
        name: what the other is called.
    """
    known = [
        field
        for field in this.fingerprint
        if None not in (this.fingerprint[field], other.fingerprint[field])
    ]
    fields = tuple(field for field in known if this.fingerprint[field] != other.fingerprint[field])
    same = True if len(known) == len(this.fingerprint) else None
    return PlanDiff(
        name=name, this=this, other=other, fields=fields, resumable=False if fields else same
    )
