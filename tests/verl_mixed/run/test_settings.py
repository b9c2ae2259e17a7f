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


ADDRESS = "++ray_kwargs.ray_init.address"
HEAD = {"MASTER_IP": "10.0.0.1"}
HAND = {"RAY_ADDRESS": "10.0.0.4:6379"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (HAND, [f"{ADDRESS}='10.0.0.4:6379'"]),
        (HAND | {"MASTER_IP": "local"}, [f"{ADDRESS}='10.0.0.4:6379'"]),
        (HAND | {"WORKER_NODES": "10.0.0.5"}, [f"{ADDRESS}='10.0.0.4:6379'", "trainer.nnodes=2"]),
        (HAND | {"NNODES": "2"}, ["trainer.nnodes=2", f"{ADDRESS}='10.0.0.4:6379'"]),
        ({"MASTER_IP": "local"}, []),
        ({"RAY_ADDRESS": "local"}, []),
        (HEAD | {"RAY_ADDRESS": "auto"}, [f"{ADDRESS}='10.0.0.1:6379'", "trainer.nnodes=1"]),
        (
            {"MASTER_IP": "[fd00::1]", "RAY_ADDRESS": "fd00::1:6379"},
            [f"{ADDRESS}='[fd00::1]:6379'", "trainer.nnodes=1"],
        ),
    ],
)
def test_a_run_joins_the_ray_that_the_settings_name(
    environ: dict[str, str], expected: list[str]
) -> None:
    assert overrides_from(environ) == expected


def test_auto_is_the_ray_that_was_last_started_on_this_machine(tmp_path: Path) -> None:
    environ = {"RAY_ADDRESS": "auto", "TMPDIR": str(tmp_path)}
    with pytest.raises(ConfigError, match="RAY_ADDRESS='auto': no Ray was started on this machine"):
        overrides_from(environ)

    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.4:7000\n")

    assert overrides_from(environ) == [f"{ADDRESS}='10.0.0.4:7000'"]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (HEAD | {"RAY_PORT": "x"}, "RAY_PORT='x': want a port number"),
        ({"RAY_ADDRESS": "10.0.0.4"}, "RAY_ADDRESS='10.0.0.4': want <ip>:<port>"),
        ({"RAY_ADDRESS": "ray://10.0.0.4:10001"}, "RAY_ADDRESS='ray://10.0.0.4:10001': want"),
        (HEAD | HAND, "MASTER_IP='10.0.0.1' (10.0.0.1:6379) and RAY_ADDRESS='10.0.0.4:6379' name"),
        (HEAD | {"RAY_ADDRESS": "local"}, "RAY_ADDRESS='local' name two Rays: unset one of them"),
        (
            HEAD | {"WORKER_NODES": "10.0.0.2 10.0.0.3", "NNODES": "2"},
            "NNODES=2, and WORKER_NODES='10.0.0.2 10.0.0.3' and the head are 3: unset one",
        ),
        ({"NNODES": "two"}, "NNODES='two': want a whole number >= 1"),
        ({"KL_COEF": "low"}, "KL_COEF='low': want a number >= 0"),
    ],
)
def test_settings_of_a_cluster_that_are_wrong_are_named(
    environ: dict[str, str], expected: str
) -> None:
    with pytest.raises(ConfigError) as error:
        overrides_from(environ)

    (problem,) = error.value.problems
    assert expected in problem


def test_the_command_line_settles_a_contradiction_about_nodes() -> None:
    environ = HEAD | {"WORKER_NODES": "10.0.0.2", "NNODES": "3"}
    assert overrides_from(environ, ["trainer.nnodes=2"])[-1] == "trainer.nnodes=2"


@pytest.mark.parametrize(
    ("coefficient", "given", "switch"),
    [("0.001", [], "true"), ("0", [], "false"), ("1e-3", ["x.use_kl_loss=false"], None)],
)
def test_kl_coef_switches_the_kl_loss_unless_the_command_line_does(
    coefficient: str, given: list[str], switch: str | None
) -> None:
    actor = "actor_rollout_ref.actor"
    given = [override.replace("x", actor) for override in given]
    expected = [f"{actor}.kl_loss_coef={float(coefficient)!r}"]
    expected += [f"{actor}.use_kl_loss={switch}"] * bool(switch)

    assert overrides_from({"KL_COEF": coefficient}, given) == [*expected, *given]
