"""Runs hostile programs among things of the host's that they may not touch, and looks after each.

What is looked at lies outside of the sandbox: processes, files, sockets, the next run. What a
program says itself counts only against the sandbox, never for it.
"""

import asyncio
import contextlib
import ctypes
import multiprocessing
import os
import resource
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil
from typing_extensions import Self

from config.compat import timeout
from tests.tool_server.hostile.program import LIMITS, MARKED, SECRET_WORD, Hostile, python
from tool_server.sandbox import (
    WALL_FACTOR,
    Limits,
    Program,
    RunResult,
    RunStatus,
    Sandbox,
    SandboxUnavailable,
)
from tool_server.sandbox import program as program_module
from tool_server.sandbox.collector import CUT_MARK

PATIENCE_S = 5.0
"""How long what is left of a run may take to go away."""

IDLE_PROCESSES = {"landlock": 3, "bubblewrap": 5}
"""Sandbox -> its processes when nothing runs: the zygote, the next run and the fork server of its
program; with bubblewrap also two of bwrap."""

_NEW_AFTER_A_RUN = 2
"""Of these, the next run and its fork server are new after each run."""

OVERLOADED_RUNS = 4
"""How often a program runs at most if other load keeps it from its time."""

MANY_DESCRIPTORS = 4200
BUSY_S = 0.1
"""Processor time that the event loop may need at a stretch: others wait for it meanwhile."""

