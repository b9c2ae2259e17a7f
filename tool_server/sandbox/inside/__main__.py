"""The zygote: an interpreter that has loaded common modules and forks a process for each program.

It receives orders on a SOCK_SEQPACKET socket, as JSON with descriptors, until the socket is closed:

| order | descriptors | meaning |
| --- | --- | --- |
| {"id", "limits", "source", ...} | those named in "descriptors", then result and status | run |
| {"stop" or "interrupt" or "kill": id} | | signal the run |

Descriptors: payload (`parts.py`), stdin, stdout, stderr; with a session its channel.

The pipe `status` gets lines: the run's pid as the zygote sees it; "compiled" from the run, after a
compiler; "done" from the run, when it has written its report and all processes of the program are
dead; "ended" when the run itself is dead.
"""

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress

sys.path.append(os.path.join(os.path.dirname(__file__), "../../isolation"))  # of which it can
import confine  # read this file only

sys.path.pop()
from fork_server import MAX_ORDER_BYTES
from parts import NOT_IMPORTED, write_parts
from run import Run, make_read_only, write_status

CLONE_NEWNS, CLONE_NEWIPC = 0x00020000, 0x08000000
CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWUTS = 0x20000000, 0x40000000, 0x04000000
NAMESPACES = CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWUTS
HUGE, MADV_COLLAPSE = 2 << 20, 25
SIGNALS = {"stop": signal.SIGUSR1, "interrupt": signal.SIGUSR2, "kill": signal.SIGKILL}


class RunProcess:
    """The first process of a run, forked into its namespaces before a program arrives."""

    def __init__(self, plan: dict, taken: "set[int]") -> None:
        self.number = next(number for number in range(len(taken) + 1) if number not in taken)
        """Runs that live have different numbers, and so different users: the kernel limits
        processes by user."""

        self.channel, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = clone(NAMESPACES) if plan["namespaces"] else confine.fork()
        if self.pid == 0:
            if plan["uids"]:
                plan["uid"] = plan["uids"][self.number % len(plan["uids"])]
            become_run(plan, child)
        child.close()
        self.pidfd = os.pidfd_open(self.pid)


class Zygote:
    """Forks runs, signals them and reaps them."""

    def __init__(self, control: socket.socket, plan: dict) -> None:
        self._control, self._plan = control, plan
        self._runs: dict[int, tuple[int, RunProcess, int]] = {}  # pidfd: id, process, status
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._spare: RunProcess | None = None

    def serve(self) -> None:
        """Work until the server closes its end of the socket."""
        while True:
            if self._spare is None:
                with suppress(OSError):  # tried again when an order comes
                    self._spare = self._new_spare()
            for fd, _ in self._poll.poll():
                if fd != self._control.fileno():
                    self._reap(fd)
                elif not self._receive_order():
                    self._end()
                    return

    def _receive_order(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._control, MAX_ORDER_BYTES, 8)
        if not data:
            return False
        order = json.loads(data)
        for action, number in SIGNALS.items():
            if action in order:
                self._signal(order[action], number)
                return True
        status = fds[-1]
        try:
            spare, self._spare = self._spare or self._new_spare(), None
        except OSError as error:
            fail(fds[-2], f"no process: {error}")
            write_status(status, "0\nended\n")
            for fd in fds:
                os.close(fd)
            return True
        write_status(status, f"{spare.pid}\n")  # before the run can write to it
        with spare.channel, suppress(BrokenPipeError):  # the run was killed; it is reaped next
            socket.send_fds(spare.channel, [data], fds)
        fds.remove(status)
        for fd in fds:
            os.close(fd)
        self._runs[spare.pidfd] = order["id"], spare, status
        self._poll.register(spare.pidfd, select.POLLIN)
        return True

    def _end(self) -> None:
        """Kill all runs, because bubblewrap waits for every process that the zygote leaves
        behind."""
        for pidfd in self._runs:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def _new_spare(self) -> RunProcess:
        return RunProcess(self._plan, {run.number for _, run, _ in self._runs.values()})

    def _signal(self, run: int, number: signal.Signals) -> None:
        if number == signal.SIGKILL and not self._plan["namespaces"]:
            number = signal.SIGUSR1  # without a pid namespace, the run must kill its program itself
        for pidfd, (own, _, _) in self._runs.items():
            if own == run:
                signal.pidfd_send_signal(pidfd, number)

    def _reap(self, pidfd: int) -> None:
        _, run, status = self._runs.pop(pidfd)
        self._poll.unregister(pidfd)
        os.waitpid(run.pid, 0)  # returns when its pid namespace is empty
        os.close(pidfd)
        write_status(status, "ended\n")
        os.close(status)


def become_run(plan: dict, channel: socket.socket) -> None:
    """Wait for an order and execute it. Does not return."""
    received: list[int] = []
    try:
        confine.close_all_but(channel.fileno())  # among them are those of other runs
        confine.set_signal_mask(confine.ALL_SIGNALS)  # also for the program
        run = Run(plan)
        data, received, _, _ = socket.recv_fds(channel, MAX_ORDER_BYTES, 8)
        if data:
            channel.close()
            run.execute(json.loads(data), received)
    except BaseException:
        if received:
            fail(received[-2], traceback.format_exc(limit=-2))
    finally:
        os._exit(0)


def fail(result: int, fault: str) -> None:
    """Write to `result` why nothing ran."""
    with open(result, "wb", closefd=False) as file:
        write_parts(file, {"fault": fault}, ())


def clone(namespaces: int) -> int:
    """Fork into new namespaces; the child is the first process of its pid namespace."""
    flags = namespaces | signal.SIGCHLD
    # PyDLL does not release the GIL, so the child has it.
    return confine.checked("clone", confine.locked_libc.syscall(confine.CLONE, flags, 0, 0, 0, 0))


def use_huge_pages() -> None:
    """Move loaded objects to huge pages, because the cost of a fork grows with the number of pages.

    See madvise(2), MADV_COLLAPSE, since Linux 6.1. Older kernels ignore the call.
    """
    for page in {id(thing) // HUGE for thing in gc.get_objects()}:
        confine.libc.madvise(ctypes.c_void_p(page * HUGE), ctypes.c_size_t(HUGE), MADV_COLLAPSE)


def main() -> None:
    control, plan = socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])
    control.set_inheritable(False)
    confine.close_all_but(control.fileno())
    # A server that a shell started in the background ignores these signals; programs must not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    sys.path += plan["packages"]
    for name in plan["preload"]:
        try:
            importlib.import_module(name)
        except Exception as error:
            sys.exit(f"{NOT_IMPORTED} {name}: {type(error).__name__}: {error}")
    sys.path[0] = "/"  # was this folder; a program's own folder replaces it
    for path in plan["read_only"]:
        make_read_only(path)
    if plan["landlock"]:
        confine.no_new_privs()
        confine.restrict_files(plan["readable"], plan["devices"], [plan["folder"]])
    if plan["namespaces"] or plan["landlock"]:
        confine.drop_bounding_set()
    gc.collect()
    if plan["packages"]:
        use_huge_pages()
    gc.freeze()
    control.send(b"ready")
    Zygote(control, plan).serve()


if __name__ == "__main__":
    main()
