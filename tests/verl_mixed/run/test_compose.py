"""The run config from `config/`, verl's defaults and overrides."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from config.lookup import at, flatten
from config.schema import TOOL_CONFIG, ConfigError
from verl_mixed.run.compose import (
    CONFIG_DIR,
    REQUIRED,
    compose_config,
    load_config,
    resolve,
    save_config,
    unset_keys,
)
from verl_mixed.run.settings import overrides_from

FILES = ["data.train_files=[a]", "data.val_files=[b]", "actor_rollout_ref.model.path=c"]


@pytest.mark.slow
@pytest.mark.parametrize("profile", [path.stem for path in CONFIG_DIR.glob("profile/*.yaml")])
@pytest.mark.parametrize("mixture", [path.stem for path in CONFIG_DIR.glob("mixture/*.yaml")])
def test_every_file_of_config_composes(profile: str, mixture: str) -> None:
    chosen = [f"profile={profile}", f"mixture={mixture}", "mixed.run_dir=/r"]

    config = resolve(compose_config([*chosen, *FILES]))

    assert at(config, "algorithm.adv_estimator") == "state_masked_grpo"
    assert at(config, "trainer.default_local_dir") == "/r/checkpoints"


def test_verls_own_model_and_data_count_as_unset() -> None:
    config = compose_config(["mixed.run_dir=/r"])

    assert unset_keys(config) == set(REQUIRED)
    with pytest.raises(ConfigError) as error:
        resolve(config)
    assert [problem.split(" set ")[1] for problem in error.value.problems] == [
        "MODEL_PATH",
        "TRAIN_FILES",
        "VAL_FILES",
    ]


def test_a_file_that_hydra_cannot_load_is_named_and_no_folder_of_the_users_called_unknown(
    tmp_path: Path,
) -> None:
    search_path = own_file(tmp_path, "mixture/mine.yaml", "defaults: [nowhere]\n")

    with pytest.raises(ConfigError, match="In 'mixture/mine': Could not load 'mixture/nowhere'"):
        compose_config([search_path, "mixture=mine"])


def test_an_unknown_key_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match="tarin_batch_size"):
        compose_config(["data.tarin_batch_size=4"])


OF_FILE = {
    "controller": "worst",
    "control": {"window": 2},
    "unit": "trajectories",
    "on_truncated": "mask",
    "experiment": "of_file",  # profiles set it and the following too
    "deadlines": {"step_s": 5, "trajectory_s": 601},
    "trajectory_sample": 7,
    "turns": {"answer_reserve": 33, "max_observation_length": 44},
    "max_probs_diff": None,
}


def own_file(folder: Path, name: str, text: str) -> str:
    """Write a config file of the user's; returns the override that lets Hydra find it."""
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return f"hydra.searchpath=['file://{folder}']"


@pytest.mark.parametrize("profile", ["laptop", "smollm", "gpu_async"])
@pytest.mark.parametrize(
    ("group", "base"), [("mixture", "three_sources"), ("prompts", "instructed")]
)
def test_what_a_file_of_mixture_or_prompts_sets_wins_over_main_file_and_profile(
    tmp_path: Path, group: str, base: str, profile: str
) -> None:
    given = f"# @package mixed\ndefaults: [{base}]\n{OmegaConf.to_yaml(OF_FILE)}"
    search_path = own_file(tmp_path, f"{group}/mine.yaml", given)

    config = compose_config(
        [search_path, f"{group}=mine", f"profile={profile}", "mixed.unit=prompts"]
    )

    assert config.mixed.unit == "prompts"  # the command line wins over the file
    wanted = flatten(OF_FILE) | {"unit": "prompts"}
    assert {key: at(config.mixed, key) for key in wanted} == wanted


def test_a_mixture_of_the_whole_config_wins_over_main_file_and_profile(tmp_path: Path) -> None:
    text = """\
# @package _global_
defaults: [three_sources, override /prompts: few_shot, override /model_engine: megatron]
data: {train_batch_size: 40}
trainer: {logger: [console]}
mixed: {prompts: {code: {system: mine}}}
"""
    search_path = own_file(tmp_path, "mixture/mine.yaml", text)

    config = compose_config([search_path, "mixture=mine", "profile=laptop"])

    assert config.data.train_batch_size == 40
    assert config.model_engine == "megatron"
    assert config.trainer.logger == ["console"]
    assert config.mixed.prompts.code.system == "mine"
    assert config.mixed.prompts.code.examples  # of few_shot


def test_sources_and_templates_of_a_profile_win_over_mixture_and_prompts(tmp_path: Path) -> None:
    text = """\
# @package _global_
defaults: [laptop, override /mixture: native_tools, _self_]
mixed: {sources: {nq: {ratio: 0.9}}, prompts: {code: {user: mine}}}
"""
    search_path = own_file(tmp_path, "profile/mine.yaml", text)

    config = compose_config([search_path, "profile=mine"])

    assert config.mixed.sources.nq.ratio == 0.9
    assert config.mixed.sources.nq.agent == "native_agent"
    assert config.mixed.prompts.code.user == "mine"


