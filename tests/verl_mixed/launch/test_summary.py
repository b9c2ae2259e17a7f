"""The last lines of a run that is complete."""

import io
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tests.verl_mixed.run_files import add_line, metrics_line, run_of
from verl_mixed.launch.summary import report_and_list_files, summarise

WORDS = "calls of nq waited 34 s for a tool server that was away or overloaded"
WAITED = {"mixed__nq__server_wait_s__sum": 17.0}


@pytest.mark.parametrize(("more", "said"), [({}, []), (WAITED, [WORDS])])
def test_what_calls_waited_for_servers_is_said_of_the_whole_run(
    more: dict[str, float], said: list[str], tmp_path: Path
) -> None:
    folder = run_of(tmp_path / "run", 3)
    for step in (4, 5):
        add_line(folder.metrics, metrics_line(step, **more))
    plan: Any = SimpleNamespace(folder=folder, config={})
    lines: list[str] = []

    summarise(plan, Console(file=io.StringIO()), lines.append)

    assert [line[13:] for line in lines if line.startswith("tools  ")] == said


@pytest.mark.parametrize("name", ["tensorboard", "trajectories"])
def test_the_last_lines_name_only_folders_that_are_there(name: str, tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", 1)
    place = folder.path / name
    if place.exists():
        shutil.rmtree(place)
    lines: list[str] = []

    report_and_list_files(folder, lines.append)
    assert str(place) not in "".join(lines)

    place.mkdir()
    report_and_list_files(folder, lines.append)
    assert str(place) in "".join(lines)
