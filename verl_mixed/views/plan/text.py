"""The output of `verl-mixed plan`: lines of text, or JSON."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from config.text_table import text_table
from samplers.ledger import Line
from verl_mixed.views.decisions import decided, sentences, table_of
from verl_mixed.views.plan.diff import PlanDiff
from verl_mixed.views.plan.report import PlanReport, SourcePlan, ToolLoad


def as_json(report: PlanReport, diff: PlanDiff | None = None) -> dict[str, Any]:
    """The report as JSON values. Programs depend on the keys, which are names of fields.

    | key | value |
    | --- | --- |
    | fields of `PlanReport` | as there |
    | `sources` | name -> fields of `SourcePlan`; the keys of `ratio` are steps, as text |
    | `tools` | fields of `ToolLoad`; null for a recipe of verl's |
    | `diff`, only with a diff | `name`, `fields`, `resumable`, and `other`, with these same keys |
    """
    plain = asdict(report)
    for source in plain["sources"].values():
        source["ratio"] = {str(step): share for step, share in source["ratio"].items()}
    if diff is not None:
        plain["diff"] = {
            "name": diff.name,
            "fields": list(diff.fields),
            "resumable": diff.resumable,
            "other": as_json(diff.other),
        }
    return plain


def describe(report: PlanReport) -> list[str]:
    """The report as lines: a table with a column per source, then sentences."""
    sources = report.sources
    batches = len(next(iter(sources.values())).counts)
    rows = [["batch", *sources]]
    rows += [[str(i + 1), *map(_count_in(i), sources.values())] for i in range(batches)]
    rows += [["total", *(str(sum(own.counts)) for own in sources.values())]]
    if report.rows_unknown is None:
        rows += [["rows", *(str(own.rows) for own in sources.values())]]
    steps = next(iter(sources.values())).ratio
    for step in steps:
        label = "ratio" if len(steps) == 1 else f"ratio after {step} steps"
        rows += [[label, *(f"{own.ratio[step]:.4g}" for own in sources.values())]]
    cells = _CELLS if report.tools is not None else _CELLS_OF_RECIPES
    rows += [[label, *map(cell, sources.values())] for label, cell in cells.items()]
    if report.rows_unknown is None:
        rows += [[label, *map(cell, sources.values())] for label, cell in _CELLS_OF_ROWS.items()]
    policy = report.fingerprint.get("policy")
    decided_later = (
        [
            f"shares are decided every {policy['window']} steps; the numbers of the run and of "
            "tool calls are for the shares of the first window"
        ]
        if policy
        else []
    )
    left_out = [f"left out (ratio 0): {', '.join(report.left_out)}"] if report.left_out else []
    return [
        *text_table(rows, numbers=True),
        *decided_later,
        *_passes(report),
        *left_out,
        *([] if report.tools is None else _tool_calls(report.tools, report.steps)),
    ]


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


Cell = Callable[[SourcePlan], str]

_CELLS: dict[str, Cell] = {
    "prompts a step": lambda own: f"{own.prompts_per_step:.4g}",
    "trajectories a prompt": lambda own: str(own.rollout_n),
    "trajectories a step": lambda own: f"{own.trajectories_per_step:.5g}",
    "turns at most": lambda own: str(own.max_turns),
    "tool calls at most": lambda own: str(own.tool_calls),
    "prompts in the run": lambda own: str(own.prompts),
}
_CELLS_OF_RECIPES = {
    label: cell
    for label, cell in _CELLS.items()
    if label not in ("turns at most", "tool calls at most")
}
_CELLS_OF_ROWS: dict[str, Cell] = {
    "steps per pass": lambda own: _or_dash(own.steps_per_pass, ".1f"),
    "times each row is used": lambda own: _or_dash(own.passes, ".3f"),
    "all rows used in step": lambda own: _or_dash(own.exhausted_at_step, "d"),
}


def _passes(report: PlanReport) -> list[str]:
    if report.rows_unknown is not None:
        return [f"rows, passes and repeats are unknown: {report.rows_unknown}"]
    if not report.exhausted:
        return [f"no source repeats a row within the {report.steps} steps"]
    ends = [f"{name} in step {report.sources[name].exhausted_at_step}" for name in report.exhausted]
    return [f"all rows used, and repeated from then on: {', '.join(ends)}"]


def _tool_calls(load: ToolLoad, steps: int) -> list[str]:
    lines = [
        f"tool calls, upper bounds (every trajectory uses all its turns): {load.calls_per_step} a "
        f"step, {load.calls} in {steps} steps"
    ]
    if not load.limited:
        lines += ["rate limit: none (enable_global_rate_limit=false)"]
    else:
        apart = f", {load.request_interval_s:g} s apart" if load.request_interval_s else ""
        lines += [
            f"rate limit: {load.per_minute:g} calls a minute, {load.burst} back to back{apart}: it "
            f"adds at least {load.added_s_per_step:.1f} s to a step with so many calls"
        ]
        if (most := load.most_per_minute) < load.per_minute:
            lines += [
                f"warning: {load.per_minute:,.6g} calls a minute cannot be reached: calls that are "
                f"{load.request_interval_s:g} s apart are {most:,.6g} a minute at most; lower "
                "TOOL_REQUEST_INTERVAL or RATE_LIMIT_PER_MINUTE"
            ]
        waits = (
            f"a call then waits {load.longest_wait_s:.1f} s at most, tool_config.timeout is "
            f"{load.timeout_s:g} s"
        )
        lines += [
            f"the rate limit suffices: {waits}"
            if load.carries
            else f"the rate limit may NOT suffice: {waits}; a call that waits longer loses its "
            "trajectory (infra_error): raise rate_limit_per_minute, burst or timeout, or lower "
            "max_turns"
        ]
    on_top = ["replaced prompts", "validation", "retries"]
    on_top += [
        f"a call per hidden test of the programs of {name}" for name in load.rewards_that_call
    ]
    return [*lines, f"not counted: {', '.join(on_top)}"]


def describe_diff(diff: PlanDiff) -> list[str]:
    """The difference as lines: a table of the values that differ, then whether a resume works."""
    names = sorted(diff.this.sources.keys() | diff.other.sources.keys())
    listed = len(next(iter(diff.this.sources.values())).counts)
    cells: dict[str, Cell] = {
        "ratio": lambda own: _ratio_text(own.ratio),
        "rows": lambda own: "?" if own.rows is None else str(own.rows),
        "prompts a step": _CELLS["prompts a step"],
        **_CELLS_OF_ROWS,
        **{f"batch {i + 1}": _count_in(i) for i in range(listed)},
    }
    rows = [[label, *(_both(diff, name, cell) for name in names)] for label, cell in cells.items()]
    rows = [row for row in rows if any(" -> " in cell for cell in row)]
    lines = [f"this -> {diff.name}"]
    lines += (
        text_table([["", *names], *rows], numbers=True)
        if rows
        else ["the same ratios, rows and batches"]
    )
    if diff.other.rows_unknown:
        lines += [f"the rows of the other plan are unknown: {diff.other.rows_unknown}"]
    return [*lines, _verdict(diff)]


def describe_decisions(ledger: Sequence[Line]) -> list[str]:
    """What the controller of the other run decided, from its ledger; nothing without one."""
    own = decided(ledger)
    if own is None:
        return []
    head, rows = table_of(own)
    title = f"decided by {own.rule}: share of {own.unit}, and prompts of the window"
    return ["", title, *text_table([head, *rows], numbers=True), *sentences(own)]


def _count_in(batch: int) -> Cell:
    return lambda own: str(own.counts[batch])


def _both(diff: PlanDiff, name: str, cell: Cell) -> str:
    this, other = (
        cell(report.sources[name]) if name in report.sources else "-"
        for report in (diff.this, diff.other)
    )
    return this if this == other else f"{this} -> {other}"


def _ratio_text(ratio: Mapping[int, float]) -> str:
    if len(ratio) == 1:
        return f"{ratio[0]:.4g}"
    return " ".join(f"{share:.4g}@{step}" for step, share in ratio.items())


def _verdict(diff: PlanDiff) -> str:
    if diff.resumable:
        return "a run of one plan can resume with the other: sizes, ratios, batch size, seed agree"
    if diff.resumable is None:
        return (
            "whether a run of one plan can resume with the other depends on the rows, which are "
            "unknown; all else agrees"
        )
    this, other = diff.this.fingerprint, diff.other.fingerprint
    differ = [
        field
        if isinstance(this.get(field, {}), dict)
        else f"{field} ({this[field]} -> {other[field]})"
        for field in diff.fields
    ]
    is_fixed = any(report.keys() & {"policy", "choices"} for report in (this, other))
    remedy = (
        "start a new run"
        if is_fixed
        else "with mixed.on_change=continue it goes on with each source's next row"
    )
    return (
        f"a run of one plan cannot resume with the other, because these differ: "
        f"{', '.join(differ)}; {remedy}"
    )
