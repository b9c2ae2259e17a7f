"""Programs that use what the kernel shares between runs, or keeps for them uncounted."""

from dataclasses import replace

from tests.tool_server.hostile.program import ENDLESS, LIMITS, MARKED, Hostile
from tool_server.sandbox import RunStatus

BUBBLEWRAP = ("bubblewrap",)
SMALL = replace(LIMITS, memory_mb=64)

SHARED = [
    Hostile(
        name="leases and watches of files",
        category="shared by runs",
        code="""
import fcntl
F_NOTIFY = 1026
for path in ("main.py", json.__file__, HOST.source, sys.executable, "/usr/lib/os-release"):
    for kind in (fcntl.F_WRLCK, fcntl.F_RDLCK):
        try:
            fd = os.open(path, os.O_RDONLY)
        except OSError:
            continue
        if attempt(f"lease {kind} of {path}", lambda: fcntl.fcntl(fd, fcntl.F_SETLEASE, kind)) == 0:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        os.close(fd)
signal.signal(signal.SIGIO, signal.SIG_IGN)
for path in (".", "/usr/lib", os.path.dirname(json.__file__)):
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        continue
    attempt(f"watch of {path}", lambda: fcntl.fcntl(fd, F_NOTIFY, 0x80000001))
""",
    ),
    Hostile(
        name="a lock that two runs see",
        category="shared by runs",
        code=(
            _LOCK := """
import fcntl
end = time.monotonic() + 0.5
fds = []
for path in (json.__file__, "/dev/null", "/usr/lib", "/usr/bin/bash"):
    try:
        fds.append((path, os.open(path, os.O_RDONLY)))
    except OSError:
        pass
while time.monotonic() < end:
    for path, fd in fds:
        for lock in (
            lambda: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB),
            lambda: fcntl.fcntl(fd, 37, struct.pack("=hhiqqi4x", 1, 0, 0, 0, 0, 0)),
        ):
            try:
                lock()
            except BlockingIOError:
                reached(f"the lock of another run on {path}")
            except OSError:
                pass
    time.sleep(0.02)
"""
        ),
        beside=_LOCK,
    ),
    Hostile(
        name="ioctl and prctl that reach beyond the program",
        category="shared by runs",
        code="""
import fcntl
for path in ("main.py", json.__file__, "/usr/lib", "/"):
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        continue
    for what, number, value in (
        ("FIFREEZE", 0xC0045877, bytes(4)), ("FITHAW", 0xC0045878, bytes(4)),
        ("FICLONE", 0x40049409, fd),
    ):
        attempt(f"{what} {path}", lambda: fcntl.ioctl(fd, number, value))
    for what, get, put in (
        ("FS_IOC_SETFLAGS", 0x80086601, 0x40086602), ("FSSETXATTR", 0x801C581F, 0x401C5820),
    ):
        try:
            same = fcntl.ioctl(fd, get, bytes(32))
        except OSError:
            continue
        if path != "main.py":
            attempt(f"{what} {path}", lambda: fcntl.ioctl(fd, put, same))
    if libc.syncfs(fd) == 0 and path != "main.py":
        reached(f"syncfs {path}")
for fd in range(3):
    attempt("TIOCSTI", lambda: fcntl.ioctl(fd, 0x5412, b"x"))
for option, *values in ((35, 1, 0), (57, 1), (62, 1, 0, 0)):  # SET_MM, IO_FLUSHER, SCHED_CORE
    if libc.prctl(option, *values, *[0] * (4 - len(values))) == 0:
        reached(f"prctl {option}")
for clock in (8, 9):  # alarms that wake the machine
    if call(222, 107)(clock, None, ctypes.create_string_buffer(8)) == 0:
        reached(f"clock {clock}")
""",
    ),
    Hostile(
        name="timers and requests of which the host has a number",
        category="shared by runs",
        code="""
event = struct.pack("=QiiQ40x", 0, signal.SIGUSR1, 1, 0)  # SIGEV_NONE
timer, timers = ctypes.create_string_buffer(8), 0
while timers < 60_000 and call(222, 107)(1, event, timer) == 0:
    timers += 1
if timers > 20_000:
    reached(f"{timers} timers of its user's")
context = ctypes.c_ulong()
if call(206, 0)(ctypes.c_uint(20_000), ctypes.byref(context)) == 0:
    reached("20000 of the host's asynchronous requests")
""",
    ),
    Hostile(
        name="watches, queues and keys of its user's",
        category="shared by runs",
        code="""
for what, x86_64, aarch64, *args in (
    ("inotify_init1", 294, 26, 0), ("fanotify_init", 300, 262, 0, 0),
    ("mq_open", 240, 180, b"hostile", 0o102, 0o600, None),
    ("add_key", 248, 217, b"user", b"hostile", b"x", 1, -3), ("keyctl", 250, 219, 0, -3, 1),
    ("userfaultfd", 323, 282, 1), ("perf_event_open", 298, 241, None, 0, -1, -1, 0),
):
    refused(what, call(x86_64, aarch64), *args)
""",
    ),
    Hostile(
        name="pipes of its user's",
        category="shared by runs",
        beside="""
time.sleep(0.5)
read_end, write_end = os.pipe()
os.set_blocking(write_end, False)
if (size := os.write(write_end, bytes(65536))) < 65536:
    reached(f"the neighbour, whose pipe holds {size} bytes")
""",
        code="""
import fcntl
held = []
try:
    while True:
        held.append(os.pipe())
        for size in (1 << 20, 1 << 19, 1 << 18, 1 << 17):
            try:
                fcntl.fcntl(held[-1][0], 1031, size)
                break
            except OSError:
                pass
        if len(held) == 28:
            if not HOST.has_processes or os.fork():
                break
            held.clear()
            os.closerange(3, 64)  # the parent keeps them
except OSError:
    pass
time.sleep(1)
os._exit(0)
""",
    ),
    Hostile(
        name="a neighbour who came first starved of processes",
        category="shared by runs",
        rungs=BUBBLEWRAP,
        code="""
time.sleep(0.6)
try:
    for _ in range(4):
        if os.fork() == 0:
            time.sleep(0.2)
            os._exit(0)
except OSError:
    reached("the neighbour, which cannot fork")
""",
        beside="""
time.sleep(0.1)  # so that the other run counts when this one asks
try:
    for _ in range(200):
        if os.fork() == 0:
            time.sleep(1)
            os._exit(0)
except OSError:
    pass
time.sleep(1)
os._exit(0)
""",
    ),
    Hostile(
        name="another process for the killer of the kernel",
        category="shared by runs",
        oom_score_seen=True,
        limits=ENDLESS,
        code=f"""
for value in ("-1000", "0"):
    for path in ("/proc/self/oom_score_adj", "/proc/1/oom_score_adj"):
        attempt(path, lambda: open(path, "w").write(value))
libc.prctl(15, b"{MARKED}", 0, 0, 0)
time.sleep(60)
""",
    ),
]

