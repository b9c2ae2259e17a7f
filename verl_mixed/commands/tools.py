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
model sees them, and their limits. With --call it calls one, through the same client as a run, and
prints what the model would read. MCP servers are started for it. Tools of the tool server are
called at TOOL_SERVER_URL.""",
    """\
verl-mixed tools mixture=mine
verl-mixed tools mixture=mine --source support --call look_up '{"order": "A1"}'
TOOL_SERVER_URL=http://127.0.0.1:8100 verl-mixed tools --call calculate '{"expression": "2^10"}'""",
    "0 listed or called, 1 the tool cannot be called, 2 usage or config error",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    add_option(parser, "--source", "NAME", "only the tools of this source")
    parser.add_argument("--call", nargs=2, metavar=("NAME", "JSON"), help="call a tool")
    add_flag(parser, "--json", "the schemas as one JSON object: source -> list of tools")


def run(arguments: argparse.Namespace) -> int:
    """List tools, or call one."""
    from config.tool_entries import without_secrets
    from verl_mixed.checks.config.tools import specs_of
    from verl_mixed.launch.plan import make_plan
    from verl_mixed.run.sections import sound_sources

    config = make_plan(config_overrides(arguments), os.environ).config
    sources = {
        name: source
        for name, source in sound_sources(config).items()
        if source.takes_part and arguments.source in (None, name)
    }
    if not sources:
        raise ValueError(f"--source {arguments.source}: no such source takes part in the mixture")
    with redirect_stdout(sys.stderr):  # a user's file may print
        found = {name: specs_of(config, name, source) for name, source in sources.items()}
    if wrong := [f"mixed.sources.{n}.tools: {v}" for n, v in found.items() if isinstance(v, str)]:
        raise ValueError("\n".join(wrong))
    tools = {name: specs for name, specs in found.items() if isinstance(specs, dict)}
    if arguments.call is not None:
        return _call(config, {name: sources[name] for name in tools if tools[name]}, arguments.call)
    if arguments.json:
        schemas = {name: [s.schema for s in specs.values()] for name, specs in tools.items()}
        print(json.dumps(schemas, ensure_ascii=False))
        return GOOD
    for name, specs in tools.items():
        agent = sources[name].agent
        if not specs:
            print(f"source={name} agent={agent}: its model calls no tools by name")
            continue
        print(f"source={name} agent={agent}: {len(specs)} tools")
        for spec in specs.values():
            print(printable(f"  {spec.name}: {' '.join(spec.description.split())}"))
            print(printable(f"    {json.dumps(spec.parameters, ensure_ascii=False)}"))
        for entry in sources[name].tools or ():
            limits = entry.model_dump(exclude_defaults=True, exclude={"tool", "mcp", "verl"})
            if limits:
                shown = ", ".join(f"{key}={value}" for key, value in limits.items())
                print(printable(f"  {without_secrets(entry.target)}: {shown}"))
    return GOOD


def _call(config: dict[str, Any], sources: dict[str, Any], call: list[str]) -> int:
    """Call a tool of the first source that has it, and print what its model would read."""
    from agent_loop.toolbox.listing import called
    from agent_loop.tools.protocol import ToolError
    from config.lookup import at
    from config.schema import TOOL_CONFIG, ToolConfig, load_section
    from verl_mixed.run.sections import agent_loops

    name, text = call
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--call {name} {text}: the arguments are no JSON ({error})") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"--call {name} {text}: the arguments are no JSON object")
    tools = load_section(ToolConfig, at(config, TOOL_CONFIG), TOOL_CONFIG)
    loops, _ = agent_loops(config)
    for source_name, source in sources.items():
        entry = (loops or {}).get(source.agent or "", {})
        try:
            observation = asyncio.run(called(source_name, source, entry, name, arguments, tools))
        except ToolError as error:
            print_error(f"tool={name!r} of source={source_name}: {error}")
            return NOT_GOOD
        if observation is None:
            continue
        print(observation.text)
        if (result := observation.result) is not None:
            print(f"source={source_name} latency_s={result.latency_s:.3f}", file=sys.stderr)
        return NOT_GOOD if observation.rejected else GOOD
    raise ValueError(f"--call {name}: no source has a tool of this name; see `verl-mixed tools`")