@pytest.mark.parametrize(
    "name", ["mixture/three_sources", "profile/laptop", "training_engine/dp", "mixed_dataset_grpo"]
)
def test_a_users_file_with_the_name_of_a_shipped_one_is_refused_since_hydra_reads_the_other(
    tmp_path: Path, name: str
) -> None:
    search_path = own_file(tmp_path, f"{name}.yaml", "mixed: {seed: 5}\n")

    with pytest.raises(ConfigError, match=f"{name}.yaml: this project has a file of this name"):
        compose_config([search_path, "profile=laptop"])

    own_file(tmp_path, f"{name}.yaml", (CONFIG_DIR / f"{name}.yaml").read_text())
    compose_config([search_path, "profile=laptop"])


@pytest.mark.parametrize("key", ["agent_loops", "actor_rollout_ref.model.override_config"])
def test_a_section_without_keys_is_no_unknown_key_and_takes_some_with_a_plus(key: str) -> None:
    given = f"{key}={{mine: {{depth: 1}}}}"

    with pytest.raises(ConfigError) as error:
        compose_config([given])

    assert error.value.problems == [f"{given}: no config file sets this key yet; write +{given}"]
    assert at(compose_config([f"+{given}"]), f"{key}.mine.depth") == 1


COLOCATE, SEPARATE = (f"trainer.v1.trainer_mode=mixed_{m}_async" for m in ("colocate", "separate"))
CORRECTION = "algorithm.rollout_correction"
NO_MASKS = f"{TOOL_CONFIG}.state_masking=false"


@cache
def composed() -> DictConfig:
    return compose_config(["mixed.run_dir=/r"])


@pytest.mark.parametrize(
    ("overrides", "level"),
    [
        ([], None),
        ([COLOCATE], "token"),
        ([SEPARATE], "token"),
        ([COLOCATE, NO_MASKS], None),
        ([COLOCATE, f"{CORRECTION}.bypass_mode=true"], None),
        ([COLOCATE, f"{CORRECTION}.rollout_is=null"], None),
        ([SEPARATE, f"{CORRECTION}.rollout_is=sequence"], "sequence"),
    ],
)
def test_importance_correction_is_on_where_rollouts_are_older_and_a_user_has_the_last_word(
    overrides: list[str], level: str | None
) -> None:
    given: Any = OmegaConf.merge(composed(), OmegaConf.from_dotlist(overrides))
    config = resolve(given, complete=False)

    assert at(config, f"{CORRECTION}.rollout_is") == level
    assert at(config, f"{CORRECTION}.rollout_is_threshold") == 2.0
    assert at(config, f"{CORRECTION}.bypass_mode") == (
        f"{CORRECTION}.bypass_mode=true" in overrides
    )


def test_text_of_a_setting_survives_hydras_quoting() -> None:
    (override,) = overrides_from({"RAY_TEMP_DIR": "/tmp/it's, a = {place}"})

    config = compose_config([override])

    assert config.ray_kwargs.ray_init._temp_dir == "/tmp/it's, a = {place}"


def test_a_saved_config_loads_as_it_was(tmp_path: Path) -> None:
    config = {"a": {"b": [1, 2], "c": None}, "lr": 5e-4}

    save_config(config, tmp_path / "config.yaml")

    assert load_config(tmp_path / "config.yaml") == config


leaves = st.one_of(st.integers(), st.text(max_size=3), st.none(), st.lists(st.integers()))
keys = st.text("abc_", min_size=1, max_size=3)
trees = st.recursive(
    st.dictionaries(keys, leaves, min_size=1, max_size=3),
    lambda inner: st.dictionaries(keys, inner, min_size=1, max_size=3),
    max_leaves=8,
)


@given(tree=trees)
def test_every_flattened_leaf_is_found_again_at_its_path(tree: dict[str, object]) -> None:
    for path, value in flatten(tree).items():
        assert at(tree, path) == value


@pytest.mark.parametrize(
    ("overrides", "micro"),
    [
        ([], 10),  # 20 prompts x 8 trajectories
        (["data.train_batch_size=16", "actor_rollout_ref.rollout.n=4"], 8),
        (["data.train_batch_size=7", "actor_rollout_ref.rollout.n=2"], 7),
        (["data.train_batch_size=20", "trainer.n_gpus_per_node=4"], 10),
        (["data.train_batch_size=13", "actor_rollout_ref.rollout.n=13"], 1),
    ],
)
def test_the_laptops_micro_batches_divide_any_batch(overrides: list[str], micro: int) -> None:
    parts = compose_config(["profile=laptop", *overrides]).actor_rollout_ref

    assert parts.actor.ppo_micro_batch_size_per_gpu == micro
    assert parts.rollout.log_prob_micro_batch_size_per_gpu == micro
