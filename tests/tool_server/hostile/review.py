"""Programs that hide from the usage monitor, fill tables of the kernel, or abuse cells."""

from dataclasses import replace

from tests.tool_server.hostile.program import ENDLESS, LIMITS, Hostile
from tool_server.sandbox import RunStatus

BUBBLEWRAP, LANDLOCK = ("bubblewrap",), ("landlock",)
SMALL = replace(LIMITS, memory_mb=64)
DISK = replace(LIMITS, wall_s=1.5)

_HOLD_FILES = """
block, held = b"x" * (1 << 20), []
def hold():
    try:
        while len(held) < 40:
            fd = os.open("f", os.O_RDWR | os.O_CREAT)
            held.append(fd)
            if os.write(fd, block) < len(block):
                break
            os.unlink("f")
    except OSError:
        pass
    time.sleep(0.8)
    if len(held) > 8:
        reached(f"{len(held)} MB in files without a name with a limit of 2")
    os._exit(0)
"""

HIDING = [
    Hostile(
        name="a process name that is no text",
        category="hiding",
        limits=ENDLESS,
        statuses=(RunStatus.TIME_LIMIT,),
        code="""
libc.prctl(15, b"\\xff) R 1\\n\\xfe(", 0, 0, 0)
time.sleep(60)
""",
    ),
    Hostile(
        name="a mapped file whose name is no text",
        category="hiding",
        limits=DISK,
        code="""
with open(b"\\xff\\n", "w+b") as file:
    file.write(bytes(4096))
    file.flush()
    mapped = mmap.mmap(file.fileno(), 4096)
time.sleep(0.4)
written = 0
try:
    for number in range(40):
        with open(f"f{number}", "wb") as file:
            written += file.write(bytes(1 << 20))
        time.sleep(0.02)
except OSError:
    pass
if written > 32 << 20:
    reached(f"{written >> 20} MB with a limit of 2")
""",
    ),
    Hostile(
        name="memory of processes whose first thread has ended",
        category="hiding",
        rungs=BUBBLEWRAP,
        limits=replace(SMALL, processes=40),
        code="""
def hold():
    held = mmap.mmap(-1, 14 << 20, flags=PRIVATE)
    for at in range(0, 14 << 20, 4096):
        held[at] = 1
    time.sleep(5)
forked = 0
for _ in range(12):
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        threading.Thread(target=hold, daemon=True).start()
        time.sleep(0.02)
        call(60, 93)(0)
    forked += 1
time.sleep(1.2)
if forked > 5:
    reached(f"a second with {14 * forked} MB and a limit of 64")
os._exit(0)
""",
    ),
    Hostile(
        name="files of a process whose first thread has ended",
        category="hiding",
        rungs=LANDLOCK,
        limits=DISK,
        code=_HOLD_FILES
        + """
threading.Thread(target=hold, daemon=True).start()
call(60, 93)(0)
""",
    ),
    Hostile(
        name="files of a thread with descriptors of its own",
        category="hiding",
        rungs=LANDLOCK,
        limits=DISK,
        code=_HOLD_FILES
        + """
def apart():
    call(436, 436)(60, 61, 2)  # CLOSE_RANGE_UNSHARE
    hold()
refused("a thread with descriptors of its own", call(56, 220), 0x10800, 0, 0, 0, 0)
threading.Thread(target=apart, daemon=True).start()
time.sleep(5)
""",
    ),
    Hostile(
        name="files in calls that wait",
        category="hiding",
        rungs=LANDLOCK,
        limits=DISK,
        code="""
threading.stack_size(65536)
pipes, held = [], 0
def wait(write_end, fd):
    try:
        os.sendfile(write_end, fd, 0, 1 << 20)
    except OSError:
        pass
try:
    while held < 13:
        pipes.append(os.pipe())
        fd = os.open("f", os.O_RDWR | os.O_CREAT)
        if os.write(fd, bytes(1 << 20)) < 1 << 20:
            break
        os.unlink("f")
        os.lseek(fd, 0, 0)
        threading.Thread(target=wait, args=(pipes[-1][1], fd), daemon=True).start()
        time.sleep(0.01)
        os.close(fd)
        os.set_blocking(pipes[-1][0], False)
        held += len(os.read(pipes[-1][0], 1))
except OSError:
    pass
time.sleep(0.7)
if held > 8:
    reached(f"{held} MB in files without a name with a limit of 2")
os._exit(0)
""",
    ),
    Hostile(
        name="files of a process that is not dumpable",
        category="hiding",
        rungs=LANDLOCK,
        limits=DISK,
        code=_HOLD_FILES + "libc.prctl(4, 0, 0, 0, 0)\nhold()\n",
    ),
    Hostile(
        name="files of a program that nobody may read",
        category="hiding",
        rungs=LANDLOCK,
        limits=replace(DISK, file_mb=8, memory_mb=256),
        code="""
with open("/usr/bin/perl", "rb") as file:
    content = file.read()
fd = os.open("unreadable", os.O_CREAT | os.O_WRONLY, 0o111)
with open(fd, "wb") as file:
    file.write(content)
script = '''
my $block = "x" x (1 << 20); my @held;
for (1 .. 40) {
    open(my $f, ">", "f") or last; syswrite($f, $block) == 1 << 20 or last;
    unlink "f"; push @held, $f;
}
select(undef, undef, undef, 0.8);
print "REACHED ", scalar(@held), " MB in files without a name with a limit of 8\\\\n" if @held > 16;
'''
os.execv("unreadable", ["perl", "-e", script])
""",
    ),
    Hostile(
        name="memory of processes that are not dumpable",
        category="hiding",
        rungs=BUBBLEWRAP,
        limits=SMALL,
        code="""
for _ in range(12):
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        libc.prctl(4, 0, 0, 0, 0)
        held = bytearray(b"x") * (14 << 20)
        time.sleep(5)
        os._exit(0)
time.sleep(1)
reached("a second with 168 MB and a limit of 64")
""",
    ),
    Hostile(
        name="memory handed from process to process",
        category="hiding",
        rungs=BUBBLEWRAP,
        # long, because it keeps a busy machine from looking; where it is contained it ends at once
        limits=replace(SMALL, wall_s=6.0, cpu_s=16, processes=40),
        code="""
end = time.monotonic() + 4.5
for _ in range(12):
    if os.fork() == 0:
        held = bytearray(b"x") * (14 << 20)
        while time.monotonic() < end:
            try:
                if os.fork() != 0:
                    os._exit(0)
            except OSError:
                pass
        os._exit(0)
time.sleep(4.4)
reached("4 seconds with 168 MB and a limit of 64")
""",
    ),
    Hostile(
        name="files that a rule of Landlock keeps",
        category="hiding",
        limits=DISK,
        code="""
ruleset = call(444, 444)(struct.pack("=Q", 4), ctypes.c_size_t(8), 0)
block, held = b"x" * (1 << 20), 0
try:
    while held < 40:
        fd = os.open("f", os.O_RDWR | os.O_CREAT)
        if os.write(fd, block) < len(block) or call(445, 445)(
            ruleset, 1, struct.pack("=Qi", 4, fd), 0
        ):
            break
        os.unlink("f")
        os.close(fd)
        held += 1
except OSError:
    pass
time.sleep(0.8)
if held > 8:
    reached(f"{held} MB in files without a name with a limit of 2")
""",
    ),
    Hostile(
        name="rules of Landlock without end",
        category="kernel memory",
        limits=SMALL,
        code="""
held = 0
for _ in range(6):
    ruleset = call(444, 444)(struct.pack("=QQ", 0, 3), ctypes.c_size_t(16), 0)
    if ruleset < 0:
        break
    for port in range(65536):
        if call(445, 445)(ruleset, 2, struct.pack("=QQ", 1, port), 0):
            break
        held += 1
if held > 200_000:
    reached(f"{held} rules")
refused("landlock_restrict_self", call(446, 446), -1, 0)
""",
    ),
    Hostile(
        name="locks on parts of a file without end",
        category="kernel memory",
        limits=SMALL,
        code="""
import fcntl
fds = [os.open(f"f{number}", os.O_RDWR | os.O_CREAT) for number in range(50)]
held, end = 0, time.monotonic() + 1.0
lock = lambda fd, at: fcntl.fcntl(fd, 37, struct.pack("=hhiqqi4x", 1, 0, 0, at, 1, 0))
try:
    while time.monotonic() < end:
        for fd in fds:
            lock(fd, (1 << 20) - 2 * held)
            held += 1
except OSError:
    pass
try:  # whether they are locks
    lock(os.open("f0", os.O_RDWR), 1 << 20)
except OSError:
    pass
else:
    held = 0
if held > 250_000:
    reached(f"{held} locks")
""",
    ),
    Hostile(
        name="a lock on a device that two runs see",
        category="shared by runs",
        code=(
            _LOCK := """
import fcntl
end = time.monotonic() + 0.5
while time.monotonic() < end:
    for path in ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom"):
        try:
            fd = os.open(path, os.O_RDWR)
        except OSError:
            continue
        for number in (fcntl.F_SETLK, 37):
            try:
                fcntl.fcntl(fd, number, struct.pack("=hhiqqi4x", 1, 0, 7, 7, 1, 0))
            except BlockingIOError:
                reached(f"the lock of another run on {path}")
            except OSError:
                pass
        time.sleep(0.02)
        os.close(fd)
"""
        ),
        beside=_LOCK,
    ),
    Hostile(
        name="a hint on a file that two runs see",
        category="shared by runs",
        code="""
import fcntl
for path in (json.__file__, sys.executable, "/usr/lib/os-release", "/dev/null"):
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        continue
    for get, put in ((1035, 1036), (1037, 1038)):
        try:
            same = fcntl.fcntl(fd, get, bytes(8))
        except OSError:
            continue
        attempt(f"hint {put} of {path}", lambda: fcntl.fcntl(fd, put, same))
""",
    ),
    Hostile(
        name="devices of the host",
        category="shared by runs",
        code="""
for path in ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom"):
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError:
        continue
    attempt(f"mmap {path}", lambda: mmap.mmap(fd, 4096))
    attempt(f"touch {path}", lambda: os.utime(path))
    attempt(f"chmod {path}", lambda: os.chmod(path, 0o666))
    attempt(f"attribute {path}", lambda: os.setxattr(path, "user.x", b"1"))
with open("/dev/null", "w") as file:
    file.write("x")  # as programs do
""",
    ),
    Hostile(
        name="lists of rights without end",
        category="kernel memory",
        limits=replace(SMALL, files=200),
        code="""
entry = lambda tag, number: struct.pack("=HHI", tag, 7, number)
uid, total = os.getuid(), 0
rights = struct.pack("=I", 2) + entry(1, 0xFFFFFFFF) + entry(2, uid) * 8000
rights += entry(4, 0xFFFFFFFF) + entry(16, 0xFFFFFFFF) + entry(32, 0xFFFFFFFF)
try:
    for number in range(150):
        os.mkdir(f"d{number}")
        for name in ("system.posix_acl_access", "system.posix_acl_default"):
            os.setxattr(f"d{number}", name, rights)
            total += len(rights)
except OSError as error:
    print(error)
if total > 4 << 20:
    reached(f"{total >> 20} MB of rights")
total = 0
try:
    for number in range(2000):
        os.setxattr("main.py", f"user.{number}", bytes(60_000))
        total += 60_000
except OSError as error:
    print(error)
if total > 4 << 20:
    reached(f"{total >> 20} MB of attributes")
""",
    ),
    Hostile(
        name="attributes of the host's file",
        category="host files",
        rungs=LANDLOCK,
        code="""
for path in (HOST.file, HOST.source, "/etc/passwd"):
    attempt(f"names of {path}", lambda: os.listxattr(path))
    ctypes.set_errno(0)
    libc.getxattr(str(path).encode(), b"user.x", None, 0)
    if ctypes.get_errno() == errno.ENODATA:
        reached(f"the attributes of {path}")
""",
    ),
    Hostile(
        name="whether the host has a file in memory",
        category="shared by runs",
        code="""
fd = os.open(json.__file__, os.O_RDONLY)
attempt("a read that does not wait", lambda: os.preadv(fd, [bytearray(64)], 0, os.RWF_NOWAIT))
""",
    ),
    Hostile(
        name="a table for futexes",
        category="kernel memory",
        limits=SMALL,
        code="""
if libc.prctl(78, 1, 1 << 20, 0, 0) == 0:
    reached("64 MB of the kernel's")
""",
    ),
    Hostile(
        name="memory merged with others'",
        category="shared by runs",
        code="""
if libc.prctl(67, 1, 0, 0, 0) == 0:
    reached("the kernel's merging of pages")
""",
    ),
    Hostile(
        name="filters without end",
        category="kernel memory",
        limits=SMALL,
        code="""
class Filter(ctypes.Structure):
    _fields_ = [("count", ctypes.c_ushort), ("program", ctypes.c_void_p)]
allow = ctypes.create_string_buffer(struct.pack("=HBBI", 6, 0, 0, 0x7FFF0000))
filters, pointer = 0, ctypes.byref(Filter(1, ctypes.addressof(allow)))
while filters < 3000 and libc.prctl(22, 2, pointer, 0, 0) == 0:
    filters += 1
if filters > 1000:
    reached(f"{filters} filters")
refused("a filter that asks", call(317, 277), 1, 8, pointer)
""",
    ),
    Hostile(
        name="pages of a file that is gone in pipes",
        category="kernel memory",
        limits=SMALL,
        code="""
huge, held, pipes = 0, 0, []
call_splice = call(275, 76)
try:
    while len(pipes) < 26:
        if held % 16 == 0:
            pipes.append(os.pipe())
        fd = os.open("f", os.O_RDWR | os.O_CREAT)
        os.write(fd, bytes(2 << 20))
        call_splice(fd, struct.pack("=q", 0), pipes[-1][1], None, ctypes.c_size_t(1), 2)
        os.ftruncate(fd, 0)
        os.unlink("f")
        os.close(fd)
        held += 1
except OSError:
    pass
for read_end, write_end in pipes:  # the rest of the page is gone, or it would be read as well
    os.set_blocking(read_end, False)
    try:
        huge += len(os.read(read_end, 1 << 20))
    except OSError:
        pass
if huge > held:
    reached(f"{huge} bytes of {held}")
""",
    ),
]

