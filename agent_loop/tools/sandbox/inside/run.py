"""One run: sets its surroundings up, starts the program, and sees that nothing outlives it.

It is the first process of the run's pid namespace where there is one, and the parent of the program
in any case.
"""

import base64
import ctypes
import json
import os
import resource
import signal
import stat
import time
from contextlib import suppress

import confine
from fork_server import PR_SET_PDEATHSIG, ForkServerClient

MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND = 2, 4, 32, 4096
PR_SET_CHILD_SUBREAPER = 36
HOME = "/box"
HEARD = (signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2)
KEPT_OF_COMPILER = 65536  # bytes of what it says, of each stream


class Run:
    """A program's life; begun before there is a program.

    Args:
        plan: of the zygote.
    """

    def __init__(self, plan: dict) -> None:
        self._plan = plan
        self._has_namespace = plan["namespaces"]
        if self._has_namespace:
            make_home(has_tmp=plan["tmp"])
        else:
            confine.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            confine.prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._spare: ForkServerClient | None = ForkServerClient(plan)

    def see_through(self, order: dict, fds: list[int]) -> None:
        """Set up, run, clean up, and write what came of it to `result`.

        The signals `HEARD` are blocked.

        Args:
            order: the server's.
            fds: payload, stdin, stdout, stderr, result, status, and a session's channel.
        """
        payload, stdin, stdout, stderr, result, status, *channel = fds
        limits, compiler = order["limits"], order["compile"]
        if self._has_namespace:
            limit_home(limits)
            confine.leave_root(self._plan["uid"])
            order["home"] = HOME
        os.umask(0o022)
        os.chdir(order["home"])
        with open(payload, closefd=False) as file:
            content = json.load(file)
        for path, encoded in content["files"].items():
            write_file(path, base64.b64decode(encoded))
        if not channel:
            write_file(order["source"], content["code"].encode(errors="replace"))
        report: dict = {}
        if compiler:
            out, err = open_unnamed(), open_unnamed()
            own = [stdin, out, err, payload]
            done = self._step(order | {"argv": compiler}, own, limits["compile_s"])
            report["compile"] = done | {"stdout": beginning_of(out), "stderr": beginning_of(err)}
            os.lseek(stdin, 0, os.SEEK_SET)
        if not compiler or report["compile"]["code"] == 0:
            own = [stdin, stdout, stderr, payload, *channel]
            report["run"] = self._step(order, own, limits["wall_s"])
        os.close(stdout)  # their readers need not wait until this process has ended
        os.close(stderr)
        most = limits["file_mb"] << 20
        report["files"] = {path: read_file(path, most) for path in content["fetch"]}
        with os.fdopen(result, "w") as file:
            json.dump(report, file)
        say(status, "done\n")

    def _step(self, order: dict, fds: list[int], wall_s: float) -> dict:
        """Run one program until it and all that it started are dead."""
        started, before_s = time.monotonic(), cpu_of_children_s()
        client, self._spare = self._spare or ForkServerClient(self._plan), None
        client.begin(order, fds)
        status, is_late = None, False
        while status is None:
            left_s = started + wall_s - time.monotonic()
            if left_s <= 0 and not is_late:
                is_late = True
                os.kill(client.pid, signal.SIGKILL)
            heard = signal.sigtimedwait(HEARD, max(0.0, left_s) or 60.0)
            if heard is not None and heard.si_signo == signal.SIGUSR1:
                os.kill(client.pid, signal.SIGKILL)
            elif heard is not None and heard.si_signo == signal.SIGUSR2:
                os.kill(client.pid, signal.SIGINT)
            status = self._reap(client.pid)
        wall_s = time.monotonic() - started
        cpu_s = cpu_of_children_s() - before_s
        self._sweep()
        code = os.waitstatus_to_exitcode(status)
        # Who ignores the soft limit's signal is killed at the hard one.
        is_spent = code == -signal.SIGKILL and cpu_s >= order["limits"]["cpu_s"]
        return {
            "code": code,
            "late": is_late or is_spent or code == -signal.SIGXCPU,
            "wall_s": wall_s,
            "cpu_s": cpu_s,
        }

    def _sweep(self) -> None:
        """Kill whatever the program left behind; under Landlock it could start nothing."""
        if self._has_namespace:
            kill_namespace()
        elif not self._plan["landlock"]:
            kill_children()

    def _reap(self, program: int) -> "int | None":
        """The program's status, if it has ended."""
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
    """Of those that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def kill_namespace() -> None:
    """Everything in the pid namespace that this process is the first of."""
    if os.getpid() != 1:
        raise RuntimeError("not the first process of a pid namespace: would kill the host's")
    while True:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def kill_children() -> None:
    """Everything that this process is the parent of; the dead's children become its own."""
    own = os.getpid()
    while True:
        with open(f"/proc/{own}/task/{own}/children") as file:
            children = [int(pid) for pid in file.read().split()]
        if not children:
            return
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def make_home(*, has_tmp: bool) -> None:
    """A full device, not a full host: all files of the run are on one small tmpfs."""
    mount("tmpfs", HOME, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=16,mode=0755")
    for name, where in (("tmp", "/tmp"), ("shm", "/dev/shm"), ("home", HOME)):
        os.mkdir(f"{HOME}/{name}")
        os.chmod(f"{HOME}/{name}", 0o777)
        if has_tmp or name != "tmp":
            mount(f"{HOME}/{name}", where, None, MS_BIND, None)


def limit_home(limits: dict) -> None:
    """Its size, once it is known."""
    options = f"size={limits['file_mb']}m,nr_inodes={limits['files']}"
    mount("tmpfs", HOME, None, MS_REMOUNT | MS_NOSUID | MS_NODEV, options)


def mount(source: str, target: str, kind: "str | None", flags: int, options: "str | None") -> None:
    """mount(2)."""
    encoded = [None if text is None else text.encode() for text in (source, target, kind, options)]
    done = confine.libc.mount(*encoded[:3], ctypes.c_ulong(flags), encoded[3])
    confine.checked(f"mount {target}", done)


def write_file(path: str, content: bytes) -> None:
    """A file of the program, with the folders above it."""
    if folder := os.path.dirname(path):
        os.makedirs(folder, exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)


def read_file(path: str, most: int) -> "str | None":
    """A regular file's content in base64; None where there is none, or a larger one.

    Never follows a link and never waits: the program chose what is there.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > most:
            return None
        with open(fd, "rb", closefd=False) as file:
            return base64.b64encode(file.read(most)).decode()
    finally:
        os.close(fd)


def open_unnamed() -> int:
    """A file on the run's own disk that has no name."""
    fd = os.open("spoken", os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.unlink("spoken")
    return fd


def beginning_of(fd: int) -> str:
    """What a compiler said first; closes the file."""
    said = os.pread(fd, KEPT_OF_COMPILER, 0).decode(errors="replace")
    os.close(fd)
    return said


def say(status: int, words: str) -> None:
    """To a server that may not listen any more."""
    with suppress(BrokenPipeError):
        os.write(status, words.encode())
