"""What `metrics.jsonl` and the log of a run say, in words: sources, pace, warnings, last error.

Pure functions over lines `{"step", "time", "metrics": {name: number}}`. The live screen, `watch`
and the report use them.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from statistics import median
from typing import Any

from verl_mixed.diagnose.log_line import clean_line
from verl_mixed.run.text import clock, passed_over_words, printable

Line = Mapping[str, Any]

_PHASES = (
    # a text of the log, and the phase of the start-up that begins with it
    ("Started a local Ray instance", "Ray is up, workers are starting"),
    ("TaskRunner", "building the trainer"),
    ("FSDP", "loading the model"),
    ("Training Progress", "first validation and first rollouts"),
)

# infra_error_rate too, because a source that lost every trajectory has no reward.
_SOURCE_METRIC = re.compile(
    r"mixed/(?P<source>.+?)/(?:val/)?(?:reward/mean|infra_error_rate)", re.S
)
_EXCEPTION = re.compile(
    r"[A-Za-z_][\w.]*(?:Error|Exception|Killed|Died\w*|Starved|Faults)(?:\([\w.]*\))?:? ?.*"
)


@lru_cache(maxsize=1 << 14)
def source_in(name: str) -> str | None:
    """The source whose reward or infra_error_rate a metric is; None for every other metric."""
    match = _SOURCE_METRIC.fullmatch(name)
    return match["source"] if match else None


def sources_of(lines: Sequence[Line]) -> list[str]:
    """Sources for which any line has a reward or an infra_error_rate, sorted."""
    names: set[str] = set()
    for line in lines:
        names.update(line["metrics"])
    return sorted({source for name in names if (source := source_in(name)) is not None})


def series(lines: Sequence[Line], name: str) -> list[tuple[int, float]]:
    """(step, value) of one metric in every line that has it."""
    return [(line["step"], line["metrics"][name]) for line in lines if name in line["metrics"]]


def phase_times(metrics: Mapping[str, float]) -> dict[str, float]:
    """Phase -> seconds of one step: verl's `timing_s/*` without `timing_s/step`."""
    return {
        name.removeprefix("timing_s/"): value
        for name, value in metrics.items()
        if name.startswith("timing_s/") and name != "timing_s/step" and name.count("/") == 1
    }


def seconds_left(lines: Sequence[Line], total_steps: int | None) -> float | None:
    """Seconds to the end, at the median pace of the last ten steps.

    None before the second step, and if the last step of the run is not known.
    The median, because a run that was stopped for a night has one very long step.
    """
    gaps_s = [after["time"] - before["time"] for before, after in pairwise(lines[-11:])]
    if not gaps_s or total_steps is None:
        return None
    return median(gaps_s) * max(0, total_steps - lines[-1]["step"])


def warnings_of(lines: Sequence[Line], passed_over: int = 0) -> list[str]:
    """Faults, most of which make the run's numbers doubtful; empty when there are none.

    The warnings are about the newest step, the validations that `improvements` compares, and the
    lines of `metrics.jsonl` that were passed over because they cannot be read.
    """
    metrics = lines[-1]["metrics"] if lines else {}
    warnings = []
    faults = {
        "infra_error_rate": "lost to infrastructure",
        "deadline_rate": "lost to deadlines",
        "loop_error_rate": "lost to exceptions of its agent loop",
    }
    if metrics.get("mixed/state_masking", 1.0) == 0:
        warnings.append("state_masking=false: tool output is in the loss (an ablation)")
    for source in sources_of(lines):
        for kind, words in faults.items():
            if share := metrics.get(f"mixed/{source}/{kind}", 0.0):
                warnings.append(f"{source}: {share:.1%} of trajectories {words}")
        warnings += [
            f"{source}: validation of step {step} lost {share:.1%} of it to faults"
            for step, share in _lost_in_validation(lines, source).items()
            if share
        ]
    warnings += server_waits(lines[-1:])
    if drifted := metrics.get("mixed/drift/found", 0.0):
        warnings.append(
            f"drift: {drifted:.0f} trajectories have other tokens than their agent loops saw"
        )
    if passed_over:
        warnings.append(passed_over_words(passed_over))
    return warnings


