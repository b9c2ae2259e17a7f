"""The tool server that a run starts for itself, and starts again if it ends."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agent_loop.tools.limiter import state_path
from agent_loop.tools.server.settings import OwnServerSettings, ServerSettings
from cluster.cluster_watch import own_ip
from config.lookup import at, files_at
from config.schema import TOOL_CONFIG, MixedConfig, ToolConfig, load_section
from verl_mixed.checks.config.sessions import sessions_needed
from verl_mixed.checks.machine.services import read_health, runs_code
from verl_mixed.launch import processes
from verl_mixed.launch.failure import RunFailed, reason_of_end
from verl_mixed.launch.plan import Plan
from verl_mixed.run.compose import save_config

START_S = 90.0
"""Deadline of the start; most of the time goes into the search index and the sandbox's test."""


class ToolServer:
    """The run's own tool server. If it ends, it is started again at the same address.

    Args:
        plan: of the run; `start` puts the server's URL into its config.
        environ: environment of the server.
        children: processes that end with the run. The server is among them from its start.
        say: prints a line.
    """

    def __init__(
        self,
        plan: Plan,
        environ: Mapping[str, str],
        children: list[subprocess.Popen[bytes]],
        say: Callable[[str], None],
    ) -> None:
        self._plan, self._environ, self._children, self._say = plan, environ, children, say
        self._ready_file = plan.folder.path / "tool_server.json"
        self._command = _command(plan, self._ready_file)
        self._most_restarts = own_settings(plan.config).restarts
        self._restarts = 0
        self._url = ""

    def start(self) -> None:
        """Start the server and wait until it listens.

        Raises:
            RunFailed: it does not start, or cannot isolate programs that the run needs.
        """
        self._process = self._started(self._command)
        self._children.append(self._process)
        while not self._ready_file.exists():
            if (reason := self._why_ended()) is not None:
                log = self._plan.folder.server_log
                raise RunFailed(f"the tool server did not start: {reason}; its log is {log}")
            time.sleep(0.1)
        folder, config = self._plan.folder, self._plan.config
        url = self._url = json.loads(self._ready_file.read_text())["url"]
        at(config, TOOL_CONFIG)["server_url"] = url
        save_config(config, folder.config)
        health = json.loads(read_health(url, self._environ, timeout_s=10))
        sandbox = health["sandbox"]
        if sandbox is None and runs_code(config):
            raise RunFailed(f"no isolation for programs, so none is run: {health['sandbox_why']}")
        self._say(f"tools        {url} (sandbox {sandbox}, {health['passages']} passages)")

    def keep_up(self) -> None:
        """Start the server again if it has ended; does not wait until the new one listens.

        Raises:
            RunFailed: it has ended once more than `mixed.tool_server.restarts` allows.
        """
        if (reason := self._why_ended()) is None:
            return
        log, most = self._plan.folder.server_log, self._most_restarts
        if self._restarts == most:
            raise RunFailed(
                f"the tool server at {self._url} ended: {reason}; it was started again "
                f"{self._restarts} times (mixed.tool_server.restarts={most}); its log is {log}; "
                "the same command resumes"
            )
        self._restarts += 1
        words = (
            f"the tool server at {self._url} ended: {reason}; started again, {self._restarts} of "
            f"{most} times"
        )
        self._say(f"WARNING {words}; its log is {log}")
        with log.open("a") as file:
            file.write(f"{words}\n")
        old = self._process
        self._process = self._started([*self._command, "--port", str(urlsplit(self._url).port)])
        self._children[self._children.index(old)] = self._process

    def _started(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        folder = self._plan.folder
        self._ready_file.unlink(missing_ok=True)
        self._log_start = folder.server_log.stat().st_size if folder.server_log.exists() else 0
        self._deadline = time.monotonic() + START_S
        return processes.start(
            command, log=folder.server_log, environ=self._environ, run_dir=folder.path
        )

    def _why_ended(self) -> str | None:
        """Why the server ended, or is given up because it does not listen; None if it runs."""
        code = self._process.poll()
        if code is not None:
            return reason_of_end(self._plan.folder.server_log, self._log_start, code)
        if self._ready_file.exists() or time.monotonic() < self._deadline:
            return None
        self._process.kill()
        return f"it did not listen within {START_S:g} s"


def own_settings(config: Mapping[str, Any]) -> OwnServerSettings:
    """The settings of `mixed.tool_server`, which the preflight has checked."""
    return OwnServerSettings.model_validate(at(config, "mixed.tool_server") or {})


def _command(plan: Plan, ready_file: Path) -> list[str]:
    """`verl-mixed serve-tools` with the run's settings, corpus and limiter."""
    command = [sys.executable, "-m", "verl_mixed", "serve-tools"]
    command += ["--ready-file", str(ready_file)]
    if plan.cluster is not None:
        command += ["--host", own_ip(plan.cluster)]
    tools = load_section(ToolConfig, at(plan.config, TOOL_CONFIG), TOOL_CONFIG)
    mixed = load_section(MixedConfig, at(plan.config, "mixed"), "mixed")
    command += ["--limiter", str(state_path(tools, mixed))]
    given = mixed.tool_server or {}
    of_server = given.keys() & ServerSettings.model_fields.keys()
    settings = {"port": 0} | {name: given[name] for name in of_server}
    if (needed := sessions_needed(plan.config)) > ServerSettings().max_sessions:
        settings = {"max_sessions": needed} | settings
    command += ["--settings", json.dumps(settings)]
    corpus = Path(files_at(plan.config, "data.train_files")[0]).parent / "corpus.jsonl"
    if not {"corpus_path", "search_upstream"} & settings.keys() and corpus.exists():
        command += ["--corpus", str(corpus)]
    return command
