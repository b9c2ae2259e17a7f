"""Isolation by namespaces: bubblewrap, with a seccomp filter on top.

Each program gets fresh user, pid, mount, network, ipc and uts namespaces, an empty environment, the
interpreter and its libraries read-only, and one small tmpfs. The pid namespace dies with its first
process, and with it whatever the program started. See bwrap(1).
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

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

_HOME = "/box"


class BubblewrapSandbox(Sandbox):
    """Programs in namespaces of their own."""

    name = "bubblewrap"

    def __init__(self) -> None:
        bwrap, self._prlimit = program("bwrap"), program("prlimit")
        self._filter = build_filter()
        self._argv = [
            bwrap,
            "--unshare-all",
            "--die-with-parent",
            "--new-session",
            "--clearenv",
            *_binds([*readable_paths(), self._prlimit]),
            "--dev",
            "/dev",
        ]

    @contextmanager
    def command(self, code: str, limits: Limits) -> Iterator[Command]:
        """bwrap, reading program and filter from descriptors: nothing touches the host's disk."""
        with ExitStack() as open_fds:
            program_fd = memory_file(open_fds, code.encode(errors="replace"))
            filter_fd = memory_file(open_fds, self._filter)
            status_fd = memory_file(open_fds)
            yield Command(
                argv=[
                    *self._argv,
                    *("--size", str(limits.file_mb * 1024 * 1024), "--tmpfs", _HOME),
                    *("--file", str(program_fd), f"{_HOME}/main.py"),
                    # bwrap's own root and /dev are tmpfs too, without a size limit.
                    *("--remount-ro", "/", "--remount-ro", "/dev"),
                    *("--chdir", _HOME, "--seccomp", str(filter_fd)),
                    *("--json-status-fd", str(status_fd), "--"),
                    *prlimit_argv(self._prlimit, limits, threads=limits.threads),
                    *(interpreter(), "-I", "-S", "-X", "utf8", "main.py"),
                ],
                pass_fds=(program_fd, filter_fd, status_fd),
                # bwrap notes the exit code only of a program that it really started.
                started=lambda: b'"exit-code"' in os.pread(status_fd, 4096, 0),
            )


def _binds(paths: list[str]) -> list[str]:
    """Read-only binds, and the links into /usr that most distributions have in the root."""
    argv = []
    for link in ("/lib", "/lib64"):
        if os.path.islink(link):
            argv += ["--symlink", os.readlink(link), link]
        elif os.path.isdir(link):
            argv += ["--ro-bind", link, link]
    for path in paths:
        argv += ["--ro-bind", path, path]
    return argv