CELLS = [
    Hostile(
        name="a cell that leaves a child",
        category="cells",
        language="cell",
        rungs=BUBBLEWRAP,
        statuses=(RunStatus.FINISHED,),
        code="""
for number in range(3):
    if os.fork() == 0:
        for each in range(1, 65):
            try:
                signal.signal(each, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        time.sleep(60)
""",
    ),
    Hostile(
        name="a cell whose children fork faster than they are killed",
        category="cells",
        language="cell",
        rungs=BUBBLEWRAP,
        limits=replace(LIMITS, cpu_s=8),
        code="""
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(6):
    if os.fork() == 0:
        while True:
            try:
                if os.fork():
                    os._exit(0)
            except OSError:
                pass
""",
    ),
    Hostile(
        name="answers that are no answers",
        category="cells",
        language="cell",
        code="""
own = socket.socket(fileno=os.dup(3))
os.set_blocking(own.fileno(), False)
try:
    for text in ("[" * 100_000, '{"cell": 1, "code": 1e999, "shown": 1, "error": null}',
                 '{"cell": 1, "code": 0, "shown": null, "error": {"0": 1}}', "1" * 9000,
                 '{"cell": true, "code": true, "shown": "\\\\ud800", "error": ["a", []]}'):
        own.send(text.encode())
except OSError:
    pass
""",
    ),
]

