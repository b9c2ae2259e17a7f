"""The tools of an MCP server, as the tests of this folder call them."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from agent_loop.calls.client import ToolClient
from agent_loop.calls.own_limits import limited
from agent_loop.calls.routes import Limiter
from agent_loop.toolbox.mcp_client import connection
from agent_loop.toolbox.mcp_servers import McpProvider
from agent_loop.toolbox.spec import Tool, ToolSpec
from agent_loop.turns.turn_loop import Observation
from config.compat import timeout
from config.schema import MixedConfig, SourceConfig, ToolConfig
from config.tool_entries import ToolEntry
from tests.fakes import mcp_lines

LINES = f"{sys.executable} -S -I {mcp_lines.__file__}"
"""Command of the server of a few lines, which starts at once."""


@dataclass
class Rig:
    provider: McpProvider
    client: ToolClient
    tools: Mapping[str, Tool]

    async def ask(self, tool: str, **arguments: Any) -> Observation:
        return await self.tools[tool].call(self.client, arguments)

    async def text(self, tool: str, **arguments: Any) -> str:
        return (await self.ask(tool, **arguments)).text


class CountingLimiter:
    def __init__(self) -> None:
        self.acquired = 0

    async def acquire_async(
        self, n: int = 1, timeout_s: float | None = None, source: str = ""
    ) -> float:
        self.acquired += n
        return 0.0

    async def penalise_async(self, retry_after_s: float = 0.0) -> None:
        pass


def mixed(folder: Path) -> MixedConfig:
    return MixedConfig(sources={"a": SourceConfig(ratio=1)}, experiment="t", run_dir=str(folder))


class Clock:
    """Real time, in which pauses pass at once."""

    def __init__(self) -> None:
        self._slept_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._slept_s

    async def sleep(self, seconds: float) -> None:
        self._slept_s += seconds
        await asyncio.sleep(0)


@asynccontextmanager
async def opened(
    folder: Path, mcp: str = LINES, *, limiter: Limiter | None = None, **settings: Any
) -> AsyncIterator[Rig]:
    """The provider of an entry, with its tools listed; `settings` are fields of the entry."""
    tools = ToolConfig(server_url="http://unused", timeout=settings.pop("call_s", 60.0))
    entry = ToolEntry(mcp=mcp, **settings)
    limits = partial(limited, tools=tools, mixed=mixed(folder))
    clock = Clock()
    async with ToolClient(
        "http://unused",
        limiter=limiter,
        sleep=clock.sleep,
        clock=clock,
        timeout_s=tools.timeout,
        limits=limits,
    ) as client:
        provider = McpProvider(entry, client)
        try:
            tools_by_name = {tool.spec.name: tool for tool in await provider.tools()}
            yield Rig(provider, client, tools_by_name)
        finally:
            await provider.close()


async def listed(entry: ToolEntry, start_s: float) -> list[ToolSpec]:
    """The tools of an entry, whose server is started and ended again."""
    with patch.object(connection, "START_S", start_s):
        async with ToolClient("http://unused", limiter=None) as client:
            return await _listed(McpProvider(entry, client))


async def _listed(provider: McpProvider) -> list[ToolSpec]:
    try:
        return [tool.spec for tool in await provider.tools()]
    finally:
        await provider.close()


def runs(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def resident_mb() -> float:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    async with timeout(limit_s):
        while not condition():  # noqa: ASYNC110 (another process makes it true)
            await asyncio.sleep(0.005)
