"""A user's own config.py, cluster.py or samplers/ in the current folder ends no run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from config.child import command
from verl_mixed.shadowed import PACKAGES, shadows

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder, with names of ours."""
    (tmp_path / "config.py").write_text("LR = 1e-6\n")
    (tmp_path / "cluster.py").write_text("raise SystemExit('the wrong cluster')\n")
    (tmp_path / "samplers").mkdir()
    (tmp_path / "agent_loop").mkdir()
    (tmp_path / "agent_loop" / "__init__.py").touch()
    (tmp_path / "users_module.py").write_text("WHERE = 'here'\n")
    return tmp_path


def _run(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    given = {k: x for k, x in os.environ.items() if k not in ("PYTHONPATH", "VERL_MIXED_FOLDER")}
    return subprocess.run(
        words, cwd=folder, env={**given, **environ}, capture_output=True, text=True, check=False
    )


def test_a_child_finds_our_packages_before_the_users_modules(folder: Path) -> None:
    done = _run(folder, *command("verl_mixed.commands.facts", "--facts", "--", "mixed.seed=1"))
    assert done.returncode == 0, done.stderr
    assert "RUN_FOLDER=" in done.stdout


def test_a_child_finds_the_users_modules_too(folder: Path) -> None:
    (folder / "look.py").write_text(
        "import sys, config.schema, users_module\n"
        "print(config.schema.__file__, users_module.WHERE, sys.path[-1] == sys.argv[1])\n"
    )
    done = _run(folder, *command("look", str(folder)))
    assert done.stdout.split() == [str(ROOT / "config" / "schema.py"), "here", "True"], done.stderr


def test_the_command_started_as_a_module_is_not_hidden(folder: Path) -> None:
    done = _run(folder, sys.executable, "-m", "verl_mixed", "limiter", "--help")
    assert done.returncode == 0, done.stderr


def test_a_package_that_is_hidden_is_one_error_before_anything_starts(folder: Path) -> None:
    done = _run(folder, sys.executable, "-m", "verl_mixed", "train", PYTHONPATH=f"{folder}:{ROOT}")
    assert done.returncode == 2
    (first, *others) = done.stderr.splitlines()
    hidden = folder / "agent_loop" / "__init__.py"
    assert first.startswith(f"error: {hidden} hides the package 'agent_loop' of this project")
    assert [line.split()[1] for line in others] == [
        str(folder / "cluster.py"),
        str(folder / "config.py"),
    ]
    assert not (folder / "runs").exists()


def test_nothing_is_hidden_here() -> None:
    assert shadows() == []
    assert {path.name for path in ROOT.iterdir() if (path / "py.typed").exists()} == {
        *PACKAGES,
        "verl_mixed",
    }


IN_RAY = """
import os, sys
from agent_loop.ray_path import keep_folder_off_workers
import ray

keep_folder_off_workers()
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)

@ray.remote
def look():
    import sys
    import agent_loop.plugin
    import config.schema, users_module
    return [config.schema.__file__, users_module.WHERE, sys.path[0]]

print("saw", *ray.get(look.remote(), timeout=100))
ray.shutdown()
"""


@pytest.mark.ray
def test_a_worker_of_ray_finds_our_packages_before_the_users_modules(folder: Path) -> None:
    (folder / "driver.py").write_text(IN_RAY)
    done = _run(folder, *command("driver"), RAY_USAGE_STATS_ENABLED="0")
    assert done.returncode == 0, done.stderr[-3000:]
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("saw")]
    _, schema, where, first = said.split()
    assert (schema, where) == (str(ROOT / "config" / "schema.py"), "here")
    assert first != str(folder)


DOOR = "import verl_mixed.recipe, samplers, config; print(samplers.MINE, config.LR)"


@pytest.fixture
def recipes_folder(tmp_path: Path) -> Path:
    """A folder with a recipe of verl's, and with names of the core."""
    (tmp_path / "samplers").mkdir()
    (tmp_path / "samplers" / "__init__.py").write_text("MINE = 'mine'\n")
    (tmp_path / "samplers" / "audit.py").write_text("the door does not load ours\n")
    (tmp_path / "config.py").write_text("LR = 1e-6\n")
    return tmp_path


@pytest.mark.slow
def test_the_door_opens_beside_a_users_modules_of_the_same_names(recipes_folder: Path) -> None:
    done = _run(recipes_folder, sys.executable, "-c", DOOR, PYTHONPATH=f"{recipes_folder}:{ROOT}")
    assert done.stdout.split()[-2:] == ["mine", "1e-06"], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("samplers/ledger.py", "", "samplers/ledger.py hides samplers.ledger of this project"),
        ("config.py", "raise SystemExit(2)", "cannot import 'config' of this folder, which hides"),
    ],
)
def test_a_users_module_that_the_door_needs_itself_is_named(
    recipes_folder: Path, name: str, text: str, words: str
) -> None:
    (recipes_folder / name).write_text(text)
    done = _run(recipes_folder, sys.executable, "-c", DOOR, PYTHONPATH=f"{recipes_folder}:{ROOT}")
    assert done.returncode == 1 and words in done.stderr.splitlines()[-1], done.stderr
