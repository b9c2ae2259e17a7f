"""Whether a controller does better than fixed shares, on the laptop's real trainer.

    python -m benchmarks.adaptive_mixture FOLDER [--only PART ...] [--steps 16] [--window 2]

Parts, each a set of whole runs of the demo:

    grid        4 fixed mixtures x 3 seeds
    controllers the best of the grid, progress and worst x 5 seeds
    broken      the controllers with a reward of taco that is always 0, and nq and math alone x 3
                seeds

The number that counts is the validation reward of the worst source, at the tokens that the run with
the fewest tokens trained: between two validations it is interpolated. Intervals are Student's, over
the seeds. Runs that are complete are kept, so the same command goes on where it was interrupted.
The demo, its warm start and its rows depend on the seed.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from agent_loop.records.run_folder import read_metrics
from agent_loop.records.statistics import half_width
from samplers.ledger import Decision, LedgerEntry, read_ledger

MIXTURES = {"equal": (1, 1, 1), "math": (1, 1, 2), "nq": (1, 2, 1), "taco": (2, 1, 1)}
"""Name -> relative shares of taco, nq and math."""

SOURCES = ("taco", "nq", "math")
CONTROLLERS = ("progress", "worst")
GRID_SEEDS, SEEDS, BROKEN_SEEDS = range(3), range(5), range(3)

REWARD = """\
def never(**_):
    return 0.0
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run."""

    name: str
    seed: int
    overrides: tuple[str, ...]

    @property
    def experiment(self) -> str:
        return f"{self.name}_{self.seed}"


def fixed(name: str, seed: int) -> Trial:
    ratios = zip(SOURCES, MIXTURES[name], strict=True)
    return Trial(
        name=name,
        seed=seed,
        overrides=tuple(f"mixed.sources.{source}.ratio={ratio}" for source, ratio in ratios),
    )


def controlled(rule: str, seed: int, window: int, broken: Path | None = None) -> Trial:
    """A run that begins with equal shares."""
    own = (f"mixed.controller={rule}", f"mixed.control.window={window}")
    if broken is not None:
        own += (f"mixed.sources.taco.reward={broken}:never",)
    name = rule if broken is None else f"{rule}_broken"
    return Trial(name=name, seed=seed, overrides=(*fixed("equal", seed).overrides, *own))


def without(seed: int) -> Trial:
    return Trial(
        name="without",
        seed=seed,
        overrides=("mixed.sources.taco=null", *fixed("equal", seed).overrides[1:]),
    )


def run(trial: Trial, folder: Path, steps: int) -> None:
    """Run a trial to its end; raises CalledProcessError if it fails."""
    done = folder / "runs" / trial.experiment / "benchmark_done"
    if done.exists():
        return
    print(f"running {trial.experiment}", flush=True)
    with (folder / f"{trial.experiment}.log").open("wb") as log:
        subprocess.run(
            [
                *(sys.executable, "-m", "verl_mixed", "train", "profile=laptop"),
                *(f"mixed.experiment={trial.experiment}", f"mixed.seed={trial.seed}"),
                *(f"trainer.total_training_steps={steps}", f"trainer.test_freq={steps // 4}"),
                *("trainer.save_freq=-1", "trainer.logger=[console]"),
                *trial.overrides,
            ],
            cwd=folder,
            check=True,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    done.touch()


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Validation rewards of a run over its trained tokens."""

    tokens: Sequence[int]
    rewards: Mapping[str, Sequence[float]]
    shares: Mapping[str, float]
    """Source -> share of all trained prompts."""

    held: frozenset[str]

    def at(self, tokens: float) -> dict[str, float]:
        return {s: float(np.interp(tokens, self.tokens, own)) for s, own in self.rewards.items()}


