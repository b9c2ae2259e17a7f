"""What it costs to know which prompt comes next: our MixturePlan beside its peers, as markdown.

    python -m benchmarks.mixture_plan
    python -m benchmarks.mixture_plan --many     # only the table of many sources; needs no peers

Every measurement has a fresh process, so no stream pays for another's memory or finds its caches,
and the streams take turns within each round. CPU time is that of the whole process. Memory is the
peak over what the process held after its imports. README.md has the environment and the last table.
"""

import argparse
import base64
import gc
import importlib
import importlib.metadata
import json
import os
import pickle
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.mixture_streams import (
    BATCH_SIZE,
    RATIOS,
    STREAMS,
    MegatronBlended,
    MegatronHelper,
    Ours,
    Stream,
)
from samplers.mixture_plan import MixturePlan, PlannedPrompt, Ratio

MANY_ROWS = (40_000_000, 30_000_000, 30_000_000)
"""Rows of each source where a stream is built and read in sequence."""

RESUMED_ROWS = (4_000_000, 3_000_000, 3_000_000)
"""Rows of each source where a stream is resumed."""

RESUMED_AT = 39_000
"""Batches drawn before the stop: near the end of the first pass over `RESUMED_ROWS`."""

EXACTNESS_BATCHES = 1_000

MANY_SOURCES: dict[str, tuple[int, int | str | None]] = {
    "64 schedules": (64, 0),
    "1,000 schedules": (1000, 0),
    "1,000 schedules, one alone to step 500": (1000, 500),
    "1,000 schedules, one alone to step 12,000": (1000, 12_000),
    "64 long ratios": (64, None),
    "1,000 long ratios": (1000, None),
    "64 decimal shares at 101 steps": (64, "decimal"),
    "1,000 decimal shares at 101 steps": (1000, "decimal"),
    "1,000 sources in turn": (1000, "in turn"),
}
"""Label -> (sources, step until which the first source is alone; None if ratios have 16 digits and
no schedules). Each schedule has two steps of its own. The ratios of "decimal" have four digits and
the same sum every 100 steps; each source of "in turn" takes part in 1,000 steps only."""

MANY_BATCH, MANY_STEPS, MANY_AT = 1024, 400, 10_000
"""Prompts per batch, steps that are timed, step at which a run is resumed."""

MISSING_MODULE_EXIT = 3

Figures = dict[str, Any]
"""What one measurement found, as JSON."""


# --- in a process of its own ---------------------------------------------------


def _timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """The result of `work`, its CPU seconds and its wall seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, time.process_time() - cpu, time.perf_counter() - wall


def _memory_mb(field: str) -> float:
    """VmRSS (now) or VmHWM (the peak) of this process, in 10^6 bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"no field={field} in /proc/self/status: this benchmark needs Linux")


def _measure_reading(kind: type[Stream], folder: Path) -> Figures:
    """Build over `MANY_ROWS`, first batch, then batches in sequence for a second."""

    def build() -> Stream:
        stream = kind(MANY_ROWS)
        stream.next_batch()
        return stream

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before_mb = _memory_mb("VmRSS")
    stream, build_cpu_s, build_wall_s = _timed(build)
    growth_mb = _memory_mb("VmHWM") - before_mb

    def block() -> None:
        for _ in range(250):
            stream.next_batch()

    batches, cpu_s, wall_s = 0, 0.0, 0.0
    while cpu_s < 1.0 and (batches + 250) * BATCH_SIZE < sum(MANY_ROWS):
        _, block_cpu_s, block_wall_s = _timed(block)
        batches, cpu_s, wall_s = batches + 250, cpu_s + block_cpu_s, wall_s + block_wall_s
    return {
        "build_cpu_s": build_cpu_s,
        "build_wall_s": build_wall_s,
        "growth_mb": growth_mb,
        "batch_cpu_s": cpu_s / batches,
        "batch_wall_s": wall_s / batches,
    }


def _measure_exactness(kind: type[Stream], folder: Path) -> Figures:
    """How near 1000 batches are to the ratios; leaves a far state for `_measure_resume`."""
    stream = kind(RESUMED_ROWS, cache=folder)
    rows = np.concatenate(
        [stream.rows(stream.next_batch()) for _ in range(EXACTNESS_BATCHES)]
    )  # (N,)
    drawn_from = np.searchsorted(stream.starts, rows, side="right")[:, None] - 1 == np.arange(3)
    ratios = np.array(RATIOS)
    quotas = np.arange(1, len(rows) + 1)[:, None] * ratios  # (N, S)
    counts = drawn_from.reshape(EXACTNESS_BATCHES, BATCH_SIZE, 3).sum(axis=1)

    stream.advance(RESUMED_AT - EXACTNESS_BATCHES)
    state = stream.state()
    expected = stream.rows(stream.next_batch())
    (folder / "far.pickle").write_bytes(pickle.dumps((state, expected)))
    return {
        "worst_prefix": float(np.abs(drawn_from.cumsum(axis=0) - quotas).max()),
        "on_quota": float((np.abs(counts - BATCH_SIZE * ratios) <= 1).all(axis=1).mean()),
        "state_bytes": len(json.dumps(state, default=_as_text).encode()),
    }


