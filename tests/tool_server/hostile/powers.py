"""Programs that start, signal and trace processes, or claim rights."""

from tests.tool_server.hostile.program import ENDLESS, MARKED, Hostile
from tool_server.sandbox import RunStatus

BUBBLEWRAP = ("bubblewrap",)

PROCESSES = [
    Hostile(
        name="fork bomb",
        category="processes",
        code="""
children = [0]
started = 0
def bomb(depth):
    global started
    for _ in range(60):
        try:
            pid = os.fork()
        except OSError:
            return
        started += 1
        if pid == 0:
            started = 0
            if depth < 2:
                bomb(depth + 1)
            time.sleep(3)
            os._exit(0)
bomb(0)
if started > (20 if HOST.has_processes else 0):
    reached(f"{started} processes with a limit of 16")
""",
        limits=ENDLESS,
    ),
    Hostile(
        name="fork bomb of a shell",
        category="processes",
        language="bash",
        rungs=BUBBLEWRAP,
        # Only where its process id says that it is alone.
        code="[ $$ -lt 20 ] || { echo REACHED the pid namespace; exit; }; :(){ :|:& };:; sleep 9",
        limits=ENDLESS,
    ),
    Hostile(
        name="threads without end",
        category="processes",
        code="""
threading.stack_size(32768)
started = 0
try:
    while started < 400:
        threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
        started += 1
        time.sleep(0.001)
except RuntimeError:
    pass
time.sleep(0.4)
if started > 100:
    reached(f"{started} threads with a limit of 16")
os._exit(0)
""",
    ),
    Hostile(
        name="a neighbour starved of processes",
        category="processes",
        beside="""
time.sleep(0.4)
try:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
except RuntimeError:
    reached("the neighbour, which cannot start a thread")
""",
        code="""
threading.stack_size(32768)
try:
    for _ in range(200):
        if HOST.has_processes:
            if os.fork() == 0:
                time.sleep(0.8)
                os._exit(0)
        else:
            threading.Thread(target=time.sleep, args=(0.8,), daemon=True).start()
except (OSError, RuntimeError):
    pass
time.sleep(0.8)
os._exit(0)
""",
    ),
    Hostile(
        name="kill everything",
        category="processes",
        code="""
for pid in (HOST.canary, HOST.server):
    attempt(f"signal {pid}", lambda: os.kill(pid, 0))
try:
    os.kill(HOST.canary, 0)
except OSError:  # else it would be everything
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(-1, number)
        except OSError:
            pass
""",
    ),
    Hostile(
        name="kill the parent",
        category="processes",
        code="""
for pid in (os.getppid(), 1 if os.getpid() < 50 else HOST.canary):
    for name in ("KILL", "TERM", "INT", "HUP", "STOP", "ABRT", "SEGV", "CHLD", "QUIT", "TSTP"):
        try:
            os.kill(pid, getattr(signal, "SIG" + name))
        except OSError:
            pass
time.sleep(0.2)
""",
    ),
    Hostile(
        name="signals that mean something to the parent",
        category="processes",
        code="""
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD, *range(34, 65)):
    try:
        os.kill(os.getppid(), number)
    except OSError:
        pass
time.sleep(0.2)
""",
    ),
    Hostile(
        name="trace the parent",
        category="processes",
        code="""
libc.ptrace.argtypes = [ctypes.c_long] * 4
for pid in {os.getppid(), HOST.canary}:
    for request in (16, 0x4206):
        if libc.ptrace(request, pid, 0, 0) == 0:
            reached(f"ptrace {pid}")
            libc.ptrace(17, pid, 0, 0)
    page = ctypes.create_string_buffer(64)
    refused("process_vm_readv", call(310, 270), pid, page, 1, page, 1, 0)
    refused("process_vm_writev", call(311, 271), pid, page, 1, page, 1, 0)
    refused("kcmp", call(312, 272), os.getpid(), pid, 0, 0, 0)
    attempt("pidfd", lambda: os.pidfd_open(pid))
refused("pidfd_getfd", call(438, 438), -1, 0, 0)
refused("process_madvise", call(440, 440), -1, 0, 0, 0, 0)
""",
    ),
    Hostile(
        name="a daemon that holds stdout",
        category="processes",
        limits=ENDLESS,
        statuses=(RunStatus.FINISHED, RunStatus.ERROR),
        code="""
try:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in range(1, 65):
                try:
                    signal.signal(number, signal.SIG_IGN)
                except (OSError, ValueError):
                    pass
            time.sleep(60)
        os._exit(0)
    os.wait()
except OSError:
    pass
print("the parent is done")
""",
    ),
    Hostile(
        name="an orphan that goes on writing",
        category="processes",
        limits=ENDLESS,
        code="""
try:
    if os.fork() == 0:
        os.setsid()
        with open("growing", "wb") as file:
            while True:
                os.write(1, b"x" * 100)
                file.write(b"x")
except OSError:
    pass
""",
    ),
    Hostile(
        name="processes by other calls",
        category="processes",
        rungs=("landlock",),
        code="""
import subprocess
def forked(call_):
    pid = call_()
    if pid == 0:
        os._exit(0)
    if pid < 0:
        raise OSError
attempt("fork", lambda: forked(os.fork))
attempt("clone", lambda: forked(lambda: call(56, 220)(17, 0, 0, 0, 0)))
attempt("clone vfork", lambda: forked(lambda: call(56, 220)(0x4000 | 17, 0, 0, 0, 0)))
attempt("spawn", lambda: os.posix_spawn("/usr/bin/true", ["true"], {}))
attempt("subprocess", lambda: subprocess.run(["/usr/bin/true"]))
attempt("forkpty", lambda: forked(lambda: os.forkpty()[0]))
""",
    ),
    Hostile(
        name="outlive the parent",
        category="processes",
        limits=ENDLESS,
        closed_while_running=True,
        code=f"""
for option in (1, 36):  # no signal when the parent dies; its children are ours
    libc.prctl(option, 0 if option == 1 else 1, 0, 0, 0)
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
libc.prctl(15, b"{MARKED}", 0, 0, 0)
time.sleep(60)
""",
    ),
    Hostile(
        name="signals by descriptors",
        category="processes",
        code="""
import fcntl
F_SETSIG = 10
for pid in (HOST.canary, -os.getpgid(0)):
    a, b = os.pipe()
    try:
        fcntl.fcntl(a, fcntl.F_SETOWN, pid)
        fcntl.fcntl(a, F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(a, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        os.write(b, b"x")
    except OSError:
        pass
""",
        statuses=(RunStatus.FINISHED, RunStatus.ERROR),
    ),
    Hostile(
        name="priorities of others",
        category="processes",
        code="""
for pid in (HOST.canary,):
    attempt("nice", lambda: os.setpriority(os.PRIO_PROCESS, pid, 19))
    attempt("affinity", lambda: os.sched_setaffinity(pid, {0}))
    attempt("scheduler", lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)))
    refused("ioprio", call(251, 30), 1, pid, 0)
attempt("negative nice", lambda: os.nice(-5))
""",
    ),
]

