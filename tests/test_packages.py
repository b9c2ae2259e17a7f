"""Packages are imported from this checkout, and each of their modules can be imported first.

`config` and `cluster` are names on PyPI too.
"""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.import_alone import PACKAGES, modules

REPO_ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", PACKAGES)
def test_package_is_imported_from_this_checkout(name: str) -> None:
    module = importlib.import_module(name)

    assert module.__file__ is not None
    assert Path(module.__file__).resolve() == REPO_ROOT / name / "__init__.py"


@pytest.mark.slow
@pytest.mark.timeout(900)  # a fork for each module
@pytest.mark.parametrize("every", ["8", pytest.param("1", marks=pytest.mark.nightly)])
def test_each_module_can_be_imported_first(every: str) -> None:
    pytest.importorskip("verl")
    assert len(modules()) > 200

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.import_alone", every],
        cwd=REPO_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {}
