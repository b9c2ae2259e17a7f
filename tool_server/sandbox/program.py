"""Types of a sandboxed program: its limits and its result."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from config.compat import StrEnum


class NotSupported(ValueError):
    """The sandbox does not run this program: unknown language, or a path outside its folder."""


class RunStatus(StrEnum):
    """How a program ended; the values are SandboxFusion's."""

    FINISHED = "Finished"
    ERROR = "Error"
    TIME_LIMIT = "TimeLimitExceeded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one program."""

    wall_s: float = 10.0
    """Time of the program, in seconds: real time, without the time in which it waited for a
    processor. A program has at most `WALL_FACTOR` times as much real time."""

    compile_s: float = 10.0
    """The same for the compiler, if the language has one."""

    cpu_s: int = 10
    """Processor time of each process, in whole seconds, because the kernel counts in seconds."""

    memory_mb: int = 512
    """Address space of each process (the interpreter uses about 20 MiB), and memory of all
    processes together, which is checked five times a second."""

    output_bytes: int = 1024 * 1024
    """Bytes kept of stdout and of stderr each; the rest is dropped, and a mark is added."""

    file_mb: int = 16
    """Size of the largest file, and of all files together."""

    files: int = 4096
    """Number of files and folders."""

    open_files: int = 64
    """File descriptors of each process, and sockets of all processes together."""

    processes: int = 32
    """Processes and threads at once. Landlock allows no further process; its threads are checked
    five times a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program to run."""

    code: str
    language: str = "python"
    stdin: str = ""

    files: Mapping[str, bytes] = field(default_factory=dict)
    """Relative path -> content; written before the program starts."""

    fetch: tuple[str, ...] = ()
    """Relative paths of files to return after the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Result of a program. A failed program is a result, not an exception."""

    status: RunStatus
    return_code: int
    """Exit code; 128 + signal if a signal ended the program, 137 if the sandbox killed it."""

    stdout: str
    stderr: str
    execution_time_s: float
    cpu_time_s: float = 0.0
    """Processor time of all its processes."""

    killed: bool = False
    """Whether the sandbox killed it for its time, memory, files or output."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    """Path -> content of the files in `Program.fetch` that exist, up to `file_mb` in all."""

    compiled: "RunResult | None" = None
    """Result of the compiler. If the compiler failed, the status above is the compiler's."""
