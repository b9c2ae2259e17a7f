"""What the project requires, read from its metadata, or from a checkout that is not installed."""

from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from verl_mixed.run import requirements
from verl_mixed.run.requirements import ALL, NotComplete, refuse_without, required


def _names(*extras: str) -> set[str]:
    return {one.name for one in required(*extras)}


def test_an_extra_adds_its_packages_to_those_of_the_core() -> None:
    core, server = _names(), _names("server")
    assert {"numpy", "filelock"} <= core < server < _names(ALL)
    assert server - core == {"aiohttp", "prometheus-client", "rich", "sympy", "tantivy"}
    assert {"verl", "mcp", "tantivy", "vl-convert-python"} <= _names(ALL) - core


def test_a_checkout_that_is_not_installed_is_read_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = _names(), _names(ALL)

    def nowhere(name: str) -> Any:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(requirements, "distribution", nowhere)
    assert (_names(), _names(ALL)) == installed
    monkeypatch.setattr(requirements, "PYPROJECT", Path("/nowhere/pyproject.toml"))
    with pytest.raises(NotComplete, match="verl-mixed-agent-loop is not installed: pip install"):
        required(ALL)


def test_a_missing_extra_is_one_sentence_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse_without("server", "the tool server")
    monkeypatch.setattr(requirements, "version_of", lambda name: None)
    with pytest.raises(NotComplete) as error:
        refuse_without("server", "the tool server")
    assert str(error.value).startswith(
        "the tool server needs the extra 'server': pip install 'verl-mixed-agent-loop[server]' "
        "(not installed: "
    )
    assert str(error.value).endswith("more packages)")
