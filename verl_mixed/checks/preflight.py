"""All problems of a run config, before Ray starts.

`preflight` combines the checks of `checks/config/` (the values of the config) and some of
`checks/machine/` (ports, tool servers, judges, packages and the login to Weights & Biases). verl's
own rules are repeated where breaking them would end a run late, in silence, or never
(`utils/config.py`, `workers/engine/utils.py` and `single_controller/ray/base.py` at 0.9.1).
"""

import json
import os
import subprocess
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from config import child
from config.lookup import at
from config.removed import why_removed
from config.schema import TOOL_CONFIG, MixedConfig, ToolConfig
from verl_mixed.checks.config.algorithm import algorithm_problems
from verl_mixed.checks.config.batches import batch_problems, storage_problems
from verl_mixed.checks.config.correction import correction_problems, correction_warnings
from verl_mixed.checks.config.data import data_problems, row_problems, row_warnings
from verl_mixed.checks.config.devices import device_problems, machine_problems, shape_problems
from verl_mixed.checks.config.environments import environment_problems
from verl_mixed.checks.config.gateway import gateway_problems
from verl_mixed.checks.config.load import load_warnings, rate_warnings, worker_problems
from verl_mixed.checks.config.lora import lora_problems
from verl_mixed.checks.config.modes import (
    VERLS_AGENTS,
    checkpoint_problems,
    loop_problems,
    mode_problems,
)
from verl_mixed.checks.config.numbers import number_problems
from verl_mixed.checks.config.own_code import own_code_problems
from verl_mixed.checks.config.prompts import media_problems, model_problems
from verl_mixed.checks.config.reward_examples import example_problems, reward_examples
from verl_mixed.checks.config.rewards import reward_problems
from verl_mixed.checks.config.search import given_search_problems, own_search_problems
from verl_mixed.checks.config.session_rows import session_row_problems
from verl_mixed.checks.config.sessions import given_session_problems, own_session_problems
from verl_mixed.checks.config.sources import controller_warnings, source_problems
from verl_mixed.checks.config.tools import tool_problems
from verl_mixed.checks.config.unread import unread_problems
from verl_mixed.checks.finding import Finding, problems
from verl_mixed.checks.machine.machine import ports
from verl_mixed.checks.machine.services import ask_servers, judges, wandb
from verl_mixed.checks.packages import entry_point
from verl_mixed.run.compose import unset_problems
from verl_mixed.run.name import name_problems
from verl_mixed.run.requirements import NotComplete, refuse_without
from verl_mixed.run.sections import agent_loops, named_sources, section_of
from verl_mixed.run.settings import ADDRESS_KEY

SET_BY_THE_RUN = frozenset({"host", "token", "limiter_path"})
"""Settings of the run's own tool server that nobody else may set."""


def preflight(
    config: Mapping[str, Any],
    *,
    own_tool_server: bool,
    corpus: Path | None = None,
    data: bool = True,
    machine: bool = True,
    changed: Collection[str] = (),
) -> list[str]:
    """Every problem that this machine can see without starting anything.

    Args:
        config: the resolved run config, as for all checks of `verl_mixed.checks.config`.
        own_tool_server: the run starts its tool server on a free port; otherwise the server that
            the config names must answer.
        corpus: what the run's own tool server searches if the config names no engine.
        data: check the data files too; False if they are not made yet.
        machine: check the GPUs and nodes too; False if the run will start on another machine.
        changed: keys that have another value than this project ships; each must be read.

    Returns:
        One sentence each: what, where, the rule, the remedy. Empty if the run may start.
    """
    found = mixture_problems(config, data=data)
    found += problems(entry_point())
    found += _extra_problems(config, own_tool_server)
    found += unread_problems(config, changed)
    found += mode_problems(config)
    found += loop_problems(config)
    found += own_code_problems(config, data=data, machine=machine)
    found += tool_problems(config, data=data)
    found += correction_problems(config)
    found += session_row_problems(config, data=data)
    found += gateway_problems(config)
    found += environment_problems(config, data=data)
    found += lora_problems(config)
    found += batch_problems(config)
    found += storage_problems(config)
    found += checkpoint_problems(config)
    found += device_problems(config)
    found += worker_problems(config)
    if machine:
        found += machine_problems(config)
    found += problems(judges(config))
    found += problems(ports(config))
    found += problems(wandb(config))
    if data:
        found += row_problems(config)
        found += example_problems(reward_examples(config, own_tool_server=own_tool_server))
        found += model_problems(config)
        found += media_problems(config)
        found += shape_problems(config)
    found += _own_server_problems(config)
    if own_tool_server:
        found += own_search_problems(config, corpus, os.environ, data=data)
    else:
        answers = ask_servers(config)
        found += problems(answer for answer in answers.values() if isinstance(answer, Finding))
        healths = {url: said for url, said in answers.items() if not isinstance(said, Finding)}
        found += given_session_problems(config, [*healths.values()])
        found += given_search_problems(config, healths, data=data)
    return found


