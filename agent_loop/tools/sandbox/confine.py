"""Runs inside the child: gives up every right that a program needs not, then becomes it.

Started as `python -I -S -c <this text> <plan>`, so it imports the standard library only. The plan
is JSON: `readable` and `devices` (paths), `filter` (BPF program, hex), `status_fd` (gets a byte
when all is in place), `argv`. Any step that fails ends the child before the program starts.
Constants: linux/landlock.h, linux/prctl.h, linux/seccomp.h.
"""

import ctypes
import json
import os
import signal
import struct
import sys

LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
RULE_PATH_BENEATH = 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
# Rights on files, by the Landlock ABI that brought them; one more bit each, all handled.
FILE_RIGHTS_BY_ABI = {1: 13, 2: 14, 3: 15, 5: 16}

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
SECCOMP_MODE_FILTER = 2

libc = ctypes.CDLL(None, use_errno=True)


def checked(what: str, value: int) -> int:
    """The value of a system call, or the end of this process."""
    if value < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return value


def restrict_files(readable: list[str], devices: list[str]) -> None:
    """Refuse every file but these, for this process and all it becomes."""
    version_flag = 1
    abi = checked("landlock", libc.syscall(LANDLOCK_CREATE_RULESET, None, 0, version_flag))
    bits = max(bits for since, bits in FILE_RIGHTS_BY_ABI.items() if since <= abi)
    files = (1 << bits) - 1
    network = 3 if abi >= 4 else 0  # bind and connect over TCP
    scopes = 3 if abi >= 6 else 0  # abstract unix sockets, signals
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    attr = struct.pack("=QQQ", files, network, scopes)[:size]
    ruleset = checked(
        "landlock_create_ruleset",
        libc.syscall(LANDLOCK_CREATE_RULESET, attr, ctypes.c_size_t(len(attr)), 0),
    )
    rules = [(path, EXECUTE | READ_FILE | READ_DIR) for path in readable]
    rules += [(path, READ_FILE | WRITE_FILE) for path in devices]
    for path, rights in rules:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if not os.path.isdir(path):
            rights &= ~READ_DIR
        rule = struct.pack("=Qi", rights, fd)
        checked(
            "landlock_add_rule",
            libc.syscall(LANDLOCK_ADD_RULE, ruleset, RULE_PATH_BENEATH, rule, 0),
        )
        os.close(fd)
    checked("landlock_restrict_self", libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def drop_capabilities() -> None:
    """Empty the bounding set, so that not even root has capabilities after the exec."""
    number = 0
    while libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0) == 0:
        number += 1
    if number == 0 and os.geteuid() == 0:
        raise OSError(ctypes.get_errno(), "cannot drop root's capabilities")


def load_filter(program: bytes) -> None:
    """Install the seccomp filter."""
    instructions = ctypes.create_string_buffer(program, len(program))
    fprog = struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions))
    checked("seccomp", libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, fprog, 0, 0))


def main() -> None:
    """Confine, then exec."""
    plan = json.loads(sys.argv[1])
    parent = os.getppid()
    checked("pdeathsig", libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    if os.getppid() != parent:
        raise SystemExit("the server is gone")
    drop_capabilities()
    checked("no_new_privs", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    restrict_files(plan["readable"], plan["devices"])
    load_filter(bytes.fromhex(plan["filter"]))
    os.set_inheritable(plan["status_fd"], False)
    os.write(plan["status_fd"], b"1")
    os.execve(plan["argv"][0], plan["argv"], {})


if __name__ == "__main__":
    main()
