"""What a run's `metrics.jsonl` and log say, in words; live view, watch and report read it here.

Pure functions over lines `{"step", "time", "metrics": {name: number}}`.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from statistics import median
from typing import Any

from verl_mixed.run.text import ANSI, clock, printable

Line = Mapping[str, Any]

_PHASES = (
    # a word of the log, what it means; the last one found is where the start-up is
    ("Started a local Ray instance", "Ray is up, workers are starting"),
    ("TaskRunner", "building the trainer"),
    ("FSDP", "loading the model"),
    ("Training Progress", "first validation and first rollouts"),
)

# One that lost every trajectory has no reward.
_OF_SOURCE = re.compile(r"mixed/(?P<source>.+?)/(?:val/)?(?:reward/mean|infra_error_rate)", re.S)
_ACTOR = re.compile(r"^\((?:[^()]*pid=\d+[^()]*)\)\s?")


@lru_cache(maxsize=1 << 14)
def source_in(name: str) -> str | None:
    """The source that a metric is a reward or losses of; None for every other metric."""
    match = _OF_SOURCE.fullmatch(name)
    return match["source"] if match else None


def sources_of(lines: Sequence[Line]) -> list[str]:
    """Sources that any line has a reward or losses of, sorted."""
    names: set[str] = set()
    for line in lines:
        names.update(line["metrics"])
    return sorted({source for name in names if (source := source_in(name)) is not None})


def series(lines: Sequence[Line], name: str) -> list[tuple[int, float]]:
    """(step, value) of one metric where it was logged."""
    return [(line["step"], line["metrics"][name]) for line in lines if name in line["metrics"]]


def phase_times(metrics: Mapping[str, float]) -> dict[str, float]:
    """Phase -> seconds of one step, verl's `timing_s/*` but for the step itself."""
    return {
        name.removeprefix("timing_s/"): value
        for name, value in metrics.items()
        if name.startswith("timing_s/") and name != "timing_s/step" and name.count("/") == 1
    }


def seconds_left(lines: Sequence[Line], total_steps: int | None) -> float | None:
    """Time to the end at the median pace of the last ten steps; None before there is a pace, and
    where the end is not known.

    The median, because a run that was stopped overnight has one very long step.
    """
    gaps_s = [after["time"] - before["time"] for before, after in pairwise(lines[-11:])]
    if not gaps_s or total_steps is None:
        return None
    return median(gaps_s) * max(0, total_steps - lines[-1]["step"])


def warnings_of(lines: Sequence[Line]) -> list[str]:
    """What a reader of any number of this run must know, newest step and the validations that are
    compared; empty when all is well."""
    metrics = lines[-1]["metrics"] if lines else {}
    found = []
    if metrics.get("mixed/state_masking", 1.0) == 0:
        found.append("state_masking=false: tool output is in the loss (an ablation)")
    for source in sources_of(lines):
        for kind, words in (
            ("infra_error_rate", "lost to infrastructure"),
            ("loop_error_rate", "lost to exceptions of its agent loop"),
        ):
            if share := metrics.get(f"mixed/{source}/{kind}", 0.0):
                found.append(f"{source}: {share:.1%} of trajectories {words}")
        found += [
            f"{source}: validation of step {step} lost {share:.1%} of it to faults"
            for step, share in _compared(lines, source).items()
            if share
        ]
    if drifted := metrics.get("mixed/drift/found", 0.0):
        found.append(f"drift: {drifted:.0f} trajectories say other than their loops saw")
    return found


def _compared(lines: Sequence[Line], source: str) -> dict[int, float]:
    """Step -> share lost, of the newest validation, and of the first and last that have a reward:
    those are what a change is told from."""
    lost = dict(series(lines, f"mixed/{source}/val/infra_error_rate"))
    judged = [step for step, _ in series(lines, f"mixed/{source}/val/reward/mean")]
    shown = {*judged[:1], *judged[-1:], *list(lost)[-1:]}
    return {step: lost.get(step, 0.0) for step in sorted(shown)}


def step_line(lines: Sequence[Line], total_steps: int | None) -> str:
    """The newest step in one line of plain text."""
    line = lines[-1]
    metrics = line["metrics"]
    parts = [f"step {line['step']}/{'?' if total_steps is None else total_steps}"]
    if line["step"] > 0:
        parts.append(f"left {clock(seconds_left(lines, total_steps))}")
    trained = [
        f"{source} {metrics[f'mixed/{source}/reward/mean']:.2f} "
        f"({metrics.get(f'mixed/{source}/count', 0):.0f})"
        for source in sources_of([line])
        if f"mixed/{source}/reward/mean" in metrics
    ]
    if trained:
        parts.append("reward (prompts): " + ", ".join(trained))
    validated = [
        f"{source} {metrics[f'mixed/{source}/val/reward/mean']:.2f}"
        for source in sources_of([line])
        if f"mixed/{source}/val/reward/mean" in metrics
    ]
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
    """Where the start-up is, by the last known word of the log."""
    found = [(log.rfind(word), meaning) for word, meaning in _PHASES]
    place, meaning = max(found)
    return meaning if place >= 0 else "starting Ray"


def last_error(log: str) -> str | None:
    """The last exception of a log as one line; None where there is none.

    The driver's own traceback counts first: Ray puts the cause at its end. Lines of workers carry
    `(name pid=...)` in front and count where the driver says nothing.
    """
    clean = [ANSI.sub("", line) for line in log.splitlines()]
    workers = [_ACTOR.sub("", line) for line in clean if _ACTOR.match(line)]
    return driver_error(log) or _last_exception(workers)


def driver_error(log: str) -> str | None:
    """The last exception of the driver itself, which ended it; workers raise and go on."""
    clean = (ANSI.sub("", line) for line in log.splitlines())
    return _last_exception([line for line in clean if not _ACTOR.match(line)])


_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Killed|Died\w*)(?:\([\w.]*\))?:? ?.*")


def _last_exception(lines: Sequence[str]) -> str | None:
    starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent")]
    if not starts:
        return None
    found = [line for line in lines[starts[-1] + 1 :] if _EXCEPTION.match(line)]
    return found[-1].strip() if found else None
