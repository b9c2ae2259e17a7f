"""A run folder that somebody sent: its files are read within bounds, and nothing in it is run."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from config.disk import BrokenFile
from config.lookup import files_at
from tests.fakes.run_folder import write_run
from tests.verl_mixed.views.viewer.episodes import as_bytes, line
from verl_mixed.run.compose import load_config, save_config
from verl_mixed.run.state import RunFolder
from verl_mixed.views.limiter import state_file_of
from verl_mixed.views.report.runs import load_run

REPORT, AUDIT, WATCH = "report RUN", "audit RUN", "watch --once RUN"
VIEW, DIAGNOSE = "view RUN --html PAGE", "diagnose RUN"
READ = [
    *((REPORT, name) for name in ("metrics.jsonl", "ledger.jsonl", "versions.jsonl")),
    *((REPORT, name) for name in ("evaluations/e/summary.json", "config.yaml")),
    *((AUDIT, name) for name in ("ledger.jsonl", "metrics.jsonl", "trajectories/1.jsonl")),
    *((WATCH, name) for name in ("metrics.jsonl", "train.log", ".lock")),
    *((VIEW, "trajectories/1.jsonl"), (DIAGNOSE, "train.log"), (DIAGNOSE, "metrics.jsonl")),
]
"""What each command reads of a run's folder."""


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))


def of(verb: str, run: Path) -> "subprocess.CompletedProcess[str]":
    words = verb.replace("RUN", str(run)).replace("PAGE", str(run / "page.html")).split()
    command = [sys.executable, "-m", "verl_mixed", *words]
    environ = {**os.environ, "XDG_CACHE_HOME": str(run.parent)}
    return subprocess.run(
        command, env=environ, preexec_fn=limited, capture_output=True, text=True, timeout=120
    )


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


KINDS: dict[str, Callable[[Path], object]] = {
    "device": lambda path: path.symlink_to("/dev/zero"),
    "pipe": os.mkfifo,
    "sparse": sparse,
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of three steps."""
    run = tmp_path / "sent"
    write_run(run, 3)
    for folder in ("trajectories", "evaluations/e"):
        (run / folder).mkdir(parents=True)
    (run / "trajectories/1.jsonl").write_bytes(as_bytes([line()]))
    (run / "train.log").write_text("began\n")
    return run


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "name"), READ)
@pytest.mark.parametrize(
    "kind",
    ["device", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("pipe", "sparse"))],
)
def test_a_file_without_end_takes_neither_memory_nor_time(
    run: Path, verb: str, name: str, kind: str
):
    if kind == "sparse" and verb == DIAGNOSE:
        pytest.skip("a log may have any size; it is streamed")
    (run / name).unlink(missing_ok=True)
    KINDS[kind](run / name)
    done = of(verb, run)
    assert done.returncode in (0, 1, 2), done.stderr[-500:]
    assert "Traceback" not in done.stderr, done.stderr[-900:]


BOMB = "a0: &a0 [x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize("verb", [REPORT, AUDIT, WATCH, VIEW])
def test_nested_anchors_end_no_command_by_their_time(run: Path, verb: str):
    (run / "config.yaml").write_text(BOMB)
    done = of(verb, run)
    assert done.returncode == (0 if verb == WATCH else 1), done.stderr[-500:]
    assert verb == WATCH or "it has anchors" in done.stderr


def test_a_config_of_a_run_reads_no_environment_and_makes_no_objects(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SECRET", "hunter2")
    (run / "config.yaml").write_text("a: ${oc.env:SECRET}\nb: ${oc.decode:'1'}\n")
    assert load_config(run / "config.yaml") == {"a": "${oc.env:SECRET}", "b": "${oc.decode:'1'}"}
    (run / "config.yaml").write_text("a: !!python/object/apply:os.system ['touch pwned']\n")
    with pytest.raises(BrokenFile, match="could not determine a constructor"):
        load_config(run / "config.yaml")


def test_a_file_that_a_config_names_by_something_else_than_a_text_is_one_that_is_not_there(
    run: Path,
):
    tool_config = {"rate_limit_file": [1]}
    multi_turn = {"multi_turn": {"tool_config": tool_config}}
    config = {"actor_rollout_ref": {"rollout": multi_turn}, "data": {"train_files": [5]}}
    save_config(config, run / "config.yaml")
    assert str(state_file_of(run)) == "[1]"
    assert files_at(load_config(run / "config.yaml"), "data.train_files") == ["5"]


@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_a_report_is_written_where_versions_is_no_file(run: Path, kind: str):
    KINDS[kind](run / "versions.jsonl")
    assert load_run(RunFolder(run)).starts == []
