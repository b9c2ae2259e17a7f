"""Commands show the old runs as recorded: some views always, all of them at night."""

import subprocess
import sys

import pytest

from tests.recorded.compare import REPO_ROOT
from tests.recorded.views import RUNS

SAMPLE = ("audit", "audit without a prompt", "watch, screen", "diagnose")

COMPARE = """
import sys
from tests.recorded.compare import changed, recorded_blocks
from tests.recorded.views import blocks, file_of
release, *names = sys.argv[1:]
file = file_of(release)
sys.exit(changed(file, recorded_blocks(file), blocks(release, names or None)) or 0)
"""
"""Runs in a process of its own, because rich remembers the environment that it was imported in."""

releases = pytest.mark.parametrize("release", RUNS)


def compare(*words: str) -> None:
    command = [sys.executable, "-c", COMPARE, *words]
    done = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@releases
@pytest.mark.slow
def test_some_views_are_as_recorded(release: str) -> None:
    compare(release, *SAMPLE)


@pytest.mark.nightly
@releases
def test_every_view_is_as_recorded(release: str) -> None:
    compare(release)
