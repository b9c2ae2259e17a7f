"""Programs that take more than their share."""

from dataclasses import replace

from tests.tool_server.hostile.program import ENDLESS, LIMITS, Hostile
from tool_server.sandbox import RunStatus

ENDED = (RunStatus.ERROR, RunStatus.TIME_LIMIT)
LATE = (RunStatus.TIME_LIMIT,)
SMALL = replace(LIMITS, memory_mb=64)
BUBBLEWRAP = ("bubblewrap",)

RESOURCES = [
    Hostile(
        name="memory bomb",
        category="resources",
        code="""
held = []
for size in (1 << 30, 1 << 28, 1 << 26):
    try:
        while len(held) < 64:
            held.append(bytearray(size))
            reached(f"{sum(map(len, held)) >> 20} MB with a limit of 128") if (
                sum(map(len, held)) > 160 << 20) else None
    except MemoryError:
        pass
""",
    ),
    Hostile(
        name="many small mappings",
        category="resources",
        code="""
import mmap
held = []
for flags in (mmap.MAP_PRIVATE, mmap.MAP_SHARED):
    try:
        while len(held) < 400:
            held.append(mmap.mmap(-1, 1 << 20, flags=flags | mmap.MAP_ANONYMOUS))
            held[-1].write(b"x" * (1 << 20))
    except (OSError, ValueError):
        pass
if len(held) > 160:
    reached(f"{len(held)} MB with a limit of 128")
""",
    ),
    Hostile(
        name="memory that stays",
        category="resources",
        code="""
libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
page = ctypes.create_string_buffer(1 << 20)
for what, result in (("mlock", libc.mlock(page, 1 << 20)), ("mlockall", libc.mlockall(3))):
    if result == 0:
        reached(what)
for what, x86_64, aarch64 in (("memfd_create", 319, 279), ("shmget", 29, 194)):
    refused(what, call(x86_64, aarch64), 0, 1 << 26, 0o1600)
""",
    ),
    Hostile(
        name="forks that hold memory",
        category="resources",
        rungs=BUBBLEWRAP,
        limits=SMALL,
        code="""
for _ in range(12):
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        held = bytearray(b"x") * (14 << 20)
        time.sleep(5)
        os._exit(0)
time.sleep(1)
reached("a second with 168 MB and a limit of 64")
""",
    ),
    Hostile(
        name="forks of threads that hold memory",
        category="resources",
        rungs=BUBBLEWRAP,
        limits=replace(SMALL, processes=40),
        code="""
import mmap
threading.stack_size(65536)
forked = []
def one():
    try:
        if os.fork() == 0:
            held = mmap.mmap(-1, 14 << 20, flags=PRIVATE)
            for at in range(0, 14 << 20, 4096):
                held[at] = 1
            time.sleep(5)
            os._exit(0)
        forked.append(1)
    except OSError:
        pass
    time.sleep(5)
try:
    for _ in range(12):
        threading.Thread(target=one, daemon=True).start()
except RuntimeError:
    pass
time.sleep(1.2)
if len(forked) > 5:
    reached(f"a second with {14 * len(forked)} MB and a limit of 64")
os._exit(0)
""",
    ),
    Hostile(
        name="daemons that hold memory",
        category="resources",
        rungs=BUBBLEWRAP,
        limits=SMALL,
        code="""
for _ in range(10):
    try:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                held = bytearray(b"x") * (14 << 20)
                time.sleep(5)
            os._exit(0)
        os.wait()
    except OSError:
        break
time.sleep(1)
reached("a second with 140 MB and a limit of 64")
""",
    ),
    Hostile(
        name="memory of the kernel in socket pairs",
        category="resources",
        limits=SMALL,
        code="""
import mmap
counted = shared(4096)
def fill(number):
    total, held = 0, []
    try:
        while True:
            pair = socket.socketpair()
            held.append(pair)
            for own in pair:
                own.setblocking(False)
                try:
                    own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
                except OSError:
                    pass
                try:
                    while True:
                        total += own.send(b"x" * 32000)
                except BlockingIOError:
                    pass
    except OSError:
        pass
    counted[number * 8 : number * 8 + 8] = struct.pack("=Q", total)
    return held
for number in range(1, 15 if HOST.has_processes else 1):
    try:
        if os.fork() == 0:
            held = fill(number)
            time.sleep(5)
            os._exit(0)
    except OSError:
        break
held = fill(0)
time.sleep(1)
total = sum(struct.unpack("=512Q", counted[:]))
if total > 80 << 20:
    reached(f"{total >> 20} MB in socket pairs with a limit of 64")
os._exit(0)
""",
    ),
    Hostile(
        name="memory of the kernel in pipes",
        category="resources",
        limits=SMALL,
        code="""
import fcntl, mmap
counted = shared(4096)
def fill(number):
    total, held = 0, []
    try:
        while True:
            read_end, write_end = os.pipe()
            held.append(read_end)
            os.set_blocking(write_end, False)
            try:
                fcntl.fcntl(write_end, 1031, 1 << 20)
            except OSError:
                pass
            try:
                while True:
                    total += os.write(write_end, b"x" * 65536)
            except BlockingIOError:
                pass
    except OSError:
        pass
    counted[number * 8 : number * 8 + 8] = struct.pack("=Q", total)
for number in range(1, 15 if HOST.has_processes else 1):
    try:
        if os.fork() == 0:
            fill(number)
            time.sleep(5)
            os._exit(0)
    except OSError:
        break
fill(0)
time.sleep(1)
total = sum(struct.unpack("=512Q", counted[:]))
if total > 80 << 20:
    reached(f"{total >> 20} MB in pipes with a limit of 64")
os._exit(0)
""",
    ),
    Hostile(
        name="fill the disk",
        category="resources",
        limits=replace(LIMITS, wall_s=1.5),
        code="""
block, written = b"x" * (1 << 20), 0
for folder in (".", "/tmp", "/dev/shm", "/var/tmp", "/box"):
    for number in range(64):
        try:
            with open(f"{folder}/{HOST.mark}-{number}", "wb") as file:
                written += file.write(block)
        except OSError:
            break
time.sleep(0.6)
if written > 8 << 20:
    reached(f"{written >> 20} MB with a limit of 2")
""",
    ),
    Hostile(
        name="fill the disk by fallocate",
        category="resources",
        limits=replace(LIMITS, wall_s=1.5),
        code="""
taken = 0
try:
    for number in range(300):
        fd = os.open(f"f{number}", os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(fd, 0, 1 << 20)
        os.close(fd)
        taken += 1
except OSError:
    pass
if taken > 32:
    reached(f"{taken} MB at once with a limit of 2")
""",
    ),
    Hostile(
        name="files without a name that stay mapped",
        category="resources",
        limits=replace(LIMITS, wall_s=1.5),
        code="""
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
block, held = b"x" * (1 << 20), 0
end = time.monotonic() + 1
try:
    while time.monotonic() < end and held < 200:
        fd = os.open("f", os.O_RDWR | os.O_CREAT)
        if os.write(fd, block) < len(block):
            break
        address = libc.mmap(None, 4096, 1, 1, fd, 0)
        os.unlink("f")
        os.close(fd)
        held += 1
        time.sleep(0.002)
except OSError:
    pass
if held > 32:
    reached(f"{held} MB in files without a name with a limit of 2")
""",
    ),
    Hostile(
        name="files without a name that stay open",
        category="resources",
        limits=replace(LIMITS, wall_s=1.5),
        code="""
block, held = b"x" * (1 << 20), []
try:
    while len(held) < 60:
        held.append(os.open("f", os.O_RDWR | os.O_CREAT))
        if os.write(held[-1], block) < len(block):
            break
        os.unlink("f")
except OSError:
    pass
time.sleep(0.6)
if len(held) > 8:
    reached(f"{len(held)} MB in files without a name with a limit of 2")
os._exit(0)
""",
    ),
    Hostile(
        name="temporary files without a name",
        category="resources",
        limits=replace(LIMITS, wall_s=1.5),
        code="""
block, held = b"x" * (1 << 20), []
try:
    while len(held) < 60:
        held.append(os.open(".", os.O_TMPFILE | os.O_RDWR))
        if os.write(held[-1], block) < len(block):
            break
except OSError:
    pass
time.sleep(0.6)
if len(held) > 8:
    reached(f"{len(held)} MB in files without a name with a limit of 2")
os._exit(0)
""",
    ),
    Hostile(
        name="files without end",
        category="resources",
        limits=replace(LIMITS, wall_s=1.5),
        code="""
made = 0
try:
    for made in range(2000):
        open(f"f{made}", "w").close()
except OSError:
    pass
time.sleep(0.6)
if made > 120:
    reached(f"{made} files with a limit of 60")
""",
    ),
    Hostile(
        name="sparse files",
        category="resources",
        fetch=("sparse",),
        code="""
with open("sparse", "wb") as file:
    attempt("truncate", lambda: file.truncate(1 << 40))
    attempt("seek", lambda: os.pwrite(file.fileno(), b"x", 1 << 40))
    try:
        file.truncate((2 << 20) + 1)
    except OSError:
        pass
    else:
        reached("a file beyond its limit")
os.unlink("sparse")
""",
    ),
    Hostile(
        name="deep folders",
        category="resources",
        limits=replace(LIMITS, wall_s=1.5),
        code="""
depth = 0
try:
    for depth in range(1500):
        os.mkdir("deep" * 5)
        os.chdir("deep" * 5)
except OSError:
    pass
time.sleep(0.6)
if depth > 120:
    reached(f"{depth} folders with a limit of 60")
""",
    ),
    Hostile(
        name="folders that nobody may enter",
        category="resources",
        code="""
os.mkdir("shut")
open("shut/file", "w").write("x")
for mode in (0o000, 0o111):
    try:
        os.chmod("shut", mode)
        os.chmod(".", mode)
    except OSError:
        pass
os.umask(0o777)
os.mkdir("also")
""",
    ),
    Hostile(
        name="stdout without end",
        category="resources",
        limits=LIMITS,
        statuses=ENDED,
        code="while True: os.write(1, b'x' * 65536)",
    ),
    Hostile(
        name="stderr without end",
        category="resources",
        limits=LIMITS,
        statuses=ENDED,
        code="while True: os.write(2, b'\\xff\\x00' * 32768)",
    ),
    Hostile(
        name="both streams without end",
        category="resources",
        limits=LIMITS,
        statuses=ENDED,
        code="""
threading.Thread(target=lambda: [os.write(2, b"e" * 4096) for _ in iter(int, 1)]).start()
while True: os.write(1, b"o" * 4096)
""",
    ),
    Hostile(
        name="one huge line",
        category="resources",
        return_codes=(0,),
        code="os.write(1, b'x' * 30_000_000)",
    ),
    Hostile(
        name="a signal for its time limit ignored",
        category="resources",
        limits=replace(LIMITS, cpu_s=1, wall_s=6.0),
        statuses=LATE,
        code="""
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
while True:
    pass
""",
    ),
    Hostile(
        name="sleep for ever",
        category="resources",
        limits=ENDLESS,
        statuses=LATE,
        code="""
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
while True:
    time.sleep(60)
""",
    ),
    Hostile(
        name="compute for ever in many processes",
        category="resources",
        limits=ENDLESS,
        statuses=LATE,
        code="""
try:
    for _ in range(8):
        if os.fork() == 0:
            break
except OSError:
    pass
while True:
    pass
""",
    ),
    Hostile(
        name="terminals without end",
        category="resources",
        code="""
import mmap
counted = shared(4096)
def fill(number):
    count = 0
    try:
        while True:
            os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
            count += 1
    except OSError:
        pass
    counted[number] = min(count, 255)
for number in range(1, 14 if HOST.has_processes else 1):
    try:
        if os.fork() == 0:
            fill(number)
            time.sleep(1)
            os._exit(0)
    except OSError:
        break
fill(0)
time.sleep(0.4)
if sum(counted[:]) > 64:
    reached(f"{sum(counted[:])} terminals at least")
os._exit(0)
""",
    ),
]
