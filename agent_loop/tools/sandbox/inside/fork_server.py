"""A forked interpreter that waits for a program and becomes its process.

The zygote forks it before a program arrives. It writes to the memory pages that every program
writes to, because copying these pages is most of the cost of a fork. It gives up every right that
the program must not have.
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
MAX_ORDER_BYTES = 1 << 16

MAX_DESCRIPTORS = 4096
"""Descriptors below this number are closed in a program. A zygote has no descriptor above it while
the server's limit on open files is 4096 or less; with a higher limit it may have one."""

MIN_OWN_DESCRIPTOR = 10
"""The channel moves to this number or above, so that 0 to 3 are free for the program's streams."""

MIB = 1 << 20


class ForkServerClient:
    """One forked interpreter and the socket that sends it a program."""

    def __init__(self, plan: dict) -> None:
        self._channel, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = confine.fork()
        if self.pid == 0:
            serve(plan, child)
        child.close()

    def begin(self, order: dict, fds: list[int]) -> None:
        """Send the program; the forked interpreter becomes its process.

        The order has the `home` and `argv` of this step; `fds` are stdin, stdout, stderr, payload,
        and the channel of a session.

        Raises:
            RuntimeError: the process could not give up its rights, so nothing ran.
        """
        with self._channel as channel:
            socket.send_fds(channel, [json.dumps(order).encode()], fds)
            if fault := channel.recv(MAX_ORDER_BYTES):
                raise RuntimeError(fault.decode(errors="replace"))


def serve(plan: dict, channel: socket.socket) -> None:
    """Wait for an order and become its program. Does not return."""
    own = fcntl.fcntl(channel.fileno(), fcntl.F_DUPFD_CLOEXEC, MIN_OWN_DESCRIPTOR)
    channel = socket.socket(fileno=own)
    try:
        os.closerange(3, own)
        os.closerange(own + 1, MAX_DESCRIPTORS)
        if plan["namespaces"] or plan["landlock"]:
            confine.leave_root(plan["uid"])
        if not plan["namespaces"]:
            confine.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        confine.no_new_privs()
        random.seed()  # otherwise all runs would draw the same numbers
        # With Landlock the filter comes later, because it would refuse the calls of Landlock.
        if plan["filter"] and not plan["landlock"]:
            confine.load_filter(bytes.fromhex(plan["filter"]))
        rehearse()
        data, fds, _, _ = socket.recv_fds(channel, MAX_ORDER_BYTES, 5)
        if not data:
            os._exit(0)
        order = json.loads(data)
        code = enter_sandbox(plan, order, fds, own)
    except BaseException as error:
        channel.send(f"{type(error).__name__}: {error}".encode())
        os._exit(127)
    channel.close()
    become_program(order, code, has_channel=len(fds) > 4)


def rehearse() -> None:
    """Run a small program, so that shared memory pages are copied before an order comes."""
    json.loads('{"code": "", "files": {}, "fetch": []}')
    with redirect_stdout(io.StringIO()):
        interpreter.run_main("print(1)", "/", "")


def enter_sandbox(plan: dict, order: dict, fds: list[int], own: int) -> str:
    """Connect the program's streams and give up rights; returns the program's code."""
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
    os.closerange(own + 1, MAX_DESCRIPTORS)
    limit(order)
    if plan["landlock"]:
        confine.restrict_files(plan["readable"], plan["devices"], ["."])
        confine.load_filter(bytes.fromhex(plan["filter"]))
    confine.set_signal_mask(confine.NO_SIGNALS)
    return code


def become_program(order: dict, code: str, *, has_channel: bool) -> None:
    """Run the program in this process. Does not return."""
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
    """Set the limits that the kernel keeps for one process or one user."""
    limits = order["limits"]
    cpu_s = limits["cpu_s"]
    # SIGXCPU of the soft limit tells the server that the time limit was reached. The hard limit
    # kills with SIGKILL, which has many causes.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    if not order["reserves_memory"]:
        resource.setrlimit(resource.RLIMIT_AS, (limits["memory_mb"] * MIB,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits["file_mb"] * MIB,) * 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits["open_files"],) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    if order["processes"]:
        resource.setrlimit(resource.RLIMIT_NPROC, (order["processes"],) * 2)
