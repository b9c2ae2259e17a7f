"""`config` and `cluster` are names on PyPI too: what is imported must be this checkout."""

import importlib
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    "name", ["agent_loop", "cluster", "config", "rate_limit", "samplers", "verl_mixed"]
)
def test_package_is_imported_from_this_checkout(name: str) -> None:
    module = importlib.import_module(name)

    assert module.__file__ is not None
    assert Path(module.__file__).resolve() == REPO_ROOT / name / "__init__.py"