def curve_of(folder: Path) -> Curve:
    lines = read_ledger(folder / "ledger.jsonl")
    entries = [e for e in lines if isinstance(e, LedgerEntry) and e.outcome == "trained"]
    by_step: dict[int, int] = {}
    for entry in entries:
        by_step[entry.step] = by_step.get(entry.step, 0) + (entry.tokens or 0)
    metrics, _ = read_metrics(folder / "metrics.jsonl")
    tokens: list[int] = []
    rewards: dict[str, list[float]] = {}
    for line in metrics:
        own = {
            source: line["metrics"][f"mixed/{source}/val/reward/mean"]
            for source in SOURCES
            if f"mixed/{source}/val/reward/mean" in line["metrics"]
        }
        if own:
            tokens.append(sum(count for step, count in by_step.items() if step <= line["step"]))
            for source, value in own.items():
                rewards.setdefault(source, []).append(value)
    counts = {s: sum(entry.source == s for entry in entries) for s in rewards}
    held = {s for line in lines if isinstance(line, Decision) for s in line.held}
    return Curve(
        tokens=tokens,
        rewards=rewards,
        shares={source: count / len(entries) for source, count in counts.items()},
        held=frozenset(held),
    )


def interval(values: Sequence[float]) -> str:
    half = f" +- {half_width(values):.3f}" if len(values) > 1 else ""
    return f"{fmean(values):.3f}{half}"


def compare(groups: Mapping[str, Sequence[Curve]], sources: Sequence[str]) -> dict[str, Any]:
    """Print a row for each group at equal tokens; returns the worst source of each seed."""
    tokens = min(curve.tokens[-1] for curve in chain.from_iterable(groups.values()))
    print(f"\nvalidation reward at {tokens:,} trained tokens")
    worst: dict[str, list[float]] = {}
    for name, curves in groups.items():
        ends = [curve.at(tokens) for curve in curves]
        worst[name] = [min(end[source] for source in sources) for end in ends]
        each = "  ".join(f"{s} {interval([end[s] for end in ends])}" for s in sources)
        shares = ", ".join(
            f"{s} {fmean(curve.shares[s] for curve in curves):.2f}" for s in curves[0].shares
        )
        held = sorted({s for curve in curves for s in curve.held})
        print(
            f"{name:<16} {len(curves)} seeds  worst {interval(worst[name])}  mean "
            f"{interval([fmean(end[s] for s in sources) for end in ends])}  {each}  shares {shares}"
            + (f"  held {', '.join(held)}" if held else "")
        )
    return {"tokens": tokens, "worst": worst}


def differences(worst: Mapping[str, Sequence[float]], other: str) -> Iterator[str]:
    """The difference of each group to another, paired by seed."""
    for name, values in worst.items():
        if name != other:
            pairs = [a - b for a, b in zip(values, worst[other], strict=False)]
            yield f"worst source, {name} minus {other}: {interval(pairs)} over {len(pairs)} seeds"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parts = ("grid", "controllers", "broken")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--window", type=int, default=2)
    arguments = parser.parse_args()
    folder, steps, window = arguments.folder.resolve(), arguments.steps, arguments.window
    folder.mkdir(parents=True, exist_ok=True)
    reward = folder / "never.py"
    reward.write_text(REWARD)

    def curves(trials: Sequence[Trial]) -> list[Curve]:
        for trial in trials:
            run(trial, folder, steps)
        return [curve_of(folder / "runs" / trial.experiment) for trial in trials]

    results: dict[str, Any] = {}
    if "grid" in arguments.only or "controllers" in arguments.only:
        grid = {name: curves([fixed(name, seed) for seed in GRID_SEEDS]) for name in MIXTURES}
        results["grid"] = compare(grid, SOURCES)
    if "controllers" in arguments.only:
        means = {name: fmean(values) for name, values in results["grid"]["worst"].items()}
        winner = max(means, key=lambda name: means[name])
        print(f"\nthe best of the grid is {winner}")
        names = dict.fromkeys([winner, "equal"])
        groups = {name: curves([fixed(name, seed) for seed in SEEDS]) for name in names}
        groups |= {
            rule: curves([controlled(rule, seed, window) for seed in SEEDS]) for rule in CONTROLLERS
        }
        results["controllers"] = compare(groups, SOURCES)
        for name in names:
            print("\n".join(differences(results["controllers"]["worst"], name)))
    if "broken" in arguments.only:
        groups = {"without": curves([without(seed) for seed in BROKEN_SEEDS])}
        for rule in CONTROLLERS:
            trials = [controlled(rule, seed, window, reward) for seed in BROKEN_SEEDS]
            groups[f"{rule}_broken"] = curves(trials)
        results["broken"] = compare(groups, SOURCES[1:])
        print("\n".join(differences(results["broken"]["worst"], "without")))
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
