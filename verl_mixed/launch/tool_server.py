"""The tool server that a run starts for itself."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from agent_loop.tools.limiter import state_path
from agent_loop.tools.server.settings import ServerSettings
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


def start_tool_server(
    plan: Plan,
    environ: Mapping[str, str],
    children: list[subprocess.Popen[bytes]],
    say: Callable[[str], None],
) -> subprocess.Popen[bytes] | None:
    """Start the run's own tool server, wait until it listens, and put its URL into the config.

    The server is added to `children` as soon as it is started. Returns None if the run uses a
    server that is given.

    Raises:
        RunFailed: it does not start, or cannot isolate programs that the run needs.
    """
    if not plan.own_tool_server:
        say(f"tools        {plan.server_url} (given)")
        return None
    folder = plan.folder
    ready_file = folder.path / "tool_server.json"
    ready_file.unlink(missing_ok=True)
    server = processes.start(
        _command(plan, ready_file), log=folder.server_log, environ=environ, run_dir=folder.path
    )
    children.append(server)
    deadline = time.monotonic() + START_S
    while not ready_file.exists():
        if server.poll() is not None or time.monotonic() > deadline:
            raise RunFailed(
                "the tool server did not start: "
                f"{reason_of_end(folder.server_log, 0, server.poll())}; its log is "
                f"{folder.server_log}"
            )
        time.sleep(0.1)
    url = json.loads(ready_file.read_text())["url"]
    at(plan.config, TOOL_CONFIG)["server_url"] = url
    save_config(plan.config, folder.config)
    health = json.loads(read_health(url, environ, timeout_s=10))
    if health["sandbox"] is None and runs_code(plan.config):
        raise RunFailed(f"no isolation for programs, so none is run: {health['sandbox_why']}")
    say(f"tools        {url} (sandbox {health['sandbox']}, {health['passages']} passages)")
    return server


def _command(plan: Plan, ready_file: Path) -> list[str]:
    """`verl-mixed serve-tools` with the run's settings, corpus and limiter."""
    command = [sys.executable, "-m", "verl_mixed", "serve-tools"]
    command += ["--ready-file", str(ready_file)]
    if plan.cluster is not None:
        command += ["--host", own_ip(plan.cluster)]
    tools = load_section(ToolConfig, at(plan.config, TOOL_CONFIG), TOOL_CONFIG)
    mixed = load_section(MixedConfig, at(plan.config, "mixed"), "mixed")
    command += ["--limiter", str(state_path(tools, mixed))]
    settings = {"port": 0} | (mixed.tool_server or {})
    if (needed := sessions_needed(plan.config)) > ServerSettings().max_sessions:
        settings = {"max_sessions": needed} | settings
    command += ["--settings", json.dumps(settings)]
    corpus = Path(files_at(plan.config, "data.train_files")[0]).parent / "corpus.jsonl"
    if not {"corpus_path", "search_upstream"} & settings.keys() and corpus.exists():
        command += ["--corpus", str(corpus)]
    return command
