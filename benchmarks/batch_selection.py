"""What exact batches cost per step: choosing the groups, laying out the rows.

`python -m benchmarks.batch_selection`. Ours and verl's own methods run in turn: in
each round a batch is taken from 10,000 finished groups and as many more finish. Medians of CPU
time. Reading TransferQueue's tags and clearing it are the same for both and left out.
"""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from omegaconf import OmegaConf
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

from samplers.balance import deal_groups, imbalance, spread_rows
from samplers.mixture_plan import MixturePlan
from samplers.replay_buffer import MixedReplayBufferAsync, Mixture
from samplers.uid import make_uid

ROUNDS = 15
FINISHED = 10_000
BATCH = 256
TRAJECTORIES = 4
ROWS, RANKS, UPDATES = 1024, 8, 4

RATIOS = {"math": 0.4, "nq": 0.3, "taco": 0.3}


def cpu_ms(action: Callable[[], Any]) -> float:
    """CPU milliseconds of one call."""
    start = time.process_time()
    action()
    return 1e3 * (time.process_time() - start)


def buffers(plan: MixturePlan) -> tuple[ReplayBufferAsync, Any]:
    """(verl's, ours), both with the same finished groups of the last eight steps."""
    options: dict[str, Any] = {
        "trainer_mode": "colocate_async",
        "trainer_config": OmegaConf.create({}),
        "max_off_policy_threshold": None,
        "max_off_policy_strategy": "drop",
        "sampler_kwargs": OmegaConf.create({}),
    }
    mixture = Mixture(
        quota=lambda groups: plan.counts(0),
        draw=lambda wanted: None,
        give_back=lambda drawn: None,
        seats=lambda later: plan.counts(0),
        max_wait_s=1e9,
        max_replacements=10**6,
    )
    theirs = ReplayBufferAsync(refill_fn=lambda prompts: None, **options)
    ours: Any = MixedReplayBufferAsync(mixture, **options)
    ours._begin(1, BATCH)
    return theirs, ours


def finish(plan: MixturePlan, prompts: int, step: int, *of_buffers: Any) -> None:
    """Let so many more groups finish in each buffer."""
    for prompt in plan.take(prompts):
        uid = make_uid(prompt.source, prompt.draw)
        for buffer in of_buffers:
            buffer.finished_keys["train"].add(uid)
            buffer.prompt_global_steps["train"][uid] = step
            for session in range(TRAJECTORIES):
                buffer.partitions["train"][f"{uid}_{session}_0"] = {"seq_len": 100}


def select(buffer: Any) -> list[str]:
    """One batch, as `sample` chooses it once the tags are read."""
    nothing: Any = (set(), set(), set(), {})
    finished = buffer._sampleable_terminal_keys("train", nothing)
    return buffer._select_prompt_uids("train", finished, BATCH)[0]


def take_away(buffer: Any, uids: list[str]) -> None:
    """What making the batch does to the buffer's picture of the queue."""
    for uid in uids:
        buffer.finished_keys["train"].discard(uid)
        buffer.prompt_global_steps["train"].pop(uid)
        for session in range(TRAJECTORIES):
            del buffer.partitions["train"][f"{uid}_{session}_0"]


def main() -> None:
    """Measure and print."""
    plan = MixturePlan(dict.fromkeys(RATIOS, 10**6), RATIOS, BATCH, seed=0)
    theirs, ours = buffers(plan)
    finish(plan, FINISHED, 0, theirs, ours)
    select(ours)  # a buffer fills over many polls, not in one
    select_ours, select_theirs = [], []
    for step in range(1, ROUNDS + 1):
        for buffer, seen in ((ours, select_ours), (theirs, select_theirs)):
            chosen: list[str] = []
            seen.append(cpu_ms(lambda b=buffer, c=chosen: c.extend(select(b))))
            take_away(buffer, chosen)
        finish(plan, BATCH, step, theirs, ours)

    rng = random.Random(1)
    lengths = [int(rng.lognormvariate(6.5, 0.8)) + 16 for _ in range(ROWS)]
    workloads = [24576 * length + length**2 for length in lengths]
    groups = ROWS // TRAJECTORIES
    sources = [plan.sources[i] for i in plan.batch(0).source_ids.tolist()][:groups]
    per_update = groups // UPDATES
    quotas = [
        plan.counts_between(update * per_update, (update + 1) * per_update)
        for update in range(UPDATES)
    ]

    def lay_out() -> list[list[int]]:
        of_group = [
            sum(workloads[group * TRAJECTORIES : (group + 1) * TRAJECTORIES])
            for group in range(groups)
        ]
        updates = [
            [group * TRAJECTORIES + i for group in dealt for i in range(TRAJECTORIES)]
            for dealt in deal_groups(sources, of_group, quotas)
        ]
        return spread_rows(updates, workloads, RANKS)

    def verls() -> Any:
        return get_seqlen_balanced_partitions(workloads, RANKS, equal_size=True)

    lay_ours, lay_theirs = [], []
    for _ in range(ROUNDS):
        lay_ours.append(cpu_ms(lay_out))
        lay_theirs.append(cpu_ms(verls))

    rows = [
        (
            f"select {BATCH} of {FINISHED:,} finished groups",
            statistics.median(select_ours),
            statistics.median(select_theirs),
            "5 ms",
        ),
        (
            f"lay out {ROWS:,} trajectories over {RANKS} ranks, {UPDATES} updates",
            statistics.median(lay_ours),
            statistics.median(lay_theirs),
            "20 ms",
        ),
    ]
    print("| what | ours, CPU | verl, CPU | goal |\n|---|---:|---:|---:|")
    for what, mine, verl, goal in rows:
        print(f"| {what} | {mine:.2f} ms | {verl:.2f} ms | < {goal} |")
    print()
    print(
        f"imbalance over ranks (busiest above mean): ours {imbalance(lay_out(), workloads):.4%}, "
        f"verl {imbalance(verls(), workloads):.4%}; ours with the quotas in every update"
    )


if __name__ == "__main__":
    main()