LANGUAGES = [
    Hostile(
        name="files of the host in a compiler",
        category="languages",
        language="c",
        rungs=BUBBLEWRAP,
        statuses=(RunStatus.FINISHED,),
        code="""
#include <stdio.h>
#if __has_include("/etc/passwd") || __has_include("/proc/self/environ") || \\
    __has_include("/etc/hosts") || __has_include("/root/.bashrc") || __has_include("/sys/fs")
#define SEEN 1
#else
#define SEEN 0
#endif
int main(void) { if (SEEN) puts("REACHED a file of the host while compiling"); return 0; }
""",
    ),
    Hostile(
        name="a compiler that reads without end",
        category="languages",
        language="c",
        rungs=BUBBLEWRAP,
        limits=replace(LIMITS, compile_s=2.0, memory_mb=256),
        statuses=(RunStatus.ERROR, RunStatus.TIME_LIMIT),
        code="""__asm__(".incbin \\"/dev/urandom\\"");\nint main(void) {}""",
    ),
    Hostile(
        name="a compiler's memory and output",
        category="languages",
        language="cpp",
        rungs=BUBBLEWRAP,
        limits=replace(LIMITS, compile_s=2.0, memory_mb=256),
        statuses=(RunStatus.ERROR, RunStatus.TIME_LIMIT),
        code="""
template <int N> struct S { static constexpr long value = S<N - 1>::value + S<N - 2>::value + x; };
char huge[1u << 30] = {1};
#define A(x) x x x x x x x x
int main() { A(A(A(A(A(undeclared;))))) return S<800>::value; }
""",
    ),
    Hostile(
        name="the network by a shell",
        category="languages",
        language="bash",
        rungs=BUBBLEWRAP,
        code="""
for to in tcp/127.0.0.1/22 udp/127.0.0.1/53 tcp/localhost/80; do
    (exec 3<>/dev/$to) 2>/dev/null && echo REACHED $to
done
ulimit -n 100000 2>/dev/null && echo REACHED ulimit -n
ulimit -v unlimited 2>/dev/null && echo REACHED ulimit -v
enable -f /usr/lib/x86_64-linux-gnu/libc.so.6 hostile 2>/dev/null && echo REACHED enable
mapfile -t lines < /etc/passwd 2>/dev/null && echo REACHED passwd
coproc cat; kill -9 1 -1; exit 0
""",
    ),
    Hostile(
        name="sockets, threads and memory of Node",
        category="languages",
        language="nodejs",
        rungs=BUBBLEWRAP,
        limits=replace(LIMITS, memory_mb=256, processes=32, wall_s=3.0, cpu_s=6),
        code="""
const fs = require("fs"), net = require("net");
for (const path of ["/etc/passwd", "/proc/1/environ", "/proc/self/maps"])
  try { fs.readFileSync(path); console.log("REACHED " + path); } catch {}
for (const path of ["/", "/dev", "/usr/lib"])
  try { fs.writeFileSync(path + "/x", "x"); console.log("REACHED " + path); } catch {}
const failed = () => {};
try { net.connect(22, "127.0.0.1", () => console.log("REACHED tcp")).on("error", failed); }
catch {}
try { process.kill(process.ppid, 9); process.setuid(0); console.log("REACHED root"); } catch {}
const held = [];
try { for (;;) { held.push(Buffer.alloc(8 << 20, 1)); if (held.length > 64) break; } } catch {}
if (held.length > 64) setTimeout(() => console.log("REACHED 512 MB with a limit of 256"), 700);
""",
    ),
    Hostile(
        name="a stack without a limit of addresses",
        category="languages",
        language="nodejs",
        rungs=BUBBLEWRAP,
        code="""
const perl = [
  "$| = 1; my $mb = 1 << 20; my $at = syscall(9, 0, 400 * $mb, 3, 0x122, -1, 0);",
  "exit if $at == -1; open(my $in, '<', '/dev/urandom');",
  "syscall(0, fileno($in), $at + $_ * $mb, $mb) for 1 .. 399;",
  "select(undef, undef, undef, 0.7); print 'REACHED 400 MB of stack with a limit of 128';",
].join(" ");
const spawn = require("child_process").spawnSync;
if (process.arch == "x64") console.log(String(spawn("/usr/bin/perl", ["-e", perl]).stdout));
""",
    ),
]

