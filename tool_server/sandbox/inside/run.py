"""The first process of a run: sets up folder and limits, starts the program, kills what it leaves.

It is the parent of the program, and with namespaces the first process of the run's pid namespace.
"""

import ctypes
import os
import resource
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import PurePosixPath

import confine
from fork_server import PR_SET_PDEATHSIG, ForkServerClient
from parts import read_parts, write_parts

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_RELATIME = 1, 2, 4, 32, 4096, 1 << 21
KEPT_FLAGS = MS_NOSUID | MS_NODEV | os.ST_NOEXEC | os.ST_NOATIME | os.ST_NODIRATIME
HOME = "/box"
AWAITED_SIGNALS = (signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2)
COMPILER_OUTPUT_BYTES = 65536  # bytes kept of each stream of a compiler


class Run:
    """One run; created before its program arrives."""

    def __init__(self, plan: dict) -> None:
        self._plan = plan
        self._has_namespace = plan["namespaces"]
        if self._has_namespace:
            make_home(has_tmp=plan["tmp"])
        else:
            confine.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        self._spare: ForkServerClient | None = ForkServerClient(plan)

    def execute(self, order: dict, received: list[int]) -> None:
        """Set up, compile if needed, run, clean up, and write a report to `result`.

        The signals `AWAITED_SIGNALS` must be blocked.
        """
        *passed_on, result, status = received
        fds = dict(zip(order["descriptors"], passed_on))  # noqa: B905
        limits, compiler = order["limits"], order["compile"]
        if self._has_namespace:
            limit_home(limits)
            confine.leave_root(self._plan["uid"])
            order["home"] = HOME
        os.umask(0o022)
        os.chdir(order["home"])
        with open(fds["payload"], "rb", closefd=False) as file:
            header, parts = read_parts(file)
            _, code = next(parts)
            for path, content in parts:
                write_file(path, content)
        if "channel" not in fds:
            write_file(order["source"], code)
        report: dict = {}
        if compiler:
            # Memory files, because every name in the folder is the program's.
            out, err = os.memfd_create("stdout"), os.memfd_create("stderr")
            streams = fds | {"stdout": out, "stderr": err}
            step = self._step(order | {"argv": compiler}, streams, limits["compile_s"])
            report["compile"] = step | {"stdout": beginning_of(out), "stderr": beginning_of(err)}
            os.lseek(fds["stdin"], 0, os.SEEK_SET)
            write_status(status, "compiled\n")
        if not compiler or report["compile"]["code"] == 0:
            report["run"] = self._step(order, fds, limits["wall_s"])
        for stream in ("stdout", "stderr"):  # their readers need not wait for this process's end
            os.close(fds[stream])
        with os.fdopen(result, "wb") as file:
            write_parts(file, report, fetched(header["fetch"], limits["file_mb"] << 20))
        write_status(status, "done\n")

    def _step(self, order: dict, fds: "dict[str, int]", wall_s: float) -> dict:
        """Run one program (compiler or program) until it and its descendants are dead."""
        started, before_s = time.monotonic(), cpu_of_children_s()
        client, self._spare = self._spare or ForkServerClient(self._plan), None
        client.begin(order, fds)
        status, is_late = None, False
        while status is None:
            left_s = started + wall_s - time.monotonic()
            if left_s <= 0 and not is_late:
                is_late = True
                os.kill(client.pid, signal.SIGKILL)
            received = signal.sigtimedwait(AWAITED_SIGNALS, max(0.0, left_s) or 60.0)
            if received is not None and received.si_signo == signal.SIGUSR1:
                os.kill(client.pid, signal.SIGKILL)
            elif received is not None and received.si_signo == signal.SIGUSR2:
                os.kill(client.pid, signal.SIGINT)
            status = self._reap(client.pid)
        wall_s = time.monotonic() - started
        cpu_s = cpu_of_children_s() - before_s
        if self._has_namespace:  # under Landlock the program could start no processes
            kill_namespace()
        code = os.waitstatus_to_exitcode(status)
        # A program that ignores SIGXCPU of the soft limit is killed at the hard limit.
        is_spent = code == -signal.SIGKILL and cpu_s >= order["limits"]["cpu_s"]
        return {
            "code": code,
            "late": is_spent or code == -signal.SIGXCPU,
            "starved": is_late,  # the server ends a program that used up its own time before this
            "wall_s": wall_s,
            "cpu_s": cpu_s,
        }

    def _reap(self, program: int) -> "int | None":
        """Reap all dead children; the program's status if it has ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return None
            if pid == 0:
                return None
            if pid == program:
                return status


def cpu_of_children_s() -> float:
    """Processor time of the children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def kill_namespace() -> None:
    """Kill and reap all other processes of the pid namespace; this process must be its first."""
    if os.getpid() != 1:
        raise RuntimeError(
            "not the first process of a pid namespace: this would kill the processes of the host"
        )
    while True:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def make_home(*, has_tmp: bool) -> None:
    """Mount one small tmpfs for all files of the run, so that a run cannot fill the host's disk."""
    mount("tmpfs", HOME, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=16,mode=0755")
    for name, where in (("tmp", "/tmp"), ("shm", "/dev/shm"), ("home", HOME)):
        os.mkdir(f"{HOME}/{name}")
        os.chmod(f"{HOME}/{name}", 0o777)
        if has_tmp or name != "tmp":
            mount(f"{HOME}/{name}", where, None, MS_BIND, None)


def limit_home(limits: dict) -> None:
    """Set the size of the tmpfs, which is known only when the order arrives."""
    options = f"size={limits['file_mb']}m,nr_inodes={limits['files']}"
    mount("tmpfs", HOME, None, MS_REMOUNT | MS_NOSUID | MS_NODEV, options)


def make_read_only(path: str) -> None:
    """Make the mount of a device read-only: programs can still write to the device, but not set
    its times, which the host and all other runs would see."""
    before = os.statvfs(path).f_flag
    flags = before & KEPT_FLAGS | (MS_RELATIME if before & os.ST_RELATIME else 0)
    mount("none", path, None, MS_REMOUNT | MS_BIND | MS_RDONLY | flags, None)


def mount(source: str, target: str, kind: "str | None", flags: int, options: "str | None") -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, options)]
    value = confine.libc.mount(*encoded[:3], ctypes.c_ulong(flags), encoded[3])
    confine.checked(f"mount {target}", value)


