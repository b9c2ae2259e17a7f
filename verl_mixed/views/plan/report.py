"""What a mixture will do, before it runs: prompts, passes over the data, tool calls.

Computed from the config and the row counts; nothing is started, and neither Ray nor torch is
imported. Numbers of tool calls are upper bounds, see `ToolLoad`. `verl-mixed report` shows what a
run really did.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from agent_loop.calls.limiter import rate_of, reachable_per_minute
from config.lookup import at
from config.schema import TOOL_CONFIG, ConfigError, MixedConfig, ToolConfig, load_section
from samplers import recipe_rules
from samplers.mixture_plan import MixturePlan
from verl_mixed.run.audit import plan_of
from verl_mixed.run.stock_recipe import StockRecipe

_BATCH = "data.train_batch_size"
_STEPS, _EPOCHS = "trainer.total_training_steps", "trainer.total_epochs"
_N = "actor_rollout_ref.rollout.n"
_TURNS = "actor_rollout_ref.rollout.multi_turn.max_assistant_turns"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePlan:
    """One source over a run. Prompts that replace failed or filtered prompts are not counted.

    Numbers that need the row counts are None if these are unknown.
    """

    rows: int | None
    """Rows in the training files."""

    ratio: dict[int, float]
    """Steps trained before -> share of the batch, linear in between. A constant ratio has the one
    key 0. If any source has a schedule, every source has the knots of all schedules."""

    counts: tuple[int, ...]
    """(K,) prompts in each of the first batches."""

    prompts_per_step: float
    """Mean over the run."""

    rollout_n: int
    """Trajectories per prompt; `remax` generates one more than it trains."""

    trajectories_per_step: float
    """Mean over the run."""

    max_turns: int | None
    """Most generations per trajectory, including the answer; None in a recipe of verl's."""

    steps_per_pass: float | None
    """Steps in which every row is used once, at the mean rate of the run; None if none is used."""

    prompts: int
    """Prompts over the run."""

    passes: float | None
    """How often each row is used over the run, on average."""

    exhausted_at_step: int | None
    """The step, counted from 1, that uses the last unused row; None if the run ends before."""

    tool_calls: int | None
    """Most calls over the run; None in a recipe of verl's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLoad:
    """The tool calls that the limiter must grant if every trajectory uses all its turns.

    The last generation of a trajectory is its answer, so a trajectory makes at most
    `max_turns - 1` calls; 1 is counted for `max_turns=1`. Not counted: retries, replaced prompts,
    validation, and rewards that run programs (`rewards_that_call`).
    """

    calls: int
    """Over the run."""

    calls_per_step: int
    """In the step with the most calls."""

    limited: bool
    """`enable_global_rate_limit`."""

    per_minute: float
    burst: int
    request_interval_s: float

    added_s_per_step: float
    """Least time in which the limiter grants the calls of one step, starting with a full burst."""

    longest_wait_s: float
    """Longest wait of one call if all trajectories of the step call at the same moment."""

    timeout_s: float
    """Time limit of a call, including its wait for the limiter."""

    carries: bool
    """Whether no call waits longer than its timeout; such a call ends as `infra_error`."""

    rewards_that_call: tuple[str, ...]
    """Sources whose reward makes a call for each hidden test of a program."""

    @property
    def most_per_minute(self) -> float:
        """`per_minute`, or fewer if calls must be further apart (`request_interval_s`)."""
        return reachable_per_minute(self.per_minute, self.request_interval_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """A mixture over a run."""

    batch_size: int
    steps: int
    sources: dict[str, SourcePlan]
    """Name -> source, for the sources with a ratio above 0."""

    left_out: tuple[str, ...]
    """Sources with ratio 0."""

    exhausted: tuple[str, ...]
    """Sources whose first pass ends within the run, in the order of these ends."""

    tools: ToolLoad | None
    """None in a recipe of verl's."""

    rows_unknown: str | None
    """Why the row counts are unknown; None if they are known."""

    fingerprint: dict[str, Any]
    """What a resume compares: `MixturePlan.description`, with `sizes` None if rows are unknown."""


def make_report(
    config: Mapping[str, Any],
    rows: Mapping[str, int] | None,
    *,
    batches: int,
    rows_unknown: str | None = None,
) -> PlanReport:
    """The plan of a config.

    Args:
        config: the resolved run config.
        rows: source -> rows; None if they are unknown.
        batches: how many batches to list.
        rows_unknown: why the rows are unknown.

    Raises:
        ConfigError, ValueError: the mixture is impossible.
    """
    mixed = load_section(MixedConfig, at(config, "mixed", {}), "mixed")
    tools = load_section(ToolConfig, at(config, TOOL_CONFIG, {}), TOOL_CONFIG)
    _, steps, common_n, common_turns = _whole(config, (_BATCH, _STEPS, _N, _TURNS))
    plan = plan_of(config, dict.fromkeys(mixed.ratios, 1) if rows is None else rows)
    n_of: dict[str, int] = {}
    turns_of: dict[str, int] = {}
    for name in plan.sources:
        own, is_remax = mixed.sources[name], at(config, "algorithm.adv_estimator") == "remax"
        n_of[name] = (own.rollout_n or common_n) + is_remax
        turns_of[name] = own.max_turns or common_turns
    report = _report(
        plan,
        steps=steps,
        batches=batches,
        ratio=_ratios(mixed),
        n_of=n_of,
        turns_of=turns_of,
        left_out=sorted(mixed.sources.keys() - mixed.ratios.keys()),
        knows_rows=rows is not None,
        rows_unknown=rows_unknown,
    )
    return replace(report, tools=_tool_load(plan, n_of, turns_of, steps, tools, mixed))


