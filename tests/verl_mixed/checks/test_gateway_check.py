"""Agents behind the gateway whose settings would fail in a worker, refused before Ray starts."""

import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.verl_mixed.checks.test_tools_check import put
from verl_mixed.checks.config.gateway import gateway_problems, guided_problems
from verl_mixed.checks.config.modes import _verdict_problems
from verl_mixed.checks.config.session_rows import session_row_problems
from verl_mixed.checks.config.tools import tool_problems
from verl_mixed.launch.plan import make_plan

Config = dict[str, Any]
AGENT = "agent_loops.gateway"
CODE = """
async def solve(address, row): ...
def slow(address, row): ...
"""


@pytest.fixture(scope="module")
def planned() -> Config:
    overrides = [f"mixed.sources.{name}.agent=gateway" for name in ("taco", "nq", "math")]
    return make_plan(overrides, os.environ | {"MODEL_PATH": "someone/some-model"}).config


def with_agent(planned: Config, **settings: Any) -> Config:
    config = deepcopy(planned)
    put(config, "agent_loops", {"gateway": settings})
    return config


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"function": "agent.py:solve"}, None),
        ({"command": "sh -c :", "where": "host"}, None),
        ({}, "name one of command and function"),
        ({"command": "sh", "function": "agent.py:solve"}, "name one of command and function"),
        ({"function": "agent.py:solve", "where": "host"}, "where: only a command has it"),
        ({"function": "agent.py"}, "write it as path/to/file.py:name"),
        ({"function": "none.py:solve"}, "no file"),
        ({"function": "agent.py:slow"}, "it is not async"),
        ({"function": "agent.py:other"}, "the file has no function 'other'"),
        ({"function": "broken.py:solve"}, "the file is not Python"),
        ({"command": "no-such-program"}, "there is no program"),
        ({"command": "sh", "memory_mb": 1}, f"{AGENT}.memory_mb"),
        ({"function": "agent.py:solve", "let_agent_set": ["top_p"]}, f"{AGENT}.let_agent_set"),
        ({"function": "agent.py:solve", "structured": "prompt"}, None),
        ({"function": "agent.py:solve", "structured": "regex"}, f"{AGENT}.structured"),
        ({"function": "agent.py:solve", "structured": "guided"}, "whose log-probs are trained"),
    ],
)
def test_what_would_not_run_for_a_session_is_named(
    planned: Config, settings: Any, words: str | None, tmp_path: Path, monkeypatch: Any
):
    (tmp_path / "agent.py").write_text(CODE)
    (tmp_path / "broken.py").write_text("def solve(")
    monkeypatch.chdir(tmp_path)
    found = [*gateway_problems(with_agent(planned, **settings))]
    assert [AGENT in text and str(words) in text for text in found] == [True] * bool(words)


@pytest.mark.parametrize(
    ("engine", "is_refused"), [("vllm", False), ("openai", False), ("sglang", True), ("hf", True)]
)
def test_an_evaluation_is_guided_only_by_an_engine_that_can(
    planned: Config, engine: str, is_refused: bool
):
    for structured in ("prompt", "guided"):
        config = with_agent(planned, function="agent.py:solve", structured=structured)
        put(config, "actor_rollout_ref.rollout.name", engine)
        found = [*guided_problems(config)]
        assert len(found) == (is_refused and structured == "guided")
        assert all(f"{AGENT}.structured=guided: rollout.name={engine}" in text for text in found)


def test_an_option_of_the_gateway_that_another_agent_has_is_named(planned: Config):
    config = deepcopy(planned)
    put(config, "agent_loops", {"math_agent": {"command": "sh"}})
    found = [text for text in gateway_problems(config) if "math_agent" in text]
    assert found and "command: only an agent with _target_=" in found[0]


def test_a_gateway_s_sessions_may_be_several_rows(planned: Config):
    config = with_agent(planned, function="agent.py:solve")
    assert session_row_problems(config) == []
    put(config, "actor_rollout_ref.actor.policy_loss.loss_mode", "gspo")
    (found,) = session_row_problems(config)
    assert "math (gateway), nq (gateway), taco (gateway)" in found


def test_agents_that_rows_name_are_judged_too(planned: Config, monkeypatch: Any):
    config = with_agent(planned, function="agent.py:solve")
    for name in ("taco", "nq", "math"):
        put(config, f"mixed.sources.{name}.agent", None)
    put(config, "actor_rollout_ref.actor.policy_loss.loss_mode", "gspo")
    assert session_row_problems(config, data=False) == []
    monkeypatch.setattr("verl_mixed.checks.config.tools.sound_files", lambda _: ["file"])
    monkeypatch.setattr(
        "verl_mixed.checks.config.tools.named_agents", lambda _: [("nq", "gateway")]
    )
    (found,) = session_row_problems(config)
    assert "nq (gateway)" in found


def test_paths_of_a_gateway_s_agent_are_absolute_and_those_of_other_agents_stay():
    own = {"_target_": "my.Loop", "command": "ls", "function": "pkg.mod:solve"}
    overrides = [f"+agent_loops.mine.{name}='{value}'" for name, value in own.items()]
    overrides += ["+agent_loops.gateway.command=sh", "+agent_loops.gateway.readable=[data]"]
    config = make_plan(overrides, os.environ | {"MODEL_PATH": "someone/some-model"}).config
    made = config["agent_loops"]["gateway"]
    assert made["readable"] == [os.path.abspath("data")] and "cwd" not in made
    assert config["agent_loops"]["mine"] == own


def test_an_agent_behind_the_gateway_may_give_the_reward(planned: Config):
    config = deepcopy(planned)
    put(config, "mixed.sources.math.reward", "loop")
    assert not [*_verdict_problems(config)]
    put(config, "mixed.sources.math.agent", "math_agent")
    assert len([*_verdict_problems(config)]) == 1


def test_an_agent_behind_the_gateway_sends_results_itself(planned: Config):
    config = deepcopy(planned)
    put(config, "mixed.sources.math.observation_style", "chat")
    assert any("sends the results itself" in text for text in tool_problems(config, data=False))
