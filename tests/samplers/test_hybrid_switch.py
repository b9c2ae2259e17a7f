"""verl's switch of training GPUs to rollout (`hybrid_rollout.enable_switch`) with our quotas.

verl's real trainer decides when to switch, verl's real buffer with our quotas waits, and groups end
in the simulated world of `tests.samplers.test_replay_buffer`. The claim: a wait for several
mini-batches, or for a part of one, is a wait for exactly the groups that these train next, so every
batch stays as planned and the mini-batches that were waited for begin at once.
"""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from samplers.uid import prompt_of
from tests.fakes.transfer_queue import Fate, World
from tests.samplers.test_replay_buffer import FATES, SIZES, Run, use_world

pytest.importorskip("verl", reason="the replay buffers and the switch are verl's")

from samplers.verl_releases import HAS_WAIT

if not HAS_WAIT:
    pytest.skip("verl 0.9.0 has no switch", allow_module_level=True)

from verl.trainer.config import HybridRolloutSwitchConfig
from verl.trainer.ppo.v1 import trainer_separate_async as verls_trainer
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode, PPOTrainerSeparateAsync

VerlsTrainer: Any = PPOTrainerSeparateAsync  # its decorator has no types
TRAIN, GENERATE = HybridEngineMode.TRAINER, HybridEngineMode.ROLLOUT


class Engines:
    """Engines of a `CheckpointEngineManager`. Each thing they are told to do takes one tick."""

    def __init__(self, world: World) -> None:
        self._world = world

    def _take_a_tick(self, *args: object, **options: object) -> dict[str, Any]:
        self._world.sleep(1)
        return {}

    update_weights = resume_generation_replicas = abort_replicas = sleep_replicas = _take_a_tick


class Trainer(VerlsTrainer):
    """verl's trainer with its decisions, without engines, workers and training."""

    def __init__(self, run: "SwitchedRun", buffer: Any) -> None:
        self.config = OmegaConf.create(
            {
                "data": {"train_batch_size": run.batch_size},
                "trainer": {"nnodes": 1, "n_gpus_per_node": 8},
                "actor_rollout_ref": {"rollout": {"nnodes": 1, "n_gpus_per_node": 8}},
            }
        )
        self.replay_buffer, self.parameter_sync_step = buffer, run.sync_steps
        self.global_steps, self.total_training_steps = run.step, 10**9
        self.timing_raw, self.prev_step_profile = {}, False
        self.checkpoint_manager = self.standalone_checkpoint_manager = Engines(run.world)
        self.hybrid_rollout_config = HybridRolloutSwitchConfig(
            enable_switch=True, switch_threshold_ratio=run.ratio
        )
        self._init_hybrid_rollout_state()
        self.current_mode = GENERATE

    def add_replicas_to_balancer(self) -> None: ...

    def remove_replicas_from_balancer(self) -> None: ...

    def clear_sticky_cache(self) -> dict[str, Any]:
        return {}


class SwitchedRun(Run):
    """A run of `separate_async` whose training GPUs generate between steps when verl wants it."""

    def __init__(self, path: Path, world: World, *, ratio: float, **options: Any) -> None:
        self.ratio = ratio
        self.waits: list[int] = []
        """Groups that were waited for while the training GPUs generated."""

        super().__init__(path, world, "separate_async", **options)

    def _buffer(self) -> Any:
        buffer = super()._buffer()
        self.trainer = Trainer(self, buffer)
        self._sample, buffer.sample = buffer.sample, self._sample_as_verl
        return buffer

    def _sample_as_verl(self, step: int, partition: str, groups: int) -> Any:
        """One mini-batch, and before the first one of a step the beginning of verl's step."""
        trainer = self.trainer
        if self.trigger == 0:
            trainer.global_steps, trainer.timing_raw = step, {}
            trainer.on_step_begin()
            self._ready = 0
            if trainer.current_mode == GENERATE:
                self._ready = trainer._step_threshold
                self.waits.append(self._ready)
            trainer._wait_for_sampleable_and_switch()
        assert trainer.current_mode == TRAIN
        trainer.on_sample_begin()
        before = self.world.tick
        batch = self._sample(step, partition, groups)
        was_waited_for = (self.trigger + 1) * groups <= self._ready
        assert self.world.tick == before or not was_waited_for
        trainer.on_sample_end()
        return batch

    def train(self) -> None:
        super().train()  # checks each mini-batch against the plan
        self.trainer.on_step_end()