def recipe_report(recipe: StockRecipe, *, batches: int) -> PlanReport:
    """The plan of a recipe of verl's without a problem.

    Raises:
        ConfigError: the plan depends on rows that are unknown, or a number is wrong.
    """
    epochs, n = _whole(recipe.config, (_EPOCHS, _N))
    limits: list[int] = []  # verl's loop ends with the first
    if recipe.steps_per_epoch is not None:
        limits.append(recipe.steps_per_epoch * epochs)
    if at(recipe.config, _STEPS) is not None:
        limits += _whole(recipe.config, (_STEPS,))
    if (shares := recipe.shares) is None or not limits:
        needed = "a share of null" if limits else f"{_STEPS}=null"
        raise ConfigError([f"{needed} needs the rows of the training files: {recipe.unknown}"])
    plan = recipe_rules.plan_of(
        recipe.mixture,
        recipe.sizes or dict.fromkeys(recipe.mixture, 1),
        at(recipe.config, _BATCH),
        at(recipe.config, "data.seed"),
    )
    left_out = [name for name, share in shares.items() if not share]
    return _report(
        plan,
        steps=min(limits),
        batches=batches,
        ratio={name: {0: share} for name, share in shares.items()},
        n_of=dict.fromkeys(plan.sources, n),
        turns_of=None,
        left_out=sorted(left_out),
        knows_rows=recipe.sizes is not None,
        rows_unknown=recipe.unknown,
    )


def _report(
    plan: MixturePlan,
    *,
    steps: int,
    batches: int,
    ratio: Mapping[str, dict[int, float]],
    n_of: Mapping[str, int],
    turns_of: Mapping[str, int] | None,
    left_out: Sequence[str],
    knows_rows: bool,
    rows_unknown: str | None,
) -> PlanReport:
    """A plan over so many steps, without its tool load; mappings have an entry per source."""
    length = steps * plan.batch_size
    due, drawn = plan.due(length), plan.counts_between(0, length)
    counts = [plan.counts(index) for index in range(batches)]
    sources: dict[str, SourcePlan] = {}
    ends: dict[str, int] = {}  # source -> prompts of all sources until its first pass ends
    for name in plan.sources:
        if name in left_out:
            continue
        size = plan.sizes[name] if knows_rows else None
        if size is not None and drawn[name] >= size:
            ends[name] = _prompts_until(plan, name, size, length)
        per_step, n = float(due[name] / steps), n_of[name]
        turns = None if turns_of is None else turns_of[name]
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
            exhausted_at_step=math.ceil(ends[name] / plan.batch_size) if name in ends else None,
            tool_calls=None if turns is None else drawn[name] * n * _most_calls(turns),
        )
    return PlanReport(
        batch_size=plan.batch_size,
        steps=steps,
        sources=sources,
        left_out=tuple(left_out),
        exhausted=tuple(sorted(ends, key=lambda name: ends[name])),
        tools=None,
        rows_unknown=rows_unknown,
        fingerprint=plan.description() | ({} if knows_rows else {"sizes": None}),
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
    """source -> step -> configured share, at the knots of all schedules."""
    schedules = {name: mixed.sources[name].schedule for name in mixed.ratios}
    steps = sorted({0}.union(*schedules.values()))
    at_step: dict[str, list[float]] = {
        name: np.interp(steps, sorted(own), [own[step] for step in sorted(own)]).tolist()
        for name, own in schedules.items()
    }
    totals = [math.fsum(ratios) for ratios in zip(*at_step.values(), strict=True)]
    return {
        name: dict(zip(steps, np.divide(ratios, totals).tolist(), strict=True))
        for name, ratios in at_step.items()
    }


def _prompts_until(plan: MixturePlan, name: str, draws: int, most: int) -> int:
    """After how many prompts of all sources this source has given `draws`; at most `most`."""
    return bisect_left(range(most), draws, key=lambda i: plan.counts_between(0, i)[name])


def _most_calls(max_turns: int) -> int:
    return max(1, max_turns - 1)


def _tool_load(
    plan: MixturePlan,
    n_of: Mapping[str, int],
    turns_of: Mapping[str, int],
    steps: int,
    tools: ToolConfig,
    mixed: MixedConfig,
) -> ToolLoad:
    # not at the top: the plan of a recipe of verl's needs the core only, and rewards need more
    from agent_loop.rewards.registry import runs_programs

    names = plan.sources
    trajectories = np.array([n_of[name] for name in names])
    calls = trajectories * [_most_calls(turns_of[name]) for name in names]
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
        calls=int((counts @ calls).sum()),
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
            name for name in names if runs_programs(mixed.sources[name].reward_name(name))
        ),
    )
