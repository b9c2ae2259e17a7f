"""The run's own tool server: its token, and whether it keeps an interpreter for each trajectory."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from config.lookup import at
from tests.verl_mixed.conftest import REPO_ROOT, RunEnviron
from verl_mixed.checks.config.sessions import (
    given_session_problems,
    own_session_problems,
    sessions_needed,
)
from verl_mixed.launch import launcher, tool_server
from verl_mixed.launch.launcher import train
from verl_mixed.launch.plan import Plan, make_plan

LOOPS = "actor_rollout_ref.rollout.agent.agent_loop_config_path"


def keeping(folder: Path, agent: str) -> str:
    """The override for agent loops of which one keeps its interpreter."""
    loops = yaml.safe_load((REPO_ROOT / "config/agent_loops.yaml").read_text())
    for loop in loops:
        loop["persistent_interpreter"] = loop["name"] == agent
    (folder / "loops.yaml").write_text(yaml.safe_dump(loops))
    return f"{LOOPS}={folder / 'loops.yaml'}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "overrides", "needed"),
    [
        ("nobody", [], 0),
        ("search_agent", [], 0),  # its source takes no part
        ("code_execution_agent", [], 120),  # 24 rows of validation x 5
        ("code_execution_agent", ["trainer.test_freq=-1", "trainer.val_before_train=false"], 20),
    ],
)
def test_each_trajectory_needs_an_interpreter(
    agent: str, overrides: list[str], needed: int, run_environ: RunEnviron, tmp_path: Path
) -> None:
    words = [*overrides, "actor_rollout_ref.rollout.val_kwargs.n=5", keeping(tmp_path, agent)]
    assert sessions_needed(make_plan(words, run_environ).config) == needed


def test_too_few_interpreters_are_a_problem(run_environ: RunEnviron, tmp_path: Path) -> None:
    keeps = keeping(tmp_path, "code_execution_agent")
    config: Mapping[str, Any] = make_plan([keeps], run_environ).config
    needed = sessions_needed(config)
    assert needed > 1
    for count, found in ((None, 0), (needed, 0), (needed - 1, 1)):
        assert len(list(own_session_problems(config, count))) == found
    few = json.dumps({"max_sessions": needed - 1}).encode()
    (problem,) = given_session_problems(config, [few])
    assert f"--max-sessions {needed}" in problem
    for healths in ([few, few], [b"{}"], [few, b"no json"], []):
        assert list(given_session_problems(config, healths)) == []


def test_the_runs_own_server_keeps_enough_unless_told_otherwise(
    run_environ: RunEnviron, tmp_path: Path
) -> None:
    def settings_of(*words: str) -> dict[str, Any]:
        keeps = keeping(tmp_path, "code_execution_agent")
        plan = make_plan([keeps, *words], run_environ | {"TRAIN_BATCH_SIZE": "40"})
        command = tool_server._command(plan)
        return json.loads(command[command.index("--settings") + 1])

    assert settings_of() == {"port": 0, "max_sessions": 200}
    assert settings_of("mixed.tool_server={max_sessions: 7}")["max_sessions"] == 7


@pytest.mark.slow
def test_the_runs_own_server_has_a_new_token_at_each_start(
    run_environ: RunEnviron, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tokens: list[str] = []

    def start(plan: Plan, environ: Mapping[str, str], *_: Any) -> None:
        assert at(plan.config, "mixed.experiment") == "trial"
        tokens.append(environ["TOOL_SERVER_TOKEN"])
        raise launcher.RunFailed("far enough")

    monkeypatch.setattr(launcher, "ToolServer", start)
    monkeypatch.setattr(launcher.signal, "signal", lambda *_: None)
    environ = {name: value for name, value in run_environ.items() if name != "TOOL_SERVER_TOKEN"}
    for given in ({}, {}, {"TOOL_SERVER_TOKEN": "mine"}):
        assert train([], environ | {"TOOL_SERVER_URL": ""} | given) == 1
    first, second, third = tokens
    assert len(first) == len(second) == 32 and first != second and third == "mine"
    written = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert not any(token.encode() in written for token in (first, second))