def write_file(path: str, content: bytes) -> None:
    """Write a file of the program and create the folders above it."""
    if folder := os.path.dirname(path):
        os.makedirs(folder, exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)


def fetched(paths: "list[str]", max_bytes: int) -> "Iterator[tuple[str, bytes]]":
    """Regular files with their content, as long as they have `max_bytes` in all."""
    for path in paths:
        content = read_file(path, max_bytes)
        if content is not None:
            max_bytes -= len(content)
            yield path, content


def read_file(path: str, max_bytes: int) -> "bytes | None":
    """Content of a regular file; None if there is none or it is larger.

    It follows no link, also not to a folder, and never blocks, because the program chose what lies
    at the path.
    """
    *folders, name = PurePosixPath(path).parts
    with ExitStack() as opened:
        try:
            above = None
            for folder in folders:
                above = os.open(folder, os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
                opened.callback(os.close, above)
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=above)
        except OSError:
            return None
        opened.callback(os.close, fd)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > max_bytes:
            return None
        with open(fd, "rb", closefd=False) as file:
            return file.read(max_bytes)


def beginning_of(fd: int) -> str:
    """The beginning of a compiler's output; closes the file."""
    text = os.pread(fd, COMPILER_OUTPUT_BYTES, 0).decode(errors="replace")
    os.close(fd)
    return text


def write_status(status: int, text: str) -> None:
    """Write to the status pipe; the server may have closed its end."""
    with suppress(BrokenPipeError):
        os.write(status, text.encode())
