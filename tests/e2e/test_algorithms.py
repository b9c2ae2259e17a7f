"""Every advantage estimator on the real trainer, each with other parts of the loss.

Entropy moves no weight here, so what changes them is the advantage; a reward that falls with the
length of a response gives every group one.
"""

from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from tests.e2e.jobs import finish, job_of, start
from tests.json_lines import read_lines
from verl_mixed.run.audit import audit_run, describe
from verl_mixed.run.compose import load_config
from verl_mixed.run.state import RunFolder

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.algorithm,
    pytest.mark.timeout(900),
]

STEPS = 3

KL_LOSS = [
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0.01",
    "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
]
CLIP_HIGHER = [
    "actor_rollout_ref.actor.clip_ratio_low=0.2",
    "actor_rollout_ref.actor.clip_ratio_high=0.28",
]
KL_IN_REWARD = ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.05"]
ADAPTIVE = ["algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=1.0e-5"]
FILTER = ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=reward"]

ALGORITHMS = {
    "state_masked_grpo": [*KL_LOSS, *CLIP_HIGHER],
    "grpo": FILTER,
    "rloo": KL_IN_REWARD,
    "reinforce_plus_plus": [*KL_IN_REWARD, *ADAPTIVE],
    "remax": ["actor_rollout_ref.actor.entropy_coeff=0.001"],
    "gae": [],
}


@pytest.fixture(scope="module", params=ALGORITHMS)
def estimator(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def run(estimator: str, demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of an estimator."""
    overrides = [
        f"algorithm.adv_estimator={estimator}",
        "actor_rollout_ref.actor.entropy_coeff=0.0",
        *(
            f"+mixed.sources.{name}.reward_terms={{length: {{free: 0, limit: 160}}}}"
            for name in ("taco", "nq", "math")
        ),
        "trainer.save_freq=1",
        "trainer.max_actor_ckpt_to_keep=3",
        "ray_kwargs.ray_init.include_dashboard=false",
        *ALGORITHMS[estimator],
    ]
    work = tmp_path_factory.mktemp("work")
    job = job_of(estimator, demo, work, overrides, STEPS)
    finish(start(job.command, work, work / "out.txt"), work / "out.txt")
    return job.folder


def metrics(run: Path) -> list[dict[str, float]]:
    return [line["metrics"] for line in read_lines(run / "metrics.jsonl") if line["step"]]


def trajectories(run: Path) -> list[dict[str, Any]]:
    return [
        line
        for step in range(1, STEPS + 1)
        for line in read_lines(run / "trajectories" / f"{step}.jsonl")
    ]


def test_every_step_is_trained_on_the_planned_batch_with_tools(run: Path):
    assert len(metrics(run)) == STEPS
    audit = audit_run(RunFolder(run), load_config(run / "config.yaml"))
    assert audit.ok, describe(audit)
    assert any(0 in line["response_mask"] for line in trajectories(run))


def test_its_advantages_change_the_weights(run: Path):
    import torch

    def weights(step: int) -> dict[str, Any]:
        path = run / "checkpoints" / f"global_step_{step}" / "actor"
        saved = torch.load(path / "model_world_size_1_rank_0.pt", weights_only=False)
        return {name: weight.to_local() for name, weight in saved.items()}

    first, last = weights(1), weights(STEPS)
    assert any(not torch.equal(first[name], last[name]) for name in first)
    assert all(line["actor/grad_norm"] > 0 for line in metrics(run))
    assert any(line["advantage"] for line in trajectories(run))


def test_rollout_and_trainer_agree(run: Path):
    assert max(line["training/rollout_probs_diff_max"] for line in metrics(run)) < 5e-5


def test_the_parts_of_its_loss_are_there(run: Path, estimator: str):
    seen = metrics(run)
    has = {name for line in seen for name in line}
    wanted = {
        "state_masked_grpo": {"actor/kl_loss"},
        "grpo": set[str](),
        "rloo": {"actor/reward_kl_penalty"},
        "reinforce_plus_plus": {"actor/reward_kl_penalty"},
        "remax": {"mixed/remax/baseline", "mixed/remax/lost_baselines"},
        "gae": {"critic/vf_loss", "critic/vf_explained_var"},
    }
    assert wanted[estimator] <= has
    if estimator in ("rloo", "reinforce_plus_plus"):
        coefficients = {line["actor/reward_kl_penalty_coeff"] for line in seen}
        assert (len(coefficients) == 1) == (estimator == "rloo")


def test_the_advantages_of_grpo_are_those_of_its_definition(run: Path, estimator: str):
    if estimator not in ("state_masked_grpo", "grpo"):
        pytest.skip("needs a critic, a baseline, or whitens over the batch")
    groups: dict[tuple[int, str, int], list[dict[str, Any]]] = {}
    for line in trajectories(run):
        groups.setdefault((line["step"], line["source"], line["draw"]), []).append(line)
    for group in groups.values():
        rewards = [line["reward"] for line in group]
        mean, spread = fmean(rewards), stdev(rewards) + 1e-6
        for line in group:
            assert line["advantage"] == pytest.approx((line["reward"] - mean) / spread, abs=2e-3)
