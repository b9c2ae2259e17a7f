"""Checks of agents behind the gateway: what runs for each session, before Ray starts."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agent_loop.gateway.program import AgentProgram
from config.gateway import GATEWAY_LOOP, GatewayOptions
from config.schema import ConfigError, load_section
from verl_mixed.checks.config.tools import gateway_agents
from verl_mixed.run.sections import agent_loops, entry_of, loop_of

_OPTIONS = frozenset(GatewayOptions.model_fields)


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
    for agent in sorted({agent for _, agent in gateway_agents(config)}):
        entry = entry_of(config, agent)
        own = {name: value for name, value in entry.items() if name in _OPTIONS}
        place = f"agent_loops.{agent}"
        try:
            options = load_section(GatewayOptions, own, place)
        except ConfigError as error:
            yield from error.problems
            continue
        if problem := _problem(options):
            yield f"{place}: {problem}"


def _problem(options: GatewayOptions) -> str | None:
    if options.function is not None:
        return _function_problem(options.function)
    try:
        AgentProgram(**options.of_command).check()
    except ValueError as error:
        return str(error)
    return None


def _function_problem(function: str) -> str | None:
    """What is wrong with a function; its file is not run, because a check starts nothing."""
    file, _, name = function.rpartition(":")
    path, failed = Path(file), f"cannot load function={function}"
    if not path.is_file():
        return f"{failed}: no file {path.absolute()}; correct the path"
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        return f"{failed}: the file is not Python: {error}; correct it"
    found = [node for node in tree.body if getattr(node, "name", None) == name]
    if not found:
        names = {alias.asname or alias.name for node in tree.body for alias in _aliases(node)}
        names |= {target.id for node in tree.body for target in _targets(node)}
        if name in names:
            return None  # imported or made: its worker sees whether it is async
        return f"{failed}: the file has no function {name!r}; correct the name"
    last = found[-1]
    if not isinstance(last, ast.AsyncFunctionDef):
        return (
            f"{failed}: it is not async: it would stop the worker's event loop; write "
            f"`async def {name}(address, row)`, and put what blocks into asyncio.to_thread"
        )
    given = last.args
    count, needed = len(given.posonlyargs + given.args), len(given.args) - len(given.defaults)
    if (count < 2 and given.vararg is None) or needed > 2:
        return f"{failed}: it is called with the address and the row; write ({name}(address, row))"
    return None


def _aliases(node: ast.stmt) -> list[ast.alias]:
    return node.names if isinstance(node, ast.Import | ast.ImportFrom) else []


def _targets(node: ast.stmt) -> list[ast.Name]:
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [target for target in targets if isinstance(target, ast.Name)]
