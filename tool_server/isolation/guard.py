"""A process above a command that ends everything that the command has started.

`python -I -S guard.py LIFE COMMAND...`

The guard is the parent of what descends from the command and has lost its own parent (daemons).
So it needs neither namespaces nor rights, and finds processes that left their session or cleared
their environment. When the command has ended, or when the process that started it closes the other
end of the descriptor LIFE or dies, the guard kills all of them, and ends as the command did. A
command could kill its guard first: then the kernel kills the command, and what it has started goes
on.

Standard library only, without modules that take long to import.
"""

# Without the enums of `signal` and without `typing` the start takes 70 ms less.
import _signal  # pyright: ignore[reportMissingImports]
import os
import select
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Sequence
    from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_lives: "Any" = ()
"""Sockets by which this process holds its guards; a fork of it must not hold them too."""

os.register_at_fork(after_in_child=lambda: [each.close() for each in list(_lives)])
_TO_THE_COMMAND = (_signal.SIGHUP, _signal.SIGINT, _signal.SIGTERM)


def guarded(
    command: "Sequence[str]", **options: "Any"
) -> "tuple[subprocess.Popen[bytes], Callable[[], None]]":
    """Start a command under a guard, in a session of its own.

    Args:
        command: absolute path of a program, and its arguments.
        options: of `subprocess.Popen`.

    Returns:
        the guard, and what tells it to end everything. The command has a process group of its own,
        to which the guard passes SIGHUP, SIGINT and SIGTERM on.

    Raises:
        OSError: there is no further process or descriptor. A command that cannot be executed has
            the exit code 127.
    """
    import socket
    import subprocess
    from weakref import WeakSet

    global _lives
    _lives = _lives or WeakSet()
    ours, life = socket.socketpair()
    _lives.add(ours)

    def end() -> None:
        with ours:
            if ours.fileno() >= 0:
                ours.shutdown(socket.SHUT_RDWR)  # also if a fork that C code made holds it

    with life:
        fd = life.fileno()  # inherited
        line = [os.path.realpath(sys.executable), "-I", "-S", __file__, str(fd)]
        pass_fds = (fd, *options.pop("pass_fds", ()))
        try:
            process: subprocess.Popen[Any] = subprocess.Popen(
                [*line, *command], pass_fds=pass_fds, start_new_session=True, **options
            )
        except BaseException:
            end()
            raise
    return process, end


def guard(life: int, ended: "Callable[[int], object]" = bool) -> None:
    """Fork, and return in the child. The parent guards it and never returns.

    Args:
        ended: called in the parent with the exit code of a child that ended by itself.
    """
    adopt_orphans()
    woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    actions = {number: _signal.signal(number, _signal.SIG_IGN) for number in _TO_THE_COMMAND}
    child = os.fork()
    if child == 0:
        _prctl(PR_SET_PDEATHSIG, _signal.SIGKILL)
        os.setpgid(0, 0)  # what it sends to its group must not reach the guard
        for number, action in actions.items():
            _signal.signal(number, _signal.SIG_DFL if action is None else action)
        os.close(woken)
        os.close(wake)
        return
    try:  # noqa: SIM105 (contextlib takes long to import)
        os.setpgid(child, child)
    except OSError:  # it has done so, and executes another program already
        pass

    def pass_on(number: int, _: object) -> None:
        try:  # noqa: SIM105
            os.killpg(child, number)
        except ProcessLookupError:
            pass

    for number in _TO_THE_COMMAND:
        _signal.signal(number, pass_on)
    _signal.signal(_signal.SIGCHLD, lambda *_: None)
    _signal.set_wakeup_fd(wake)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # else the ends of the command's pipes would not be seen
        os.dup2(null, fd)
    poll = select.poll()
    poll.register(life, 0)  # no events: its end alone
    poll.register(woken, select.POLLIN)
    status = _reaped().get(child)
    while status is None and all(fd != life for fd, _ in poll.poll()):
        os.read(woken, 4096)
        status = _reaped().get(child)
    killed = kill_children()
    code = os.waitstatus_to_exitcode(killed[child] if status is None else status)
    if status is not None:
        ended(code)
    if code < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != _signal.SIGKILL:
            _signal.signal(-code, _signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def adopt_orphans() -> None:
    """Become the parent of descendants that lose theirs."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _reaped() -> "dict[int, int]":
    """Statuses of the children that have ended."""
    statuses: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return statuses
        if pid == 0:
            return statuses
        statuses[pid] = status


def kill_children() -> "dict[int, int]":
    """Kill all children of this process, and those that it adopts then; returns their statuses."""
    statuses: dict[int, int] = {}
    while pids := _children():
        for pid in pids:
            try:  # noqa: SIM105 (contextlib takes long to import)
                os.kill(pid, _signal.SIGKILL)
            except PermissionError:  # a setuid program: its end is waited for
                pass
        for pid in pids:
            statuses[pid] = os.waitpid(pid, 0)[1]
    return statuses


def _children() -> "list[int]":
    pids: list[int] = []
    for task in os.listdir("/proc/self/task"):  # those that any thread has started
        with open(f"/proc/self/task/{task}/children") as file:
            pids += map(int, file.read().split())
    return pids


def main() -> None:
    life, *command = sys.argv[1:]
    guard(int(life))
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):  # Python ignores them
        _signal.signal(number, _signal.SIG_DFL)
    try:
        os.execv(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


if __name__ == "__main__":
    main()