_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of a program."""

    program: Hostile
    rung: str
    findings: list[str]
    """What it reached or left; empty where it was contained."""

    observed: str
    """How it ended."""


class Host:
    """A file, a process, sockets and queues, of which each must be as it was; and the processes
    that other tests have left, which are not counted.

    While it is open, orphans become this process's children, and temporary files go to a folder of
    its own.
    """

    def __init__(self) -> None:
        self.secret = SECRET_WORD + secrets.token_hex(8)
        self.mark = f"hostile-{secrets.token_hex(4)}"
        self.key = secrets.randbelow(1 << 30) + 1
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="host-")))
            self.folder.chmod(0o755)
            self.temporary = self.folder / "temporary"
            self.temporary.mkdir()
            before = tempfile.tempdir
            tempfile.tempdir = str(self.temporary)
            stack.callback(setattr, tempfile, "tempdir", before)
            os.environ["HOSTILE_SECRET"] = self.secret
            stack.callback(os.environ.pop, "HOSTILE_SECRET", None)
            self.file = self.folder / "secret"
            self.file.write_text(self.secret)
            self._file_was = self._stat_of_file()
            self.others = frozenset(_children())
            self.canary = subprocess.Popen(
                ["sleep", "600"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            stack.callback(self.canary.wait)
            stack.callback(self.canary.kill)
            self._canary_was = self._state_of_canary()
            self._sockets = list(self._open_sockets(stack))
            self._queues(stack)
            self._hold_descriptors(stack)
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            stack.callback(_libc.prctl, _PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _open_sockets(self, stack: contextlib.ExitStack) -> Iterator[tuple[str, socket.socket]]:
        stream, datagram = socket.SOCK_STREAM, socket.SOCK_DGRAM
        self.unix, self.unix_datagram = f"{self.folder}/stream", f"{self.folder}/datagram"
        for what, family, kind, address in (
            ("tcp", socket.AF_INET, stream, ("127.0.0.1", 0)),
            ("udp", socket.AF_INET, datagram, None),
            ("unix", socket.AF_UNIX, stream, self.unix),
            ("unix datagram", socket.AF_UNIX, datagram, self.unix_datagram),
            ("abstract", socket.AF_UNIX, stream, f"\0{self.mark}-stream"),
            ("abstract datagram", socket.AF_UNIX, datagram, f"\0{self.mark}-datagram"),
        ):
            own = stack.enter_context(socket.socket(family, kind))
            own.bind(address or ("127.0.0.1", self.port))
            own.setblocking(False)
            if what == "tcp":
                self.port = own.getsockname()[1]
            if kind == stream:
                own.listen()
            yield what, own
        for path in (self.unix, self.unix_datagram):
            os.chmod(path, 0o777)

    def _queues(self, stack: contextlib.ExitStack) -> None:
        """A message and a semaphore, where the kernel has them."""
        self.queue = _libc.msgget(0, 0o1666)
        self.semaphore = _libc.semget(0, 1, 0o1666)
        if self.queue >= 0:
            stack.callback(_libc.msgctl, self.queue, 0, None)
            message = ctypes.create_string_buffer(
                (1).to_bytes(8, "little") + self.secret.encode(), 72
            )
            _libc.msgsnd(self.queue, message, 64, 0o4000)
        if self.semaphore >= 0:
            stack.callback(_libc.semctl, self.semaphore, 0, 0, 0)

    def _hold_descriptors(self, stack: contextlib.ExitStack) -> None:
        """Many, as of a busy server: what it opens from now on has a number above 4096."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MANY_DESCRIPTORS + 1000
        if soft < wanted and (hard == resource.RLIM_INFINITY or hard >= wanted):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        own, _ = self._pair = socket.socketpair()
        for held in self._pair:
            stack.callback(held.close)
        with contextlib.suppress(OSError):  # the hard limit is lower
            while (fd := os.dup(own.fileno())) < MANY_DESCRIPTORS:
                stack.callback(os.close, fd)
            stack.callback(os.close, fd)

    def told(self, sandbox: Sandbox) -> dict[str, Any]:
        """What a program knows of the host: where to aim at."""
        return {
            "file": str(self.file),
            "folder": str(self.folder),
            "source": program_module.__file__,
            "canary": self.canary.pid,
            "server": os.getpid(),
            "port": self.port,
            "unix": self.unix,
            "unix_datagram": self.unix_datagram,
            "abstract": f"{self.mark}-stream",
            "abstract_datagram": f"{self.mark}-datagram",
            "message_queue": self.queue,
            "semaphore": self.semaphore,
            "key": self.key,
            "mark": self.mark,
            "has_processes": sandbox.has_processes,
            "huge_pages": _has_huge_pages(),
            "secret_words": [SECRET_WORD[:8], SECRET_WORD[8:]],
        }

    def findings(self) -> Iterator[str]:
        """What is not as it was."""
        if self._stat_of_file() != self._file_was:
            yield "the host's file has changed"
        if self._state_of_canary() != self._canary_was:
            yield "the host's process has changed"
        for what, own in self._sockets:
            with contextlib.suppress(BlockingIOError):
                if own.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM:
                    own.accept()[0].close()
                else:
                    own.recv(4096)
                yield f"contact over {what}"
        for folder in ("/", "/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", self.folder):
            with contextlib.suppress(OSError):
                for path in Path(folder).glob(f"{self.mark}*"):
                    yield f"left {path}"
        if _libc.shmget(self.key, 0, 0) >= 0 or _libc.msgget(self.key, 0) >= 0:
            yield "left memory or a queue"

    def _stat_of_file(self) -> tuple[object, ...] | None:
        try:
            found = self.file.stat()
            return found.st_mode, found.st_uid, found.st_mtime_ns, found.st_nlink, found.st_size
        except OSError:
            return None

    def _state_of_canary(self) -> tuple[object, ...] | None:
        if self.canary.poll() is not None:
            return None
        process = psutil.Process(self.canary.pid)
        is_stopped = process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        return is_stopped, process.nice(), process.cpu_affinity(), process.rlimit(psutil.RLIMIT_CPU)