def simulated(
    patch: pytest.MonkeyPatch, path: Path, fates: dict[str, Fate], seed: int, **options: Any
) -> SwitchedRun:
    """A run in a world of its own."""
    world = World(fates=fates, source_of=lambda uid: prompt_of(uid)[0], rng=random.Random(seed))
    use_world(patch, world)
    patch.setattr(verls_trainer, "time", SimpleNamespace(perf_counter=world.time))
    return SwitchedRun(path / "ledger.jsonl", world, **options)


LATE = FATES | {"taco": Fate(filtered=0.2, failed=0.1, latency=(10, 40))}
"""One source ten times slower than the others."""


@pytest.mark.parametrize("ratio", [0.01, 0.4, 0.75, 1.0])
@pytest.mark.parametrize("strategy", ["drop", "wait"])
def test_steps_with_lent_gpus_train_exact_mini_batches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, strategy: str, ratio: float
) -> None:
    run = simulated(
        monkeypatch,
        tmp_path,
        LATE,
        seed=3,
        ratio=ratio,
        parameter_sync_step=5,
        filter_groups_metric="acc",
        max_off_policy_threshold=2,
        max_off_policy_strategy=strategy,
    )
    for _ in range(60):
        run.train()

    outcomes = run.check()

    assert outcomes["trained"] == 600
    assert outcomes["filtered"] > 100
    assert len(run.waits) > 5, "the training GPUs were hardly lent"
    # mini-batches have 2 groups, and verl changes the threshold between one of them and the batch
    assert min(run.waits) >= 2 and max(run.waits) <= 10


def test_a_kill_while_gpus_are_lent_loses_no_prompt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = simulated(monkeypatch, tmp_path, LATE, seed=4, ratio=0.7, parameter_sync_step=2)
    rng = random.Random(5)
    for _ in range(40):
        for _ in range(rng.randint(1, 3)):
            run.train()
            if rng.random() < 0.5:
                run.save()
        run.step, run.trigger = run.step + 1, 0  # killed in the wait of the next step
        run._start(run.plan.take(run.batch_size))
        run.trainer.global_steps = run.step
        run.trainer.on_step_begin()
        run.begin()
        run.train()
    run.check()


@pytest.mark.slow
@given(
    fates=st.fixed_dictionaries(
        {name: st.tuples(st.floats(0, 0.9), st.integers(0, 20)) for name in SIZES}
    ),
    ratio=st.floats(0.01, 1.0),
    mini_batches=st.sampled_from([1, 2, 3, 6]),
    groups=st.integers(1, 4),
    strategy=st.sampled_from(["drop", "wait"]),
    warmup=st.sampled_from([0, 0.5, 1, 2]),
    seed=st.integers(0, 2**16),
)
def test_any_threshold_and_latencies_leave_every_mini_batch_exact(
    tmp_path_factory: pytest.TempPathFactory,
    fates: dict[str, tuple[float, int]],
    ratio: float,
    mini_batches: int,
    groups: int,
    strategy: str,
    warmup: float,
    seed: int,
) -> None:
    own = {
        source: Fate(filtered=share * 0.9, failed=share * 0.1, latency=(0, ticks))
        for source, (share, ticks) in fates.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        run = simulated(
            patch,
            tmp_path_factory.mktemp("run"),
            own,
            seed,
            ratio=ratio,
            batch_size=mini_batches * groups,
            parameter_sync_step=mini_batches,
            warmup=warmup,
            filter_groups_metric="acc",
            max_off_policy_threshold=3,
            max_off_policy_strategy=strategy,
        )
        for _ in range(12):
            run.train()
        run.check()
