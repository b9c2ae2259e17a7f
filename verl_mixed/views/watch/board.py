"""The values of `metrics.jsonl` that a screen shows. Pure: computed once, drawn often."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from verl_mixed.views import progress, summary
from verl_mixed.views.estimates import NO_RECORDS, Improvement, Validated, improvements

MOST_POINTS = 1000
"""Points of a curve that are kept; a screen shows far fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRow:
    """The values of one source; None: not known."""

    source: str
    rewards: list[tuple[int, float]]
    """(step, mean reward) of at most `MOST_POINTS` spans of equally many steps."""

    latest: float | None
    """Mean reward of the newest step."""

    recent: float | None
    """Mean reward of the last `AVERAGE_OVER` steps."""

    improvement: Improvement | None
    validation: float | None
    """Mean reward of the newest validation."""

    count: float | None
    pass_rate: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LimiterRow:
    """The values of the rate limiter at the end of a step."""

    utilisation: float
    """Share of the rate that was used in the last minute."""

    granted: float
    waiting: float
    rate_factor: float
    """Share of the configured rate that the limiter allows; below 1 after 429s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """The values of the lines of `metrics.jsonl`; computed again when the lines change."""

    step: int
    time: float | None
    """Seconds since 1970, of the newest line."""

    left_s: float | None
    sources: list[SourceRow]
    ratio_error: tuple[float, float] | None
    """Prompts: (of the newest step, cumulative)."""

    phases: dict[str, float]
    """Phase -> seconds, of the newest step."""

    limits: summary.Limits | None
    """What took the time of the newest step."""

    limiter: LimiterRow | None
    tools: list[summary.ToolRow]
    """Of the newest step."""

    warnings: list[str]


def board_of(
    lines: Sequence[progress.Line],
    total_steps: int | None,
    passed_over: int = 0,
    validated: Validated = NO_RECORDS,
) -> Board:
    """The values of all lines so far; old lines need only the metrics of curves."""
    newest: Mapping[str, float] = lines[-1]["metrics"] if lines else {}
    trained = next((line for line in reversed(lines) if line["step"] > 0), None)
    metrics: Mapping[str, float] = trained["metrics"] if trained else {}
    changes = {change.source: change for change in improvements(lines, validated)}
    ratio = metrics.get("mixed/ratio_error/max")
    return Board(
        step=max((line["step"] for line in lines), default=0),
        time=lines[-1]["time"] if lines else None,
        left_s=progress.seconds_left(lines, total_steps) if trained else None,
        sources=[
            _source_row(source, lines, metrics, changes.get(source))
            for source in progress.sources_of(lines)
        ],
        ratio_error=(
            None if ratio is None else (ratio, metrics.get("mixed/ratio_error/cumulative_max", 0.0))
        ),
        phases=progress.phase_times(metrics or newest),
        limits=summary.limits_of([trained]) if trained else None,
        limiter=_limiter_in(metrics),
        tools=summary.tool_rows([trained]) if trained else [],
        warnings=progress.warnings_of(lines, passed_over),
    )


def _source_row(
    source: str,
    lines: Sequence[progress.Line],
    metrics: Mapping[str, float],
    improvement: Improvement | None,
) -> SourceRow:
    rewards = progress.series(lines, f"mixed/{source}/reward/mean")
    validations = progress.series(lines, f"mixed/{source}/val/reward/mean")
    return SourceRow(
        source=source,
        rewards=means_of(rewards, MOST_POINTS),
        latest=rewards[-1][1] if rewards else None,
        recent=summary.mean_of_last(rewards),
        improvement=improvement,
        validation=validations[-1][1] if validations else None,
        count=metrics.get(f"mixed/{source}/count"),
        pass_rate=metrics.get(f"mixed/{source}/pass_rate"),
    )


def means_of(points: summary.Points, most: int) -> list[tuple[int, float]]:
    """A curve of at most `most` points.

    A longer curve is divided into spans of equally many steps. Each span becomes one point: its
    first step, and the mean of its values.
    """
    if len(points) <= most:
        return list(points)
    spans = summary.in_buckets([step for step, _ in points], most)
    return [(points[span[0]][0], fmean(points[i][1] for i in span)) for span in spans]


def _limiter_in(metrics: Mapping[str, float]) -> LimiterRow | None:
    if "mixed/limiter/utilisation" not in metrics:
        return None
    return LimiterRow(
        utilisation=metrics["mixed/limiter/utilisation"],
        granted=metrics.get("mixed/limiter/granted", 0.0),
        waiting=metrics.get("mixed/limiter/waiting", 0.0),
        rate_factor=metrics.get("mixed/limiter/rate_factor", 1.0),
    )
