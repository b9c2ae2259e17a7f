"""`python -m agentfly.cli` says what to type here, and an installed AgentFly is never hidden."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.verl_mixed.conftest import REPO_ROOT

OURS = REPO_ROOT / "agentfly.py"


def run(work: Path, *words: str, path: list[Path]) -> subprocess.CompletedProcess[str]:
    places = os.pathsep.join(map(str, path))
    return subprocess.run(
        [sys.executable, *words],
        cwd=work,
        env={**os.environ, "PYTHONPATH": places},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder with a package AgentFly."""
    package = tmp_path / "theirs" / "agentfly"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("WHOSE = 'theirs'\n")
    for name in ("cli.py", "__main__.py"):
        (package / name).write_text("import agentfly, sys\nprint(agentfly.WHOSE, sys.argv[1:])\n")
    return package.parent


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (
            ["agentfly.cli", "train", "algorithm.adv_estimator=grpo", "trainer.logger=[a, b]"],
            "verl-mixed train algorithm.adv_estimator=grpo 'trainer.logger=[a, b]'",
        ),
        (["agentfly", "train", "a=b"], "verl-mixed train a=b"),
        (["agentfly.cli"], "verl-mixed train KEY=VALUE"),
        (["agentfly.cli", "--help"], "verl-mixed train KEY=VALUE"),
    ],
)
def test_the_guides_command_says_what_to_type(tmp_path: Path, typed: list[str], says: str) -> None:
    (tmp_path / "agentfly").mkdir()  # a folder of data is no AgentFly
    done = run(tmp_path, "-m", *typed, path=[REPO_ROOT])

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: AgentFly is not installed; type its keys here as: {says}\n"


@pytest.mark.parametrize("module", ["agentfly.cli", "agentfly"])
@pytest.mark.parametrize("where", ["behind", "before", "same folder"])
def test_an_installed_agentfly_wins(tmp_path: Path, theirs: Path, module: str, where: str) -> None:
    path = {"behind": [OURS.parent, theirs], "before": [theirs, OURS.parent]}.get(where, [theirs])
    if where == "same folder":
        shutil.copy(OURS, theirs)

    done = run(tmp_path, "-m", module, "train", "a=b", path=path)

    assert (done.stdout, done.stderr) == ("theirs ['train', 'a=b']\n", "")


def test_an_agentfly_with_a_finder_of_its_own_wins(tmp_path: Path, theirs: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom importlib.machinery import PathFinder\n\n\n"
        "class Editable:\n    @staticmethod\n    def find_spec(name, path=None, target=None):\n"
        f"        return PathFinder.find_spec(name, [{str(theirs)!r}])\n\n\n"
        "sys.meta_path.append(Editable)\nimport agentfly\nprint(agentfly.WHOSE)\n"
    )

    done = run(tmp_path, str(program), path=[OURS.parent])

    assert (done.stdout, done.stderr) == ("theirs\n", "")


@pytest.mark.parametrize("name", ["agentfly", "agentfly.cli"])
def test_an_import_finds_no_agentfly(tmp_path: Path, name: str) -> None:
    done = run(tmp_path, "-c", f"import {name}", path=[REPO_ROOT])

    assert done.stderr.endswith("ModuleNotFoundError: No module named 'agentfly'\n")
