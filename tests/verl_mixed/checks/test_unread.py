"""Keys that a run does not read are refused: the table of readers, line by line."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from agent_loop.training.estimators import ESTIMATORS
from config.lookup import at, flatten
from config.schema import TOOL_CONFIG, ConfigError
from tests.verl_mixed.checks.test_profiles import PROFILES, config_of
from tests.verl_mixed.conftest import RunEnviron
from verl_mixed.checks.config.modes import VERLS_AGENTS
from verl_mixed.checks.config.unread import (
    AGENTS,
    BACKEND,
    CACHE,
    CRITIC,
    ENGINE,
    ESTIMATOR,
    LIMITER,
    MODE,
    OWN_SERVER,
    READERS,
    STOPPING,
    Reader,
    unread_problems,
)
from verl_mixed.launch.plan import make_plan
from verl_mixed.run.compose import CONFIG_DIR, TRAINING_ENGINES
from verl_mixed.run.settings import SERVER_URL_KEY

Config = dict[str, Any]
ROLLOUT = "actor_rollout_ref.rollout"
MASKING = f"{TOOL_CONFIG}.state_masking"
VALUES: dict[str, tuple[Any, ...]] = {
    ESTIMATOR: ESTIMATORS,
    MODE: ("mixed_sync", "mixed_colocate_async", "mixed_separate_async"),
    BACKEND: ("hf", "vllm", "vllm_cpu", "sglang"),
    ENGINE: TRAINING_ENGINES,
    AGENTS: ("ours", "verl's"),
    **dict.fromkeys((LIMITER, MASKING, CACHE, CRITIC, OWN_SERVER, STOPPING), (True, False)),
}
"""The setting that decides who reads -> its values."""

NOT_COMPOSED = {
    "data.sampler",
    "mixed.rate_limit.across_nodes",
    f"{ROLLOUT}.enable_sleep_mode",
    f"{ROLLOUT}.standalone_gpu_memory_utilization",
    *(f"{ROLLOUT}.engine_kwargs.{name}" for name in ("hf", "vllm", "sglang", "trtllm")),
}
"""Keys of the table that a user can add, and that no config file has."""


def put(config: Config, key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        config = config.setdefault(part, {})
    config[last] = value


def put_agents(config: Config, value: str) -> None:
    for source in config["mixed"]["sources"].values():
        source["agent"] = "math_agent" if value == "ours" else min(VERLS_AGENTS)


DERIVED: dict[str, Callable[[Config, Any], None]] = {
    AGENTS: put_agents,
    CACHE: lambda c, v: put(c, f"{TOOL_CONFIG}.cache.store", "sqlite" if v else "none"),
    CRITIC: lambda c, v: put(c, ESTIMATOR, "gae" if v else "grpo"),
    OWN_SERVER: lambda c, v: put(c, SERVER_URL_KEY, f"http://host:{0 if v else 80}"),
    STOPPING: lambda c, v: put(c, "mixed.infra_error_limit", 0.5 if v else 1.0),
}


def walk(*, reading: bool) -> Iterator[Any]:
    """A line of the table and a value with which its key is, or is not, read."""
    for reader in READERS:
        for value in VALUES[reader.by] if reader.by else [None]:
            if (value in reader.values) is reading:
                yield pytest.param(reader, value, id=f"{reader.key}-{value}")


def problems(reader: Reader, value: Any) -> list[str]:
    """The refusals of a run where the deciding setting has a value, and the key another one."""
    config = deepcopy(config_of("laptop"))
    if reader.by:
        DERIVED.get(reader.by, lambda c, v: put(c, reader.by, v))(config, value)
    leaf = next((key for key in flatten(config) if f"{key}.".startswith(f"{reader.key}.")), None)
    assert leaf or reader.key in NOT_COMPOSED, f"no key {reader.key}"
    leaf = leaf or reader.key
    put(config, leaf, "another")
    found = unread_problems(config, {leaf})
    return [text for text in found if text.startswith(f"{leaf}='another': ")]


@pytest.mark.parametrize(("reader", "value"), [*walk(reading=False)])
def test_a_key_that_is_not_read_is_refused(reader: Reader, value: Any) -> None:
    found = problems(reader, value)

    assert any((reader.instead if not reader.by else "reads it") in text for text in found)
    assert all("remove it" in text for text in found)


@pytest.mark.parametrize(("reader", "value"), [*walk(reading=True)])
def test_a_key_that_is_read_is_not_refused_for_that(reader: Reader, value: Any) -> None:
    others = [row for row in READERS if row.key == reader.key and row != reader]

    assert len(problems(reader, value)) <= len(others)


@pytest.mark.parametrize("profile", PROFILES)
def test_what_this_project_ships_is_nobodys_setting(run_environ: RunEnviron, profile: str) -> None:
    plan = make_plan([f"{ESTIMATOR}=grpo"], run_environ | {"PROFILE": profile})

    assert list(unread_problems(plan.config, plan.changed)) == []


def test_a_users_own_profile_may_repeat_what_a_shipped_one_has(
    run_environ: RunEnviron, tmp_path: Path
) -> None:
    (tmp_path / "own" / "profile").mkdir(parents=True)
    own = (CONFIG_DIR / "profile" / "gpu.yaml").read_text() + "  total_epochs: 3\n"
    (tmp_path / "own" / "profile" / "mine.yaml").write_text(own)

    plan = make_plan(
        ["profile=mine", f"hydra.searchpath=[file://{tmp_path / 'own'}]"],
        run_environ | {"PROFILE": ""},
    )

    (problem,) = unread_problems(plan.config, plan.changed)
    assert problem.startswith("trainer.total_epochs=3: ")


@pytest.mark.parametrize("in_defaults", [True, False])
def test_a_users_own_profile_chooses_the_training_engine_in_its_defaults(
    run_environ: RunEnviron, tmp_path: Path, in_defaults: bool
) -> None:
    choice = "override /model_engine: megatron, " if in_defaults else ""
    value = "" if in_defaults else "model_engine: megatron\n"
    (tmp_path / "profile").mkdir()
    own = f"# @package _global_\ndefaults: [gpu, {choice}_self_]\n{value}"
    (tmp_path / "profile" / "mine.yaml").write_text(own)
    overrides = ["profile=mine", f"hydra.searchpath=[file://{tmp_path}]"]

    if in_defaults:
        plan = make_plan(overrides, run_environ | {"PROFILE": ""})
        assert list(unread_problems(plan.config, plan.changed)) == []
    else:
        with pytest.raises(ConfigError, match=r"model_engine=megatron in a config file: .* `overr"):
            make_plan(overrides, run_environ | {"PROFILE": ""})


def test_keys_of_a_ray_of_the_run_s_own_are_refused_on_a_cluster(run_environ: RunEnviron) -> None:
    plan = make_plan(
        ["++ray_kwargs.ray_init.num_cpus=4", "++ray_kwargs.ray_init.dashboard_host=0.0.0.0"],
        run_environ | {"MASTER_IP": "127.0.0.1", "RAY_DASHBOARD_PORT": "9999"},
    )

    found = [text for text in plan.problems(data=False, machine=False) if "ray_init" in text]
    assert [text.split(":")[0].rpartition(".")[2] for text in found] == [
        "num_cpus",
        "dashboard_host",
    ]


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        (
            [
                "algorithm.adv_estimator=grpo",
                "algorithm.state_masked_grpo.dr_grpo=true",
                "algorithm.state_masked_grpo.scale={math: 2}",
                "algorithm.norm_adv_by_std_in_grpo=false",  # norm_by_std follows it, and is not set
                "algorithm.lam=0.9",
                "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
                "actor_rollout_ref.actor.loss_scale_factor=100",
            ],
            ["state_masked_grpo.dr_grpo=True", "state_masked_grpo.scale.math", "algorithm.lam=0.9"],
        ),
        (
            [
                "critic.optim.lr=1e-4",
                "trainer.v1.separate_async.parameter_sync_step=2",
                f"{ROLLOUT}.gpu_memory_utilization=0.9",
                "mixed.tool_server={sandbox_workers: 2}",
                "algorithm.state_masked_grpo.dr_grpo=false",  # as it is shipped
            ],
            [
                "critic.optim.lr",
                "separate_async.parameter_sync_step",
                "gpu_memory_utilization=0.9",
                "mixed.tool_server.sandbox_workers=2",
            ],
        ),
        (  # the value that it follows anyway
            ["algorithm.adv_estimator=grpo", "algorithm.state_masked_grpo.norm_by_std=true"],
            [],
        ),
        # max_probs_diff is the profile's, and not the user's
        ([f"{LIMITER}=false", f"{TOOL_CONFIG}.burst=3", f"{MASKING}=false"], ["burst=3"]),
        ([f"{MASKING}=false", "mixed.max_probs_diff=0.1"], ["mixed.max_probs_diff=0.1"]),
        (
            [
                "data.shuffle=true",
                "+data.sampler.class_path=x",
                "trainer.total_epochs=3",
                f"{ROLLOUT}.multi_turn.format=llama3_json",
            ],
            [
                "multi_turn.format",
                "data.shuffle=True: no run uses it",
                "data.sampler.class_path",
                "trainer.total_epochs=3",
            ],
        ),
    ],
)
def test_what_a_user_sets_and_the_run_ignores_is_a_problem_of_the_run(
    run_environ: RunEnviron, overrides: list[str], refused: list[str]
) -> None:
    found = make_plan(overrides, run_environ).problems()

    assert len(found) == len(refused), found
    assert all(words in text for words, text in zip(refused, found, strict=True)), found


def test_a_users_own_estimator_may_read_any_key() -> None:
    config = deepcopy(config_of("laptop"))
    put(config, ESTIMATOR, "mine")

    assert at(config, ESTIMATOR) == "mine"
    assert (
        list(unread_problems(config, {"algorithm.state_masked_grpo.scale", "algorithm.lam"})) == []
    )