def server_waits(lines: Sequence[Line]) -> list[str]:
    """A sentence for each source whose calls waited for a server in these steps."""
    waited_s = {
        source: sum(seconds for _, seconds in series(lines, f"mixed/{source}/server_wait_s/sum"))
        for source in sources_of(lines)
    }
    return [
        f"calls of {source} waited {seconds:,.0f} s for a tool server that was away or overloaded"
        for source, seconds in waited_s.items()
        if seconds >= 0.5  # less would be 0 s
    ]


def _lost_in_validation(lines: Sequence[Line], source: str) -> dict[int, float]:
    """Step -> share of trajectories lost: of the newest validation, and of the first and the last
    validation with a reward, which a change is computed from."""
    lost = dict(series(lines, f"mixed/{source}/val/infra_error_rate"))
    judged = [step for step, _ in series(lines, f"mixed/{source}/val/reward/mean")]
    steps = {*judged[:1], *judged[-1:], *list(lost)[-1:]}
    return {step: lost.get(step, 0.0) for step in sorted(steps)}


def step_line(lines: Sequence[Line], total_steps: int | None) -> str:
    """The newest step in one line of plain text."""
    line = lines[-1]
    metrics = line["metrics"]
    parts = [f"step {line['step']}/{'?' if total_steps is None else total_steps}"]
    if line["step"] > 0:
        parts.append(f"left {clock(seconds_left(lines, total_steps))}")
    trained, validated = [], []
    for source in sources_of([line]):
        if (reward := metrics.get(f"mixed/{source}/reward/mean")) is not None:
            count = metrics.get(f"mixed/{source}/count", 0)
            trained.append(f"{source} {reward:.2f} ({count:.0f})")
        if (reward := metrics.get(f"mixed/{source}/val/reward/mean")) is not None:
            validated.append(f"{source} {reward:.2f}")
    if trained:
        parts.append("reward (prompts): " + ", ".join(trained))
    if validated:
        parts.append("validation: " + ", ".join(validated))
    times = sorted(phase_times(metrics).items(), key=lambda item: -item[1])[:4]
    if times:
        parts.append("seconds: " + ", ".join(f"{name} {value:.1f}" for name, value in times))
    if "mixed/ratio_error/max" in metrics:
        parts.append(f"ratio error {metrics['mixed/ratio_error/max']:.0f}")
    parts += [f"WARNING {warning}" for warning in warnings_of(lines)]
    return printable("  ".join(parts))


def startup_phase(log: str) -> str:
    """The phase of the start-up that began last, by the texts in the log."""
    place, phase = max((log.rfind(text), phase) for text, phase in _PHASES)
    return phase if place >= 0 else "starting Ray"


def last_error(log: str) -> str | None:
    """The last exception of a log as one line; None if there is none.

    The driver's own traceback comes first, because Ray puts the cause at its end. An exception of a
    worker (lines with `(name pid=...)` in front) is returned only if the driver has none.
    """
    return driver_error(log) or _last_exception(log, of_driver=False)


def driver_error(log: str) -> str | None:
    """The last exception of the driver, which ended the run; a worker's exception does not."""
    return _last_exception(log, of_driver=True)


def _last_exception(log: str, *, of_driver: bool) -> str | None:
    """The last exception after the last line that begins a traceback, of driver or workers."""
    exception, is_traceback = None, False
    for line in log.splitlines():
        text, speaker, _ = clean_line(line.encode("utf-8", "replace"))
        if bool(speaker) is of_driver:
            continue
        if text.startswith("Traceback (most recent"):
            exception, is_traceback = None, True
        elif is_traceback and _EXCEPTION.match(text):
            exception = text.strip()
    return exception
