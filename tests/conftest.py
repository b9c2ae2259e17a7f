"""What every test runs under."""

import os
import subprocess
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import settings

# No test may fail because the machine is busy.
settings.register_profile("no_deadline", deadline=None)
settings.register_profile("thorough", deadline=None, max_examples=3000)  # --hypothesis-profile
settings.load_profile("no_deadline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A browser that starts slowly is no failure; what hangs is named before this limit."""
    for item in items:
        if item.get_closest_marker("browser") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))


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
