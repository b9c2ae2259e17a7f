"""Test of a sandbox's isolation: a probe program that tries to get out, run before any other.

The probe tries to reach host files, the server's environment, the network, other processes, and
memory beyond its limit. A sandbox in which one attempt succeeds is not used.
"""

import json
import os
import tempfile
from pathlib import Path

from tool_server.isolation.errors import SandboxUnavailable
from tool_server.isolation.host import ENVIRONMENT
from tool_server.sandbox.program import Limits, Program, RunStatus
from tool_server.sandbox.sandbox import Sandbox

_LIMITS = Limits(wall_s=20.0)

_PROGRAM = """
import fcntl, json, mmap, os, socket, sys

reached = []

def attempt(what, action):
    try:
        action()
    except (OSError, MemoryError):
        return
    reached.append(what)

def fork():
    pid = os.fork()
    if pid == 0:
        os._exit(0)

plan = json.loads(sys.stdin.read())
for path in plan["files"]:
    attempt(f"read {path}", lambda: open(path, "rb").read(1))
for path in plan["folders"]:
    attempt(f"write {path}", lambda: open(f"{path}/sandbox-probe", "w"))
attempt("network", lambda: socket.create_connection(("127.0.0.1", 9), timeout=1))
attempt("unix socket", lambda: socket.socket(socket.AF_UNIX))
attempt("signal", lambda: os.kill(plan["pid"], 0))
attempt("memory", lambda: bytearray(plan["memory"]))
attempt("shared memory", lambda: mmap.mmap(-1, 4096))
shared_file = open(os.__file__)
attempt("file lease", lambda: fcntl.fcntl(shared_file, fcntl.F_SETLEASE, fcntl.F_RDLCK))
attempt("file lock", lambda: fcntl.flock(shared_file, fcntl.LOCK_EX))
shared_file.close()
if not plan["processes"]:
    attempt("new process", fork)
elif os.getpid() > 3:
    reached.append("pid namespace")
for name in set(os.environ) - set(plan["environment"]):
    reached.append(f"environment {name}")
for fd in range(3, 1 << 16):
    attempt(f"descriptor {fd}", lambda: os.fstat(fd))
print(json.dumps(reached))
"""


def prove(sandbox: Sandbox) -> str:
    """Run the probe program.

    Returns:
        One line that says what is isolated.

    Raises:
        SandboxUnavailable: the probe did not run, or one of its attempts succeeded.
    """
    with tempfile.TemporaryDirectory(prefix="sandbox-probe-") as folder:
        secret = Path(folder) / "secret"
        secret.write_text("host")
        plan = {
            "files": [str(secret), __file__, "/etc/passwd", "/proc/self/status"],
            "folders": [folder, "/usr/lib", "/", "/dev"],
            "pid": os.getpid(),
            "processes": sandbox.has_processes,
            "environment": [*ENVIRONMENT, "PWD", "LC_CTYPE"],  # the last two are the interpreter's
            "memory": 2 * _LIMITS.memory_mb * 1024 * 1024,
        }
        probe = Program(code=_PROGRAM, stdin=json.dumps(plan))
        done = sandbox.run_blocking(probe, _LIMITS)
    if done.status is not RunStatus.FINISHED:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.return_code}"]
        raise SandboxUnavailable(f"the probe program did not run ({lines[-1]})")
    reached = json.loads(done.stdout)
    if reached:
        raise SandboxUnavailable(f"the probe program got out ({', '.join(reached)})")
    return "no host file, environment, network, process or signal within reach"
