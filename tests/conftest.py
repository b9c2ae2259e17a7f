"""What every test runs under."""

import faulthandler
import gc
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

# No test may fail because the machine is busy. --hypothesis-profile chooses another one.
settings.register_profile("change", deadline=None, max_examples=25)
settings.register_profile("nightly", deadline=None, max_examples=200)
settings.register_profile("thorough", deadline=None, max_examples=3000)
settings.register_profile(
    "mutants",
    deadline=None,
    max_examples=25,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
)
settings.load_profile("change")

_SCREEN = pytest.StashKey[int]()
_LEFT = pytest.StashKey[Counter[str]]()

LANES = {
    "nightly": ("nightly",),
    "cluster": ("cluster",),
    "long": (
        *("algorithm", "model", "toolservers", "agents", "environments", "reasoning", "vllm"),
    ),
}
"""Option of run_tests.sh -> the marks of the tests that only it runs."""

SECONDS = {"ray": 40.0, "nodes": 20.0, "slow": 1.5, "sandbox": 0.6, "browser": 3.0}
"""About what a test with a mark takes; one without any takes a twentieth of a second."""

RUNS = ("tests/e2e/", "tests/nodes/", "tests/guides/")
"""Folders whose tests start Ray in processes of its own, not in the one that runs the tests."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and items stay to the end: a search for garbage among them only takes time, 15 of the
    35 s of a collection. Afterwards it passes over them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(trylast=True)  # without what -m leaves out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first, because a worker of xdist takes a file after the other.

    Files over machines come after them, when the checks that run_tests.sh has beside the tests have
    ended: several Rays start at once there, and each must within 30 s (fixed in Ray).
    Files that start Ray in the testing process come last: its threads outlive `ray.shutdown()`.
    A browser that starts slowly is no failure; what hangs is named before this limit.
    """
    seconds = defaultdict[str, float](float)
    has_ray: set[str] = set()
    for item in items:
        file = item.nodeid.partition("::")[0]
        marks = {mark.name for mark in item.iter_markers()}
        seconds[file] += max((SECONDS[mark] for mark in marks & SECONDS.keys()), default=0.05)
        if "ray" in marks and not file.startswith(RUNS):
            has_ray.add(file)
        if "browser" in marks and "timeout" not in marks:
            item.add_marker(pytest.mark.timeout(900))

    def place(item: pytest.Item) -> tuple[bool, bool, float, str]:
        file = item.nodeid.partition("::")[0]
        return file in has_ray, file.startswith("tests/nodes/"), -seconds[file], file

    items.sort(key=place)


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count what another option of run_tests.sh runs."""
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        lane = next((name for name, its in LANES.items() if marks & {*its}), "")
        item.config.stash[_LEFT][f"--{lane}".rstrip("-")] += 1
        if hasattr(item.config, "workeroutput"):
            item.config.workeroutput["left"] = dict(item.config.stash[_LEFT])  # type: ignore[attr-defined]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """All workers of xdist leave out the same tests."""
    if left := getattr(node, "workeroutput", {}).get("left"):
        node.config.stash[_LEFT] = Counter(left)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    left = terminalreporter.config.stash[_LEFT]
    if left:
        parts = (f"{count} to ./run_tests.sh {lane}".rstrip() for lane, count in left.items())
        terminalreporter.write_line(f"left to other lanes: {', '.join(parts)}")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Hydra lays the same files over one another once, and not in each of a thousand tests."""
    if "hydra" in sys.modules:
        from tests.compose_once import compose_once

        compose_once()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_SCREEN] = os.dup(2)  # what is captured is lost in a crash
    config.stash[_LEFT] = Counter()
    if "PYTEST_XDIST_WORKER" in os.environ:  # programs that tests start have terminals of their own
        os.environ.pop("COLUMNS", None)
        os.environ.pop("LINES", None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A handle of an actor of an earlier Ray is not left to a later collection: that would end the
    actor of the next Ray that has the same number."""
    if item.get_closest_marker("ray"):
        gc.collect()


def pytest_runtest_call(item: pytest.Item) -> None:
    """Crashes are shown although Ray, when it shuts down, takes their handlers away."""
    if "ray" in sys.modules:
        faulthandler.disable()
        faulthandler.enable(item.config.stash[_SCREEN])


@pytest.fixture
def mount_disk(tmp_path: Path) -> Generator[Callable[[str], Path]]:
    """Mounts a file system of the test's own, of a size like `16k`, where one may be mounted."""
    with ExitStack() as mounted:

        def mount(size: str) -> Path:
            place = tmp_path / "disk"
            place.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
            if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
                pytest.skip("cannot mount a file system here")
            mounted.callback(subprocess.run, ["umount", "--lazy", str(place)], check=True)
            return place

        yield mount
