"""An agent program: a user's command that runs once for each session and talks to the gateway.

`run` starts it, waits for its end and leaves nothing behind. What it says to the gateway, and what
its answer is worth, is decided elsewhere.

| what | `where="host"` | `where="sandbox"` |
| --- | --- | --- |
| can read | all that the worker's user can | the system, the worker's Python, `cwd`, `readable` |
| cannot read | | what is `hidden`, wherever it lies |
| can write | all that the worker's user can | /tmp and /dev/shm, in memory, of a bounded size |
| network | the host's | a loopback of its own, where one port leads to the gateway |
| user | the worker's | one without capabilities |
| memory of each process, processes | not limited | limited |
| left at its end | no process, no folder | no process, no folder |

Its working folder is `cwd`; without a `cwd` it is the session's folder, which MIXED_SESSION_DIR
names. The answer file is relative to the session's folder in both cases.

What is not held:

- A guard (`isolation.guard`) kills what the program left, daemons too, also if the worker dies. On
  the host the program could kill the guard first.
- On the host, a session's folder stays if the worker is killed by SIGKILL.
- In a sandbox, memory of all processes together: RLIMIT_DATA bounds the private memory of each. If
  the memory of the host or of its container is full, the kernel kills programs before the worker.
  Neither memory that is shared, memory of the kernel, nor processor time is limited.
"""

import asyncio
import os
import shlex
import stat
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path, PurePosixPath
from socket import AF_UNIX, SOCK_SEQPACKET, socketpair
from socket import socket as Socket
from typing import Any

from agent_loop.calls.child_process import find_program, inherited_environment, uninterrupted
from agent_loop.calls.guarded_process import GuardedProcess
from agent_loop.gateway.sandbox import ENVIRONMENT, AgentSandbox, lies_in
from config.compat import timeout
from config.gateway import GatewayOptions
from tool_server.isolation.errors import SandboxUnavailable
from tool_server.isolation.host import memory_file
from tool_server.isolation.proc import remove

MAX_ANSWER_BYTES = 1 << 16
"""Of an answer file; of a longer one the end is taken."""

TRIAL_S = 60.0
"""Longest time of the trial of `check`."""

_LOCALE = ("LANG", "LC_ALL", "TZ")

Serve = Callable[[Socket], AbstractAsyncContextManager[None]]
"""Answers what comes at a listening socket, while it is open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramEnd:
    """How a session's program ended."""

    exit_code: int
    """Negative: killed by that signal."""

    answer: str | None
    """Content of the answer file, or the last line of stdout that is not blank; None without."""

    stderr: str
    """Its last 4096 bytes, for messages."""


