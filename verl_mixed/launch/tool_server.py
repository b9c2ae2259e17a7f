"""The tool server that a run starts for itself, and starts again if it ends."""

import json
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

from agent_loop.calls.limiter import state_path
from cluster.cluster_watch import own_ip
from config import child
from config.lookup import at
from config.schema import TOOL_CONFIG, MixedConfig, ToolConfig, load_section
from tool_server.settings import OwnServerSettings, ServerSettings
from verl_mixed.checks.config.sessions import sessions_needed
from verl_mixed.checks.machine.services import read_health, runs_code
from verl_mixed.launch.failure import RunFailed
from verl_mixed.launch.node_tool_servers import command_of
from verl_mixed.launch.plan import Plan
from verl_mixed.launch.server_process import ServerProcess, end_words, restart_words
from verl_mixed.launch.trainer import driver_environ
from verl_mixed.run.compose import save_config


class ToolServer:
    """The run's own tool server, or one on each node. What ends is started again at its address.

    Args:
        plan: of the run; `start` puts the servers' URLs into its config.
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
        self._settings = own_settings(plan.config)
        if self._settings.per_node:
            environ = driver_environ(plan, environ)  # with what Ray needs
        self._server = ServerProcess(_command(plan), environ, plan.folder.path)
        if self._settings.per_node:
            self._server.start_s *= 2  # Ray's processes start before the servers
        self._restarts = 0
        self._url = ""

    def start(self) -> None:
        """Start the server and wait until it listens.

        Raises:
            RunFailed: it does not start, or cannot isolate programs that the run needs.
        """
        self._server.start()
        self._children.append(self._server.process)
        self._url = self._server.wait_for_url()
        folder, config = self._plan.folder, self._plan.config
        at(config, TOOL_CONFIG)["server_url"] = self._url
        save_config(config, folder.config)
        for url in self._url.split(","):
            health = json.loads(read_health(url, self._environ, timeout_s=10))
            sandbox = health["sandbox"]
            if sandbox is None and runs_code(config):
                why = health["sandbox_why"]
                raise RunFailed(
                    f"no isolation for programs at {url}, so none is run: {why}", mends=False
                )
            upstream = health.get("search") not in (None, "index")
            search = (
                f"search by {health['search']}" if upstream else f"{health['passages']} passages"
            )
            self._say(f"tools        {url} (sandbox {sandbox}, {search})")

    def keep_up(self) -> None:
        """Start the server again if it has ended; does not wait until the new one listens.

        Raises:
            RunFailed: it has ended once more than `mixed.tool_server.restarts` allows.
        """
        if (reason := self._server.why_ended()) is None:
            return
        log, most = self._server.log, self._settings.restarts
        read = f"; its log is {log}"
        if self._settings.per_node:  # it has started the servers of the nodes again itself
            raise RunFailed(f"the tool servers of the nodes ended: {reason}{read}")
        if self._restarts == most:
            raise RunFailed(end_words(self._url, reason, most) + read)
        self._restarts += 1
        words = restart_words(self._url, reason, self._restarts, most)
        self._say(f"WARNING {words}; its log is {log}")
        with log.open("a") as file:
            file.write(f"{words}\n")
        old = self._server.process
        self._server.start(self._url)
        self._children[self._children.index(old)] = self._server.process


def own_settings(config: Mapping[str, Any]) -> OwnServerSettings:
    """The settings of `mixed.tool_server`, which the preflight has checked."""
    return OwnServerSettings.model_validate(at(config, "mixed.tool_server") or {})


def _command(plan: Plan) -> list[str]:
    """`verl-mixed serve-tools`, here or on each node."""
    options, own = _options(plan), own_settings(plan.config)
    if plan.cluster is not None and own.per_node:
        return command_of(options, plan.cluster, plan.folder.path, own.restarts)
    host = [] if plan.cluster is None else ["--host", own_ip(plan.cluster)]
    return child.command("verl_mixed", "serve-tools", *options, *host)


def _options(plan: Plan) -> list[str]:
    """The run's settings, corpus and limiter, whose numbers are added to `/metrics`."""
    tools = load_section(ToolConfig, at(plan.config, TOOL_CONFIG), TOOL_CONFIG)
    mixed = load_section(MixedConfig, at(plan.config, "mixed"), "mixed")
    options = ["--limiter", str(state_path(tools, mixed))]
    given = mixed.tool_server or {}
    of_server = given.keys() & ServerSettings.model_fields.keys()
    settings = {"port": 0} | {name: given[name] for name in of_server}
    if (needed := sessions_needed(plan.config)) > ServerSettings().max_sessions:
        settings = {"max_sessions": needed} | settings
    options += ["--settings", json.dumps(settings)]
    named = any(settings.get(name) for name in ("corpus_path", "search_upstream"))
    if not named and plan.corpus is not None:
        options += ["--corpus", str(plan.corpus)]
    return options
