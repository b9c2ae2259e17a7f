"""Runs one program in a child process: feeds it, caps its output, kills it on time.

Decides what a result is called; leaves the isolation itself to the backends, which only say what
command to start (`Sandbox.command`).
"""

import asyncio
import os
import shutil
import signal
import sys
import sysconfig
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from agent_loop.compat import StrEnum

_MIB = 1024 * 1024
_CHUNK_BYTES = 64 * 1024
_CPU_LIMIT_SIGNAL = int(signal.SIGXCPU)


class SandboxUnavailable(RuntimeError):
    """This machine cannot isolate programs, so none are run."""


class RunStatus(StrEnum):
    """How a program ended, in SandboxFusion's words."""

    FINISHED = "Finished"
    ERROR = "Error"
    TIME_LIMIT = "TimeLimitExceeded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one program may use."""

    wall_s: float = 10.0
    """Real time, starting the interpreter included."""

    cpu_s: int = 10
    """Processor time; whole seconds, because the kernel counts no finer."""

    memory_mb: int = 512
    """Address space, which the interpreter itself uses some 20 MiB of."""

    output_bytes: int = 1024 * 1024
    """Bytes of stdout, and as many of stderr; the program is killed when it writes more."""

    file_mb: int = 16
    """Largest file, and all files together (a tmpfs); the Landlock backend allows no files."""

    open_files: int = 64
    """File descriptors at once."""

    threads: int = 64
    """Threads at once. Further processes are always refused. Not enforced by bubblewrap run as
    root (the kernel exempts it) nor by Landlock; `memory_mb` bounds threads there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a program did. Its own mistakes are results, not exceptions."""

    status: RunStatus
    return_code: int
    """Exit code; 128 + signal where a signal ended it, 137 where we killed it."""

    stdout: str
    stderr: str
    execution_time_s: float
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    killed: bool = False
    """We ended it, for its time or its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What a backend wants started for one program."""

    argv: Sequence[str]
    cwd: str = "/"
    env: Mapping[str, str] = field(default_factory=dict)
    pass_fds: Sequence[int] = ()
    started: Callable[[], bool]
    """Asked after the end: whether the program itself ever ran. Tells a fault of the sandbox from
    a program that failed, without believing anything the program printed."""


class Sandbox(ABC):
    """One way of isolating a program. Holds no state between runs."""

    name: str
    why: str = "not proven"
    """What the start-up probe found; for logs and `/health`."""

    @abstractmethod
    def command(self, code: str, limits: Limits) -> AbstractContextManager[Command]:
        """The command that runs `code`; what it needs on disk lives as long as the context."""

    async def run_python(
        self, code: str, stdin: str = "", limits: Limits | None = None
    ) -> RunResult:
        """Run one program to its end and leave nothing of it behind.

        Raises:
            SandboxUnavailable: the isolation could not be set up, so nothing ran.
        """
        limits = limits or Limits()
        with self.command(code, limits) as command:
            started_s = time.monotonic()
            try:
                process = await asyncio.create_subprocess_exec(
                    *command.argv,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    cwd=command.cwd,
                    env=dict(command.env),
                    pass_fds=command.pass_fds,
                    start_new_session=True,
                )
            except OSError as error:
                raise SandboxUnavailable(
                    f"cannot start sandbox={self.name} ({error}): its programs must be installed"
                ) from error
            try:
                result = await _attend(process, stdin, limits, started_s)
            finally:
                await _kill(process)
            if result.status is RunStatus.ERROR and not result.killed and not command.started():
                raise SandboxUnavailable(
                    f"cannot isolate a program with sandbox={self.name} "
                    f"({last_line(result.stderr, result.return_code)}): it worked at start-up; "
                    "check the host's limits on namespaces and memory"
                )
            return result


