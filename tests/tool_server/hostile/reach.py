"""Programs that reach for the host's files, its network, and descriptors."""

from tests.tool_server.hostile.program import Hostile
from tool_server.sandbox import RunStatus

FILES = [
    Hostile(
        name="absolute paths",
        category="host files",
        code="""
for path in (HOST.file, "/etc/passwd", "/etc/shadow", "/etc/hostname", HOST.source):
    attempt(path, lambda: read(path))
for path in (HOST.folder, "/home", "/var/log", "/etc/ssh", "/opt"):
    attempt(path, lambda: os.listdir(path))
""",
    ),
    Hostile(
        name="the host's file by a link",
        category="host files",
        code="""
for make in (os.symlink, os.link):
    try:
        make(HOST.file, "link")
        attempt("by a link", lambda: read("link"))
        os.unlink("link")
    except OSError:
        pass
""",
    ),
    Hostile(
        name="a link that is fetched",
        category="host files",
        fetch=("link", "hard", "folder/secret", "etc/passwd", "pipe"),
        code="""
for make, what, name in (
    (os.symlink, HOST.file, "link"), (os.link, HOST.file, "hard"),
    (os.symlink, HOST.folder, "folder"), (os.symlink, "/etc", "etc"),
):
    try:
        make(what, name)
    except OSError:
        pass
try:
    os.mkfifo("pipe")
except OSError:
    pass
""",
    ),
    Hostile(
        name="one file fetched by many names",
        category="host files",
        fetch=tuple(f"link{number}" for number in range(12)),
        fetched_mb=2,
        code="""
with open("link0", "wb") as file:
    file.write(bytes(1_500_000))
for number in range(1, 12):
    try:
        os.link("link0", f"link{number}")
    except OSError:
        pass
""",
    ),
    Hostile(
        name="proc of parents",
        category="host files",
        code="""
for pid in ("self", "1", os.getppid(), HOST.server, HOST.canary):
    for what in ("environ", "cmdline", "maps", "status", "cwd/.", "root/etc/passwd", "fd/0"):
        if (pid, what) == ("self", "fd/0"):
            continue  # its own input
        attempt(f"/proc/{pid}/{what}", lambda: read(f"/proc/{pid}/{what}"))
    attempt(f"/proc/{pid}/mem", lambda: open(f"/proc/{pid}/mem", "r+b"))
attempt("/proc", lambda: os.listdir("/proc")[0])
attempt("/sys", lambda: os.listdir("/sys")[0])
attempt("/proc/sysrq-trigger", lambda: open("/proc/sysrq-trigger", "w"))
""",
    ),
    Hostile(
        name="upwards from the own folder",
        category="host files",
        code="""
up = "../" * 24
attempt("relative", lambda: read(up + HOST.file.lstrip("/")))
fd = os.open(".", os.O_RDONLY)
for _ in range(24):
    try:
        fd = os.open("..", os.O_PATH | os.O_DIRECTORY, dir_fd=fd)
    except OSError:
        break
attempt("by descriptors", lambda: os.open(HOST.file.lstrip("/"), os.O_RDONLY, dir_fd=fd))
try:
    os.chdir(fd)
    attempt("by chdir", lambda: read(HOST.file.lstrip("/")))
except OSError:
    pass
call_handle = call(303, 264)
refused("name_to_handle_at", call_handle, -100, b".", None, None, 0)
refused("open_by_handle_at", call(304, 265), -100, None, 0)
""",
    ),
    Hostile(
        name="environment of the server",
        category="host files",
        code="""
import re
values = " ".join(f"{k}={v}" for k, v in os.environ.items())
environ = ctypes.c_void_p.in_dll(libc, "environ").value
names, at = [], ctypes.cast(environ, ctypes.POINTER(ctypes.c_char_p))
while at[len(names)]:
    names.append(at[len(names)])
values += b" ".join(names).decode(errors="replace")
if SECRET_WORD in values:
    reached("the secret")
for name in re.findall(r"\\b(PYTHONPATH|VIRTUAL_ENV|SSH_[A-Z]+|USER|LOGNAME)=", values):
    reached(name)
""",
    ),
    Hostile(
        name="folders of other runs",
        category="host files",
        beside="""
open("private", "w").write("@SECRET@")
time.sleep(0.5)
""",
        code="""
end = time.monotonic() + 0.4
while time.monotonic() < end:
    for folder in ("..", "../..", "/tmp", "/box", "/dev/shm", HOST.folder):
        try:
            found = [name for name in os.listdir(folder) if not folder.startswith("..")]
        except OSError:
            continue
        for name in {"private", *found}:
            try:
                text = open(f"{folder}/{name}").read()
            except OSError:
                continue
            if SECRET_WORD in text:
                reached(f"{folder}/{name}")
    time.sleep(0.02)
""",
    ),
    Hostile(
        name="raw devices",
        category="host files",
        code="""
import stat
for path in ("mem", "kmem", "kmsg", "fuse", "kvm", "vda", "sda", "nvme0n1", "net/tun", "loop0"):
    attempt(f"/dev/{path}", lambda: open(f"/dev/{path}", "rb"))
for major, minor in ((1, 1), (254, 0), (259, 0), (8, 0)):
    for kind in (stat.S_IFBLK, stat.S_IFCHR):
        try:
            os.mknod("device", kind | 0o600, os.makedev(major, minor))
        except OSError:
            continue
        attempt(f"device {major}:{minor}", lambda: open("device", "rb"))
        os.unlink("device")
""",
    ),
    Hostile(
        name="another program reads for it",
        category="host files",
        code="""
script = 'read -r line < "$0"; [ -z "$line" ] || echo "REACHED by a shell: $line"'
os.execv("/usr/bin/bash", ["bash", "-c", script, HOST.file])
""",
    ),
]

