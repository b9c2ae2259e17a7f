"""Environments that would fail in a worker, refused before Ray starts."""

import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from config.schema import SourceConfig
from samplers.rows.schema import write_rows
from samplers.rows.sources.seeds import records, to_row
from tests.verl_mixed.checks.test_tools_check import put
from verl_mixed.checks.config.environments import environment_problems, start_of_source
from verl_mixed.launch.plan import make_plan

WORLDS = Path(__file__).parents[2] / "fakes" / "environments.py"
KEY = "mixed.sources.math"
Config = dict[str, Any]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run whose source math has one row."""
    file = tmp_path_factory.mktemp("rows") / "math.parquet"
    found = records(split="train", size=1, val_size=1)
    write_rows(file, [to_row(r, split="train", index=0, source="math") for r in found])
    overrides = [
        *("mixed.sources.taco=null", "mixed.sources.nq=null"),
        *(f"data.train_files=[{file}]", f"data.val_files=[{file}]"),
        *("mixed.sources.math.agent=null", "mixed.sources.math.reward=null"),
        "mixed.sources.math.prompt={}",
        f"mixed.sources.math.environment={WORLDS}:Guess",
    ]
    return make_plan(overrides, os.environ | {"MODEL_PATH": "someone/some-model"}).config


def with_environment(planned: Config, **changed: Any) -> Config:
    """The config with other keys of the source; `environment` is a change of the entry's keys."""
    config = deepcopy(planned)
    entry = {"use": f"{WORLDS}:Guess", "where": "loop", **changed.pop("environment", {})}
    put(config, f"{KEY}.environment", entry)
    for name, value in changed.items():
        put(config, f"{KEY}.{name}", value)
    return config


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, None),
        ({"environment": {"where": "process"}}, None),
        ({"agent": "math_agent"}, "this agent acts in no environment"),
        ({"observation_style": "inline"}, "messages of the chat template"),
        (
            {"prompt": {"user": "Q: {question}"}},
            "`user` and `examples` of a template have no effect",
        ),
        ({"prompt": {"system": "Play."}}, None),
        ({"environment": {"use": f"{WORLDS}:None_"}}, "the file has no class 'None_', but"),
        ({"environment": {"use": f"{WORLDS}:NoStep"}}, "the class has no step"),
        ({"environment": {"options": {"hihg": 1}}}, "does not take options={'hihg': 1}"),
        ({"environment": {"options": {"mode": "no start"}}}, "reset returned []"),
        ({"environment": {"options": {"mode": "fails at once"}}}, "raised OSError: no board"),
        (
            {"environment": {"use": "http://127.0.0.1:9", "where": None}},
            "no answer from http://127.0.0.1:9",
        ),
    ],
)
def test_what_begins_no_episode_is_named(planned: Config, changed: Any, words: str | None):
    config = with_environment(planned, **changed)
    put(config, "actor_rollout_ref.rollout.multi_turn.tool_config.max_retries", 0)
    found = [*environment_problems(config)]
    assert found == [] if words is None else any(words in each for each in found), found
    assert all(each.startswith(KEY) for each in found)


def test_the_agent_of_environments_without_one_is_named(planned: Config):
    config = deepcopy(planned)
    put(config, f"{KEY}.environment", None)
    put(config, f"{KEY}.agent", "environment")
    assert "has no environment" in " ".join(environment_problems(config))


@pytest.mark.parametrize("setting", [{"topk": 3}, {"tool_names": ["search"]}])
def test_a_setting_of_tools_is_refused(planned: Config, setting: dict[str, Any]):
    config = with_environment(planned)
    put(config, "agent_loops", {"environment": setting})
    (found,) = environment_problems(config)
    assert found.startswith(f"agent 'environment': {next(iter(setting))}")


def test_the_first_messages_are_those_of_the_first_row(planned: Config):
    start: Any = start_of_source(
        with_environment(planned, environment={"options": {"high": 3}}), "math"
    )
    assert start.messages[-1]["content"] == "a number from 1 to 3"
    assert start_of_source(planned, "nq") is None


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("maze", "none of openenv, textarena"),
        ("verifiers", "run docs/examples/verifiers_agent.py as the source's agent"),
        ({"use": "http://a", "where": "loop"}, "where: not read for use='http://a'"),
        ({"use": "a.py:B", "token": "T"}, "token: not read"),
        ({"use": "a.py:B", "where": "loop", "python": "p"}, "python: not read"),
        ({"use": "openenv", "env": ["A"]}, "env: not read"),
        ({"use": "a.py:B", "rate": "2 a day"}, "write a number above 0 and a unit"),
        ({"use": "a.py:B", "retry": 2}, "Extra inputs"),
    ],
)
def test_an_entry_that_contradicts_itself_is_refused(entry: Any, words: str):
    with pytest.raises(ValueError, match="environment") as caught:
        SourceConfig.model_validate({"ratio": 1, "environment": entry})
    assert words in str(caught.value)


def test_a_source_with_an_environment_has_its_agent_and_its_reward():
    given = {"ratio": 1, "environment": "a.py:B"}
    source = SourceConfig.model_validate(given)
    assert (source.agent, source.reward) == ("environment", "loop")
    own = SourceConfig.model_validate({**given, "agent": "mine", "reward": "math"})
    assert (own.agent, own.reward) == ("mine", "math")


def test_paths_of_a_plan_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    overrides = ["mixed.sources.math.environment={use: 'a/maze.py:Maze', python: bin/python}"]
    plan = make_plan(overrides, os.environ | {"MODEL_PATH": "someone/some-model"})
    entry = plan.config["mixed"]["sources"]["math"]["environment"]
    assert entry["use"] == f"{tmp_path}/a/maze.py:Maze"
    assert entry["python"] == f"{tmp_path}/bin/python"
