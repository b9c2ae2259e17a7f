"""The lock files: what `pyproject.toml` wants is in them, in its range, and they agree with
themselves."""

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
TOML = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
PROJECT: dict[str, Any] = TOML.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ("3.10", "3.11", "3.12")
OF_A_RUN = ("torch.txt", "laptop.lock")
OF_A_CHECK = (*OF_A_RUN, "dev.lock")


def _lines(*files: str) -> Iterator[Requirement]:
    for file in files:
        for line in (ROOT / "requirements" / file).read_text().splitlines():
            if line and not line.startswith("#"):
                yield Requirement(line)


def _environment(python: str, extra: str = "") -> dict[str, str]:
    """Of the markers, on Linux under this Python."""
    environment = {name: str(value) for name, value in default_environment().items()}
    return environment | {
        "python_version": python,
        "python_full_version": f"{python}.9",
        "extra": extra,
    }


def _holds(wanted: Requirement, python: str, extras: set[str]) -> bool:
    return wanted.marker is None or any(
        wanted.marker.evaluate(_environment(python, extra)) for extra in extras | {""}
    )


def _pins(python: str, *files: str) -> dict[str, str]:
    """Package -> version; each is pinned once."""
    pins: dict[str, str] = {}
    for line in _lines(*files):
        if not _holds(line, python, set()):
            continue
        name = canonicalize_name(line.name)
        found = re.fullmatch(r"==([^,*]+)", str(line.specifier))
        assert found, f"{line}: not pinned"
        assert name not in pins, f"{line}: pinned twice for Python {python}"
        pins[name] = found[1]
    return pins


def _own(python: str, *extras: str) -> list[Requirement]:
    """What the project wants under a Python, with the extra `all` and other extras."""
    optional: dict[str, list[str]] = PROJECT["optional-dependencies"]
    (every,) = map(Requirement, optional["all"])
    wanted = [
        *PROJECT["dependencies"],
        *(one for extra in (*sorted(every.extras), *extras) for one in optional[extra]),
    ]
    requirements = [Requirement(one) for one in wanted]
    return [one for one in requirements if _holds(one, python, set())]


def _unmet(wanted: Requirement, pins: dict[str, str], by: str) -> list[str]:
    version = pins.get(canonicalize_name(wanted.name))
    if version is None:
        return [f"{by} wants {wanted}: not in the lock"]
    if not wanted.specifier.contains(version, prereleases=True):
        return [f"{by} wants {wanted}: the lock has {version}"]
    return []


def _followed(
    roots: list[Requirement], pins: dict[str, str], python: str
) -> tuple[set[str], list[str]]:
    """Everything that the roots lead to, as the packages installed here say, and what of it the
    lock does not have. A package of another version than the lock's is not followed."""
    reached: set[str] = set()
    unmet: list[str] = []
    seen: set[tuple[str, frozenset[str]]] = set()
    open_ends = [(one, "pyproject.toml") for one in roots if _holds(one, python, set())]
    while open_ends:
        wanted, by = open_ends.pop()
        name = canonicalize_name(wanted.name)
        unmet += _unmet(wanted, pins, by)
        reached.add(name)
        if (name, frozenset(wanted.extras)) in seen:
            continue
        seen.add((name, frozenset(wanted.extras)))
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue
        if found.version.partition("+")[0] != pins.get(name):
            continue
        for text in found.requires or []:
            requirement = Requirement(text)
            if _holds(requirement, python, set(wanted.extras)):
                open_ends.append((requirement, f"{name} {found.version}"))
    return reached, unmet


@pytest.mark.parametrize("python", PYTHONS)
def test_everything_the_project_wants_is_locked_in_its_range(python: str) -> None:
    run, check = _pins(python, *OF_A_RUN), _pins(python, *OF_A_CHECK)
    unmet = [text for one in _own(python) for text in _unmet(one, run, "pyproject.toml")]
    unmet += [text for one in _own(python, "dev") for text in _unmet(one, check, "pyproject.toml")]
    assert unmet == []


@pytest.mark.parametrize("python", PYTHONS)
def test_everything_a_run_on_gpus_wants_is_locked_in_its_range(python: str) -> None:
    pins = _pins(python, "gpu.lock")
    assert [
        text for one in _own(python, "gpu") for text in _unmet(one, pins, "pyproject.toml")
    ] == []


@pytest.mark.parametrize("python", PYTHONS)
def test_what_the_locked_packages_want_is_locked_in_their_range(python: str) -> None:
    pins = _pins(python, *OF_A_CHECK)
    reached, unmet = _followed(_own(python, "dev"), pins, python)
    assert len(reached) > len(_own(python, "dev"))
    of_cuda = re.compile(r" wants (nvidia-|cuda-|triton)")  # a build of torch brings them
    assert [text for text in unmet if not of_cuda.search(text)] == []


def test_a_lock_holds_nothing_that_nobody_wants() -> None:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    pins = _pins(python, *OF_A_CHECK)
    for name, version in pins.items():
        try:
            installed = distribution(name).version.partition("+")[0]
        except PackageNotFoundError:
            installed = None
        if installed != version:
            pytest.skip(f"{name} is {installed} here, {version} in the lock: not to be followed")
    reached, _ = _followed(_own(python, "dev"), pins, python)
    assert pins.keys() - reached == set()
