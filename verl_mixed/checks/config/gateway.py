"""Checks of agents behind the gateway: what runs for each session, before Ray starts."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from agent_loop.gateway.program import AgentProgram
from agent_loop.rewards.custom import is_async
from config.gateway import GATEWAY_LOOP, GatewayOptions
from config.lookup import at
from config.schema import ConfigError, load_section
from samplers.module_file import named_in
from verl_mixed.checks.config.tools import gateway_agents, tried_agents
from verl_mixed.run.sections import agent_loops, entry_of, loop_of

_OPTIONS = frozenset(GatewayOptions.model_fields)
GUIDED_ENGINES = frozenset({"vllm", "vllm_cpu", "openai"})
"""openai: a server at --base-url."""


def gateway_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Mistakes in the settings of gateway agents, and options of theirs that another agent has."""
    for agent, entry in (agent_loops(config)[0] or {}).items():
        given = sorted(_OPTIONS & entry.keys())
        is_ours = str(entry.get("_target_")).startswith("agent_loop.")
        if given and is_ours and loop_of(entry) != GATEWAY_LOOP:
            yield (
                f"agent {agent!r}: {', '.join(given)}: only an agent with _target_={GATEWAY_LOOP} "
                "reads it; leave it out"
            )
    used = {agent for _, agent in gateway_agents(config)}
    for agent in sorted(tried_agents(config), key=str):
        entry = entry_of(config, agent)
        own = {name: value for name, value in entry.items() if name in _OPTIONS}
        if loop_of(entry) != GATEWAY_LOOP or not (own or agent in used):
            continue
        place = f"agent_loops.{agent}"
        try:
            options = load_section(GatewayOptions, own, place)
        except ConfigError as error:
            yield from error.problems
            continue
        if problem := _problem(options):
            yield f"{place}: {problem}"
        if options.structured == "guided":
            yield (
                f"{place}.structured=guided: guided decoding samples from another distribution "
                "than the policy's, whose log-probs are trained; leave it out, and set it in "
                "`verl-mixed evaluate`"
            )


def guided_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Agents of an evaluation whose engine has no guided decoding."""
    engine = at(config, "actor_rollout_ref.rollout.name")
    for agent, entry in (agent_loops(config)[0] or {}).items():
        if entry.get("structured") == "guided" and engine not in GUIDED_ENGINES:
            yield (
                f"agent_loops.{agent}.structured=guided: rollout.name={engine} has no guided "
                "decoding that is proven here; evaluate with vllm or --base-url of a vLLM server, "
                "or set prompt"
            )


def _problem(options: GatewayOptions) -> str | None:
    if options.function is not None:
        return _function_problem(options.function)
    try:
        AgentProgram(options).check()
    except ValueError as error:
        return str(error)
    return None


def _function_problem(function: str) -> str | None:
    """What is wrong with a function; its file is imported, as a worker does."""
    name, failed = function.rpartition(":")[2], f"cannot load function={function}"
    try:
        found = named_in(function, "function")
    except ValueError as error:
        return str(error)
    if not is_async(found):
        return (
            f"{failed}: it is not async: it would stop the worker's event loop; write "
            f"`async def {name}(address, row)`, and put what blocks into asyncio.to_thread"
        )
    try:
        inspect.signature(found).bind("address", "row")
    except TypeError:
        return f"{failed}: it is called with the address and the row; write ({name}(address, row))"
    return None
