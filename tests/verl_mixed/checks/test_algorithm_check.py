"""Algorithms that could not run, or not as they say, are named before Ray starts."""

from pathlib import Path

import pytest

from agent_loop.training.estimators import ESTIMATORS, UNTRIED
from tests.verl_mixed.conftest import ProblemsWith, RunEnviron
from verl_mixed.agentfly.files import translate_files
from verl_mixed.checks.config.algorithm import FILTER_METRICS, LOSSES
from verl_mixed.launch.plan import make_plan

DAPO = ("algorithm.filter_groups.enable=true",)

MICRO_BATCHES = ("actor.ppo_micro_batch_size", "rollout.log_prob_micro_batch_size")


def problems_of(environ: RunEnviron, *overrides: str) -> list[str]:
    return make_plan(overrides, environ).problems()


@pytest.mark.slow
@pytest.mark.parametrize("estimator", (*ESTIMATORS, *UNTRIED))
def test_every_known_estimator_is_taken_as_it_is(
    problems_with: ProblemsWith, estimator: str
) -> None:
    assert problems_with(f"algorithm.adv_estimator={estimator}") == []


def test_every_estimator_of_verl_is_known_or_left_out_on_purpose() -> None:
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, AdvantageEstimator

    of_verl = {estimator.value for estimator in AdvantageEstimator}
    left_out = {
        "tir_optimal_token_baseline",  # needs a sum of squared probabilities that no rollout sends
        "optimal_token_baseline",
        "gdpo",  # normalises several rewards apart, which its own reward manager sends
    }
    assert {*POLICY_LOSS_REGISTRY} == {*LOSSES}
    assert of_verl - left_out == {*ESTIMATORS, *UNTRIED} - {"state_masked_grpo"}


def test_an_unknown_estimator_is_named_with_those_there_are(problems_with: ProblemsWith) -> None:
    (found,) = problems_with("algorithm.adv_estimator=grpoo")
    assert found.startswith("algorithm.adv_estimator='grpoo': no estimator that is supported;")


def test_what_a_module_of_the_users_own_registers_is_left_to_them(
    run_environ: RunEnviron, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = (
        "algorithm.adv_estimator=mine",
        "actor_rollout_ref.actor.policy_loss.loss_mode=mine",
        "actor_rollout_ref.model.external_lib=my_estimators",
    )
    (found,) = problems_of(run_environ, *own)
    assert "external_lib='my_estimators': no module 'my_estimators' on PYTHONPATH" in found
    (tmp_path / "my_estimators.py").touch()
    assert problems_of(run_environ, *own) == []


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ("gae", "remax", "reinforce_plus_plus"))
def test_an_estimator_that_compares_with_no_group_takes_one_trajectory(
    run_environ: RunEnviron, estimator: str
) -> None:
    one = run_environ | {"ROLLOUT_N": "1"}
    small = [f"actor_rollout_ref.{key}_per_gpu=1" for key in MICRO_BATCHES]
    assert problems_of(one, f"algorithm.adv_estimator={estimator}", *small) == []
    (found,) = problems_of(one, "algorithm.adv_estimator=rloo", *small)
    assert "rloo compares the trajectories of one prompt" in found


def test_what_the_critic_lacks_is_said_only_where_there_is_one(problems_with: ProblemsWith) -> None:
    broken = (
        "critic.strategy=megatron",
        "critic.ppo_mini_batch_size=3",
    )
    found = problems_with(*broken)
    assert all("only a critic reads it" in problem for problem in found)

    found = problems_with("algorithm.adv_estimator=gae", *broken)
    assert [problem.split("=")[0] for problem in found] == [
        "critic.ppo_mini_batch_size",
        "critic.strategy",
    ]
    (off,) = problems_with("algorithm.adv_estimator=gae", "critic.enable=false")
    assert off.startswith("critic.enable=False with algorithm.adv_estimator=gae")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trainer.critic_warmup=5"], "=state_masked_grpo: there is no critic to warm up"),
        (["training.critic_warmup=1", "algorithm.adv_estimator=grpo"], "=grpo: there is no critic"),
        (["trainer.critic_warmup=x"], "trainer.critic_warmup='x': want a whole number >= 0"),
        (["trainer.critic_warmup=-1"], "trainer.critic_warmup=-1: want a whole number >= 0"),
        (
            [
                "trainer.critic_warmup=5",
                "algorithm.adv_estimator=gae",
                "trainer.total_training_steps=4",
            ],
            "trainer.total_training_steps=4: the policy is first trained at this step",
        ),
        (["trainer.critic_warmup=0"], None),
        (
            [
                "trainer.critic_warmup=4",
                "algorithm.adv_estimator=gae",
                "trainer.total_training_steps=4",
            ],
            None,
        ),
    ],
)
def test_a_warmup_that_would_leave_out_updates_of_the_policy_is_refused(
    run_environ: RunEnviron, overrides: list[str], said: str | None
) -> None:
    given = translate_files([], overrides, run_environ).overrides

    found = problems_of(run_environ, *given)

    assert len(found) == (said is not None)
    assert (said or "") in "".join(found)


@pytest.mark.slow
def test_groups_are_filtered_by_what_every_trajectory_has(problems_with: ProblemsWith) -> None:
    for metric in FILTER_METRICS:
        assert problems_with(*DAPO, f"algorithm.filter_groups.metric={metric}") == []
    (found,) = problems_with(*DAPO, "algorithm.filter_groups.metric=seq_reward")
    assert "metric='seq_reward': want reward or acc or" in found


def test_groups_of_one_cannot_be_filtered(run_environ: RunEnviron) -> None:
    small = [f"actor_rollout_ref.{key}_per_gpu=1" for key in MICRO_BATCHES]
    reward = ("algorithm.filter_groups.metric=reward", "algorithm.adv_estimator=remax")
    (found,) = problems_of(run_environ | {"ROLLOUT_N": "1"}, *DAPO, *reward, *small)
    assert "filter_groups.enable=True with actor_rollout_ref.rollout.n=1" in found


def test_the_parts_that_groups_are_filtered_by_are_those_of_every_source() -> None:
    from agent_loop.records.trajectory_record import COMMON_PARTS

    assert {*FILTER_METRICS} <= {"reward", *COMMON_PARTS}
