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


def test_an_unknown_key_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match="tarin_batch_size"):
        compose_config(["data.tarin_batch_size=4"])


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