async def _attend(
    process: asyncio.subprocess.Process, stdin: str, limits: Limits, started_s: float
) -> RunResult:
    """Feed and read a started program until it ends, overflows or runs out of time."""
    assert process.stdout is not None and process.stderr is not None
    outputs = bytearray(), bytearray()
    work = [
        asyncio.create_task(_feed(process, stdin.encode(errors="replace"))),
        asyncio.create_task(_read(process.stdout, outputs[0], limits.output_bytes)),
        asyncio.create_task(_read(process.stderr, outputs[1], limits.output_bytes)),
        asyncio.create_task(process.wait()),
    ]
    try:
        ended, running = await asyncio.wait(
            work, timeout=limits.wall_s, return_when=asyncio.FIRST_EXCEPTION
        )
    finally:
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
    faults = [fault for task in ended if (fault := task.exception())]
    overflowed = any(isinstance(fault, _OutputLimitError) for fault in faults)
    if faults and not overflowed:
        raise faults[0]
    timed_out = bool(running) and not overflowed
    killed = timed_out or overflowed
    await _kill(process)
    execution_time_s = time.monotonic() - started_s
    return_code = process.returncode if process.returncode is not None else -signal.SIGKILL
    return_code = 128 - return_code if return_code < 0 else return_code
    timed_out = timed_out or return_code == 128 + _CPU_LIMIT_SIGNAL
    stdout, stderr = (bytes(out[: limits.output_bytes]).decode(errors="replace") for out in outputs)
    if overflowed:
        stderr = f"{stderr}\noutput limit of {limits.output_bytes} bytes exceeded".lstrip("\n")
    if timed_out:
        status = RunStatus.TIME_LIMIT
    else:
        status = RunStatus.ERROR if overflowed or return_code != 0 else RunStatus.FINISHED
    return RunResult(
        status=status,
        return_code=return_code,
        stdout=stdout,
        stderr=stderr,
        execution_time_s=execution_time_s,
        stdout_truncated=len(outputs[0]) > limits.output_bytes,
        stderr_truncated=len(outputs[1]) > limits.output_bytes,
        killed=killed,
    )


class _OutputLimitError(Exception):
    """The program wrote more than it may."""


async def _feed(process: asyncio.subprocess.Process, data: bytes) -> None:
    assert process.stdin is not None
    # A program need not read its input: a closed pipe is not an error.
    with suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(data)
        await process.stdin.drain()
    process.stdin.close()


async def _read(stream: asyncio.StreamReader, output: bytearray, limit_bytes: int) -> None:
    while chunk := await stream.read(_CHUNK_BYTES):
        output += chunk
        if len(output) > limit_bytes:
            raise _OutputLimitError


async def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill the program's process group, if it lives, and reap it even when cancelled."""
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await asyncio.shield(_reap(process))


async def _reap(process: asyncio.subprocess.Process) -> None:
    """Wait for a killed process. asyncio does not see its end before its pipes are read empty."""
    assert process.stdout is not None and process.stderr is not None
    for stream in (process.stdout, process.stderr):
        while await stream.read(_CHUNK_BYTES):
            pass
    await process.wait()


def last_line(stderr: str, return_code: int) -> str:
    """What a failed command said last, or its exit code where it said nothing."""
    lines = stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {return_code}"


def memory_file(open_fds: ExitStack, content: bytes = b"") -> int:
    """A descriptor that holds `content`, read from its start; closed with `open_fds`.

    A child shares its offset, so every run needs its own.
    """
    fd = os.memfd_create("sandbox")
    open_fds.callback(os.close, fd)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def interpreter() -> str:
    """The Python that programs run on: ours, without its virtual environment."""
    return os.path.realpath(sys.executable)


def readable_paths() -> list[str]:
    """Host paths an interpreter needs to start: itself, its library, the system's libraries."""
    paths = [
        interpreter(),
        sysconfig.get_path("stdlib", vars={"base": sys.base_prefix}),
        str(Path(sys.base_prefix) / "lib"),
        "/usr/lib",
        "/usr/lib64",
        "/etc/ld.so.cache",
    ]
    return [path for path in dict.fromkeys(paths) if os.path.exists(path)]


def program(name: str) -> str:
    """Where a program is, links followed.

    Raises:
        SandboxUnavailable: it is not on PATH.
    """
    found = shutil.which(name)
    if found is None:
        raise SandboxUnavailable(f"{name} is not on PATH")
    return os.path.realpath(found)


def prlimit_argv(prlimit: str, limits: Limits, threads: int | None) -> list[str]:
    """The command prefix that sets the kernel's limits on what it starts."""
    cpu_s = max(1, int(limits.cpu_s))
    options = {
        # The soft limit's signal tells us it was the time limit; the hard one cannot be caught.
        "cpu": f"{cpu_s}:{cpu_s + 1}",
        "as": limits.memory_mb * _MIB,
        "fsize": limits.file_mb * _MIB,
        "nofile": limits.open_files,
        "core": 0,
    }
    if threads is not None:
        options["nproc"] = threads
    return [prlimit, *(f"--{name}={value}" for name, value in options.items())]