WRITING = [
    Hostile(
        name="write outside",
        category="writing outside",
        code="""
for path in (HOST.file, HOST.source, sys.executable, json.__file__):
    attempt(path, lambda: open(path, "ab"))
for folder in (HOST.folder, "/", "/etc", "/usr/lib", "/usr/bin", "/dev", "/var/tmp", "..",
               os.path.dirname(HOST.source), os.path.dirname(json.__file__)):
    attempt(folder, lambda: open(f"{folder}/{HOST.mark}", "w"))
    attempt(folder, lambda: os.mkdir(f"{folder}/{HOST.mark}"))
if not HOST.has_processes:
    for folder in ("/tmp", "/dev/shm"):
        attempt(folder, lambda: open(f"{folder}/{HOST.mark}", "w"))
""",
    ),
    Hostile(
        name="change a file of the host's without writing",
        category="writing outside",
        code="""
attempt("chmod", lambda: os.chmod(HOST.file, 0o777))
attempt("chown", lambda: os.chown(HOST.file, 12345, 12345))
attempt("utime", lambda: os.utime(HOST.file, (1, 1)))
attempt("truncate", lambda: os.truncate(HOST.file, 0))
attempt("xattr", lambda: os.setxattr(HOST.file, "user.x", b"1"))
attempt("rename", lambda: os.rename(HOST.file, HOST.file + HOST.mark))
attempt("unlink", lambda: os.unlink(HOST.file))
attempt("link", lambda: os.link(HOST.file, HOST.file + HOST.mark))
attempt("replace", lambda: os.replace("main.py", HOST.file))
attempt("rmdir", lambda: os.rmdir(HOST.folder))
refused("fchmodat2", call(452, 452), -100, HOST.file.encode(), 0o777, 0)
""",
    ),
    Hostile(
        name="move the own folder away",
        category="writing outside",
        code="""
here = os.getcwd() if HOST.has_processes else "."
for source, target in (
    (".", f"../{HOST.mark}"), (here, f"/{HOST.mark}"), ("main.py", "../main.py"),
):
    attempt(f"{source} to {target}", lambda: os.rename(source, target))
for name in os.listdir("."):
    os.unlink(name)
try:
    os.rmdir(os.getcwd())
    os.symlink(HOST.folder, here)
except OSError:
    pass
""",
    ),
]