MEMORY = [
    Hostile(
        name="shared memory that no process maps",
        category="memory uncounted",
        rungs=BUBBLEWRAP,
        limits=SMALL,
        code="""
import mmap
for _ in range(14):
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        try:
            held = mmap.mmap(-1, 20 << 20)
        except OSError:
            os._exit(0)
        for at in range(0, len(held), 4096):
            held[at] = 1
        held.madvise(mmap.MADV_DONTNEED)
        time.sleep(0.9)
        os._exit(held[4096])
time.sleep(1)
kept = 0
try:
    while True:
        kept += os.waitstatus_to_exitcode(os.wait()[1])
except ChildProcessError:
    pass
if kept > 5:
    reached(f"a second with {20 * kept} MB and a limit of 64")
""",
    ),
    Hostile(
        name="shared memory without a limit of addresses",
        category="memory uncounted",
        rungs=BUBBLEWRAP,
        language="nodejs",
        # Perl has the calls; as a child of Node its address space is not limited.
        code="""
const perl = [
  "$| = 1; my ($mb, @held) = (1 << 20);",
  "for (1 .. 20) {",
  "  my $at = syscall(9, 0, 30 * $mb, 3, 0x21, -1, 0);",
  "  exit if $at == -1;",
  "  open(my $zero, '<', '/dev/zero'); syscall(0, fileno($zero), $at, 30 * $mb);",
  "  syscall(28, $at, 30 * $mb, 4);",
  "}",
  "select(undef, undef, undef, 0.7); print \\"REACHED 600 MB shared with a limit of 128\\\\n\\";",
].join("\\n");
const spawn = require("child_process").spawnSync;
if (process.arch == "x64") console.log(String(spawn("/usr/bin/perl", ["-e", perl]).stdout));
""",
    ),
    Hostile(
        name="page tables without a limit of addresses",
        category="memory uncounted",
        rungs=BUBBLEWRAP,
        language="nodejs",
        code="""
const perl = [
  "my $mb = 1 << 20; my $at = syscall(9, 0, 150_000 * $mb, 1, 0x4022, -1, 0); exit if $at == -1;",
  "syscall(28, $at, 150_000 * $mb, 15);",
  "unpack('P1', pack('Q', $at + $_ * 2 * $mb)) for 0 .. 74_999;",
  "select(undef, undef, undef, 0.7); print \\"REACHED 300 MB of page tables\\\\n\\";",
].join("\\n");
const spawn = require("child_process").spawnSync;
if (process.arch == "x64") console.log(String(spawn("/usr/bin/perl", ["-e", perl]).stdout));
""",
    ),
    Hostile(
        name="huge pages held by a byte in a pipe",
        category="memory uncounted",
        limits=SMALL,
        code="""
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
huge, held, pipe = 2 << 20, 0, None
while held < 150 and HOST.huge_pages:
    try:
        if held % 15 == 0:
            pipe = os.pipe()
    except OSError:
        break
    at = libc.mmap(None, 2 * huge, 3, 0x22, -1, 0)
    if at in (None, 2**64 - 1):
        break
    page = (at + huge - 1) // huge * huge
    libc.madvise(page, huge, 14)
    ctypes.memset(page, 1, huge)
    part = struct.pack("=QQ", page, 1)
    if call(278, 75)(pipe[1], part, ctypes.c_size_t(1), 0) != 1:
        break
    libc.munmap(at, 2 * huge)
    held += 1
time.sleep(0.6)
if held > 60:
    reached(f"{2 * held} MB in pipes with a limit of 64")
""",
    ),
    Hostile(
        name="files without a name in flight",
        category="memory uncounted",
        limits=replace(LIMITS, wall_s=1.5),
        code="""
block, held, pairs = b"x" * (1 << 20), 0, []
try:
    while held < 50:
        if held % 8 == 0:
            pairs.append(socket.socketpair())
        fd = os.open("f", os.O_RDWR | os.O_CREAT)
        if os.write(fd, block) < len(block):
            break
        os.unlink("f")
        socket.send_fds(pairs[-1][0], [b"x"], [fd])
        os.close(fd)
        held += 1
except OSError:
    pass
time.sleep(0.8)
if held > 12:
    reached(f"{held} MB in files in flight with a limit of 2")
os._exit(0)
""",
    ),
    Hostile(
        name="files that come and go while they are counted",
        category="memory uncounted",
        limits=replace(LIMITS, wall_s=2.5),
        code="""
def flicker(name):
    while True:
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY))
        os.unlink(name)
for number in range(6):
    threading.Thread(target=flicker, args=(f"flicker{number}",), daemon=True).start()
block, written = b"x" * (1 << 20), 0
try:
    for number in range(40):
        with open(f"f{number}", "wb") as file:
            written += file.write(block)
        time.sleep(0.04)
except OSError:
    pass
if written > 32 << 20:
    reached(f"{written >> 20} MB with a limit of 2")
os._exit(0)
""",
    ),
    Hostile(
        name="sockets in flight in each other",
        category="memory uncounted",
        code="""
for _ in range(300):
    try:
        a, b = socket.socketpair()
        for own, other in ((a, b), (b, a)):
            socket.send_fds(own, [b"x"], [a.fileno(), b.fileno(), other.fileno()])
        a.close()
        b.close()
    except OSError:
        break
""",
    ),
]

