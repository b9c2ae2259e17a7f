"""The seccomp filter of sandboxed programs: denied system calls, as a classic BPF program.

The filter refuses sockets, new namespaces, memory that no limit counts, and calls that reach the
state of the kernel, of another process, or of files that others use. A program without namespaces
of its own is also refused new processes (threads are allowed), signals and file attributes. Record
locks do nothing. A call that is newer than the table gets ENOSYS, so that a newer kernel opens no
hole. Calls that the kernel itself refuses without a capability, such as `mount` and `reboot`, are
not in the table, because programs have none.

An agent program (`agent=True`) may be node, curl or a shell. Its filter allows what these need,
sockets among it, and denies the rest.

Numbers: Linux `arch/x86/entry/syscalls/syscall_64.tbl` and `include/uapi/asm-generic/unistd.h`.
"""

import errno
import platform
import struct

from tool_server.isolation.errors import SandboxUnavailable

# Denied with EPERM. name: (x86_64, aarch64); None where the architecture has no such call.
_DENIED: dict[str, tuple[int | None, int | None]] = {
    # access to other processes
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "kcmp": (312, 272),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # network and other channels out of the sandbox
    "socket": (41, 198),
    "setsockopt": (54, 208),  # larger buffers are memory that no limit counts
    # Descriptors in flight are counted by user, and hide files without a name.
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semctl": (66, 191),
    "msgget": (68, 186),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    # what is shared with other runs and the host: locks, cached pages and queued writes of files
    "flock": (73, 32),
    "mincore": (27, 232),
    "fadvise64": (221, 223),
    "sync": (162, 81),
    "syncfs": (306, 267),
    # mounts, and files by another way than their path
    "umount2": (166, 39),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    # memory that the address space limit does not see; vmsplice keeps a huge page for each byte
    "vmsplice": (278, 75),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    # objects of the kernel that no limit counts: rules, filters, lists of rights. A rule of
    # Landlock also keeps a deleted file on the disk, where the usage monitor does not see it.
    "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
    "seccomp": (317, 277),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    # namespaces, identity, and the kernel itself
    "unshare": (272, 97),
    "setns": (308, 268),
    "setuid": (105, 146),
    "setgid": (106, 144),
    "setreuid": (113, 145),
    "setregid": (114, 143),
    "setresuid": (117, 147),
    "setresgid": (119, 149),
    "setfsuid": (122, 151),
    "setfsgid": (123, 152),
    "personality": (135, 92),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_setup": (206, 0),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "swapon": (167, 224),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "modify_ldt": (154, None),
}

# Also denied to a program that shares its pid and mount namespaces with the host.
_DENIED_OUTSIDE: dict[str, tuple[int | None, int | None]] = {
    # new processes
    "fork": (57, None),
    "vfork": (58, None),
    # signals
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    # sockets, messages and semaphores of the host, by their names and numbers
    "connect": (42, 203),
    "bind": (49, 200),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    # space and file attributes, which Landlock does not guard
    "fallocate": (285, 47),
    "truncate": (76, 45),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "getxattr": (191, 8),
    "lgetxattr": (192, 9),
    "fgetxattr": (193, 10),
    "listxattr": (194, 11),
    "llistxattr": (195, 12),
    "flistxattr": (196, 13),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
}

# Denied with ENOSYS, because libc then calls preadv instead. With RWF_NOWAIT, preadv2 tells which
# pages of a file the host has in memory, as mincore does.
_ABSENT: dict[str, tuple[int, int]] = {"preadv2": (327, 286)}

# The same for a program that shares its pid and mount namespaces with the host. A thread that waits
# in one of these calls, because the pipe that it writes to is full, keeps a deleted file on the
# disk, where the usage monitor does not see it. Python then copies by read and write.
_ABSENT_OUTSIDE: dict[str, tuple[int, int]] = {"sendfile": (40, 71), "splice": (275, 76)}

# Calls of `_DENIED` that an agent program may make: sockets, locks and watches of files, priorities
# of its own threads. Those that change the user succeed only for the user that it already is.
_AGENT_CALLS = {
    *("socket", "setsockopt", "sendmsg", "sendmmsg", "flock", "fadvise64"),
    *("inotify_init", "inotify_init1", "pidfd_open", "pidfd_send_signal"),
    *("setpriority", "ioprio_set", "sched_setaffinity"),
    *("sched_setscheduler", "sched_setparam", "sched_setattr"),
    *("setuid", "setgid", "setreuid", "setregid", "setresuid", "setresgid"),
    *("setfsuid", "setfsgid"),
}

