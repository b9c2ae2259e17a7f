"""Functions that give up rights: Landlock for files, seccomp for calls, capabilities of root.

Constants: linux/landlock.h, linux/prctl.h, linux/seccomp.h, linux/capability.h.
"""

import ctypes
import os
import platform
import signal
import struct

LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
RULE_PATH_BENEATH = 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
REMOVE_DIR, REMOVE_FILE, MAKE_DIR, MAKE_REG, TRUNCATE = 1 << 4, 1 << 5, 1 << 7, 1 << 8, 1 << 14
READ = EXECUTE | READ_FILE | READ_DIR
ON_FILES = EXECUTE | READ_FILE | WRITE_FILE | TRUNCATE
OWN = READ | WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | TRUNCATE
# Landlock ABI -> number of its rights on files, which are the lowest bits of the mask.
FILE_RIGHTS_BY_ABI = {1: 13, 2: 14, 3: 15, 5: 16}

PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 22, 24, 38, 47
SECCOMP_MODE_FILTER, PR_CAP_AMBIENT_CLEAR_ALL = 2, 4
CAPABILITY_VERSION_3 = 0x20080522
CLONE, CAPSET = {"x86_64": (56, 126), "aarch64": (220, 91)}[platform.machine()]

CLOSE_RANGE, LARGEST_DESCRIPTOR = 436, 0x7FFFFFFF

ALL_SIGNALS, NO_SIGNALS = b"\xff" * 128, bytes(128)

libc = ctypes.CDLL(None, use_errno=True)
locked_libc = ctypes.PyDLL(None, use_errno=True)


def checked(what: str, value: int) -> int:
    """The value that a system call returned.

    Raises:
        OSError: the call failed.
    """
    if value < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return value


def prctl(option: int, value: int) -> None:
    checked(f"prctl {option}", libc.prctl(option, value, 0, 0, 0))


def fork() -> int:
    """`os.fork` without Python's hooks for threads, because the zygote has one thread only.

    The hooks write to 150 memory pages in the child, and each page would have to be copied.
    """
    return checked("fork", locked_libc.fork())


def close_all_but(*kept: int) -> None:
    """Close every descriptor above the standard streams but `kept`, however large its number.

    The numbers depend on how many descriptors the server has open. `close_range` needs Linux 5.9.
    """
    first = 3
    for fd in (*sorted(kept), LARGEST_DESCRIPTOR):
        if first < fd:
            checked("close_range", libc.syscall(CLOSE_RANGE, first, fd - 1, 0))
        first = fd + 1


def set_signal_mask(mask: bytes) -> None:
    """As `signal.pthread_sigmask`, which is slower: it makes an object of each signal."""
    checked("sigprocmask", libc.sigprocmask(signal.SIG_SETMASK, mask, None))


def no_new_privs() -> None:
    """Programs that this process starts gain no rights, for example by setuid."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def leave_root(uid: "int | None") -> None:
    """Drop all capabilities, and become user `uid` if one is given.

    This is final only after `drop_bounding_set`.
    """
    if uid is not None and os.geteuid() != uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    # the effective, permitted and inheritable capabilities
    header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    checked("capset", libc.syscall(CAPSET, header, bytes(24)))


def drop_bounding_set() -> None:
    """Empty the capability bounding set, so that even an exec as root gains no capabilities."""
    number = 0
    while libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0) == 0:
        number += 1
    if number == 0 and os.geteuid() == 0:
        raise OSError(ctypes.get_errno(), "cannot drop root's capabilities")


def restrict_files(readable: "list[str]", devices: "list[str]", own: "list[str]") -> None:
    """Deny all other files to this process and its descendants, by Landlock.

    Args:
        readable: files and folders that may be read and executed.
        devices: files that may be read and written.
        own: folders in which files may be created, read, written and removed.
    """
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
    rules = [(path, READ) for path in readable]
    rules += [(path, READ_FILE | WRITE_FILE) for path in devices]
    rules += [(path, OWN) for path in own]
    for path, rights in rules:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rights &= files if os.path.isdir(path) else files & ON_FILES
        rule = struct.pack("=Qi", rights, fd)
        checked(
            "landlock_add_rule",
            libc.syscall(LANDLOCK_ADD_RULE, ruleset, RULE_PATH_BENEATH, rule, 0),
        )
        os.close(fd)
    checked("landlock_restrict_self", libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def load_filter(program: bytes) -> None:
    """Install the seccomp filter; needs `no_new_privs`."""
    instructions = ctypes.create_string_buffer(program, len(program))
    fprog = struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions))
    checked("seccomp", libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, fprog, 0, 0))