SERVER = [
    Hostile(
        name="a hundred thousand mappings",
        category="the server's time",
        rungs=BUBBLEWRAP,
        limits=replace(LIMITS, wall_s=1.5, memory_mb=512, processes=32),
        code=(
            _MAPPINGS := """
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
at = libc.mmap(None, 60_000 * 4096, 1, 0x4022, -1, 0)
for page in range(0, 60_000, 2):
    if libc.mprotect(at + page * 4096, 4096, 3):
        break
libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(60_000 * 4096), 22)
try:
    for _ in range(28):
        if os.fork() == 0:
            break
except OSError:
    pass
time.sleep(60)
"""
        ),
        beside=_MAPPINGS,
    ),
    Hostile(
        name="as many files as it may have",
        category="the server's time",
        limits=replace(LIMITS, wall_s=2.0, files=4096, file_mb=16),
        code="""
try:
    for number in range(3900):
        if number % 300 == 0:
            folder = f"folder{number}"
            os.mkdir(folder)
            for _ in range(9):
                folder += "/" + "deep" * 20
                os.mkdir(folder)
        os.close(os.open(f"{folder}/{number}", os.O_CREAT | os.O_WRONLY))
except OSError:
    pass
time.sleep(0.7)
""",
    ),
    Hostile(
        name="thousands of threads",
        category="the server's time",
        rungs=("landlock",),
        code="""
import _thread
threading.stack_size(32768)
try:
    while True:
        _thread.start_new_thread(time.sleep, (9,))
except (RuntimeError, MemoryError):
    pass
time.sleep(60)
""",
    ),
    Hostile(
        name="children that nobody waits for",
        category="the server's time",
        rungs=BUBBLEWRAP,
        limits=ENDLESS,
        statuses=(RunStatus.TIME_LIMIT,),
        code="""
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    try:
        if os.fork() == 0:
            end = time.monotonic() + 0.02
            while time.monotonic() < end:
                pass
            os._exit(0)
    except OSError:
        time.sleep(0.005)
""",
    ),
    Hostile(
        name="a program that stops itself",
        category="the server's time",
        rungs=BUBBLEWRAP,
        limits=ENDLESS,
        statuses=(RunStatus.TIME_LIMIT,),
        code="os.fork()\nos.kill(0, signal.SIGSTOP)\ntime.sleep(60)",
    ),
    Hostile(
        name="a pipe and a folder where files are fetched",
        category="the server's time",
        fetch=("pipe", "folder", "deep/pipe", "terminal", "loop"),
        code="""
os.mkdir("folder")
os.mkdir("deep")
for make, *args in (
    (os.mkfifo, "pipe"), (os.mkfifo, "deep/pipe"), (os.symlink, "loop", "loop"),
    (os.symlink, "/dev/zero", "terminal"),
):
    try:
        make(*args)
    except OSError:
        pass
""",
    ),
    Hostile(
        name="streams closed, and still there",
        category="the server's time",
        limits=ENDLESS,
        statuses=(RunStatus.TIME_LIMIT,),
        code="os.closerange(0, 3)\ntime.sleep(60)",
    ),
]
