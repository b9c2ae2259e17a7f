"""What differs between the releases of verl that the core works with: 0.9.0 and 0.9.1.

verl adapter. Nothing else in `samplers` asks for a release.
"""

# verl has no type annotations.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from typing import Any

import transfer_queue as tq
from verl.trainer.ppo.v1 import replay_buffer

OF_REWARD: str | None = getattr(replay_buffer, "FILTER_GROUPS_REWARD_METRIC", None)
"""The `filter_groups.metric` that is the reward itself. None on 0.9.0, which knows names of
`reward_extra_info` only."""

HAS_WAIT = hasattr(replay_buffer.ReplayBufferAsync, "wait_for_sampleable")
"""Whether `ReplayBufferAsync.sample` waits in a method of its own. 0.9.0 does not."""


def warm_up_once(trainer: Any) -> None:
    """Have 0.9.0 start only the warm-up prompts that are not in flight, as 0.9.1 does.

    0.9.0 starts all warm-up batches again at every resume, beside the prompts that its checkpoint
    restored. The open prompts would grow by so many batches with each resume.
    """
    if trainer.trainer_mode == "sync" or hasattr(trainer, "_add_async_warmup_batches"):
        return

    def on_train_begin() -> None:
        ahead = trainer.config.trainer.v1[trainer.trainer_mode].num_warmup_batches
        wanted = int(ahead * trainer.config.data.train_batch_size)
        tags = (tq.kv_list("train") or {}).get("train", {}).values()
        missing = wanted - sum(bool(tag.get("is_prompt")) for tag in tags)
        if missing > 0 and not trainer.config.skip.rollout_tq.enable:
            trainer._add_prompts_to_generate(missing)

    trainer.on_train_begin = on_train_begin
