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
import sys
from contextlib import redirect_stdout

import confine
import interpreter
from parts import read_parts

PR_SET_PDEATHSIG = 1
MAX_ORDER_BYTES = 1 << 16

CLONE_NEWUSER = 0x10000000
MAX_PENDING_SIGNALS = 64
"""Signals and timers that wait. The kernel counts them by user, so that without this limit a
program of an ordinary user could take those of the user's other processes."""

RESERVED_MB = 16 << 10
"""Address space that the runtime of a language may reserve beyond its memory."""

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

    def begin(self, order: dict, fds: "dict[str, int]") -> None:
        """Send the program; the forked interpreter becomes its process.

        The order has the `home` and `argv` of this step; `fds` are listed in `__main__.py`.

        Raises:
            RuntimeError: the process could not give up its rights, so nothing ran.
        """
        with self._channel as channel:
            order = order | {"descriptors": list(fds)}
            socket.send_fds(channel, [json.dumps(order).encode()], list(fds.values()))
            if fault := channel.recv(MAX_ORDER_BYTES):
                raise RuntimeError(fault.decode(errors="replace"))


def serve(plan: dict, channel: socket.socket) -> None:
    """Wait for an order and become its program. Does not return."""
    own = fcntl.fcntl(channel.fileno(), fcntl.F_DUPFD_CLOEXEC, MIN_OWN_DESCRIPTOR)
    channel = socket.socket(fileno=own)
    try:
        confine.close_all_but(own)
        if plan["own_user_namespace"]:
            confine.checked("unshare", confine.libc.unshare(CLONE_NEWUSER))
            confine.drop_bounding_set()  # a new user namespace begins with all capabilities
        if plan["namespaces"] or plan["landlock"]:
            confine.leave_root(plan["uid"])
        if not plan["namespaces"]:
            confine.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        confine.no_new_privs()
        reseed()
        # With Landlock the filter comes later, because it would refuse the calls of Landlock.
        if plan["filter"] and not plan["landlock"]:
            confine.load_filter(bytes.fromhex(plan["filter"]))
        rehearse()
        data, received, _, _ = socket.recv_fds(channel, MAX_ORDER_BYTES, 8)
        if not data:
            os._exit(0)
        order = json.loads(data)
        fds = dict(zip(order["descriptors"], received))  # noqa: B905
        code = enter_sandbox(plan, order, fds, own)
    except BaseException as error:
        channel.send(f"{type(error).__name__}: {error}".encode())
        os._exit(127)
    channel.close()
    home, source, argv = (order[name] for name in ("home", "source", "argv"))
    for ours in (plan, order):  # a program can read all frames and objects of its process
        ours.clear()
    del data
    become_program(code, home, source, argv, has_channel="channel" in fds)


def reseed() -> None:
    """Give this process random numbers of its own; all forks would draw the zygote's."""
    random.seed()
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()


def rehearse() -> None:
    """Run a small program, so that shared memory pages are copied before an order comes."""
    read_parts(io.BytesIO(b'{"sizes": []}\n'))
    with redirect_stdout(io.StringIO()):
        interpreter.run_main("print(1)", "/", "")


def enter_sandbox(plan: dict, order: dict, fds: "dict[str, int]", own: int) -> str:
    """Connect the program's streams and give up rights; returns the program's code."""
    os.chdir(order["home"])
    with open(fds["payload"], "rb", closefd=False) as file:
        file.seek(0)
        _, parts = read_parts(file)
        _, code = next(parts)
    for number, stream in enumerate(("stdin", "stdout", "stderr")):
        os.dup2(fds[stream], number)
    kept = [own]
    if "channel" in fds:
        kept.append(os.dup2(fds["channel"], 3, inheritable=False))
    confine.close_all_but(*kept)
    limit(order)
    if plan["landlock"]:
        confine.restrict_files(plan["readable"], plan["devices"], ["."])
        confine.load_filter(bytes.fromhex(plan["filter"]))
    confine.set_signal_mask(confine.NO_SIGNALS)
    return code.decode(errors="replace")


def become_program(
    code: str, home: str, source: str, argv: "list[str]", *, has_channel: bool
) -> None:
    """Run the program in this process. Does not return."""
    try:
        if argv:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.execvpe(argv[0], argv, os.environ)
        elif has_channel:
            interpreter.run_cells(socket.socket(fileno=3), home)
        else:
            interpreter.end(interpreter.run_main(code, home, source))
    except OSError as error:
        os.write(2, f"{argv[0]}: {error}\n".encode())
    finally:
        os._exit(127)


def limit(order: dict) -> None:
    """Set the limits that the kernel keeps for one process or one user."""
    limits = order["limits"]
    cpu_s = limits["cpu_s"]
    # SIGXCPU of the soft limit tells the server that the time limit was reached. The hard limit
    # kills with SIGKILL, which has many causes.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    space_mb = limits["memory_mb"] + (RESERVED_MB if order["reserves_memory"] else 0)
    resource.setrlimit(resource.RLIMIT_AS, (space_mb * MIB,) * 2)
    resource.setrlimit(resource.RLIMIT_DATA, (limits["memory_mb"] * MIB,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits["file_mb"] * MIB,) * 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits["open_files"],) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    resource.setrlimit(resource.RLIMIT_MSGQUEUE, (0, 0))
    resource.setrlimit(resource.RLIMIT_SIGPENDING, (MAX_PENDING_SIGNALS, MAX_PENDING_SIGNALS))
    if order["processes"]:
        resource.setrlimit(resource.RLIMIT_NPROC, (order["processes"],) * 2)
