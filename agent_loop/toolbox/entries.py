"""Opens the entries of `mixed.sources.<name>.tools`."""

from collections.abc import Sequence
from functools import partial

from agent_loop.calls.client import ToolClient
from agent_loop.calls.routes import Route
from agent_loop.toolbox.functions import (
    ClassProvider,
    FunctionProvider,
    definition_of,
    run_in_loop,
)
from agent_loop.toolbox.own import ToolServerProvider
from agent_loop.toolbox.spec import ToolProvider
from agent_loop.toolbox.toolbox import OpenedProvider, Toolbox
from config.tool_entries import OWN_TOOLS, ToolEntry

PROCESSES = 2
"""Processes of a function with `where: process`, if its entry has no `slots`."""


def toolbox_of(
    entries: Sequence[ToolEntry],
    client: ToolClient,
    *,
    topk: int,
    persistent: bool = False,
) -> Toolbox:
    """The toolbox of these entries, for the event loop of the client. Sources that name an equal
    entry share what answers, for example the process of an MCP server.

    Args:
        topk: passages of a search.
        persistent: whether `run_code` keeps its state from call to call.

    Raises:
        ValueError: an entry is wrong.
    """
    opened = [
        OpenedProvider(
            provider=client.resource(
                f"{entry.model_dump_json()} topk={topk} persistent={persistent}",
                partial(provider_of, entry, client, topk=topk, persistent=persistent),
            ),
            only=entry.only,
            target=entry.target,
        )
        for entry in entries
    ]
    return Toolbox(opened)


def provider_of(
    entry: ToolEntry,
    client: ToolClient,
    *,
    topk: int,
    persistent: bool,
) -> ToolProvider:
    """What answers the calls of one entry.

    Raises:
        ValueError: the entry is wrong: no such file, function or variable.
    """

    def limit(route: Route) -> Route:
        return client.limits(route, entry)

    timeout_s = client.route.timeout_s
    if entry.mcp is not None:
        from agent_loop.toolbox.mcp_servers import McpProvider  # takes a second to import

        return McpProvider(entry, client)
    if entry.verl is not None:
        from agent_loop.training.verl_adapters.verl_tools import VerlProvider, tools_of_file

        found = tools_of_file(entry.verl)
        return VerlProvider(found, entry.verl, limit, timeout_s, client.clock)
    if entry.tool in OWN_TOOLS:
        has_limits = any(
            value is not None
            for value in (entry.rate, entry.slots, entry.timeout, entry.retry, entry.cache)
        )
        route = limit(client.route) if has_limits else None
        return ToolServerProvider([entry.tool], topk=topk, route=route, persistent=persistent)
    file, name = entry.python_name or ("", "")
    # A file that is not trusted is read here, and run only in the sandbox.
    definition = definition_of(file, name, is_run=entry.where != "sandbox")
    if definition.is_class:
        if entry.where is not None or entry.cache:
            raise ValueError(
                f"tool={entry.tool!r} is a class, which has state for each trajectory: leave "
                "`where` and `cache` out"
            )
        return ClassProvider(definition, limit, timeout_s, client.clock)
    if entry.where == "sandbox":
        from agent_loop.toolbox.sandboxed import SandboxProvider

        return SandboxProvider(definition, limit, caches=bool(entry.cache), run_s=entry.timeout)
    if entry.where == "process":
        from agent_loop.processes import KillablePool, call_in_file

        pool = KillablePool(entry.slots or PROCESSES)
        run = partial(pool.run, call_in_file, str(definition.path.resolve()), name)
        return FunctionProvider(definition, run, limit, timeout_s, client.clock, pool.close)
    run_here = partial(run_in_loop, definition.target, definition.place)
    return FunctionProvider(definition, run_here, limit, timeout_s, client.clock)