def preflight_warnings(config: Mapping[str, Any]) -> list[Finding]:
    """What a user should know about a run that can start; `config` is resolved."""
    return [
        *correction_warnings(config),
        *load_warnings(config),
        *rate_warnings(config),
        *controller_warnings(config),
        *row_warnings(config),
    ]


def verls_problems(config: Mapping[str, Any]) -> list[str]:
    """What verl refuses of a resolved config; a process of its own imports verl."""
    done = subprocess.run(
        child.command("agent_loop.training.verl_config"),
        input=json.dumps(config),
        capture_output=True,
        check=False,
        text=True,
    )
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])  # verl prints too
    (last,) = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
    return [f"verl cannot build its config: {last}; `verl-mixed doctor` looks at the packages"]


def mixture_problems(config: Mapping[str, Any], *, data: bool = True) -> list[str]:
    """The part of `preflight` that is the same on every machine: mixture, rows, numbers."""
    loops, of_loops = agent_loops(config)
    agents = None if loops is None else loops.keys() | VERLS_AGENTS
    return [
        *section_of(MixedConfig, at(config, "mixed", {}), "mixed")[1],
        *section_of(ToolConfig, at(config, TOOL_CONFIG, {}), TOOL_CONFIG)[1],
        *unset_problems(config),
        *name_problems(at(config, "mixed.experiment")),
        *of_loops,
        *source_problems(config, agents),
        *algorithm_problems(config),
        *number_problems(config),
        *reward_problems(config),
        *(data_problems(config, agents) if data else ()),
    ]


def _extra_problems(config: Mapping[str, Any], own_tool_server: bool) -> Iterator[str]:
    """Extras of pyproject.toml that the run needs and that are not installed."""
    needed = {"train": "a run"}
    if own_tool_server:
        needed["server"] = "the tool server that the run starts"
    for name, source in named_sources(config).items():
        if isinstance(source, Mapping) and source.get("tools"):
            needed["tools"] = f"mixed.sources.{name}.tools"
    for extra, what in needed.items():
        try:
            refuse_without(extra, what)
        except NotComplete as error:
            yield str(error)


def _own_server_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Settings that the run's own tool server refuses, or that the run itself sets."""
    given = at(config, "mixed.tool_server", {})
    if not given or not isinstance(given, Mapping):
        return  # the schema reports a value that is no mapping
    from tool_server.settings import OwnServerSettings  # slow to import, rarely needed

    yield from own_session_problems(config, given.get("max_sessions"))
    for name in sorted(SET_BY_THE_RUN & given.keys()):
        yield f"mixed.tool_server.{name}: the run sets it itself; leave it out"
    if given.get("per_node") and not at(config, ADDRESS_KEY):
        yield (
            "mixed.tool_server.per_node=true: the run joins no Ray cluster, so there is one node; "
            "leave it out, or set MASTER_IP and WORKER_NODES"
        )
    try:
        OwnServerSettings.model_validate(dict(given))
    except ValidationError as error:
        for item in error.errors():
            key = ".".join(map(str, item["loc"]))
            why = why_removed(f"mixed.tool_server.{key}")
            why = why or f"{item['msg']}; see `verl-mixed serve-tools --help`"
            yield f"mixed.tool_server.{key}: {why}"
