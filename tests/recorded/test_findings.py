"""The checks say what they said when findings.txt was recorded."""

import subprocess
import sys

import pytest

from tests.recorded.compare import REPO_ROOT


def compare(*words: str) -> None:
    """Runs in a process of its own, because it changes the environment, the folder and sys.path."""
    command = [sys.executable, "-m", "tests.recorded.findings", "--check", *words]
    done = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_sample_of_configs_is_judged_as_recorded() -> None:
    compare("--sample", "25")


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_every_config_is_judged_as_recorded() -> None:
    compare()
