"""What a tool call costs the process that makes it, beside bare aiohttp and httpx.

    python -m benchmarks.tool_client [--calls 2000] [--rounds 7]

The server is another process; counted is the CPU time of the caller (`time.process_time`), so the
kernel's work for its sockets is in it and the server's is not. All clients of a round come one
after the other, and the order turns from round to round; printed are medians over the rounds. Then
16,000 calls are made at once: the time until the first answer, and until the last.
"""

import argparse
import asyncio
import gc
import itertools
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import aiohttp
import httpx
from aiohttp import web

from agent_loop.calls.client import ToolClient
from rate_limit.file_limiter import FileRateLimiter
from rate_limit.slots import FileSlots
from tool_server.wire.protocol import ToolCall

AT_ONCE = 16
QUEUED = 16_000
GOAL_OF_BARE, GOAL_OF_HTTPX, GOAL_FIRST_S = 1.5, 10.0, 1.0

Ask = Callable[[str], Awaitable[object]]
Client = Callable[[str, Path], AbstractAsyncContextManager[Ask]]


def payload_of(code: str) -> dict[str, str]:
    return {"code": code, "language": "python", "stdin": ""}


@asynccontextmanager
async def bare_aiohttp(url: str, _: Path) -> AsyncIterator[Ask]:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def ask(code: str) -> object:
            async with session.post(f"{url}/run_code", json=payload_of(code)) as response:
                return await response.json()

        yield ask


@asynccontextmanager
async def bare_httpx(url: str, _: Path) -> AsyncIterator[Ask]:
    async with httpx.AsyncClient(timeout=60) as session:

        async def ask(code: str) -> object:
            return (await session.post(f"{url}/run_code", json=payload_of(code))).json()

        yield ask


@asynccontextmanager
async def ours(url: str, folder: Path, cached: bool = False) -> AsyncIterator[Ask]:
    """With limiter, slots, retries and metrics on."""
    client = ToolClient(
        url,
        limiter=FileRateLimiter(folder / "rate_limit.state", per_minute=6e9, burst=10_000),
        slots=FileSlots(folder / "slots", AT_ONCE).hold_async,
        caches=cached,
        timeout_s=600.0,
    )
    async with client as tools:
        tools = tools.for_source("taco")

        async def ask(code: str) -> object:
            call = ToolCall(tool="run_code", payload=payload_of(code))
            return (await tools.call(call)).body

        yield ask


CLIENTS: dict[str, Client] = {
    "aiohttp, pooled": bare_aiohttp,
    "httpx, pooled": bare_httpx,
    "ours": ours,
    "ours, cache on (all misses)": partial(ours, cached=True),
}


async def cpu_per_call_us(client: Client, url: str, folder: Path, calls: int) -> float:
    async with client(url, folder) as ask:
        numbers = itertools.count()

        async def work(last: int) -> None:
            while (number := next(numbers)) < last:
                await ask(f"print({number})")

        async def all_of(last: int) -> None:
            await asyncio.gather(*(work(last) for _ in range(AT_ONCE)))

        await all_of(4 * AT_ONCE)  # opens the connections
        gc.collect()
        started = time.process_time()
        await all_of(4 * AT_ONCE + calls)
        return (time.process_time() - started) / calls * 1e6


async def queued_s(url: str, folder: Path) -> tuple[float, float]:
    """Seconds until the first answer of many calls made at once, and until the last."""
    async with ours(url, folder, cached=True) as ask:
        first = 0.0
        started = time.perf_counter()

        async def one(number: int) -> None:
            nonlocal first
            await ask(f"print({number})")
            first = first or time.perf_counter() - started

        await asyncio.gather(*map(one, range(QUEUED)))
        return first, time.perf_counter() - started


def serve(report: Connection) -> None:
    """Answers every call at once, until its parent goes."""
    run = {"status": "Finished", "execution_time": 0.01, "return_code": 0, "stdout": "42\n"}
    body = json.dumps({"status": "Success", "message": "", "run_result": run | {"stderr": ""}})

    async def answer(request: web.BaseRequest) -> web.Response:
        await request.read()
        return web.Response(text=body, content_type="application/json")

    async def run_server() -> None:
        server = web.Server(answer, access_log=None)
        runner = web.ServerRunner(server)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        report.send(runner.addresses[0][1])
        await asyncio.get_running_loop().run_in_executor(None, report.poll, None)

    asyncio.run(run_server())


def measure(url: str, calls: int, rounds: int) -> None:
    costs: dict[str, list[float]] = {name: [] for name in CLIENTS}
    for turn in range(rounds):
        names = list(CLIENTS)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            with tempfile.TemporaryDirectory() as folder:
                cost = asyncio.run(cpu_per_call_us(CLIENTS[name], url, Path(folder), calls))
                costs[name].append(cost)
    bare = costs["aiohttp, pooled"]
    medians = {name: statistics.median(values) for name, values in costs.items()}
    print("| client | CPU per call | of bare aiohttp | httpx needs |\n| --- | --- | --- | --- |")
    for name, values in costs.items():
        of_bare = statistics.median(a / b for a, b in zip(values, bare, strict=True))
        of_httpx = medians["httpx, pooled"] / medians[name]
        print(f"| {name} | {medians[name]:.0f} us | {of_bare:.2f}x | {of_httpx:.1f}x |")
    times = []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            times.append(asyncio.run(queued_s(url, Path(folder))))
    first, last = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"\n{QUEUED} calls at once, {AT_ONCE} slots: first {first:.2f} s, last {last:.1f} s")
    print(f"goals: {GOAL_OF_BARE}x, {GOAL_OF_HTTPX}x, {GOAL_FIRST_S} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    ours_end, theirs = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    try:
        measure(f"http://127.0.0.1:{ours_end.recv()}", given.calls, given.rounds)
    finally:
        server.terminate()
        server.join()


if __name__ == "__main__":
    main()
