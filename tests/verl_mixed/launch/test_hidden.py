"""What a start hands down to agents behind the gateway: their files, and what is hidden."""

import os
from pathlib import Path

import pytest
import yaml

from config.gateway import with_absolute_paths
from tests.verl_mixed.checks.test_gateway_check import Config
from verl_mixed.checks.config.gateway import gateway_problems
from verl_mixed.launch.plan import make_plan
from verl_mixed.run.state import changes_of_resume


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The start folder, with an agent and data."""
    for file in ("start/agent.py", "start/dist/agent.mjs", "beside/run.sh", "start/x"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("")
    (tmp_path / "start" / "math").mkdir()
    monkeypatch.chdir(tmp_path / "start")
    return tmp_path / "start"


@pytest.mark.parametrize(
    ("command", "expected", "readable"),
    [
        ("python agent.py math", "python {s}/agent.py math", ["{s}"]),
        ("node dist/agent.mjs --file=x -v", "node {s}/dist/agent.mjs --file={s}/x -v", ["{s}"]),
        ("bash ../beside/run.sh x", "bash {s}/../beside/run.sh {s}/x", ["{s}/../beside", "{s}"]),
        ("./x ./math", "{s}/x {s}/math", ["{s}"]),
        ("x 'a b' none.py", "x 'a b' none.py", []),
        ("sh -c 'python agent.py'", "sh -c 'python agent.py'", []),
        ("python {s}/agent.py", "python {s}/agent.py", ["{s}"]),
        ("/bin/sh -c :", "/bin/sh -c :", []),
        ("python -c " + "y" * 999, "python -c " + "y" * 999, []),
        ("sh 'x", "sh 'x", []),
    ],
)
def test_words_that_name_files_may_be_relative_to_the_start_folder(
    command: str, expected: str, readable: list[str], start: Path
):
    made = with_absolute_paths({"command": command.format(s=start)})
    paths = [os.path.normpath(path.format(s=start)) for path in readable]
    words = [os.path.normpath(w) if "/.." in w else w for w in expected.format(s=start).split()]
    assert (made["command"].split(), made.get("readable", [])) == (words, paths)
    assert "cwd" not in made


def planned(*overrides: str) -> Config:
    return make_plan(list(overrides), os.environ | {"MODEL_PATH": "someone/some-model"}).config


AGENT = ("+agent_loops.gateway.command='python agent.py'", "mixed.sources.math.agent=gateway")


def test_data_runs_and_secrets_are_hidden_from_agents_and_a_folder_in_them_is_refused(start: Path):
    (start / "rows.parquet").touch()
    config = planned(*AGENT, "data.val_files=[rows.parquet]", "mixed.sources.nq.val_files=[v.json]")
    hidden = config["agent_loops"]["gateway"]["hidden"]
    named = ("data", "runs", "logs", ".env", "rows.parquet", "v.json")
    assert {str(start / name) for name in named} <= {*hidden}
    assert {str(Path.home() / name) for name in (".ssh", ".netrc")} <= {*hidden}
    (start / "data").mkdir()
    config = planned(*AGENT, "+agent_loops.gateway.cwd=data")
    (found,) = gateway_problems(config)
    assert "agent_loops.gateway" in found and "lies in" in found


def test_a_run_of_1_1_0_keeps_the_start_folder_as_the_folder_of_its_command(start: Path):
    given = (*AGENT, "mixed.experiment=old")
    old = planned(*given)
    gateway = {"command": "python agent.py", "cwd": str(start)}
    old["agent_loops"]["gateway"] = gateway
    folder = start / "runs" / "old"
    (folder / "checkpoints" / "global_step_1").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(old))
    new = planned(*given)
    made = new["agent_loops"]["gateway"]
    assert {name: made[name] for name in gateway} == gateway and made["hidden"]
    assert not [text for text in changes_of_resume(old, new) if "agent_loops" in text]