class Judge:
    """Judges programs in one sandbox, which it warms up first.

    Args:
        host: opened before the sandbox was.
    """

    def __init__(self, sandbox: Sandbox, host: Host) -> None:
        self._sandbox, self._host = sandbox, host
        self._idle = IDLE_PROCESSES[sandbox.name]

    async def begin(self) -> Self:
        """Remember what is there when nothing runs."""
        await self._trivial()
        await holds(self._is_idle)
        self._files = self._left()
        self._descriptors = _descriptors()
        return self

    async def judge(self, hostile: Hostile) -> Verdict:
        """Run it, and what belongs to it, and look around."""
        findings: list[str] = []
        observed = "no answer"
        try:
            limits = hostile.limits
            longest_s = WALL_FACTOR * (limits.wall_s + limits.compile_s) + PATIENCE_S
            longest_s *= OVERLOADED_RUNS
            async with timeout(longest_s), _Stretches() as stretches:
                result, *others = await self._run_with_patience(hostile, findings)
            if stretches.longest_s > BUSY_S:
                findings.append(f"the event loop was busy for {stretches.longest_s:.2f} s")
            observed = f"{result.status}, code {result.return_code}"
            findings += _said(result, *others)
            findings += _against(hostile, result)
        except TimeoutError:
            findings.append("it did not end")
        except SandboxUnavailable as error:
            observed = "ended with its sandbox"
            if not hostile.closed_while_running:
                findings.append(f"it lost its run: {error}")
        except (ArithmeticError, LookupError, OSError, TypeError, ValueError) as error:
            findings.append(f"its run raises {error!r:.200}")
        if hostile.then:
            findings += await self._then(hostile)
        findings += await self._left_over()
        return Verdict(
            program=hostile, rung=self._sandbox.name, findings=findings, observed=observed
        )

    async def _run_with_patience(self, hostile: Hostile, findings: list[str]) -> list[RunResult]:
        """Run all; again if the machine was overloaded, which says nothing about the program."""
        for _ in range(OVERLOADED_RUNS - 1):
            try:
                return await self._run_all(hostile, findings)
            except SandboxUnavailable as error:
                if "the machine is overloaded" not in str(error):
                    raise
        return await self._run_all(hostile, findings)

    async def _run_all(self, hostile: Hostile, findings: list[str]) -> list[RunResult]:
        runs: list[Coroutine[Any, Any, RunResult | None]] = [
            self._program(hostile.code, hostile.limits, hostile)
        ]
        if hostile.beside:
            runs.append(self._program(hostile.beside, hostile.limits))
        if hostile.closed_while_running:
            runs.append(self._close())
        if hostile.oom_score_seen:
            runs.append(self._see_oom_score(findings))
        done = await asyncio.gather(*runs, return_exceptions=True)
        faults = [each for each in done if isinstance(each, BaseException)]
        if faults:
            raise faults[0]
        return [each for each in done if isinstance(each, RunResult)]

    async def _close(self) -> None:
        await holds(lambda: bool(self._marked()))
        self._sandbox.close()

    async def _see_oom_score(self, findings: list[str]) -> None:
        await holds(lambda: bool(self._marked()))
        for child in self._marked():
            if (score := _oom_score(child.pid)) != 1000:
                findings.append(f"the kernel would kill others first: oom_score_adj={score}")

    def _marked(self) -> list[psutil.Process]:
        return [child for child in self._children() if _name(child) == MARKED]

    async def _program(
        self, code: str, limits: Limits, hostile: Hostile | None = None
    ) -> RunResult:
        code = code.replace("@SECRET@", self._host.secret)
        language = hostile.language if hostile else "python"
        if language in ("python", "cell"):
            code = python(code, self._host.told(self._sandbox))
        if language == "cell":
            async with self._sandbox.interpreter(limits) as interpreter:
                return await interpreter.run_cell(code)
        program = Program(
            code=code,
            language=language,
            files=hostile.files if hostile else {},
            fetch=hostile.fetch if hostile else (),
        )
        return await self._sandbox.run(program, limits)

    async def _then(self, hostile: Hostile) -> list[str]:
        try:
            result = await self._program(hostile.then, LIMITS)
        except SandboxUnavailable as error:
            return [f"the next run is lost: {error}"]
        findings = _said(result)
        if result.status is not RunStatus.FINISHED:
            findings.append(f"the next run fails: {result.stderr[-200:]}")
        return findings

    async def _trivial(self) -> str:
        try:
            result = await self._sandbox.run_python("print(6 * int(input()))", "7\n")
        except SandboxUnavailable as error:
            return f"the next run is lost: {error}"
        return "" if result.stdout == "42\n" else f"the next run answers {result!r:.200}"

    async def _left_over(self) -> list[str]:
        findings = []
        before = self._processes()
        if fault := await self._trivial():
            findings.append(fault)
        if not await holds(lambda: self._is_idle(before)):
            findings += self._strays()
        findings += self._host.findings()
        if not await holds(lambda: self._left() == self._files):
            findings.append(f"left {sorted(self._left() - self._files)[:3]}")
        # A thread of the watch may still be closing the last folder that it looked into.
        if not await holds(lambda: _descriptors() <= self._descriptors):
            count = _descriptors()
            findings.append(f"left {count - self._descriptors} descriptors of the server's")
            self._descriptors = count
        return findings

    def _strays(self) -> list[str]:
        """Counted, and ended, so that the next program is judged for itself."""
        counted = f"{len(self._processes())} processes where {self._idle} were"
        counted += f": {[f'{_name(child)} {_status(child)}' for child in self._children()]}"
        self._sandbox.close()
        for pid in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return [f"stray processes: {counted}"]

    def _processes(self) -> frozenset[int]:
        """All below this one but the canary; orphans that have ended are buried."""
        own = {
            self._host.canary.pid,
            *(each.process.pid for each in filter(None, self._sandbox._zygotes)),
        }
        for child in psutil.Process().children():
            if child.pid not in own and _status(child) == psutil.STATUS_ZOMBIE:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child.pid, os.WNOHANG)
        return frozenset(
            child.pid for child in self._children() if child.pid != self._host.canary.pid
        )

    def _children(self) -> list[psutil.Process]:
        return [child for child in _children() if child not in self._host.others]

    def _is_idle(self, before: frozenset[int] = frozenset()) -> bool:
        """Whether the sandbox's processes are there and no others.

        A number alone does not show it: a stray process makes up for the next run while that one
        is not forked yet. But the stray was there `before` the last run.
        """
        processes = self._processes()
        kept = processes & before
        return len(processes) == self._idle and len(kept) <= self._idle - _NEW_AFTER_A_RUN

    def _left(self) -> frozenset[str]:
        """All that is in folders of the sandbox's."""
        temporary = self._host.temporary
        return frozenset(
            f"{folder}/{name}"
            for folder, folders, files in os.walk(temporary)
            for name in (*folders, *files)
        )


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _children() -> list[psutil.Process]:
    """All below this one but its own helpers: pools of other tests, and their resource tracker."""
    helpers = {child.pid for child in multiprocessing.active_children()}
    helpers.add(getattr(resource_tracker._resource_tracker, "_pid", None))
    below = psutil.Process().children(recursive=True)
    return [child for child in below if child.pid not in helpers]


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return process.name()
    return ""


