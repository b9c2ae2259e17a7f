"""The zygote: an interpreter that has loaded what programs need, and forks for each of them.

It hears its orders on a SOCK_SEQPACKET, as JSON with descriptors, and works until that is closed:
    {"id", "limits", "source", ...} with payload, stdin, stdout, stderr, result, status[, channel]
    {"stop" | "interrupt" | "kill": id}
Of a run it says, on `status`: its process as the zygote knows it, and that it has ended. Before,
the run itself says that it is done, when it has reported and nothing of its program lives any
more.
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

import confine
from fork_server import MOST_BYTES, MOST_DESCRIPTORS
from run import Run, say

CLONE_NEWNS, CLONE_NEWIPC = 0x00020000, 0x08000000
CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWUTS = 0x20000000, 0x40000000, 0x04000000
NAMESPACES = CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWUTS
HUGE, MADV_COLLAPSE = 2 << 20, 25
SIGNALS = {"stop": signal.SIGUSR1, "interrupt": signal.SIGUSR2, "kill": signal.SIGKILL}


class Spare:
    """A child in namespaces of its own, forked before there is anything to run in it."""

    def __init__(self, plan: dict, taken: "set[int]") -> None:
        self.place = next(place for place in range(len(taken) + 1) if place not in taken)
        """Each run that lives has its own, and so its own user: the kernel counts by user."""

        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = clone(NAMESPACES) if plan["namespaces"] else confine.fork()
        if self.pid == 0:
            if plan["uids"]:
                plan["uid"] = plan["uids"][self.place % len(plan["uids"])]
            become_run(plan, theirs)
        theirs.close()
        self.pidfd = os.pidfd_open(self.pid)


class Zygote:
    """Forks runs, kills and buries them."""

    def __init__(self, control: socket.socket, plan: dict) -> None:
        self._control, self._plan = control, plan
        self._runs: dict[int, tuple[int, Spare, int]] = {}  # pidfd: id, process, status
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._spare: Spare | None = None

    def serve(self) -> None:
        """Until the server closes its end, or is gone."""
        while True:
            if self._spare is None:
                with suppress(OSError):  # asked for again when it is needed
                    self._spare = self._new_spare()
            for fd, _ in self._poll.poll():
                if fd != self._control.fileno():
                    self._bury(fd)
                elif not self._hear():
                    self._end()
                    return

    def _hear(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._control, MOST_BYTES, 8)
        if not data:
            return False
        order = json.loads(data)
        for word, number in SIGNALS.items():
            if word in order:
                self._signal(order[word], number)
                return True
        try:
            spare, self._spare = self._spare or self._new_spare(), None
        except OSError as error:
            fail(fds[4], f"no process: {error}")
            say(fds[5], "0\nended\n")
            for fd in fds:
                os.close(fd)
            return True
        status = fds[5]
        say(status, f"{spare.pid}\n")  # before the run can say anything
        with spare.channel, suppress(BrokenPipeError):  # somebody killed it: it is buried at once
            socket.send_fds(spare.channel, [data], fds)
        fds.remove(status)
        for fd in fds:
            os.close(fd)
        self._runs[spare.pidfd] = order["id"], spare, status
        self._poll.register(spare.pidfd, select.POLLIN)
        return True

    def _end(self) -> None:
        """bubblewrap waits for every process that this one leaves behind."""
        for pidfd in self._runs:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def _new_spare(self) -> Spare:
        return Spare(self._plan, {run.place for _, run, _ in self._runs.values()})

    def _signal(self, run: int, number: signal.Signals) -> None:
        if number == signal.SIGKILL and not self._plan["namespaces"]:
            number = signal.SIGUSR1  # it has to kill what it started itself
        for pidfd, (own, _, _) in self._runs.items():
            if own == run:
                signal.pidfd_send_signal(pidfd, number)

    def _bury(self, pidfd: int) -> None:
        _, run, status = self._runs.pop(pidfd)
        self._poll.unregister(pidfd)
        os.waitpid(run.pid, 0)  # returns when its pid namespace is empty
        os.close(pidfd)
        say(status, "ended\n")
        os.close(status)


def become_run(plan: dict, channel: socket.socket) -> None:
    """Wait for an order and see it through. Does not return."""
    given: list[int] = []
    try:
        own = channel.fileno()
        os.closerange(3, own)  # descriptors of other runs, which these would hold open
        os.closerange(own + 1, MOST_DESCRIPTORS)
        confine.set_signal_mask(confine.ALL_SIGNALS)  # the program's, too
        run = Run(plan)
        data, given, _, _ = socket.recv_fds(channel, MOST_BYTES, 8)
        if data:
            channel.close()
            run.see_through(json.loads(data), given)
    except BaseException:
        if given:
            fail(given[4], traceback.format_exc(limit=-2))
    finally:
        os._exit(0)


def fail(result: int, fault: str) -> None:
    """Say why nothing ran."""
    with open(result, "w", closefd=False) as file:
        json.dump({"fault": fault}, file)


def clone(namespaces: int) -> int:
    """A fork into new namespaces; the child is the first process of its pid namespace.

    Raises:
        OSError: the kernel refuses.
    """
    flags = namespaces | signal.SIGCHLD
    # Through PyDLL, which keeps the interpreter's lock.
    return confine.checked("clone", confine.locked_libc.syscall(confine.CLONE, flags, 0, 0, 0, 0))


def preload(modules: list[str]) -> None:
    """Import them now, so that a program finds them imported."""
    for name in modules:
        importlib.import_module(name)


def use_huge_pages() -> None:
    """Hold what is loaded in few large pages, where the kernel can: forks and exits cost by their
    number. See madvise(2), MADV_COLLAPSE, since Linux 6.1.
    """
    for page in {id(thing) // HUGE for thing in gc.get_objects()}:
        confine.libc.madvise(ctypes.c_void_p(page * HUGE), ctypes.c_size_t(HUGE), MADV_COLLAPSE)


def main() -> None:
    """Serve."""
    control, plan = socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])
    control.set_inheritable(False)
    # A server that a shell started in the background ignores these, and so would all it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    sys.path += plan["packages"]
    preload(plan["preload"])
    sys.path[0] = "/"  # was ours; a program's own folder comes there
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