def _measure_resume(kind: type[Stream], folder: Path) -> Figures:
    """Build again, continue at the saved state, and draw the batch there."""
    state, expected = pickle.loads((folder / "far.pickle").read_bytes())

    def resume() -> tuple[Stream, Any]:
        stream = kind(RESUMED_ROWS, cache=folder)
        stream.resume(state)
        return stream, stream.next_batch()

    (stream, batch), cpu_s, wall_s = _timed(resume)
    return {
        "resume_cpu_s": cpu_s,
        "resume_wall_s": wall_s,
        "same_batch": bool(np.array_equal(stream.rows(batch), expected)),
    }


def _many(label: str) -> MixturePlan:
    sources, kind = MANY_SOURCES[label]
    draw = random.Random(0)
    ratios: dict[str, Ratio] = {}
    for number in range(sources):
        ratio: Ratio = draw.random()
        if kind == "decimal":  # the first half of the sources gives what the second half takes
            turned = number if number < sources // 2 else sources - 1 - number
            sign = 1 if turned == number else -1
            changes = random.Random(turned)
            own = 10_000 // sources
            ratio = {
                step: (own + sign * changes.randrange(own)) / 10_000
                for step in range(0, MANY_AT + 1, 100)
            }
        elif kind == "in turn":
            start = number * 10
            ratio = {start: 0.0, start + 500: round(draw.uniform(0.1, 9), 2), start + 1000: 0.0}
            if number < 50:
                ratio = {0: 1.0, start + 500: 0.0}
            elif number == sources - 1:
                ratio = {start: 0.0, start + 500: 1.0}
        elif isinstance(kind, int) and kind:
            start = kind + number
            ratio = {start: 0.0, start + draw.randrange(1, 9_000): round(draw.uniform(0.1, 9), 2)}
            if number == 0:
                ratio = {0: 1.0, start: 0.2}
        elif kind is not None:
            steps = [0, draw.randrange(1, MANY_AT), draw.randrange(1, MANY_AT)]
            ratio = {step: round(draw.uniform(0.1, 9), 2) for step in steps}
        ratios[f"s{number:04}"] = ratio
    return MixturePlan(dict.fromkeys(ratios, 100_000), ratios, MANY_BATCH, 0)


def _walk_many(label: str, folder: Path) -> Figures:
    """Leave the state at `MANY_AT` and the batch due there for `_measure_many`."""

    def walk() -> MixturePlan:
        plan = _many(label)
        plan.position = MANY_AT * MANY_BATCH
        plan.drawn = plan.counts_between(0, plan.position)
        return plan

    plan, walk_cpu_s, _ = _timed(walk)
    state = json.dumps(plan.state_dict())
    (folder / "many.pickle").write_bytes(pickle.dumps((state, plan.take(MANY_BATCH))))
    return {"walk_cpu_s": walk_cpu_s, "state_bytes": len(state)}


