"""Sections on time: tools, the rate limiter, the phases of a step. Pure."""

from collections.abc import Sequence

from verl_mixed.views.pace import pace_words
from verl_mixed.views.progress import Line, series, server_waits
from verl_mixed.views.report.charts import Curve, Panel
from verl_mixed.views.report.panels import Section, Table, by_source, colored, drawn, per_source
from verl_mixed.views.report.runs import Run
from verl_mixed.views.summary import AFTER_STEP, PHASE_WORDS, increments, phase_means, tool_rows

PHASES_SHOWN = 6
"""The longest phases, each with a colour of its own. The other phases are one layer."""


def tools(run: Run) -> Section:
    """Calls, failures and latency of each tool."""
    # a run of many sources has a thousand metrics a step, and `tool_rows` looks at all of them
    lines: list[Line] = [
        {**line, "metrics": {n: value for n, value in line["metrics"].items() if "/tools/" in n}}
        for line in run.trained
    ]
    names = [row.tool for row in tool_rows(lines)]

    def per_tool(title: str, metric: str) -> Panel:
        points = {name: series(run.trained, f"mixed/tools/{name}/{metric}") for name in names}
        return Panel(title=title, curves=colored(points))

    head = ("tool", "source", "calls", "failed", "share", "p50 s", "p95 s", "worst p95 s")
    rows = [
        [
            row.tool,
            source or "all",
            row.calls,
            row.failed,
            "" if row.error_rate is None else f"{row.error_rate:.2%}",
            *("" if s is None else s for s in (row.p50_s, row.p95_s, row.worst_p95_s)),
        ]
        for source in (None, *run.sources)
        for row in tool_rows(lines, source)
    ]
    panels = drawn(
        per_source(run, "Tool calls per trajectory", "tool_calls/mean"),
        per_source(run, "Tool calls rejected, share", "tool_error_rate"),
        per_tool("Calls per step", "calls"),
        per_tool("Failed calls, share", "error_rate"),
        per_tool("Latency p50, s", "latency_s/p50"),
        per_tool("Latency p95, s", "latency_s/p95"),
        per_source(run, "Latency p95 of all tools of a source, s", "tool_latency_s/p95"),
        per_source(run, "Answered by the cache, share", "tool_cache_hit_rate"),
        per_source(run, "Trajectories lost to infrastructure, share", "infra_error_rate"),
        per_source(run, "Trajectories lost to deadlines, share", "deadline_rate"),
    )
    return Section(
        title="Tools",
        panels=panels,
        tables=[Table(head=head, rows=rows)] if names else (),
        notes=("p50 and p95 in the table are medians over the steps.",) if names else (),
        missing="No tool has been called.",
    )


def limiter(run: Run) -> Section:
    """Grants, waits and utilisation of the rate limiter, and waits for servers."""
    waits = server_waits(run.trained)
    title = "Seconds waited for servers per step, all calls"
    for_servers = [per_source(run, title, "server_wait_s/sum")] if waits else []

    def one(title: str, metric: str, ceiling: float | None = None) -> Panel:
        curve = Curve(name=metric, points=series(run.trained, f"mixed/limiter/{metric}"))
        return Panel(title=title, curves=[curve], ceiling=ceiling)

    def gained(title: str, metric: str) -> Panel:
        counters = by_source(run, f"limiter/{metric}")
        gains = {source: increments(own, run.restarts) for source, own in counters.items()}
        return Panel(title=title, curves=colored(gains))

    return Section(
        title="Rate limiter",
        panels=drawn(
            one("Utilisation of the rate", "utilisation", 1),
            one("Waiting at the end of the step", "waiting"),
            gained("Granted per step", "granted"),
            gained("Seconds waited per step, all calls", "waited_s"),
            per_source(run, "Wait per call, s", "limiter_wait_s/mean"),
            *for_servers,
            one("Rate factor (adaptive)", "rate_factor", 1),
        ),
        notes=[f"{words}." for words in waits],
        missing="The run has no rate limiter.",
    )


def times(run: Run) -> Section:
    """Seconds of each phase of a step."""
    seconds = phase_means(run.timed)
    step = Curve(name="step", points=series(run.timed, "timing_s/step"), color=7, faint=True)
    whole = sum(value for _, value in step.points) / max(1, len(run.timed))
    head = ("phase", "mean seconds a step", "share of the step")
    rows = [
        [PHASE_WORDS.get(phase, phase), s, f"{s / whole:.1%}"]
        for phase, s in seconds.items()
        if whole
    ]
    throughput = Curve(name="throughput", points=series(run.timed, "perf/throughput"))
    return Section(
        title="Time",
        panels=drawn(
            Panel(title="Seconds a step, by phase", layers=phase_layers(run), curves=[step]),
            Panel(title="Tokens per second and GPU", curves=[throughput]),
            per_source(run, "Waited for the groups of a source, s a step", "wait_s"),
            per_source(run, "Seconds in flight per group", "lead/flight_s"),
            per_source(run, "Open groups wanted", "lead/groups"),
        ),
        tables=[Table(head=head, rows=rows)] if rows else (),
        notes=(
            "The thin line is the step; validation comes on top of it. Phases of an asynchronous "
            "run overlap, so that their sum can exceed the step.",
            *([f"{pace}."] if (pace := pace_words(run.trained)) else []),
        ),
        missing="No step has been timed yet.",
    )


def phase_layers(run: Run) -> list[Curve]:
    """Seconds of each step as layers: the longest phases, the rest of the step, validation."""
    timed = run.timed
    shown = [phase for phase in phase_means(timed) if phase != AFTER_STEP][:PHASES_SHOWN]
    layers = [_layer(timed, phase, i) for i, phase in enumerate(shown)]
    rest = []
    for line in timed:
        seconds = [line["metrics"].get(f"timing_s/{phase}", 0.0) for phase in ("step", *shown)]
        rest.append((line["step"], max(0.0, seconds[0] - sum(seconds[1:]))))
    layers.append(Curve(name="other", points=rest, color=7))
    layers.append(_layer(timed, AFTER_STEP, 6))
    return [layer for layer in layers if any(value > 0 for _, value in layer.points)]


def _layer(timed: Sequence[Line], phase: str, color: int) -> Curve:
    name = PHASE_WORDS.get(phase, phase)
    return Curve(name=name, points=series(timed, f"timing_s/{phase}"), color=color)