# AF_UNIX, AF_INET, AF_INET6, AF_NETLINK (which lists the interfaces). AF_VSOCK, for example, would
# reach the host of a virtual machine from every network namespace.
_AGENT_FAMILIES: tuple[tuple[int, int], int, tuple[int, ...]] = ((41, 198), 0, (1, 2, 10, 16))

# TIOCSTI, TIOCLINUX: input in the name of another user of a terminal
_AGENT_DENIED_IOCTLS = (0x5412, 0x541C)

_NEWEST_KNOWN = 450  # set_mempolicy_home_node, the last call the table was checked against

_FLAGS_OF_SOCKETS = (0, 0x800, 0x80000, 0x80800)  # SOCK_NONBLOCK, SOCK_CLOEXEC

# Denied where an argument has one of these values. name: (numbers, argument, values).
_Options = dict[str, tuple[tuple[int, int], int, tuple[int, ...]]]
_DENIED_OPTIONS: _Options = {
    # F_SETLEASE, F_NOTIFY: whoever opens the file waits, or tells of it. F_GETLK, F_OFD_GETLK: a
    # lock on a file that all runs can read would be seen by another run. F_SETPIPE_SZ: pages of
    # pipes are counted by user, and a user who has many gets small pipes. F_SET_RW_HINT,
    # F_SET_FILE_RW_HINT: a number that the kernel keeps with a file for all who read it.
    "fcntl": ((72, 25), 1, (1024, 1026, 5, 36, 1031, 1036, 1038)),
    # PR_SET_SECCOMP, PR_FUTEX_HASH: memory of the kernel that no limit counts. PR_SET_MEMORY_MERGE:
    # the same as MADV_MERGEABLE.
    "prctl": ((157, 167), 0, (22, 78, 67)),
    # MADV_MERGEABLE, MADV_PAGEOUT: memory that is shared with others
    "madvise": ((28, 233), 2, (12, 21)),
}

# The same for a program that shares its pid and mount namespaces with the host.
_DENIED_OPTIONS_OUTSIDE: _Options = {
    # F_SETOWN, F_SETSIG, F_SETOWN_EX: a signal to any process of the same user
    "fcntl": ((72, 25), 1, (*_DENIED_OPTIONS["fcntl"][2], 8, 10, 15)),
    # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER: the program must die with its parent
    "prctl": ((157, 167), 0, (*_DENIED_OPTIONS["prctl"][2], 1, 36)),
    # CLOSE_RANGE_UNSHARE, also with CLOSE_RANGE_CLOEXEC: the usage monitor looks at the descriptors
    # of a process, which are those of its first thread
    "close_range": ((436, 436), 2, (2, 6)),
    # FUTEX_LOCK_PI, FUTEX_TRYLOCK_PI, FUTEX_LOCK_PI2, also with FUTEX_PRIVATE_FLAG: the kernel
    # notes the lock with its owner, which can be any process whose number the program writes to it
    "futex": ((202, 98), 1, (6, 8, 13, 134, 136, 141)),
    # all but SOCK_STREAM, because a datagram socket can send to sockets of the host
    "socketpair": (
        (53, 199),
        1,
        tuple(kind | flags for kind in (2, 3, 4, 5, 6, 10) for flags in _FLAGS_OF_SOCKETS),
    ),
}

# F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW: they succeed without a lock, because a real one on
# /dev/null would be seen by other runs. SQLite needs them for each file, and has locks of its own
# between the threads of a process.
_IDLE_LOCKS: tuple[tuple[int, int], int, tuple[int, ...]] = ((72, 25), 1, (6, 7, 37, 38))

# TCGETS, TCGETS2, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX. Others reach terminals, signals
# of other processes, or attributes of files; a program gets ENOTTY, as from a file without them.
_ALLOWED_IOCTLS = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)

# Memory that outlives its mapping, so that no limit counts it: MAP_SHARED (also the low bit of
# MAP_SHARED_VALIDATE) with MAP_ANONYMOUS; and the host's huge pages (MAP_HUGETLB).
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = 0x01, 0x20, 0x40000

# machine: (column of the tables, AUDIT_ARCH_*, clone, clone3, prlimit64, ioctl, mmap)
_ARCHITECTURES = {
    "x86_64": (0, 0xC000003E, 56, 435, 302, 16, 9),
    "aarch64": (1, 0xC00000B7, 220, 435, 261, 29, 222),
}

# Opcodes: linux/bpf_common.h; return values: linux/seccomp.h.
_LOAD, _JUMP_EQ, _JUMP_GT, _JUMP_SET, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_AT_NR, _AT_ARCH, _AT_ARGS = 0, 4, 16  # struct seccomp_data; low halves, little endian
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_CLONE_FILES, _CLONE_THREAD = 0x00000400, 0x00010000
_CLONE_NEW = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET


