"""Isolation without namespaces: Landlock for files, seccomp for everything else.

For machines that deny user namespaces (many containers). A program may read the interpreter, the
system's libraries and its own source, and write nothing; the seccomp filter leaves it no sockets,
no further processes and no signals. Weaker than namespaces in one point: it may ask whether a path
exists (`stat`), which Landlock does not guard. See landlock(7), seccomp(2).
"""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from agent_loop.tools.sandbox.runner import (
    Command,
    Limits,
    Sandbox,
    interpreter,
    memory_file,
    prlimit_argv,
    program,
    readable_paths,
)
from agent_loop.tools.sandbox.seccomp import build_filter

_CONFINE = Path(__file__).with_name("confine.py").read_text()


class LandlockSandbox(Sandbox):
    """Programs that gave up their rights before they started."""

    name = "landlock"

    def __init__(self) -> None:
        self._prlimit = program("prlimit")
        self._filter = build_filter().hex()

    @contextmanager
    def command(self, code: str, limits: Limits) -> Iterator[Command]:
        """An interpreter that confines itself, then becomes the program's interpreter."""
        python = [interpreter(), "-I", "-S", "-X", "utf8"]
        with tempfile.TemporaryDirectory(prefix="sandbox-") as home, ExitStack() as open_fds:
            status_fd = memory_file(open_fds)
            (Path(home) / "main.py").write_bytes(code.encode(errors="replace"))
            plan = {
                "readable": [*readable_paths(), home],
                "devices": ["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"],
                "filter": self._filter,
                "status_fd": status_fd,
                "argv": [*python, "main.py"],
            }
            yield Command(
                argv=[
                    # The kernel counts processes per user, not per sandbox: no thread limit here.
                    *prlimit_argv(self._prlimit, limits, threads=None),
                    *(*python, "-c", _CONFINE, json.dumps(plan)),
                ],
                cwd=home,
                pass_fds=(status_fd,),
                started=lambda: os.pread(status_fd, 1, 0) != b"",
            )
