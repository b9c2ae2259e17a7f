"""What both releases of verl do with our adapters, by verl's own classes."""

from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl", reason="its releases are compared")

from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

from samplers import verl_releases
from samplers.verl_releases import warm_up_once

BATCH_SIZE = 8
TRAINERS: dict[str, Any] = {
    "colocate_async": PPOTrainerColocateAsync,
    "separate_async": PPOTrainerSeparateAsync,
}


@pytest.mark.parametrize("mode", TRAINERS)
@pytest.mark.parametrize("restored", [0, 3, 16, 20])
def test_a_resume_starts_only_the_warm_up_prompts_that_its_checkpoint_lacks(
    mode: str, restored: int, monkeypatch: pytest.MonkeyPatch
):
    class Trainer(TRAINERS[mode]):
        """verl's, without workers. Its queue has the prompts of a checkpoint, and their rows."""

        def __init__(self) -> None:
            self.trainer_mode, self.started = mode, 0
            self._restored_tq_prompt_count = restored  # 0.9.1's own count
            self.config = OmegaConf.create(
                {
                    "data": {"train_batch_size": BATCH_SIZE, "gen_batch_size": 1},
                    "skip": {"rollout_tq": {"enable": False}},
                    "trainer": {"v1": {mode: {"num_warmup_batches": 2}}},
                }
            )

        def _add_prompts_to_generate(self, num_prompts: int) -> None:
            self.started += num_prompts

        def _add_batch_to_generate(self) -> None:
            self._add_prompts_to_generate(BATCH_SIZE)

    prompts = {f"p{place}": {"is_prompt": True} for place in range(restored)}
    rows = {f"p{place}_0_0": {"seq_len": 9} for place in range(restored)}
    queue = SimpleNamespace(kv_list=lambda partition: {partition: prompts | rows})
    monkeypatch.setattr(verl_releases, "tq", queue)
    warm_up_once(own := Trainer())
    own.on_train_begin()
    assert own.started == max(0, 2 * BATCH_SIZE - restored)