_Instruction = tuple[int, int, int, int]
"""Opcode, instructions to skip if true and if false, operand (`struct sock_filter`)."""


def build_filter(machine: str | None = None, *, processes: bool, agent: bool = False) -> bytes:
    """The filter as an array of `struct sock_filter`, 8 bytes each.

    Args:
        machine: architecture in the form of `platform.machine()`; None takes this machine's.
        processes: whether the program has its own namespaces, so that it may start processes.
        agent: whether it is an agent program; it has its own namespaces too.

    Raises:
        SandboxUnavailable: the architecture is neither x86_64 nor aarch64.
    """
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise SandboxUnavailable(
            f"no system call table for machine={machine!r}: have {', '.join(_ARCHITECTURES)}"
        )
    assert processes or not agent, "an agent program has its own namespaces"
    column, audit_arch, clone, clone3, prlimit64, ioctl, mmap = _ARCHITECTURES[machine]
    allow, deny, absent = map(_return, (_ALLOW, _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS))
    program = [
        (_LOAD, 0, 0, _AT_ARCH),
        (_JUMP_EQ, 1, 0, audit_arch),
        _return(_KILL_PROCESS),
        (_LOAD, 0, 0, _AT_NR),
        # Also refuses the x32 calls, whose numbers carry bit 30.
        (_JUMP_GT, 0, 1, _NEWEST_KNOWN),
        absent,
        # clone3 passes its flags in memory, which a filter cannot read; libc falls back to clone.
        *_if_equal(clone3, absent),
    ]
    denied = _DENIED if processes else _DENIED | _DENIED_OUTSIDE
    if agent:
        denied = {name: each for name, each in denied.items() if name not in _AGENT_CALLS}
    for numbers in denied.values():
        if (number := numbers[column]) is not None:
            program += _if_equal(number, deny)
    for numbers in (_ABSENT if processes else _ABSENT | _ABSENT_OUTSIDE).values():
        program += _if_equal(numbers[column], absent)
    if agent:
        numbers, argument, values = _AGENT_FAMILIES
        no_family = _return(_ERRNO | errno.EAFNOSUPPORT)
        rules = [
            (numbers[column], argument, values, allow, no_family),
            (ioctl, 1, _AGENT_DENIED_IOCTLS, deny, allow),
        ]
    else:
        numbers, argument, values = _IDLE_LOCKS
        rules = [(numbers[column], argument, values, _return(_ERRNO), (_LOAD, 0, 0, _AT_NR))]
        options = _DENIED_OPTIONS if processes else _DENIED_OPTIONS | _DENIED_OPTIONS_OUTSIDE
        rules += [
            (numbers[column], argument, values, deny, allow)
            for numbers, argument, values in options.values()
        ]
        rules.append((ioctl, 1, _ALLOWED_IOCTLS, allow, _return(_ERRNO | errno.ENOTTY)))
    for number, argument, values, if_one_of_them, otherwise in rules:
        tests = [each for value in values for each in _if_equal(value, if_one_of_them)]
        program += _if_equal(number, _load(argument), *tests, otherwise)
    # An agent program may share memory; its processes are charged for it while they map it.
    is_shared = [(_JUMP_SET, 0, 2, _MAP_ANONYMOUS), (_JUMP_SET, 0, 1, _MAP_SHARED)]
    is_huge = (_JUMP_SET, 2, 3 if agent else 0, _MAP_HUGETLB)
    program += _if_equal(mmap, _load(3), is_huge, *is_shared, deny, allow)
    if processes:
        flags = [(_JUMP_SET, 0, 1, _CLONE_NEW), deny, allow]
    else:  # threads that share the descriptors of their process
        flags = [(_JUMP_SET, 0, 2, _CLONE_THREAD), (_JUMP_SET, 0, 1, _CLONE_FILES), allow, deny]
    program += _if_equal(clone, _load(0), *flags)
    # prlimit64 only on the calling process (pid 0).
    program += _if_equal(prlimit64, _load(0), (_JUMP_EQ, 1, 0, 0), deny)
    program.append(allow)
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _return(value: int) -> _Instruction:
    return _RETURN, 0, 0, value


def _load(argument: int) -> _Instruction:
    """Load an argument of the call; the number of the call is lost."""
    return _LOAD, 0, 0, _AT_ARGS + 8 * argument


def _if_equal(value: int, *then: _Instruction) -> list[_Instruction]:
    """Run instructions if the loaded value is this one, and skip them otherwise."""
    return [(_JUMP_EQ, 0, len(then), value), *then]
