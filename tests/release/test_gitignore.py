"""`.gitignore` covers what a checkout collects."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("is_link", [False, True])
def test_an_environment_is_ignored_also_if_it_is_a_symbolic_link(
    tmp_path: Path, is_link: bool
) -> None:
    checkout, elsewhere = tmp_path / "checkout", tmp_path / "elsewhere"
    checkout.mkdir()
    elsewhere.mkdir()
    shutil.copy(ROOT / ".gitignore", checkout)
    if is_link:
        (checkout / ".venv").symlink_to(elsewhere)
    else:
        (checkout / ".venv").mkdir()
    subprocess.run(["git", "init", "-q"], cwd=checkout, check=True)
    ignored = subprocess.run(["git", "check-ignore", "-q", ".venv"], cwd=checkout)
    assert ignored.returncode == 0