def _status(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return process.status()
    return ""


def _said(*results: RunResult) -> list[str]:
    lines = [line for result in results for line in result.stdout.splitlines()]
    found = [line[:160] for line in lines if line.startswith("REACHED")]
    return found[:5] + ([f"and {len(found) - 5} more"] if len(found) > 5 else [])


def _against(hostile: Hostile, result: RunResult) -> Iterator[str]:
    """What the result itself shows."""
    if result.status not in hostile.statuses:
        yield f"its status is {result.status}: {result.stderr[-200:]}"
    if hostile.return_codes and result.return_code not in hostile.return_codes:
        yield f"its code is {result.return_code}: {result.stderr[-200:]}"
    if (size := sum(map(len, result.files.values()))) > hostile.fetched_mb << 20:
        yield f"fetched {list(result.files)} with {size} bytes"
    for what in ("stdout", "stderr"):
        most = hostile.limits.output_bytes + len(CUT_MARK) + 200
        if len(getattr(result, what)) > most:
            yield f"{len(getattr(result, what))} characters of {what}"
    if result.execution_time_s > WALL_FACTOR * hostile.limits.wall_s + PATIENCE_S:
        yield f"it took {result.execution_time_s:.1f} s"
    try:
        f"{result.stdout}{result.stderr}".encode()
    except UnicodeEncodeError:
        yield "its output is not Unicode"


class _Stretches:
    """Measures the longest time that this thread, with its event loop, computed at a stretch.

    It is processor time, so that a busy machine is not taken for a busy loop.
    """

    longest_s = 0.0

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._measure())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()

    async def _measure(self) -> None:
        before_s = time.thread_time()
        while True:
            await asyncio.sleep(0.002)
            now_s = time.thread_time()
            self.longest_s = max(self.longest_s, now_s - before_s)
            before_s = now_s


def _oom_score(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())
    except OSError:
        return 1000


def _has_huge_pages() -> bool:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False
    return "[never]" not in text


async def holds(condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> bool:
    """Whether it comes true in time."""
    ends_at = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > ends_at:
            return False
        await asyncio.sleep(0.005)
    return True
