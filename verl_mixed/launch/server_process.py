"""A process of `verl-mixed serve-tools` that can be started again at the same address."""

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from verl_mixed.launch import processes
from verl_mixed.launch.failure import RunFailed, reason_of_end

START_S = 90.0
"""Deadline of the start; most of the time goes into the search index and the sandbox's test."""


class ServerProcess:
    """The process, its log and its ready file.

    Args:
        command: gets the option `--ready-file`, and `--port` when it is started again.
        environ: environment of the process.
        run_dir: folder of the run, for the log and the ready file.
        name: name of both files.
    """

    process: subprocess.Popen[bytes]

    start_s = START_S

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        run_dir: Path,
        name: str = "tool_server",
    ) -> None:
        self._environ, self._run_dir = environ, run_dir
        self.log = run_dir / f"{name}.log"
        self._ready_file = run_dir / f"{name}.json"
        self._command = [*command, "--ready-file", str(self._ready_file)]

    def start(self, url: str = "") -> None:
        """Start the process, at the port of `url` if it was started before; does not wait."""
        self._ready_file.unlink(missing_ok=True)
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        self._deadline = time.monotonic() + self.start_s
        port = ["--port", str(urlsplit(url).port)] if url else []
        self.process = processes.start(
            [*self._command, *port], log=self.log, environ=self._environ, run_dir=self._run_dir
        )

    def wait_for_url(self) -> str:
        """The URL, once the process listens.

        Raises:
            RunFailed: it does not start.
        """
        while not self._ready_file.exists():
            if (reason := self.why_ended()) is not None:
                raise RunFailed(f"the tool server did not start: {reason}; its log is {self.log}")
            time.sleep(0.1)
        return json.loads(self._ready_file.read_text())["url"]

    def why_ended(self) -> str | None:
        """Why the process ended, or is killed because it does not listen; None if it runs."""
        code = self.process.poll()
        if code is not None:
            return reason_of_end(self.log, self._log_start, code)
        if self._ready_file.exists() or time.monotonic() < self._deadline:
            return None
        self.process.kill()
        self.process.wait()  # its port is free then
        return f"it did not listen within {self.start_s:g} s"


def restart_words(url: str, reason: str, count: int, most: int) -> str:
    """The line about a restart; `verl-mixed diagnose` knows it."""
    return f"the tool server at {url} ended: {reason}; started again, {count} of {most} times"


def end_words(url: str, reason: str, most: int) -> str:
    """The line about a server that may not be started again."""
    return (
        f"the tool server at {url} ended: {reason}; it was started again {most} times "
        f"(mixed.tool_server.restarts={most})"
    )
