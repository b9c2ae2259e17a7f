"""What a call of an MCP tool costs the process that makes it, beside the bare SDK.

    python -m benchmarks.mcp_call [--calls 2000] [--rounds 5]

One server over stdio has a tool `echo`. Counted is the CPU time of the caller
(`time.process_time`), without that of the server. The bare SDK and our client take turns; ours has
the limiter, the slots and the deadline of a run. Printed are medians over the rounds.
"""

import argparse
import asyncio
import gc
import itertools
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

from mcp import Client, StdioServerParameters

from agent_loop.calls.client import ToolClient
from agent_loop.calls.limiter import make_limiter
from agent_loop.calls.own_limits import limited
from agent_loop.toolbox.mcp_servers import McpProvider
from config.schema import MixedConfig, SourceConfig, ToolConfig
from config.tool_entries import ToolEntry
from rate_limit.slots import FileSlots
from tests.fakes import mcp_lines, mcp_server

AT_ONCE = 16
GOAL_OF_BARE = 1.3

Ask = Callable[[str], Awaitable[object]]
Open = Callable[[str, Path], AbstractAsyncContextManager[Ask]]


@asynccontextmanager
async def bare(command: str, _: Path) -> AsyncIterator[Ask]:
    program, *arguments = command.split()
    async with Client(StdioServerParameters(command=program, args=arguments)) as client:

        async def ask(text: str) -> object:
            return (await client.call_tool("echo", {"text": text})).content

        yield ask


@asynccontextmanager
async def ours(command: str, folder: Path, own_limits: bool = False) -> AsyncIterator[Ask]:
    config = ToolConfig(
        server_url="http://unused", max_workers=AT_ONCE, rate_limit_per_minute=6e9, burst=10_000
    )
    mixed = MixedConfig(
        sources={"a": SourceConfig(ratio=1)}, experiment="benchmark", run_dir=str(folder)
    )
    limits = {"rate": "100000/s", "slots": AT_ONCE} if own_limits else {}
    async with ToolClient(
        config.server_urls,
        limiter=make_limiter(config, mixed),
        slots=FileSlots(folder / "run.slots", AT_ONCE).hold_async,
        limits=partial(limited, tools=config, mixed=mixed),
    ) as client:
        provider = McpProvider(ToolEntry(mcp=command, **limits), client)  # type: ignore[arg-type]
        [tool] = [tool for tool in await provider.tools() if tool.spec.name == "echo"]
        for_source = client.for_source("a")

        async def ask(text: str) -> object:
            return (await tool.call(for_source, {"text": text})).text

        try:
            yield ask
        finally:
            await provider.close()


CLIENTS: dict[str, Open] = {
    "bare SDK": bare,
    "ours": ours,
    "ours, rate and slots of its own too": partial(ours, own_limits=True),
}


async def cpu_per_call_us(client: Open, command: str, folder: Path, calls: int) -> float:
    async with client(command, folder) as ask:
        numbers = itertools.count()

        async def work(last: int) -> None:
            while (number := next(numbers)) < last:
                await ask(str(number))

        async def all_of(last: int) -> None:
            await asyncio.gather(*(work(last) for _ in range(AT_ONCE)))

        await all_of(4 * AT_ONCE)
        gc.collect()
        started = time.process_time()
        await all_of(4 * AT_ONCE + calls)
        return (time.process_time() - started) / calls * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    print("| server | client | CPU per call | of the bare SDK |\n| --- | --- | --- | --- |")
    program = mcp_server.COMMAND.split()[0]
    servers = {"of the SDK": mcp_server.COMMAND, "plain": f"{program} -S {mcp_lines.__file__}"}
    for server, command in servers.items():
        costs: dict[str, list[float]] = {name: [] for name in CLIENTS}
        for turn in range(given.rounds):
            names = list(CLIENTS)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                with tempfile.TemporaryDirectory() as folder:
                    work = cpu_per_call_us(CLIENTS[name], command, Path(folder), given.calls)
                    costs[name].append(asyncio.run(work))
        for name, values in costs.items():
            pairs = zip(values, costs["bare SDK"], strict=True)
            ratio = statistics.median(ours / bare for ours, bare in pairs)
            print(f"| {server} | {name} | {statistics.median(values):.0f} us | {ratio:.2f}x |")
    print(f"\ngoal: {GOAL_OF_BARE}x")


if __name__ == "__main__":
    main()
