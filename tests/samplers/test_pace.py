"""Exact batches cost no time: groups a second, beside verl's sampler that knows no quotas.

Both get the same prompts, and as many of their groups may be open. One source takes 20 times as
long as the two others.
"""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from samplers.mixture_plan import MixturePlan
from samplers.uid import make_uid, prompt_of
from samplers.verl_releases import HAS_WAIT
from tests.fakes.transfer_queue import Fate, World
from tests.samplers import test_pace, test_replay_buffer
from tests.samplers.test_replay_buffer import Run, use_world

pytest.importorskip("verl", reason="the replay buffers are verl's")

from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

BATCH, STEPS = 40, 60
SIZES = {"a": 1000, "b": 1000, "slow": 1000}
TICKS, FACTOR = 5, 20
UNBOUNDED = None if HAS_WAIT else 1000
"""0.9.0 needs a number for `max_off_policy_threshold`."""


def ratios(share: float) -> dict[str, float]:
    return {"a": (1 - share) / 2, "b": (1 - share) / 2, "slow": share}


def world(spread: float, seed: int = 0) -> World:
    """Latencies are uniform in `spread` times the mean around it."""

    def fate(ticks: int) -> Fate:
        latency = (round(ticks * (1 - spread)), round(ticks * (1 + spread)))
        return Fate(filtered=0.0, failed=0.0, latency=latency)

    fates = {name: fate(TICKS * (FACTOR if name == "slow" else 1)) for name in SIZES}
    return World(fates=fates, source_of=lambda uid: prompt_of(uid)[0], rng=random.Random(seed))


def ticks_of_verl(share: float, warmup: int, spread: float) -> list[int]:
    """Tick at the end of each step with verl's own buffer, dispatch and sampler."""
    own = world(spread)
    plan = MixturePlan(SIZES, ratios(share), BATCH, seed=1)

    def start(prompts: int, step: int) -> None:
        for prompt in plan.take(prompts):
            own.start(make_uid(prompt.source, prompt.draw), step)

    with pytest.MonkeyPatch.context() as patch:
        use_world(patch, own)
        options: dict[str, Any] = {"max_off_policy_threshold": UNBOUNDED, "poll_interval": 0.05}
        buffer = ReplayBufferAsync(
            trainer_mode="colocate_async",
            trainer_config=OmegaConf.create({}),
            sampler_kwargs=OmegaConf.create({}),
            max_off_policy_strategy="drop",
            **options,
        )
        ends: list[int] = []
        start(warmup * BATCH, 1)
        for step in range(1, STEPS + 1):
            start(BATCH, step)
            batch, _ = buffer.sample(step, "train", BATCH)
            own.kv_clear(partition_id="train", keys=batch.keys)
            own.items.pop("ended", None)  # verl's buffer does not read it, but lists it
            ends.append(own.tick)
    return ends


def run_of_ours(
    path: Path, monkeypatch: pytest.MonkeyPatch, share: float, spread: float, **options: Any
) -> tuple[Run, list[int]]:
    """(the run after its steps, which checked every batch; tick at the end of each step)"""
    monkeypatch.setattr(test_replay_buffer, "SIZES", SIZES)
    monkeypatch.setattr(test_replay_buffer, "RATIOS", ratios(share))
    own = world(spread)
    use_world(monkeypatch, own)
    run = Run(path / "ledger.jsonl", own, "colocate_async", batch_size=BATCH, **options)
    ends: list[int] = []
    for _ in range(STEPS):
        run.train()
        ends.append(own.tick)
    run.check()
    return run, ends


def ticks_a_step(ends: list[int]) -> float:
    """Mean of the second half, when both have settled."""
    half = len(ends) // 2
    return (ends[-1] - ends[half]) / (len(ends) - 1 - half)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "share", [0.1, *(pytest.param(s, marks=pytest.mark.nightly) for s in (0.3, 0.8))]
)
@pytest.mark.parametrize(
    ("warmup", "steps"), [(1, 100), pytest.param(4, 400, marks=pytest.mark.nightly)]
)
def test_exact_batches_come_as_fast_as_verls(
    share: float, warmup: int, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    spread = 0.5
    monkeypatch.setattr(test_pace, "STEPS", steps)
    theirs = ticks_of_verl(share, warmup, spread)
    run, ends = run_of_ours(
        tmp_path, monkeypatch, share, spread, warmup=warmup, max_off_policy_threshold=UNBOUNDED
    )
    assert ticks_a_step(theirs) / ticks_a_step(ends) >= 0.95
    assert run.buffer.lead.limit == "in_flight"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["drop", "wait"])
@pytest.mark.parametrize(
    "bounds", [{"max_off_policy_threshold": 3}, {"max_staleness": {"slow": 3}}]
)
def test_a_source_at_its_staleness_bound_sets_a_pace_of_latency_over_bound(
    bounds: dict[str, Any], strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run, ends = run_of_ours(
        tmp_path,
        monkeypatch,
        0.1,
        0.0,
        **{"max_off_policy_threshold": 30, "warmup": 4, **bounds},
        max_off_policy_strategy=strategy,
    )
    assert ticks_a_step(ends) == pytest.approx(TICKS * FACTOR / 3, rel=0.1)
    assert (run.buffer.lead.limit, run.buffer.lead.source) == ("staleness", "slow")
    waits = Counter(run.buffer.take_waits())
    assert waits.most_common(1)[0][0] == "slow"