NETWORK = [
    Hostile(
        name="tcp",
        category="network",
        code="""
for address in (("127.0.0.1", HOST.port), ("0.0.0.0", HOST.port), ("::1", HOST.port)):
    attempt(f"connect {address}", lambda: socket.create_connection(address, timeout=0.5))
attempt("listen", lambda: socket.create_server(("0.0.0.0", 0)))
""",
    ),
    Hostile(
        name="udp",
        category="network",
        code="""
def send():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        return own.sendto(b"hostile", ("127.0.0.1", HOST.port))
attempt("datagram", send)
""",
    ),
    Hostile(
        name="unix and abstract sockets",
        category="network",
        code="""
def connect(address, kind):
    with socket.socket(socket.AF_UNIX, kind) as own:
        own.connect(address)
for address in (HOST.unix, "\\0" + HOST.abstract):
    attempt(f"stream {address!r}", lambda: connect(address, socket.SOCK_STREAM))
for address in (HOST.unix_datagram, "\\0" + HOST.abstract_datagram):
    attempt(f"datagram {address!r}", lambda: connect(address, socket.SOCK_DGRAM))
""",
    ),
    Hostile(
        name="a socket pair that writes elsewhere",
        category="network",
        code="""
for address in (HOST.unix_datagram, "\\0" + HOST.abstract_datagram):
    try:
        own, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    except OSError:
        continue
    attempt(f"sendto {address!r}", lambda: own.sendto(b"hostile", address))
    attempt(f"connect {address!r}", lambda: own.connect(address))
for family in (socket.AF_INET, socket.AF_INET6):
    attempt("inet pair", lambda: socket.socketpair(family, socket.SOCK_STREAM))
""",
    ),
    Hostile(
        name="raw, packet, netlink and odd families",
        category="network",
        code="""
for family in (1, 2, 10, 15, 16, 17, 21, 30, 31, 38, 40, 44):
    for kind in (1, 2, 3, 5):
        attempt(f"family {family} kind {kind}", lambda: socket.socket(family, kind))
""",
    ),
    Hostile(
        name="names",
        category="network",
        code="""
for name in ("example.org", "localhost.localdomain.example"):
    attempt(name, lambda: socket.getaddrinfo(name, 80))
""",
    ),
]

DESCRIPTORS = [
    Hostile(
        name="inherited descriptors",
        category="descriptors",
        code="""
import stat
for fd in range(3, 20_000):
    try:
        found = os.fstat(fd)
    except OSError:
        continue
    reached(f"descriptor {fd} mode {found.st_mode:o}")
for fd in range(3):
    if stat.S_ISSOCK(os.fstat(fd).st_mode) or stat.S_ISDIR(os.fstat(fd).st_mode):
        reached(f"descriptor {fd} is more than a stream")
""",
    ),
    Hostile(
        name="inherited descriptors of a program in C",
        category="descriptors",
        rungs=("bubblewrap",),
        language="c",
        code="""
#include <fcntl.h>
#include <stdio.h>
int main(void) {
    for (int fd = 3; fd < 20000; fd++)
        if (fcntl(fd, F_GETFD) >= 0) printf("REACHED descriptor %d\\n", fd);
}
""",
    ),
    Hostile(
        name="inherited descriptors of a cell",
        category="descriptors",
        language="cell",
        code="""
channels = 0
def is_open(fd):
    try:
        return os.fstat(fd)
    except OSError:
        return None
for fd, found in [(fd, found) for fd in range(3, 20_000) if (found := is_open(fd))]:
    if found.st_rdev == os.stat("/dev/null").st_rdev:
        continue
    try:  # the interpreter gets its cells by one socket
        own = socket.socket(fileno=os.dup(fd))
        channels += 1
        if own.type == socket.SOCK_SEQPACKET and channels == 1:
            for _ in range(20):
                try:
                    socket.send_fds(own, [b"{}"], [0, 1, 2])
                except PermissionError:  # Landlock refuses descriptors in flight
                    own.send(b"{}")
            continue
    except OSError:
        pass
    reached(f"descriptor {fd} mode {found.st_mode:o}")
""",
        statuses=(RunStatus.FINISHED, RunStatus.ERROR),
    ),
    Hostile(
        name="its input written to",
        category="descriptors",
        code="""
attempt("write", lambda: os.write(0, b"hostile"))
attempt("truncate", lambda: os.ftruncate(0, 1 << 30))
import mmap
attempt("map", lambda: mmap.mmap(0, 4096))
""",
    ),
    Hostile(
        name="its output made strange",
        category="descriptors",
        code="""
import fcntl
os.set_blocking(1, False)
fcntl.fcntl(1, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
for size in (4096, 1 << 20):
    try:
        fcntl.fcntl(1, fcntl.F_SETPIPE_SZ, size)
    except OSError:
        pass
try:
    while True:
        os.write(1, b"x" * 4096)
except OSError:
    pass
os.dup2(0, 1)
os.close(2)
os.close(0)
""",
    ),
    Hostile(
        name="descriptors without end",
        category="descriptors",
        code="""
held = []
try:
    while len(held) < 2000:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
if len(held) > 64:
    reached(f"{len(held)} descriptors")
""",
    ),
]