def _measure_many(label: str, folder: Path) -> Figures:
    """Build and first batch; steps in sequence; build, load a state and draw the batch there."""
    state, expected = pickle.loads((folder / "many.pickle").read_bytes())

    def start() -> MixturePlan:
        plan = _many(label)
        plan.take(MANY_BATCH)
        return plan

    def step() -> None:
        plan.counts(plan.position // MANY_BATCH)
        plan.take(MANY_BATCH)
        plan.ahead(plan.position)

    def resume() -> list[PlannedPrompt]:
        resumed = _many(label)
        resumed.load_state_dict(json.loads(state))
        return resumed.take(MANY_BATCH)

    plan, first_cpu_s, first_s = _timed(start)
    steps = [_timed(step) for _ in range(MANY_STEPS)]
    batch, resume_cpu_s, resume_s = _timed(resume)
    return {
        "first_cpu_s": first_cpu_s,
        "first_s": first_s,
        "step_cpu_s": statistics.fmean(cpu_s for _, cpu_s, _ in steps),
        "step_s": statistics.fmean(wall_s for _, _, wall_s in steps),
        "slowest_step_s": max(wall_s for _, _, wall_s in steps),
        "resume_cpu_s": resume_cpu_s,
        "resume_s": resume_s,
        "same_batch": batch == expected,
    }


def _as_text(tensor: Any) -> str:
    return base64.b64encode(tensor.numpy().tobytes()).decode()


MEASUREMENTS = {
    "reading": _measure_reading,
    "exactness": _measure_exactness,
    "resume": _measure_resume,
}


MANY_MEASUREMENTS = {"walk_many": _walk_many, "many": _measure_many}


def _child(measurement: str, label: str, folder: Path) -> int:
    if measurement in MANY_MEASUREMENTS:
        print(json.dumps(MANY_MEASUREMENTS[measurement](label, folder)))
        return 0
    kind = next(kind for kind in STREAMS if kind.label == label)
    try:
        importlib.import_module(kind.library)
    except ModuleNotFoundError as error:
        print(error.name)
        return MISSING_MODULE_EXIT
    print(json.dumps(MEASUREMENTS[measurement](kind, folder)))
    return 0


# --- in the process that was started -------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table: a figure, or how many times better ours is in it."""

    title: str
    field: str
    text: Callable[[float], str]
    against_ours: bool = False


def _in_a_process(measurement: str, label: str, folder: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.mixture_plan", "--child", measurement, label, folder],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode not in (0, MISSING_MODULE_EXIT):
        raise RuntimeError(
            f"cannot measure {measurement} of {label}: exit={done.returncode}\n"
            f"{done.stderr[-3000:]}"
        )
    return done


def _many_table(folder: Path, rounds: int) -> list[str]:
    """The table of many sources; its medians are of `rounds` fresh processes each."""
    lines = [
        f"**Many sources, batches of {MANY_BATCH:,}**; a step is `counts`, `take` and `ahead`, "
        f"the mean of {MANY_STEPS}; wall time, CPU time in brackets",
        "",
        f"| | first batch | step | slowest step | resume at step {MANY_AT:,} | the batch due | "
        "state, bytes | CPU of the same step without a pin |",
        f"| --- |{' ---: |' * 7}",
    ]
    for label in MANY_SOURCES:
        print(f"{label}, {rounds} rounds", file=sys.stderr)
        walked = json.loads(_in_a_process("walk_many", label, folder).stdout)
        found = [json.loads(_in_a_process("many", label, folder).stdout) for _ in range(rounds)]
        medians = {name: statistics.median(own[name] for own in found) for name in found[0]}
        cells = [
            f"{_seconds(medians[f'{name}_s'])} ({_seconds(medians[f'{name}_cpu_s'])})"
            for name in ("first", "step", "resume")
        ]
        cells.insert(2, _seconds(medians["slowest_step_s"]))
        cells += ["yes" if medians["same_batch"] == 1 else "NO", f"{walked['state_bytes']:,}"]
        lines.append(f"| {label} | {' | '.join(cells)} | {_seconds(walked['walk_cpu_s'])} |")
    return lines


class Results:
    """Figures of every round, per stream."""

    def __init__(self) -> None:
        self._rounds: dict[str, list[Figures]] = {kind.label: [] for kind in STREAMS}
        self.missing: dict[str, str] = {}

    def measure(self, kind: type[Stream], measurement: str, folder: Path) -> None:
        """Run one measurement in a fresh process; a stream found missing is not tried again."""
        if kind.label in self.missing:
            return
        own_folder = folder / str(STREAMS.index(kind))
        own_folder.mkdir(exist_ok=True)
        done = _in_a_process(measurement, kind.label, own_folder)
        if done.returncode == MISSING_MODULE_EXIT:
            self.missing[kind.label] = done.stdout.split()[-1]
        else:
            self._rounds[kind.label].append(json.loads(done.stdout.splitlines()[-1]))

    def median(self, label: str, field: str) -> float:
        figures = [figures[field] for figures in self._rounds[label] if field in figures]
        return statistics.median(figures)

    def against_ours(self, label: str, field: str) -> float:
        return self.median(label, field) / self.median(Ours.label, field)

    def table(self, columns: list[Column]) -> list[str]:
        lines = [
            f"| | {' | '.join(column.title for column in columns)} |",
            f"| --- |{' ---: |' * len(columns)}",
        ]
        for kind in STREAMS:
            if kind.label in self.missing:
                cells = [f"not installed (no module {self.missing[kind.label]})"]
                cells += [""] * (len(columns) - 1)
            else:
                cells = [
                    column.text(
                        self.against_ours(kind.label, column.field)
                        if column.against_ours
                        else self.median(kind.label, column.field)
                    )
                    for column in columns
                ]
            lines.append(f"| {kind.label} | {' | '.join(cells)} |")
        return lines


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.2f} ms"


def _megabytes(value: float) -> str:
    return f"{value:,.1f} MB"


def _per_second(batch_s: float) -> str:
    return f"{1 / batch_s:,.0f}"


def _times(value: float) -> str:
    return f"{value:,.0f}x" if value >= 100 else f"{value:.3g}x"


def _report(results: Results, rounds: int) -> list[str]:
    """The whole output, as lines of markdown."""
    lines = [
        f"{os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}, "
        f"OMP_NUM_THREADS=1. Medians of {rounds} rounds, the streams taking turns, each "
        "measurement in a fresh process. 'Ours better' is how many times faster or leaner ours is; "
        "below 1x the other one is.",
        "",
        f"**Build and first batch of {BATCH_SIZE}, {sum(MANY_ROWS) // 10**6}M rows** "
        f"(sources {' / '.join(f'{size // 10**6}M' for size in MANY_ROWS)}, "
        f"ratios {' / '.join(map(str, RATIOS))})",
        "",
        *results.table(
            [
                Column(title="CPU", field="build_cpu_s", text=_seconds),
                Column(title="wall", field="build_wall_s", text=_seconds),
                Column(title="memory growth", field="growth_mb", text=_megabytes),
                Column(
                    title="ours better: CPU", field="build_cpu_s", text=_times, against_ours=True
                ),
                Column(
                    title="ours better: wall", field="build_wall_s", text=_times, against_ours=True
                ),
                Column(
                    title="ours better: memory", field="growth_mb", text=_times, against_ours=True
                ),
            ]
        ),
        "",
        f"**Batches of {BATCH_SIZE} in sequence, after the build**",
        "",
        *results.table(
            [
                Column(title="per CPU second", field="batch_cpu_s", text=_per_second),
                Column(title="per second", field="batch_wall_s", text=_per_second),
                Column(
                    title="ours better: CPU", field="batch_cpu_s", text=_times, against_ours=True
                ),
                Column(
                    title="ours better: wall", field="batch_wall_s", text=_times, against_ours=True
                ),
            ]
        ),
        "",
        f"**Resume after {RESUMED_AT * BATCH_SIZE:,} of {sum(RESUMED_ROWS):,} rows**: build, load "
        "the state, draw the batch there",
        "",
        *results.table(
            [
                Column(title="CPU", field="resume_cpu_s", text=_seconds),
                Column(title="wall", field="resume_wall_s", text=_seconds),
                Column(title="state, bytes of JSON", field="state_bytes", text="{:,.0f}".format),
                Column(
                    title="the batch due",
                    field="same_batch",
                    text=lambda value: "yes" if value == 1 else "NO",
                ),
                Column(
                    title="ours better: CPU", field="resume_cpu_s", text=_times, against_ours=True
                ),
                Column(
                    title="ours better: wall", field="resume_wall_s", text=_times, against_ours=True
                ),
            ]
        ),
        "",
        f"**Exactness over {EXACTNESS_BATCHES:,} batches of {BATCH_SIZE}**",
        "",
        *results.table(
            [
                Column(
                    title="farthest that a source is from i x ratio after any i prompts",
                    field="worst_prefix",
                    text="{:.2f} prompts".format,
                ),
                Column(
                    title="batches within one prompt of every quota",
                    field="on_quota",
                    text="{:.1%}".format,
                ),
            ]
        ),
        "",
        *[f"- {kind.label}{_version(kind, results)}: {kind.note}." for kind in STREAMS],
        "",
    ]
    for kind in (MegatronBlended, MegatronHelper):
        if kind.label not in results.missing:
            faster = results.against_ours(kind.label, "build_cpu_s")
            leaner = results.against_ours(kind.label, "growth_mb")
            lines.append(
                f"ours is {faster:,.0f} times faster and {leaner:,.0f} times leaner than megatron "
                f"({kind.label}; CPU and memory of build and first batch)  "
            )
    return lines


def _version(kind: type[Stream], results: Results) -> str:
    if kind.package is None or kind.label in results.missing:
        return ""
    return f" ({kind.package} {importlib.metadata.version(kind.package)})"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="times each stream is measured (5)")
    parser.add_argument("--many", action="store_true", help="only the table of many sources")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        measurement, label, folder = arguments.child
        return _child(measurement, label, Path(folder))

    results = Results()
    with tempfile.TemporaryDirectory() as folder:
        many = _many_table(Path(folder), arguments.rounds)
        if arguments.many:
            print("\n".join(many))
            return 0
        for kind in STREAMS:
            results.measure(kind, "exactness", Path(folder))
        for number in range(1, arguments.rounds + 1):
            print(f"round {number} of {arguments.rounds}", file=sys.stderr)
            for kind in STREAMS:
                for measurement in ("reading", "resume"):
                    results.measure(kind, measurement, Path(folder))
    print("\n".join([*_report(results, arguments.rounds), "", *many]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