PRIVILEGES = [
    Hostile(
        name="new namespaces",
        category="privileges",
        code="""
for flag in (0x10000000, 0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x20000000, 0x40000000):
    refused(f"unshare {flag:#x}", libc.unshare, flag)
def cloned(flags):
    pid = call(56, 220)(flags | 17, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    return pid
for flag in (0x10000000, 0x10020000, 0x20000000, 0x40000000):
    refused(f"clone {flag:#x}", cloned, flag)
""",
    ),
    Hostile(
        name="clone3",
        category="privileges",
        code="""
args = struct.pack("=11Q", 0x10000000, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0)
def cloned():
    pid = call(435, 435)(args, ctypes.c_size_t(len(args)))
    if pid == 0:
        os._exit(0)
    return pid
refused("clone3", cloned)
""",
    ),
    Hostile(
        name="setns",
        category="privileges",
        code="""
for pid in (1, HOST.server, os.getppid()):
    for kind in ("user", "mnt", "net", "pid"):
        attempt(f"{kind} of {pid}", lambda: os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY))
refused("setns", libc.setns, 0, 0)
""",
    ),
    Hostile(
        name="mounts and roots",
        category="privileges",
        code="""
MS_BIND, MS_REMOUNT = 4096, 32
refused("tmpfs", libc.mount, b"tmpfs", b"/tmp", b"tmpfs", 0, None)
refused("proc", libc.mount, b"proc", b"/tmp", b"proc", 0, None)
refused("bind", libc.mount, b"/", b"/tmp", None, MS_BIND, None)
refused("remount", libc.mount, None, b"/", None, MS_BIND | MS_REMOUNT, None)
refused("umount", libc.umount2, b"/tmp/no-such-folder", 2)
refused("chroot", libc.chroot, b"/")
refused("pivot_root", call(155, 41), b"/no-such-folder", b"/no-such-folder")
refused("open_tree", call(428, 428), -100, b"/", 1)
refused("fsopen", call(430, 430), b"tmpfs", 0)
refused("mount_setattr", call(442, 442), -100, b"/no-such-folder", 0, None, 0)
""",
    ),
    Hostile(
        name="another user",
        category="privileges",
        code="""
for function in (os.setuid, os.setgid, os.seteuid, os.setegid):
    attempt(function.__name__, lambda: function(0))
    attempt(function.__name__, lambda: function(12345))
attempt("setgroups", lambda: os.setgroups([0]))
attempt("setresuid", lambda: os.setresuid(0, 0, 0))
refused("setfsuid", call(122, 151), 0)
""",
    ),
    Hostile(
        name="capabilities",
        category="privileges",
        code="""
header = struct.pack("=Ii", 0x20080522, 0)
data = ctypes.create_string_buffer(24)
call(125, 90)(header, data)
if any(struct.unpack("=6I", data.raw)):
    reached(f"capabilities {data.raw.hex()}")
refused("capset", call(126, 91), header, b"\\xff" * 24)
for number in range(41):
    if os.geteuid() == 0 and libc.prctl(23, number, 0, 0, 0) == 1:  # gives others nothing
        reached(f"bounding {number}")
    if libc.prctl(47, 2, number, 0, 0) == 0:
        reached(f"ambient {number}")
if libc.prctl(39, 0, 0, 0, 0) != 1:
    reached("new privileges by exec")
if libc.prctl(28, 0x2f, 0, 0, 0) == 0:
    reached("securebits")
""",
    ),
    Hostile(
        name="calls into the kernel's depth",
        category="privileges",
        code="""
for what, x86_64, aarch64 in (
    ("keyctl", 250, 219), ("add_key", 248, 217), ("request_key", 249, 218), ("bpf", 321, 280),
    ("perf_event_open", 298, 241), ("userfaultfd", 323, 282), ("io_uring_setup", 425, 425),
    ("io_uring_enter", 426, 426), ("io_uring_register", 427, 427), ("init_module", 175, 105),
    ("finit_module", 313, 273), ("delete_module", 176, 106), ("kexec_load", 246, 104),
    ("reboot", 169, 142), ("swapon", 167, 224), ("acct", 163, 89), ("quotactl", 179, 60),
    ("syslog", 103, 116), ("settimeofday", 164, 170), ("fanotify_init", 300, 262),
    ("memfd_secret", 447, 447), ("move_pages", 279, 239), ("a call not yet made", 600, 600),
):
    refused(what, call(x86_64, aarch64), -1, -1, -1, -1, -1)
""",
    ),
    Hostile(
        name="personality and names of the machine",
        category="privileges",
        code="""
refused("personality", libc.personality, 0x0040000)
name = os.uname().nodename.encode()
refused("sethostname", libc.sethostname, name, len(name))
refused("setdomainname", libc.setdomainname, b"x", 1)
refused("iopl", call(172, 600), 3)
refused("modify_ldt", call(154, 600), 0, None, 0)
""",
    ),
    Hostile(
        name="limits raised",
        category="privileges",
        code="""
import resource
for name in ("CPU", "AS", "FSIZE", "NOFILE", "CORE", "MEMLOCK", "NPROC"):
    number = getattr(resource, f"RLIMIT_{name}")
    soft, hard = resource.getrlimit(number)
    if hard == resource.RLIM_INFINITY:
        if name == "NPROC" and not HOST.has_processes:
            continue
        reached(f"{name} is not limited")
        continue
    attempt(name, lambda: resource.setrlimit(number, (hard + 1, hard + 1)))
    attempt(name, lambda: resource.setrlimit(number, (-1, -1)))
for pid in (HOST.canary, HOST.server):
    attempt("limits of others", lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE))
""",
    ),
    Hostile(
        name="system calls of another kind",
        category="privileges",
        statuses=(RunStatus.ERROR,),
        code="""
import mmap
if not IS_X86:
    sys.exit(1)
def machine(code):
    page = mmap.mmap(-1, 4096, flags=PRIVATE, prot=7)
    page.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return ctypes.CFUNCTYPE(ctypes.c_long)(address)()
if libc.syscall(0x40000000 + 39) > 0:
    reached("x32")
# mov eax, 20 (getpid); int 0x80; ret
reached(f"32-bit {machine(bytes.fromhex('b814000000cd80c3'))}")
""",
    ),
]
