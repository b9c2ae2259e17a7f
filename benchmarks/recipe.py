"""The mixture in recipes of verl's own, beside verl's sampler, and under kills.

`python -m benchmarks.recipe MODEL OUT [--modes sync ...] [--kills 20] [--steps 6]` runs verl's
stock trainers on a CPU (`tests/e2e/recipes.py`) with DAPO filtering and a loop of which 3 % of the
trajectories raise. What was trained is read from verl's own dump, not from our ledger. verl's
sampler gets rows that are in the exact order of the mixture, so each batch that it draws is exact.

`wrong` counts the prompts that have the place of another source, over all steps, and `worst` those
of one step. `s/step` is the median of verl's `timing_s/step`. A kill is a SIGKILL of all processes
while a step generates, updates the weights or saves.
"""

import argparse
import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median

import pyarrow as pa
import pyarrow.parquet as pq

from samplers.audit import audit, plans_in
from samplers.ledger import read_ledger
from samplers.mixture_plan import MixturePlan
from tests.e2e.recipes import (
    BATCH_SIZE,
    DAPO,
    DOOR,
    FAILING_LOOP,
    MODES,
    PHASES,
    ROWS,
    SHARES,
    Recipe,
    wrong,
)


def in_order(recipe: Recipe) -> None:
    """Put the rows into the order of the mixture, for a sampler that takes them as they come."""
    path = recipe.folder / "rows.parquet"
    rows = pq.read_table(path).to_pylist()
    by_source = {name: [row for row in rows if row["data_source"] == name] for name in SHARES}
    plan = MixturePlan(dict.fromkeys(SHARES, ROWS), SHARES, BATCH_SIZE, seed=0)
    drawn = [plan.prompt(i) for i in range(2 * ROWS)]
    table = pa.Table.from_pylist([by_source[source][row] for source, row in drawn])
    pq.write_table(table, path)


def compare(recipe: Recipe) -> dict[str, object]:
    """One run without a kill."""
    recipe.run()
    of_steps = [wrong(prompts) for prompts in recipe.trained().values()]
    seconds = [line["timing_s/step"] for line in recipe.metrics()]
    return {
        "steps": len(of_steps),
        "wrong": sum(of_steps),
        "worst": max(of_steps),
        "s/step": round(median(seconds), 2),
    }


def killed(recipe: Recipe, kills: int) -> dict[str, object]:
    """One run that is killed so many times, in all phases in turn, and then goes on to its end."""
    began, phases = time.monotonic(), Counter[str]()
    for number in range(kills):
        phases[phase := PHASES[number % len(PHASES)]] += 1
        recipe.start().kill_in(phase)
        print(f"kill {number + 1}, {phase}: checkpoint {recipe.saved()}", flush=True)
    recipe.run()
    trained = recipe.trained()
    lines = read_ledger(recipe.checkpoints / "ledger.jsonl")
    report = audit(lines, plans_in(lines)[-1][1])
    drawn = Counter(prompt for prompts in trained.values() for prompt in prompts)
    return {
        "steps": f"{len(trained)} of {recipe.steps}",
        "kills": dict(phases),
        "wrong": sum(map(wrong, trained.values())),
        "trained twice": sum(count - 1 for count in drawn.values()),
        "audit": list(report.problems) or "every batch as planned",
        "minutes": round((time.monotonic() - began) / 60, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a folder of weights, as of the demo")
    parser.add_argument("out", type=Path)
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    parser.add_argument("--what", nargs="*", default=["verl", "ours", "kills"])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=6)
    given = parser.parse_args()
    for mode in given.modes:
        common = (*DAPO, *FAILING_LOOP)
        for what in given.what:
            recipe = Recipe(
                folder=given.out / f"{mode}_{what}",
                model=given.model.resolve(),
                mode=mode,
                steps=given.steps,
                overrides=common,
            )
            recipe.write()
            if what == "verl":
                in_order(recipe)
                found = compare(replace(recipe, overrides=(*common, "data.shuffle=false")))
            elif what == "ours":
                found = compare(replace(recipe, overrides=(*common, *DOOR)))
            else:
                recipe = replace(recipe, overrides=(*common, *DOOR), steps=given.kills // 2 + 2)
                found = killed(recipe, given.kills)
            print(json.dumps({"mode": mode, "sampler": what, **found}), flush=True)


if __name__ == "__main__":
    main()
