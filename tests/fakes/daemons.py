"""Code that leaves processes in every way, and the processes of this host by their command line."""

import os
import signal
import textwrap
from pathlib import Path

DAEMONS = """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    mark = [sys.executable, "-c", "import time; time.sleep(1000)", MARK]
    subprocess.Popen(mark)
    subprocess.Popen(mark, start_new_session=True, env={}, close_fds=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            subprocess.Popen(mark, stdin=-3, stdout=-3, stderr=-3)
            time.sleep(1000)
        os._exit(0)
"""


def processes_with(mark: str) -> list[int]:
    """Living processes of this host whose command line has this text, without this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (
                mark.encode() in (folder / "cmdline").read_bytes()
                and int(folder.name) != os.getpid()
            ):
                found.append(int(folder.name))
        except OSError:
            pass
    return found


class Leaves:
    """An environment whose reset leaves processes, and whose step hangs or crashes."""

    def reset(self, row: dict[str, str]) -> str:
        exec(textwrap.dedent(DAEMONS.replace("MARK", repr(row["mark"]))))
        return "begin"

    def step(self, action: str) -> tuple[str, float, bool]:
        os._exit(3) if action == "crash" else signal.pause()
        return "", 0.0, True
