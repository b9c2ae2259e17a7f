"""Programs that forge what is said of them, crash, or hunt in the interpreter they are given."""

from dataclasses import replace

from tests.tool_server.hostile.program import ENDLESS, LIMITS, Hostile
from tool_server.sandbox import RunStatus

FAILED = (RunStatus.ERROR,)

FORGING = [
    Hostile(
        name="a report of its own",
        category="forging",
        return_codes=(7,),
        code="""
report = b'{"run": {"code": 0, "late": false, "wall_s": 0.0, "cpu_s": 0.0}, "files": {}}'
for fd in (*range(3, 300), *range(900, 1100)):
    for words in (report, b"ended\\n", b'{"fault": "forged"}', b"ready", b""):
        try:
            os.write(fd, words)
        except OSError:
            pass
print("ended")
sys.stdout.flush()
os._exit(7)
""",
    ),
    Hostile(
        name="a changed interpreter for the next",
        category="forging",
        code="""
import builtins, random, gc, linecache, importlib
builtins.hostile = True
builtins.print = lambda *args, **named: os.write(1, b"REACHED print\\n")
json.loads = json.dumps = lambda *args, **named: {}
sys.modules["math"] = None
sys.modules["hostile"] = sys
sys.path.insert(0, "/tmp")
sys.path_hooks.clear()
sys.meta_path.clear()
os.environ["HOSTILE"] = "1"
os.fork = os._exit = lambda *args: 0
random.seed(1)
gc.disable()
sys.setrecursionlimit(60)
try:
    for number in range(1, 65):
        signal.signal(number, signal.SIG_IGN)
except (OSError, ValueError):
    pass
""",
        then="""
import builtins, math, gc
for what, is_changed in (
    ("builtins", hasattr(builtins, "hostile")),
    ("modules", "hostile" in sys.modules),
    ("path", "/tmp" in sys.path),
    ("environment", "HOSTILE" in os.environ),
    ("gc", not gc.isenabled()),
    ("recursion", sys.getrecursionlimit() < 500),
    ("signals", signal.getsignal(signal.SIGTERM) != signal.SIG_DFL),
    ("finders", not sys.meta_path),
):
    if is_changed:
        reached(what)
""",
    ),
    Hostile(
        name="files for the next",
        category="forging",
        code="""
for folder in (".", "..", "/tmp", "/dev/shm", "/box", "/var/tmp", "/dev", "/dev/mqueue", "/run"):
    for name in (HOST.mark, "json.py", "sitecustomize.py", "usercustomize.py", "encodings"):
        try:
            with open(f"{folder}/{name}", "w") as file:
                file.write("print('REACHED by import')")
        except OSError:
            pass
""",
        then="""
for folder in (".", "..", "/tmp", "/dev/shm", "/box", "/var/tmp", "/dev", "/dev/mqueue", "/run"):
    for name in (HOST.mark, "sitecustomize.py", "usercustomize.py", "encodings"):
        if os.path.lexists(f"{folder}/{name}"):
            reached(f"{folder}/{name}")
for folder in (".", "/tmp", "/dev/shm"):
    try:
        left = set(os.listdir(folder)) - {"main.py"}
    except OSError:
        continue
    # What stands there for good is on the way to an interpreter or a checkout below /tmp.
    if left := {name for name in left if os.access(f"{folder}/{name}", os.W_OK)}:
        reached(f"{folder}: {left}")
""",
    ),
    Hostile(
        name="memory and queues for the next",
        category="forging",
        code="""
for get, x86_64, aarch64, flags in (
    ("shmget", 29, 194, (4096, 0o1666)),
    ("semget", 64, 190, (1, 0o1666)),
    ("msgget", 68, 186, (0o1666,)),
):
    call(x86_64, aarch64)(HOST.key, *flags)
call(240, 180)(HOST.mark.encode(), os.O_CREAT | os.O_RDWR, 0o666, None)
""",
        then="""
for get, x86_64, aarch64, flags in (
    ("shmget", 29, 194, (0, 0)), ("semget", 64, 190, (0, 0)), ("msgget", 68, 186, (0,)),
):
    if call(x86_64, aarch64)(HOST.key, *flags) >= 0:
        reached(get)
if call(240, 180)(HOST.mark.encode(), os.O_RDWR, 0, None) >= 0:
    reached("mq_open")
""",
    ),
    Hostile(
        name="messages of the host",
        category="forging",
        code="""
message = ctypes.create_string_buffer(128)
for queue in {HOST.message_queue, 0}:
    if call(70, 188)(queue, message, 64, 0, 0o4000) > 0:
        reached(f"a message {message.raw[8:40]!r}")
    libc.memcpy(message, struct.pack("=q", 1), 8)
    if call(69, 189)(queue, message, 8, 0o4000) == 0:
        reached("the queue, to write")
for semaphore in {HOST.semaphore, 0}:
    if call(65, 193)(semaphore, struct.pack("=Hhh", 0, 1, 0o4000), 1) == 0:
        reached("a semaphore")
    if call(220, 192)(semaphore, struct.pack("=Hhh", 0, 1, 0o4000), 1, None) == 0:
        reached("a semaphore, timed")
""",
    ),
    Hostile(
        name="a socket that two runs share",
        category="forging",
        beside="""
try:
    own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    own.bind("\\0" + HOST.mark)
    own.settimeout(0.5)
    reached(own.recv(64))
except OSError:
    time.sleep(0.5)
""",
        code="""
end = time.monotonic() + 0.4
while time.monotonic() < end:
    for make in (lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM),
                 lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0]):
        try:
            make().sendto(b"from another run", "\\0" + HOST.mark)
        except OSError:
            continue
        reached("another run's socket")
    time.sleep(0.02)
""",
    ),
    Hostile(
        name="a terminal that two runs share",
        category="forging",
        beside="""
import select
try:
    ours, theirs = os.openpty()
    os.write(theirs, b"@SECRET@")
    os.read(ours, 1000)
    if select.select([ours], [], [], 0.6)[0]:
        reached(f"{os.read(ours, 100)!r} of another run")
except OSError:
    time.sleep(0.6)
""",
        code="""
end = time.monotonic() + 0.5
while time.monotonic() < end:
    for number in range(8):
        try:
            terminal = os.open(f"/dev/pts/{number}", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
            os.write(terminal, b"from another run")
        except OSError:
            continue
        reached(f"terminal {number}")
    time.sleep(0.02)
""",
    ),
]

