"""Proof of a sandbox: a program that tries to get out, run before any other.

It must come back having reached nothing: no host file, no environment, no network, no process, no
memory beyond its limit. A sandbox that fails one point is not used.
"""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from agent_loop.tools.sandbox.runner import Limits, Sandbox, SandboxUnavailable, last_line

_TIMEOUT_S = 20.0
_LIMITS = Limits(memory_mb=256)

_PROGRAM = """
import json, os, socket, sys

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
attempt("new process", fork)
attempt("signal", lambda: os.kill(plan["pid"], 0))
attempt("memory", lambda: bytearray(plan["memory"]))
# PWD is the sandbox's own, LC_CTYPE the interpreter's.
if set(os.environ) - {"PWD", "LC_CTYPE"}:
    reached.append("environment")
print(json.dumps(reached))
"""


def prove(sandbox: Sandbox) -> str:
    """Run the probe program; one line that says what holds.

    Raises:
        SandboxUnavailable: the probe did not run, or reached something.
    """
    with tempfile.TemporaryDirectory(prefix="sandbox-probe-") as folder:
        secret = Path(folder) / "secret"
        secret.write_text("host")
        plan = {
            "files": [str(secret), __file__, "/etc/passwd", f"/proc/{os.getpid()}/environ"],
            "folders": [folder, "/usr/lib", "/", "/dev", "/dev/shm"],
            "pid": os.getpid(),
            "memory": 2 * _LIMITS.memory_mb * 1024 * 1024,
        }
        with sandbox.command(_PROGRAM, _LIMITS) as command:
            try:
                done = subprocess.run(
                    command.argv,
                    input=json.dumps(plan).encode(),
                    capture_output=True,
                    cwd=command.cwd,
                    env=dict(command.env),
                    pass_fds=tuple(command.pass_fds),
                    start_new_session=True,
                    timeout=_TIMEOUT_S,
                    check=False,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise SandboxUnavailable(f"the probe program did not run ({error})") from error
    if done.returncode != 0:
        reason = last_line(done.stderr.decode(errors="replace"), done.returncode)
        raise SandboxUnavailable(f"the probe program did not run ({reason})")
    reached = json.loads(done.stdout)
    if reached:
        raise SandboxUnavailable(f"the probe program got out ({', '.join(reached)})")
    return "no host file, environment, network, process or signal within reach"
