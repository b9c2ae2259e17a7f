"""The process that becomes a program: forked early, it waits until there is one.

By then it has touched the pages that every program touches, which is most of what a fork costs.
It has no right that its program should not have.
"""

import fcntl
import io
import json
import os
import random
import resource
import signal
import socket
from contextlib import redirect_stdout

import confine
import interpreter

PR_SET_PDEATHSIG = 1
MOST_BYTES = 1 << 16  # of an order
MOST_DESCRIPTORS = 4096
LEAST_OWN_DESCRIPTOR = 10
MIB = 1 << 20


class Seat:
    """A forked process and what it is told by.

    Args:
        plan: of the zygote.
    """

    def __init__(self, plan: dict) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = confine.fork()
        if self.pid == 0:
            take_seat(plan, theirs)
        theirs.close()

    def begin(self, order: dict, fds: list[int]) -> None:
        """Let it become the program.

        Args:
            order: the server's, with `home`, and the `argv` of this step.
            fds: stdin, stdout, stderr, payload, and a session's channel.

        Raises:
            RuntimeError: it could not give its rights up, so nothing ran.
        """
        with self._channel as channel:
            socket.send_fds(channel, [json.dumps(order).encode()], fds)
            if fault := channel.recv(MOST_BYTES):
                raise RuntimeError(fault.decode(errors="replace"))


def take_seat(plan: dict, channel: socket.socket) -> None:
    """Wait for an order, and become what it says. Does not return."""
    own = fcntl.fcntl(channel.fileno(), fcntl.F_DUPFD_CLOEXEC, LEAST_OWN_DESCRIPTOR)
    channel = socket.socket(fileno=own)
    try:
        os.closerange(3, own)
        os.closerange(own + 1, MOST_DESCRIPTORS)
        if plan["namespaces"] or plan["landlock"]:
            confine.leave_root(plan["uid"])
        if not plan["namespaces"]:
            confine.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        confine.no_new_privs()
        random.seed()  # or all runs would draw the same
        if plan["filter"] and not plan["landlock"]:  # whose calls it refuses
            confine.load_filter(bytes.fromhex(plan["filter"]))
        rehearse()
        data, fds, _, _ = socket.recv_fds(channel, MOST_BYTES, 5)
        if not data:
            os._exit(0)
        order = json.loads(data)
        code = sit_down(plan, order, fds, own)
    except BaseException as error:
        channel.send(f"{type(error).__name__}: {error}".encode())
        os._exit(127)
    channel.close()
    become_program(order, code, has_channel=len(fds) > 4)


def rehearse() -> None:
    """Touch what every run touches: a page that is shared since a fork costs when it is written."""
    json.loads('{"code": "", "files": {}, "fetch": []}')
    with redirect_stdout(io.StringIO()):
        interpreter.run_main("print(1)", "/", "")


def sit_down(plan: dict, order: dict, fds: list[int], own: int) -> str:
    """Take the program's streams, and give up every right that it should not have; its code."""
    stdin, stdout, stderr, payload, *channel = fds
    os.chdir(order["home"])
    with open(payload, closefd=False) as file:
        file.seek(0)
        code = json.load(file)["code"]
    for number, fd in enumerate((stdin, stdout, stderr)):
        os.dup2(fd, number)
    if channel:
        os.dup2(channel[0], 3, inheritable=False)
    os.closerange(4 if channel else 3, own)
    os.closerange(own + 1, MOST_DESCRIPTORS)
    limit(order)
    if plan["landlock"]:
        confine.restrict_files(plan["readable"], plan["devices"], ["."])
        confine.load_filter(bytes.fromhex(plan["filter"]))
    confine.set_signal_mask(confine.NO_SIGNALS)
    return code


def become_program(order: dict, code: str, *, has_channel: bool) -> None:
    """Does not return."""
    try:
        if order["argv"]:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.execvpe(order["argv"][0], order["argv"], os.environ)
        elif has_channel:
            interpreter.run_cells(socket.socket(fileno=3), order["home"])
        else:
            interpreter.end(interpreter.run_main(code, order["home"], order["source"]))
    except OSError as error:
        os.write(2, f"{order['argv'][0]}: {error}\n".encode())
    finally:
        os._exit(127)


def limit(order: dict) -> None:
    """What the kernel limits of one process, or of one user."""
    limits = order["limits"]
    cpu_s = limits["cpu_s"]
    # The soft limit's signal tells us it was the time limit; the hard one cannot be caught.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    if not order["reserves_memory"]:
        resource.setrlimit(resource.RLIMIT_AS, (limits["memory_mb"] * MIB,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits["file_mb"] * MIB,) * 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits["open_files"],) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    if order["processes"]:
        resource.setrlimit(resource.RLIMIT_NPROC, (order["processes"],) * 2)