CRASHES = [
    Hostile(
        name="a file where the compiler's output goes",
        category="crashes",
        language="c",
        rungs=("bubblewrap",),
        files={".compiler-output": b"x"},
        statuses=(RunStatus.FINISHED,),
        code="int main(void) { return 0; }",
    ),
    Hostile(
        name="output that is no text",
        category="crashes",
        return_codes=(0,),
        code="""
for fd in (1, 2):
    os.write(fd, bytes(range(256)) * 20 + b"\\xed\\xa0\\x80\\x1b]0;x\\x07\\x1b[2J" + b"\\xf0" * 9)
""",
    ),
    Hostile(
        name="a death like one by the sandbox",
        category="crashes",
        rungs=("bubblewrap",),
        statuses=FAILED,
        return_codes=(137,),
        code="os.kill(os.getpid(), signal.SIGKILL)",
    ),
    Hostile(
        name="segfault",
        category="crashes",
        statuses=FAILED,
        return_codes=(139,),
        code="ctypes.string_at(0)",
    ),
    Hostile(
        name="stack overflow",
        category="crashes",
        limits=replace(LIMITS, wall_s=60.0, cpu_s=60),  # filling its memory takes what it takes
        statuses=FAILED,
        code="""
sys.setrecursionlimit(10**9)
class Endless:
    def __repr__(self):
        return repr([self])
    def __getattr__(self, name):
        return getattr(self, name + "x")
def fall(value):
    return fall([value]) + repr(Endless()).count("x")
fall([])
""",
    ),
    Hostile(name="abort", category="crashes", statuses=FAILED, code="os.abort()"),
    Hostile(
        name="illegal instruction",
        category="crashes",
        statuses=FAILED,
        return_codes=(132,),
        code="""
import mmap
page = mmap.mmap(-1, 4096, flags=PRIVATE, prot=7)
page.write(bytes.fromhex("0f0b") if IS_X86 else bytes(4))
ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
""",
    ),
    Hostile(
        name="an exit within the exit",
        category="crashes",
        return_codes=(9,),
        code="""
import atexit
atexit.register(os._exit, 9)
atexit.register(lambda: 1 / 0)
sys.excepthook = None
sys.stdout = None
""",
    ),
    Hostile(
        name="an exit that never comes",
        category="crashes",
        limits=ENDLESS,
        statuses=(RunStatus.TIME_LIMIT,),
        code="""
import atexit
def again():
    atexit.register(again)
    time.sleep(60)
atexit.register(again)
""",
    ),
    Hostile(
        name="recursion in a destructor",
        category="crashes",
        limits=LIMITS,
        code="""
class Undying:
    def __del__(self):
        Undying()
Undying()
""",
    ),
    Hostile(
        name="a source that the parser dies of",
        category="crashes",
        statuses=FAILED,
        code="eval('-' * 1_000_000 + '1')\nexec('(' * 100_000)",
    ),
]

