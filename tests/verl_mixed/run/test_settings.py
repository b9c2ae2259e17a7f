"""Environment variables as Hydra overrides."""

from pathlib import Path

import pytest

from config.schema import ConfigError
from verl_mixed.run.settings import is_own_tool_server, overrides_from


def test_empty_and_absent_variables_set_nothing() -> None:
    assert overrides_from({"TACO_RATIO": "", "LEARNING_RATE": "  ", "HOME": "/"}) == []


def test_each_number_becomes_an_override_of_its_key() -> None:
    environ = {"TACO_RATIO": ".5", "LEARNING_RATE": "1e-6", "ROLLOUT_N": "4"}

    assert overrides_from(environ) == [
        "mixed.sources.taco.ratio=0.5",
        "actor_rollout_ref.actor.optim.lr=1e-06",
        "actor_rollout_ref.rollout.n=4",
    ]


def test_files_become_absolute_and_may_be_separated_by_commas_or_spaces() -> None:
    (override,) = overrides_from({"TRAIN_FILES": "a.parquet, /b/c.parquet"})

    assert override == f"data.train_files=['{Path.cwd()}/a.parquet','/b/c.parquet']"


def test_the_command_line_wins_over_the_variable() -> None:
    given = ["++mixed.sources.taco.ratio=0.9"]

    assert overrides_from({"TACO_RATIO": "0.1"}, given) == given


def test_all_wrong_texts_are_named_at_once() -> None:
    environ = {"TRAIN_BATCH_SIZE": "many", "NQ_RATIO": "nan", "WORKER_NODES": "10.0.0.1"}

    with pytest.raises(ConfigError) as error:
        overrides_from(environ)

    assert [problem.split("=")[0] for problem in error.value.problems] == [
        "NQ_RATIO",
        "TRAIN_BATCH_SIZE",
        "WORKER_NODES",
    ]


def test_a_url_with_port_zero_is_the_runs_own_tool_server() -> None:
    assert is_own_tool_server("http://127.0.0.1:0")
    assert not is_own_tool_server("http://10.0.0.4:8100")
    assert not is_own_tool_server("http://tools.example")


def test_a_run_joins_the_cluster_of_the_head_with_all_its_nodes() -> None:
    environ = {"MASTER_IP": "10.0.0.1", "WORKER_NODES": "10.0.0.2 10.0.0.3"}
    assert overrides_from(environ) == [
        "++ray_kwargs.ray_init.address='10.0.0.1:6379'",
        "trainer.nnodes=3",
    ]
    assert overrides_from({**environ, "RAY_PORT": "7000"}, ["trainer.nnodes=2"]) == [
        "++ray_kwargs.ray_init.address='10.0.0.1:7000'",
        "trainer.nnodes=2",
    ]


def test_a_port_of_the_cluster_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match="RAY_PORT='x'"):
        overrides_from({"MASTER_IP": "10.0.0.1", "RAY_PORT": "x"})
