"""Lists or calls the tools of a source outside a run, without the run's rate, slots and stored
results."""

from collections.abc import Mapping, Sequence
from typing import Any

from agent_loop.calls.client import ToolClient
from agent_loop.row import Row
from agent_loop.toolbox.entries import toolbox_of
from agent_loop.toolbox.spec import ToolSpec
from agent_loop.toolbox.toolbox import Toolbox
from agent_loop.turns.turn_loop import Observation
from config.schema import ToolConfig
from config.tool_entries import ToolEntry


def _opened(entries: Sequence[ToolEntry], client: ToolClient, topk: int = 1) -> Toolbox:
    # Rate and slots have files, which nobody else needs here.
    plain = [entry.model_copy(update={"rate": None, "slots": None}) for entry in entries]
    return toolbox_of(plain, client, topk=topk)


def client_of(tools: ToolConfig) -> ToolClient:
    """A client outside a run, whose calls soon give up a server that is away."""
    return ToolClient(
        tools.server_urls,
        limiter=None,
        timeout_s=tools.timeout,
        max_retries=tools.max_retries,
        patience_s=1.0,
    )


async def listed(entries: Sequence[ToolEntry], tools: ToolConfig) -> dict[str, ToolSpec]:
    """Name -> tool, of these entries. MCP servers are started and ended again.

    Raises:
        ToolUnavailable: an MCP server does not start, or does not list its tools in time.
        ValueError: an entry is wrong.
    """
    async with client_of(tools) as client:
        toolbox = _opened(entries, client)
        await toolbox.open()
        return toolbox.specs


async def called(
    source: str,
    entries: Sequence[ToolEntry],
    topk: int,
    tool: str,
    arguments: Mapping[str, Any],
    tools: ToolConfig,
) -> Observation:
    """Call a tool of a source once, in a trajectory of an empty row.

    Args:
        topk: passages of a search.

    Raises:
        ToolUnavailable: a fault of the tool.
        ToolRejected: a mistake in the arguments.
        ValueError: an entry is wrong.
    """
    async with client_of(tools) as client:
        toolbox = _opened(entries, client.for_source(source), topk)
        await toolbox.open()
        async with toolbox.begin(client, Row(source=source)) as mine:
            return await mine.call(tool, arguments)