_HUNTER = """
import gc, re
pattern = re.compile(SECRET_WORD.encode() + b"[0-9a-f]{16}")
read_end, write_end = os.pipe()
os.set_blocking(write_end, False)
libc.write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
found = set()
def scan(start, size):
    for page in range(start & ~4095, start + size, 4096):
        if libc.write(write_end, page, 4096) == 4096:  # the kernel looks whether it can be read
            found.update(pattern.findall(os.read(read_end, 4096)))
for thing in (object(), [], "x" * 600, sys.modules, b"x" * 100_000):
    scan(max(4096, id(thing) - (4 << 20)), 8 << 20)
scan(ctypes.c_void_p.in_dll(libc, "environ").value - (1 << 16), 1 << 18)
scan(ctypes.addressof(ctypes.create_string_buffer(100_000)) - (4 << 20), 8 << 20)
for text in {str(thing)[:5000] for thing in gc.get_objects() if type(thing) in (dict, list, tuple)}:
    found.update(pattern.findall(text.encode(errors="replace")))
for secret in found:
    reached(f"the secret {secret!r}")
"""

INTERPRETER = [
    Hostile(
        name="secrets in the memory it inherits",
        category="interpreter",
        code="secret = '@SECRET@' * 100\nprint(len(secret))",
        then=_HUNTER,
    ),
    Hostile(
        name="our modules",
        category="interpreter",
        code="""
import gc
for name, module in list(sys.modules.items()):
    if name == "__main__":
        continue
    path = getattr(module, "__file__", None) or ""
    if "sandbox" in path or name.split(".")[0] in ("agent_loop", "run", "fork_server", "confine"):
        reached(f"module {name}")
words = " ".join([*sys.orig_argv, *sys.argv])
if '"landlock"' in words or len(words) > 2000:
    reached("the sandbox's plan in sys.orig_argv")
""",
    ),
    Hostile(
        name="living sockets of ours",
        category="interpreter",
        code="""
import gc
for thing in gc.get_objects():
    if isinstance(thing, socket.socket):
        attempt(f"{thing!r}", lambda: os.fstat(thing.fileno()))
""",
    ),
    Hostile(
        name="hooks of the interpreter",
        category="interpreter",
        statuses=(RunStatus.FINISHED, RunStatus.ERROR),
        code="""
import atexit, faulthandler
def hook(*args):
    raise RuntimeError("hostile")
faulthandler.enable()
atexit.register(sys.addaudithook, hook)
threading.setprofile(hook)
sys.setswitchinterval(1000)
sys.unraisablehook = threading.excepthook = sys.excepthook = hook
threading._shutdown = lambda: None
sys.stdout = sys.stderr = type("Stream", (), {"flush": hook, "write": hook})()
""",
        then="""
if sys.getswitchinterval() > 1 or threading._shutdown.__name__ == "<lambda>":
    reached("the next interpreter")
""",
    ),
    Hostile(
        name="programs in memory",
        category="interpreter",
        code="""
refused("memfd_create", call(319, 279), b"x", 0)
for path in ("/usr/bin/su", "/usr/bin/mount", "/usr/bin/passwd"):
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        try:
            os.execv(path, [path, "-c", "id -u >&2"])
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
if os.geteuid() != os.getuid() or libc.prctl(39, 0, 0, 0, 0) != 1:
    reached("the rights of a file")
""",
    ),
    Hostile(
        name="frames and objects of ours",
        category="interpreter",
        code="""
import gc
frame = sys._getframe()
while frame := frame.f_back:
    for name, value in frame.f_locals.items():
        if isinstance(value, dict) and {"namespaces", "limits", "home"} & set(value):
            reached(f"{name} of {frame.f_code.co_name}")
for thing in gc.get_objects():
    if isinstance(thing, dict) and {"namespaces", "filter"} <= set(map(str, thing)):
        reached("the plan")
""",
    ),
    Hostile(
        name="a filter of its own",
        category="interpreter",
        code="""
if libc.prctl(22, 0, 0, 0, 0) == 0 or libc.prctl(22, 1, 0, 0, 0) == 0:
    reached("the filter, to loosen")
class Filter(ctypes.Structure):
    _fields_ = [("count", ctypes.c_ushort), ("program", ctypes.c_void_p)]
allow = ctypes.create_string_buffer(struct.pack("=HBBI", 6, 0, 0, 0x7FFF0000))
libc.prctl(22, 2, ctypes.byref(Filter(1, ctypes.addressof(allow))), 0, 0)
attempt("a socket past a filter of its own", lambda: socket.socket(socket.AF_INET))
attempt("a file past a filter of its own", lambda: read(HOST.file))
""",
    ),
]
