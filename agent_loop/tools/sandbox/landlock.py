"""Isolation without namespaces: Landlock for files, seccomp for everything else.

For machines that deny user namespaces (many containers). A program may read the interpreter, the
system's libraries and a folder of its own, which it may also fill; the seccomp filter leaves it no
sockets, no further processes and no signals. Weaker than namespaces in two points: it may ask
whether a path exists (`stat`), which Landlock does not guard, and the host's disk is protected by
a look at its folder five times a second. See landlock(7), seccomp(2).

From Linux 5.13 (ABI 1) on; sandlock 0.9, a library for the same, wants ABI 6 (Linux 6.12).
"""

import os
import shutil
import tempfile
import weakref
from contextlib import ExitStack
from pathlib import Path

from agent_loop.tools.sandbox.host import ENVIRONMENT, package_paths, readable_paths
from agent_loop.tools.sandbox.program import Limits
from agent_loop.tools.sandbox.sandbox import Sandbox
from agent_loop.tools.sandbox.seccomp import build_filter
from agent_loop.tools.sandbox.watch import remove
from agent_loop.tools.sandbox.zygote import Launch

DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


class FolderSandbox(Sandbox):
    """A sandbox whose runs have folders on the host's disk."""

    has_processes = False

    def __init__(self, workers: int = 1, packages: tuple[str, ...] = ()) -> None:
        super().__init__(workers, packages)
        self._paths = package_paths(packages)
        self._folder: Path | None = None

    def home_of_run(self, open_fds: ExitStack, limits: Limits) -> str:
        home = tempfile.mkdtemp(dir=self.folder)
        open_fds.callback(remove, home)
        return home

    @property
    def folder(self) -> Path:
        """Holds the folders of all runs; made on first use, removed with the sandbox."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="sandbox-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder

    def environment(self) -> dict[str, str]:
        """What a program sees of it."""
        return ENVIRONMENT | {"TMPDIR": ".", "HOME": "."}


class LandlockSandbox(FolderSandbox):
    """Programs that gave up their rights before they started."""

    name = "landlock"

    def __init__(self, workers: int = 1, packages: tuple[str, ...] = ()) -> None:
        super().__init__(workers, packages)
        self._filter = build_filter(processes=False).hex()

    def launch(self, open_fds: ExitStack) -> Launch:
        return Launch(
            plan={
                "namespaces": False,
                "landlock": True,
                "filter": self._filter,
                "readable": readable_paths(self._paths),
                "devices": [path for path in DEVICES if os.path.exists(path)],
                "folder": str(self.folder),
                "uid": None,
                "uids": [],
                "packages": list(dict.fromkeys(str(path.parent) for path in self._paths)),
                "preload": self.preload(),
            },
            env=self.environment(),
        )
