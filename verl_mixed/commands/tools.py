"""`verl-mixed tools`: list what the models of a run can call, and call a tool."""

import argparse
import asyncio
import json
import os
import sys
from contextlib import redirect_stdout
from typing import Any

from verl_mixed.commands.arguments import (
    Help,
    add_config_arguments,
    add_flag,
    add_option,
    config_overrides,
)
from verl_mixed.exit_codes import GOOD, NOT_GOOD
from verl_mixed.run.text import print_error, printable

HELP = Help(
    """\
Lists for each source the tools that its model can call: their names, their JSON schemas as the
model sees them, and their limits. With --call it calls one and prints what the model would read:
with the deadline and the attempts of a run, but without its rate, its slots and its stored results.
MCP servers are started for it. Tools of the tool server are called at TOOL_SERVER_URL.""",
    """\
verl-mixed tools mixture=mine
verl-mixed tools mixture=mine --source support --call look_up '{"order": "A1"}'
TOOL_SERVER_URL=http://127.0.0.1:8100 verl-mixed tools --call calculate '{"expression": "2^10"}'""",
    "0 listed or called, 1 the tool cannot be called, 2 usage or config error",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    add_option(parser, "--source", "NAME", "only the tools of this source")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--call", nargs=2, metavar=("NAME", "JSON"), help="call a tool")
    add_flag(either, "--json", "the schemas as one JSON object: source -> list of tools")


def run(arguments: argparse.Namespace) -> int:
    """List tools, or call one."""
    from config.tool_entries import without_secrets
    from verl_mixed.checks.config.tools import agents_of, specs_of
    from verl_mixed.launch.plan import make_plan
    from verl_mixed.run.sections import sound_sources

    overrides = config_overrides(arguments)
    with redirect_stdout(sys.stderr):  # a user's file may print
        config = make_plan(overrides, os.environ).config
        agents = agents_of(config)
        found = {
            (name, agent): specs_of(config, name, agent)
            for name, named in agents.items()
            for agent in named or [""]
            if arguments.source in (None, name)
        }
    if arguments.source not in (None, *agents):
        raise ValueError(
            f"--source {arguments.source}: no such source takes part in the mixture; name one of "
            f"{', '.join(agents)}"
        )
    if wrong := [specs for specs in found.values() if isinstance(specs, str)]:
        raise ValueError("\n".join(wrong))
    tools = {pair: specs for pair, specs in found.items() if isinstance(specs, dict)}
    if arguments.call is not None:
        return _call(config, tools, arguments.call)
    if arguments.json:
        schemas: dict[str, dict[str, Any]] = {}
        for (name, _), specs in tools.items():
            schemas.setdefault(name, {}).update({n: spec.schema for n, spec in specs.items()})
        lists = {name: [*of_source.values()] for name, of_source in schemas.items()}
        print(json.dumps(lists, ensure_ascii=False))
        return GOOD
    sources = sound_sources(config)
    for (name, agent), specs in tools.items():
        if not specs:
            why = "its model calls no tools by name"
            if not agent:
                why = "its rows name the agent, and none of them can be read yet"
            print(f"source={name} agent={agent or None}: {why}")
            continue
        print(f"source={name} agent={agent}: {len(specs)} tools")
        for spec in specs.values():
            print(printable(f"  {spec.name}: {' '.join(spec.description.split())}"))
            print(printable(f"    {json.dumps(spec.parameters, ensure_ascii=False)}"))
        for entry in sources[name].tools or ():
            limits = entry.model_dump(exclude_defaults=True, exclude={"tool", "mcp", "verl"})
            if limits.get("cwd") == os.getcwd():  # as without it
                del limits["cwd"]
            if limits:
                shown = ", ".join(f"{key}={value}" for key, value in limits.items())
                print(printable(f"  {without_secrets(entry.target)}: {shown}"))
    return GOOD


def _call(config: dict[str, Any], tools: dict[tuple[str, str], Any], call: list[str]) -> int:
    """Call a tool of the first source that has it, and print what its model would read."""
    from agent_loop.toolbox.listing import called
    from config.lookup import at
    from config.schema import TOOL_CONFIG, ToolConfig, load_section
    from tool_server.wire.protocol import Fault
    from verl_mixed.checks.config.tools import entries_of
    from verl_mixed.run.sections import entry_of

    name, text = call
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--call {name} {text}: the arguments are no JSON ({error})") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"--call {name} {text}: the arguments are no JSON object")
    settings = load_section(ToolConfig, at(config, TOOL_CONFIG), TOOL_CONFIG)
    pair = next((pair for pair, specs in tools.items() if name in specs), None)
    if pair is None:
        raise ValueError(
            f"--call {name}: no source has a tool of this name; see `verl-mixed tools`"
        )
    source, topk = pair[0], entry_of(config, pair[1]).get("topk", 3)
    entries = entries_of(config, *pair)
    try:
        observation = asyncio.run(called(source, entries, topk, name, arguments, settings))
    except Fault as error:
        print_error(f"tool={name!r} of source={source}: {error}")
        return NOT_GOOD
    print(observation.text)
    if (result := observation.result) is not None:
        print(f"source={source} latency_s={result.latency_s:.3f}", file=sys.stderr)
    return NOT_GOOD if observation.rejected else GOOD