class AgentProgram:
    """One command that runs once for each session.

    Besides `options.env` it gets PATH (the worker's interpreter first), HOME, USER, LANG and the
    like. No shell reads the command; a program with a slash is relative to `cwd`.

    Raises:
        ValueError: the command cannot be split, or the answer file is not below the folder.
    """

    def __init__(self, options: GatewayOptions) -> None:
        command, answer_file = options.command or "", options.answer_file
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise ValueError(
                f"command={command!r} is no command: {error}; correct its quotes"
            ) from error
        if not self._words:
            raise ValueError("command='' is no command: write a program and its arguments")
        if answer_file is not None:
            path = PurePosixPath(answer_file)
            if path.is_absolute() or ".." in path.parts or not path.parts:
                raise ValueError(
                    f"answer_file={answer_file!r} is not below the session's folder: it is a "
                    "relative path without `..`; let the program write it to $MIXED_SESSION_DIR"
                )
        self._options = options
        self._cwd = None if options.cwd is None else os.path.abspath(options.cwd)
        self._checking, self._is_checked = threading.Lock(), False
        self._sandbox: AgentSandbox | None = None

    def check(self) -> None:
        """Find out whether sessions can be started on this node, a sandbox by a short trial; it
        blocks, and runs where no event loop does.

        Raises:
            ValueError: they cannot; the message says what to change.
        """
        with self._checking:
            if self._is_checked:
                return
            program = self._program(self._environment({}))
            for path in map(os.path.abspath, self._options.readable):
                if not os.path.exists(path):
                    raise ValueError(f"readable={path!r}: this node has no such path; correct it")
            if self._options.where == "sandbox":
                self._check_sandbox(program)
            self._is_checked = True

    def _check_sandbox(self, program: str) -> None:
        options = self._options
        visible = [*map(os.path.abspath, options.readable), *([self._cwd] if self._cwd else [])]
        hidden = [*map(os.path.abspath, options.hidden)]
        if "/" in visible:
            raise ValueError(
                "where=sandbox: `cwd` or `readable` is /, so the program would read the secrets of "
                "the host; name the folders that it needs"
            )
        for path, folder in product(visible, hidden):
            if lies_in(path, folder):
                raise ValueError(
                    f"where=sandbox: `cwd` or `readable` is {path}, which lies in {folder}: agents "
                    "do not see the run's data, records and secrets, because the model could read "
                    "answers there; move what the program needs to another folder"
                )
        # The program of a worker that is root has another user.
        for path in visible if os.geteuid() == 0 else ():
            needed = stat.S_IROTH | (stat.S_IXOTH if os.path.isdir(path) else 0)
            if (mode := os.stat(path).st_mode) & needed != needed:
                raise ValueError(
                    f"where=sandbox: its user may not read {path} (mode {stat.S_IMODE(mode):o}); "
                    f"run `chmod o+rX {path}`, or name another folder as cwd or in readable"
                )
        try:
            self._sandbox = AgentSandbox(visible, hidden, options.memory_mb, options.processes)
            has_program = asyncio.run(self._trial(program))
        except (SandboxUnavailable, TimeoutError, asyncio.TimeoutError) as error:
            raise ValueError(
                f"where=sandbox: no program can be isolated on this node ({error}): without "
                "isolation none is run; install bubblewrap 0.7 or newer and allow user namespaces, "
                "or set where=host if the program may do all that the worker's user may"
            ) from error
        if not has_program:
            raise ValueError(
                f"command={self._words[0]!r} is {program}, which the sandbox does not show, or its "
                "user may not execute; add its folder to `readable`"
            )

    async def _trial(self, program: str) -> bool:
        """Whether the sandbox shows a program that its user may execute."""
        async with timeout(TRIAL_S):
            command = ("/bin/sh", "-c", 'test -x "$0"', program)
            async with self._running(command, self._environment({}), b"{}", 8080) as (running, _):
                await running.ended()
        return running.exit_code == 0

    async def run(
        self, variables: Mapping[str, str], row: bytes, *, port: int, serve: Serve
    ) -> ProgramEnd:
        """Run the command for one session, to its end.

        If this is cancelled, a program on the host gets SIGTERM, and SIGKILL a second later; a
        second cancellation does not wait for this second.

        Args:
            variables: for its environment: OPENAI_BASE_URL and the like.
            row: its stdin, and the content of the file that MIXED_ROW_FILE names.
            port: in a sandbox, port of 127.0.0.1 on which it reaches the gateway.
            serve: answers there; the listening socket is in the sandbox's network.

        Raises:
            ValueError: as `check`.
            SandboxUnavailable: it was not isolated, so it did not begin.
        """
        if not self._is_checked:
            await asyncio.to_thread(self.check)
        env = self._environment(variables)
        command = (self._program(env), *self._words[1:])
        async with self._running(command, env, row, port) as (running, fds):
            if self._sandbox is not None:
                async with serve(Socket(fileno=os.dup(fds[1]))):
                    await running.ended()
            else:
                await running.ended()
            await running.stop()
            if self._options.answer_file is not None:
                answer = _content(fds[0], self._options.answer_file)
            else:
                answer = running.printed("stdout").strip().rpartition("\n")[2].strip() or None
            return ProgramEnd(exit_code=running.exit_code, answer=answer, stderr=running.printed())

    @asynccontextmanager
    async def _running(
        self, command: Sequence[str], env: dict[str, str], row: bytes, port: int
    ) -> AsyncIterator[tuple[GuardedProcess, list[int]]]:
        """The processes of a command that has begun, and a descriptor of the session's folder; in a
        sandbox also of a socket that listens there. At the end nothing of it is left."""
        folder = tempfile.mkdtemp(prefix="mixed-session-") if self._sandbox is None else ""
        try:
            with ExitStack() as open_fds:
                control, child = socketpair(AF_UNIX, SOCK_SEQPACKET)
                open_fds.enter_context(control)
                with child:
                    running = self._started(open_fds, command, env, row, port, folder, child)
                try:
                    if self._sandbox is None:
                        fds = [os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
                    elif not (fds := await running.begun(control)):
                        await running.stop()
                        words = running.printed().strip().rpartition("\n")[2]
                        raise SandboxUnavailable(f"no program begins: {words}")
                    for fd in fds:
                        open_fds.callback(os.close, fd)
                    yield running, fds
                finally:
                    await running.stop()
        finally:
            if folder:
                await uninterrupted(asyncio.to_thread(remove, folder))

    def _started(
        self,
        open_fds: ExitStack,
        command: Sequence[str],
        env: dict[str, str],
        row: bytes,
        port: int,
        folder: str,
        control: Socket,
    ) -> GuardedProcess:
        how: dict[str, Any] = {"stdin": memory_file(open_fds, row), "env": env}
        if self._sandbox is not None:
            command, fds = self._sandbox.command(
                open_fds, row, port, self._cwd, control.fileno(), command
            )
            env |= ENVIRONMENT
            return GuardedProcess(command, open_fds, cwd="/", pass_fds=fds, **how)
        row_file = Path(folder, "row.json")
        row_file.write_bytes(row)
        env |= {"MIXED_SESSION_DIR": folder, "MIXED_ROW_FILE": str(row_file)}
        return GuardedProcess(command, open_fds, cwd=self._cwd or folder, **how)

    def _environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        if missing := [name for name in self._options.env if name not in os.environ]:
            raise ValueError(
                f"env names {', '.join(missing)}: the environment has no such variable; export it "
                "before the run starts"
            )
        env = inherited_environment()
        # `python` is the worker's, also if the worker was started by its full path
        env["PATH"] = f"{os.path.dirname(sys.executable)}:{env.get('PATH', os.defpath)}"
        env |= {name: os.environ[name] for name in _LOCALE if name in os.environ}
        return env | {name: os.environ[name] for name in self._options.env} | dict(variables)

    def _program(self, env: Mapping[str, str]) -> str:
        try:
            return find_program(self._words[0], cwd=self._cwd, path=env["PATH"])
        except FileNotFoundError as error:
            raise ValueError(
                f"command={self._words[0]!r} cwd={self._cwd!r}: {error}; correct it, or install "
                "the program on this node"
            ) from error


def _content(at: int, path: str) -> str | None:
    """The end of a file below an open folder, without the space around it; None if there is none.

    Links are not followed, because a link in a sandbox would name a file of the host.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with ExitStack() as open_fds:
        try:
            for part in PurePosixPath(path).parts:
                at = os.open(part, flags, dir_fd=at)
                open_fds.callback(os.close, at)
            found = os.fstat(at)
            if not stat.S_ISREG(found.st_mode):
                return None
            content = os.pread(at, MAX_ANSWER_BYTES, max(0, found.st_size - MAX_ANSWER_BYTES))
        except OSError:
            return None
    return content.decode(errors="replace").strip() or None