ODDITIES = [
    Hostile(
        name="addresses that the kernel follows at the end",
        category="crashes",
        code="""
call(273, 99)(0x4141414141414000, ctypes.c_size_t(24))  # set_robust_list
call(218, 96)(0x4141414141414000)  # set_tid_address
head = ctypes.create_string_buffer(24)
at = ctypes.addressof(head)
libc.memcpy(head, struct.pack("=QqQ", at, -(1 << 62), at), 24)
threads = [threading.Thread(target=lambda: call(273, 99)(ctypes.c_void_p(at), ctypes.c_size_t(24)))
           for _ in range(4)]
for thread in threads:
    thread.start()
libc.prctl(59, 1, 0, 1, 0)  # calls by a handler that is not there
os._exit(0)
""",
    ),
    Hostile(
        name="settings of a process for the next",
        category="forging",
        code="""
for option, *values in ((53, 1, 4), (53, 0, 4), (41, 1), (33, 1, 1), (29, 1 << 40), (8, 1),
                        (14, 1), (65, 1), (4, 0), (13, 4), (72, 0)):
    libc.prctl(option, *values, *[0] * (4 - len(values)))
os.nice(19)
""",
        then="""
if libc.prctl(30, 0, 0, 0, 0) > 1_000_000:
    reached("the settings of another run")
if os.getpriority(os.PRIO_PROCESS, 0) > 10:
    reached("the priority of another run")
""",
    ),
    Hostile(
        name="its streams sealed, locked and reopened",
        category="descriptors",
        code="""
import fcntl
for number, value in ((1033, 1), (1033, 16), (1032, 0)):  # F_SEAL_SEAL, F_SEAL_FUTURE_WRITE
    attempt(f"seal {value}", lambda: fcntl.fcntl(0, number, value))
for path in ("/proc/self/fd/0", "/dev/fd/0"):
    try:
        again = os.open(path, os.O_RDWR)
    except OSError:
        continue
    attempt("a write to its input", lambda: os.write(again, b"x"))
    attempt("a cut of its input", lambda: os.ftruncate(again, 1))
attempt("a mapping of its input", lambda: mmap.mmap(0, 4096, prot=3))
fcntl.fcntl(1, fcntl.F_SETFL, os.O_DIRECT)  # each byte a packet
end = time.monotonic() + 0.3
while time.monotonic() < end:
    os.write(1, b"x")
os.dup2(1, 0)
os.dup2(1, 2)
""",
    ),
    Hostile(
        name="folders and pipes in the way of what is fetched",
        category="forging",
        fetch=("a/b", "grow", "line\n", "hole"),
        fetched_mb=2,
        code="""
os.mkdir("a")
with open("hole", "wb") as file:
    file.truncate(2 << 20)
    os.pwrite(file.fileno(), b"x", 1)
open("line\\n", "w").close()
def swap():
    while True:
        for make in (lambda: os.symlink(HOST.file, "a/b"), lambda: os.mkdir("a/b"),
                     lambda: os.mkfifo("a/b"), lambda: os.link("hole", "a/b")):
            try:
                make()
                os.rename("a/b", "a/c")
            except OSError:
                pass
            for remove in (os.unlink, os.rmdir):
                try:
                    remove("a/c")
                except OSError:
                    pass
def grow():
    with open("grow", "ab") as file:
        while True:
            file.write(b"x" * 4096)
for target in (swap, grow):
    try:
        if os.fork() == 0:
            os.setsid()
            target()
    except OSError:
        threading.Thread(target=target, daemon=True).start()
time.sleep(0.1)
os._exit(0)
""",
    ),
    Hostile(
        name="a lock that a process of the host owns",
        category="processes",
        code="""
for operation in (6, 8, 13, 134):
    owner = ctypes.c_uint(HOST.canary)
    until = struct.pack("=qq", int(time.time()), 0)
    ctypes.set_errno(0)
    call(202, 98)(ctypes.byref(owner), operation, 0, until, 0, 0)
    if ctypes.get_errno() in (errno.ETIMEDOUT, errno.EAGAIN):
        reached(f"a lock by futex {operation}: {os.strerror(ctypes.get_errno())}")
""",
    ),
    Hostile(
        name="children of its parent's",
        category="processes",
        rungs=BUBBLEWRAP,
        limits=ENDLESS,
        statuses=(RunStatus.FINISHED,),
        code="""
for number in range(4):  # CLONE_PARENT
    if call(56, 220)(0x8000 | signal.SIGUSR1, 0, 0, 0, 0) == 0:
        for each in range(1, 65):
            try:
                signal.signal(each, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        while True:
            time.sleep(1)
os._exit(0)
""",
    ),
    Hostile(
        name="descriptors in flight of its user's",
        category="shared by runs",
        rungs=BUBBLEWRAP,
        code="""
held = []
try:
    for _ in range(20):
        held.append(socket.socketpair())
        socket.send_fds(held[-1][0], [b"x"], [1] * 100)
except OSError:
    pass
time.sleep(0.6)
os._exit(0)
""",
        beside="""
time.sleep(0.3)
a, b = socket.socketpair()
try:
    socket.send_fds(a, [b"x"], [1])
except OSError as error:
    if error.errno == errno.ETOOMANYREFS:
        reached("the neighbour, which cannot send a descriptor")
""",
    ),
    Hostile(
        name="tables of polls and timers",
        category="kernel memory",
        limits=SMALL,
        code="""
import select
held, watched = [], 0
try:
    pipes = [os.pipe() for _ in range(10)]
    while len(held) < 30:
        held.append(select.epoll())
        for pair in pipes:
            for fd in pair:
                held[-1].register(fd)
                watched += 1
        for other in held[:-1]:
            held[-1].register(other.fileno())
            watched += 1
except OSError:
    pass
if watched > 4000:
    reached(f"{watched} watched descriptors")
attempt("5 loops of polls", lambda: [a.register(b.fileno()) for a in held for b in held])
""",
    ),
]

REVIEW = [*HIDING, *CELLS, *LANGUAGES, *ODDITIES]
