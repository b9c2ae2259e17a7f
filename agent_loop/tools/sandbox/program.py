"""What is run, what it may use, and what came of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from agent_loop.compat import StrEnum


class SandboxUnavailable(RuntimeError):
    """This machine cannot isolate programs, so none are run."""


class NotSupported(ValueError):
    """A program that this sandbox does not run: its language, or a path outside its folder."""


class RunStatus(StrEnum):
    """How a program ended, in SandboxFusion's words."""

    FINISHED = "Finished"
    ERROR = "Error"
    TIME_LIMIT = "TimeLimitExceeded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one program may use."""

    wall_s: float = 10.0
    """Real time."""

    compile_s: float = 10.0
    """Real time of the compiler, where the language has one."""

    cpu_s: int = 10
    """Processor time of each process; whole seconds, because the kernel counts no finer."""

    memory_mb: int = 512
    """Address space of each process, which the interpreter itself uses some 20 MiB of, and memory
    of all together, looked at five times a second."""

    output_bytes: int = 1024 * 1024
    """Bytes kept of stdout, and as many of stderr; the rest is dropped, with a mark."""

    file_mb: int = 16
    """Largest file, and all files together."""

    files: int = 4096
    """Files and folders."""

    open_files: int = 64
    """File descriptors of each process, and sockets of all together."""

    processes: int = 32
    """Processes and threads at once; Landlock allows no further process, and its threads are looked
    at five times a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What is run."""

    code: str
    language: str = "python"
    stdin: str = ""

    files: Mapping[str, bytes] = field(default_factory=dict)
    """Relative path -> content; there before the program starts."""

    fetch: tuple[str, ...] = ()
    """Relative paths of files wanted afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a program did. Its own mistakes are results, not exceptions."""

    status: RunStatus
    return_code: int
    """Exit code; 128 + signal where a signal ended it, 137 where we killed it."""

    stdout: str
    stderr: str
    execution_time_s: float
    cpu_time_s: float = 0.0
    """Of its processes together."""

    stdout_truncated: bool = False
    stderr_truncated: bool = False
    killed: bool = False
    """We ended it, for its time, its memory, its files or its output."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    """Of those wanted, the ones that are there and no larger than `file_mb`."""

    compiled: "RunResult | None" = None
    """What the compiler did; where it failed this is all there is, with its status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """What a session's cell did."""

    result: RunResult

    shown: str | None = None
    """The value of its last expression, where that is one and not None."""

    error: tuple[str, str] | None = None
    """Name and text of what it raised."""
