"""What runs in a sandbox before an agent program: takes the user and limits, listens, then exec.

`python -I -S inside.py CONTROL FOLDER CWD PORT UID MEMORY_BYTES PROCESSES COMMAND...`

CONTROL is a socket to the worker. When all is set up, this process sends descriptors there: of
FOLDER, so that the worker can read the answer when the sandbox is gone, and of a socket that
listens on PORT in the sandbox's network, so that the worker itself serves it and no process inside
need pass bytes on. Standard library only, without modules that take long to import.
"""

import _socket  # without the enums of `socket` and `signal` the start takes 10 ms less
import os
import resource
import struct
import sys

SIGPIPE, SIGXFSZ = 13, 25
OPEN_FILES = 4096
LARGEST_DESCRIPTOR = 0x7FFFFFFF


def main() -> None:
    control_fd, folder, cwd, *rest = sys.argv[1:]
    port, uid, memory_bytes, processes = map(int, rest[:4])
    command = rest[4:]
    control = _socket.socket(fileno=int(control_fd))
    os.set_inheritable(control.fileno(), False)
    os.closerange(3, control.fileno())  # bwrap leaves the user namespace open
    os.closerange(control.fileno() + 1, LARGEST_DESCRIPTOR)
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if the host's memory is full, the kernel kills this before the worker
    if uid:  # this process is root of its user namespace, and loses all capabilities here
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    for path in (os.environ["HOME"], folder):
        os.mkdir(path, 0o700)
    limits = {"NPROC": processes, "DATA": memory_bytes, "NOFILE": OPEN_FILES, "CORE": 0}
    for name, value in limits.items():
        which = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))
    listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    sent = [os.open(folder, os.O_RDONLY | os.O_DIRECTORY), listener.detach()]
    os.chdir(cwd)
    rights = struct.pack("=2i", *sent)
    control.sendmsg([b"ready"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
    import _signal  # pyright: ignore[reportMissingImports]

    for number in (SIGPIPE, SIGXFSZ):  # Python ignores them, and the command would inherit it
        _signal.signal(number, _signal.SIG_DFL)
    try:
        os.execv(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
