"""Opens the entries of `mixed.sources.<name>.tools`."""

from collections.abc import Sequence
from functools import partial

from agent_loop.calls.client import ToolClient
from agent_loop.calls.routes import Route, local_route
from agent_loop.toolbox.functions import (
    ClassProvider,
    definition_of,
    local_tool,
    not_posted,
    run_in_loop,
)
from agent_loop.toolbox.own import ToolServerProvider
from agent_loop.toolbox.spec import ToolProvider, chosen
from agent_loop.toolbox.toolbox import Toolbox
from config.tool_entries import OWN_TOOLS, ToolEntry

PROCESSES = 2
"""Processes of a function with `where: process`, if its entry has no `slots`."""


def toolbox_of(
    entries: Sequence[ToolEntry], client: ToolClient, *, topk: int, persistent: bool = False
) -> Toolbox:
    """The toolbox of these entries, for the event loop of the client. Sources that name an equal
    entry share what answers, for example the process of an MCP server.

    Args:
        topk: passages of a search.
        persistent: whether `run_code` keeps its state from call to call.

    Raises:
        ValueError: an entry is wrong.
    """
    about = f"topk={topk} persistent={persistent}"
    shared: list[tuple[str, ToolProvider]] = []
    for entry in entries:
        make = partial(provider_of, entry, client, topk, persistent)
        shared.append((entry.target, client.resource(f"{entry.model_dump_json()} {about}", make)))
    return Toolbox(shared)


def provider_of(entry: ToolEntry, client: ToolClient, topk: int, persistent: bool) -> ToolProvider:
    """What answers the calls of one entry.

    Raises:
        ValueError: the entry is wrong: no such file, function or variable.
    """

    def route_of(name: str, key: str) -> Route:
        route = local_route(
            name, not_posted, key=key, timeout_s=client.route.timeout_s, clock=client.clock
        )
        return client.limits(route, entry)

    if entry.mcp is not None:
        from agent_loop.toolbox.mcp_servers import McpProvider  # takes a second to import

        return McpProvider(entry, client)
    if entry.verl is not None:
        from agent_loop.training.verl_adapters.verl_tools import key_of, tools_of, tools_of_file

        found = chosen(entry.only, tools_of_file(entry.verl))
        return ToolProvider(tools_of(found, entry.verl, route_of(entry.verl, key_of(entry.verl))))
    if entry.tool in OWN_TOOLS:
        limits = (entry.rate, entry.slots, entry.timeout, entry.retry, entry.cache)
        route = client.limits(client.route, entry) if any(x is not None for x in limits) else None
        return ToolServerProvider([entry.tool], topk=topk, route=route, persistent=persistent)
    file, name = entry.python_name or ("", "")
    # A file that is not trusted is read here, and run only in the sandbox.
    definition = definition_of(file, name, is_run=entry.where != "sandbox")
    spec, place = definition.spec, definition.place
    if definition.is_class:
        if entry.where is not None or entry.cache:
            raise ValueError(
                f"tool={entry.tool!r} is a class, which has state for each trajectory: leave "
                "`where` and `cache` out"
            )
        return ClassProvider(definition, route_of(place, definition.digest))
    if entry.where == "sandbox":
        from agent_loop.toolbox.sandboxed import SandboxTool

        route = client.limits(client.route, entry)
        caches = bool(entry.cache)
        return ToolProvider([SandboxTool(definition, route, caches=caches, run_s=entry.timeout)])
    run, close = partial(run_in_loop, definition.target, place), None
    if entry.where == "process":
        from agent_loop.processes import KillablePool, call_in_file

        pool = KillablePool(entry.slots or PROCESSES)
        run = partial(pool.run, call_in_file, str(definition.path.resolve()), name)
        close = pool.close
    route = route_of(place, f"python:{definition.digest}")
    return ToolProvider([local_tool(spec, route, run, place, definition.path)], close)
