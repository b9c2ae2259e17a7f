"""What every test runs under."""

import copy
import faulthandler
import os
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# No test may fail because the machine is busy.
settings.register_profile("no_deadline", deadline=None)
settings.register_profile("thorough", deadline=None, max_examples=3000)  # --hypothesis-profile
settings.load_profile("no_deadline")

_SCREEN = pytest.StashKey[int]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start Ray come last: its threads outlive `ray.shutdown()`, and a crash of theirs
    would end all that follow.

    A browser that starts slowly is no failure; what hangs is named before this limit.
    """
    items.sort(key=lambda item: item.get_closest_marker("ray") is not None)
    for item in items:
        if item.get_closest_marker("browser") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Hydra reads each config file once: the same files of verl are composed a thousand times."""
    if "hydra" not in sys.modules:
        return
    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.core.plugins import Plugins

    Plugins.instance()  # registers the class that reads files
    source: Any = SourcesRegistry.instance().resolve("file")
    read, known = source.load_config, dict[tuple[object, ...], Any]()

    def load_config(self: Any, config_path: str) -> Any:
        path = os.path.join(self.path, self._normalize_file_name(config_path))
        if not os.path.isfile(path):
            return read(self, config_path)
        status = os.stat(path)
        key = (path, self.path, self.provider, status.st_mtime_ns, status.st_size)
        if key not in known:
            known[key] = read(self, config_path)
        return copy.deepcopy(known[key])

    source.load_config = load_config


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_SCREEN] = os.dup(2)  # what is captured is lost in a crash


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
