"""Seconds a step of asynchronous training when one source is 20 times slower than two others.

Simulated: verl's real replay buffer and ours, and the same prompts, of which the same number may be
open. verl's buffer takes the oldest finished groups, whatever their sources; ours trains exact
batches. 1.0.0 had each source as many batches ahead (`by quota`). Latencies are uniform within
`spread` of their mean.

Run: python -m benchmarks.pace
"""

import logging
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.samplers import test_pace
from tests.samplers.test_pace import BATCH, run_of_ours, ticks_a_step, ticks_of_verl
from tests.samplers.test_replay_buffer import Run

STEPS = 400


def by_quota(run: Run) -> None:
    """Start a step's prompts as 1.0.0 did: its quotas, and some batches before the first step."""
    if run.step == 1:
        run._start(run.plan.take(run.warmup * BATCH))
    run._start(run.plan.take(BATCH))


def ticks(share: float, warmup: int, spread: float, *, auto: bool) -> float:
    """Of a step with our buffer."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as path:
        if not auto:
            patch.setattr(Run, "dispatch", by_quota)
        options: dict[str, Any] = {"warmup": warmup, "max_off_policy_threshold": None}
        return ticks_a_step(run_of_ours(Path(path), patch, share, spread, **options)[1])


def main() -> None:
    """Measure and print."""
    logging.disable()
    test_pace.STEPS = STEPS
    print(f"batch of {BATCH}, {STEPS} steps, of which the second half counts; verl's step is 1\n")
    print("| share of the slow source | batches ahead | spread | lead: auto | lead: by quota |")
    print("|---:|---:|---:|---:|---:|")
    for share, warmup, spread in product((0.1, 0.3, 0.5, 0.8), (1, 4), (0.0, 0.5)):
        theirs = ticks_a_step(ticks_of_verl(share, warmup, spread))
        auto, quota = (ticks(share, warmup, spread, auto=own) / theirs for own in (True, False))
        print(f"| {share} | {warmup} | {spread} | {auto:.2f} | {quota:.2f} |", flush=True)


if __name__ == "__main__":
    main()
