"""Isolation without namespaces: Landlock restricts files, seccomp restricts system calls.

This is for machines that deny user namespaces, as many containers do. A program may read the
interpreter and the system's libraries, and may read and write its own folder. The seccomp filter
refuses sockets, further processes and signals. Three points are weaker than with namespaces:

- a program can find out whether a path exists (`stat`), because Landlock does not restrict that;
- a program can find out which process numbers of the host are in use (`getpgid`);
- the size of its folder on the host's disk is only checked five times a second.

See landlock(7), seccomp(2). It needs Linux 5.13 (Landlock ABI 1). The library sandlock 0.9 is not
used, because it needs ABI 6 (Linux 6.12).
"""

import os
import shutil
import tempfile
import weakref
from contextlib import ExitStack
from pathlib import Path

from tool_server.isolation.host import ENVIRONMENT, package_paths, readable_paths
from tool_server.isolation.seccomp import build_filter
from tool_server.sandbox.sandbox import Sandbox
from tool_server.sandbox.zygote import READABLE, Launch

DEVICES = ("/dev/null", "/dev/random", "/dev/urandom")
"""Without /dev/zero, because a shared mapping of it is memory that no limit counts."""


class LandlockSandbox(Sandbox):
    """Sandbox with Landlock and seccomp, in which each run has a folder on the host's disk."""

    name = "landlock"
    has_processes = False

    def __init__(self, workers: int = 1, packages: tuple[str, ...] = ()) -> None:
        super().__init__(workers, packages)
        self._paths = package_paths(packages)
        self._filter = build_filter(processes=False).hex()
        self._folder: Path | None = None

    def home_of_run(self) -> str:
        return tempfile.mkdtemp(dir=self.folder)

    @property
    def folder(self) -> Path:
        """Parent folder of all runs' folders; created on first use, removed with the sandbox."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="sandbox-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder

    def launch(self, open_fds: ExitStack) -> Launch:
        return Launch(
            plan=self.plan(
                self._paths,
                landlock=True,
                filter=self._filter,
                readable=readable_paths([*READABLE, *self._paths]),
                devices=[path for path in DEVICES if os.path.exists(path)],
                folder=str(self.folder),
            ),
            env=ENVIRONMENT | {"TMPDIR": ".", "HOME": "."},
        )
