"""What a step of an environment costs the process that makes it, beside a bare client.

    python -m benchmarks.environment_call [--steps 2000] [--rounds 5] [--openenv PYTHON]

Counted is the CPU time of the caller (`time.process_time`), without that of the server. The bare
client and our provider take turns at the same server; ours has the limiter, the slots and the
deadline of a run. Printed are medians over the rounds. `--openenv` is an interpreter with OpenEnv's
server (tests/fakes/environment_hubs/openenv.txt); OpenEnv's client must be on PYTHONPATH. A class
in the loop's process or in one of its own has no client: its row says what the provider adds to the
call.
"""

import argparse
import asyncio
import gc
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from agent_loop.calls.client import ToolClient
from agent_loop.calls.limiter import make_limiter
from agent_loop.calls.own_limits import limited
from agent_loop.environments.provider import EnvironmentProvider
from agent_loop.row import Row
from config.environments import EnvironmentEntry
from config.schema import MixedConfig, SourceConfig, ToolConfig
from rate_limit.slots import FileSlots

AT_ONCE = 16
GOAL_OF_BARE = 1.5
START_S = 60.0
TEXT = "I go to the left, because the other ways are closed."
SEEN = "You stand at a crossing. There are doors in the north, in the east and in the west. " * 6
WITHOUT = "EnvironmentProvider, no limiter and slots"
ROOT = Path(__file__).parents[1]

Step = Callable[[], Awaitable[object]]
Begin = Callable[[], Awaitable[Step]]
Open = Callable[[Path], AbstractAsyncContextManager[Begin]]


class Crossing:
    """An environment that never ends."""

    def reset(self, row: Mapping[str, Any]) -> str:
        return SEEN

    async def step(self, action: str) -> tuple[str, float, bool]:
        return SEEN, 0.0, False


@asynccontextmanager
async def bare_class(_: Path) -> AsyncIterator[Begin]:
    async def begin() -> Step:
        return partial(Crossing().step, TEXT)

    yield begin


@asynccontextmanager
async def bare_http(_: Path, url: str) -> AsyncIterator[Begin]:
    async with aiohttp.ClientSession() as http:

        async def ask(path: str, asked: Mapping[str, Any]) -> dict[str, Any]:
            async with http.post(f"{url}/{path}", json=asked) as response:
                return await response.json()

        async def begin() -> Step:
            session = (await ask("reset", {"row": {"row_id": "a"}, "options": {}}))["session"]
            return partial(ask, "step", {"session": session, "action": TEXT})

        yield begin


@asynccontextmanager
async def bare_openenv(_: Path, url: str) -> AsyncIterator[Begin]:
    from agent_loop.environments.openenv_client import client_class

    Client = client_class()

    clients: list[Any] = []

    async def begin() -> Step:
        client = Client(base_url=url)
        clients.append(client)
        await client.connect()
        await client.reset(lives=1 << 30)
        return partial(client.step, {"number": 51})

    try:
        yield begin
    finally:
        for client in clients:
            await client.close()


@asynccontextmanager
async def ours(
    folder: Path, action: str, has_limits: bool = True, **entry: Any
) -> AsyncIterator[Begin]:
    config = ToolConfig(
        server_url="http://unused", max_workers=AT_ONCE, rate_limit_per_minute=6e9, burst=10_000
    )
    mixed = MixedConfig(
        sources={"a": SourceConfig(ratio=1)}, experiment="benchmark", run_dir=str(folder)
    )
    async with ToolClient(
        config.server_urls,
        limiter=make_limiter(config, mixed) if has_limits else None,
        slots=FileSlots(folder / "run.slots", AT_ONCE).hold_async if has_limits else None,
        limits=partial(limited, tools=config, mixed=mixed),
    ) as client:
        provider = EnvironmentProvider(EnvironmentEntry.model_validate(entry), client)
        for_source = client.for_source("a")
        row = Row(source="a", row_id="a", came={"reward_model": {"ground_truth": "null"}})

        async def begin() -> Step:
            return partial((await provider.begin(for_source, row).__aenter__()).step, action)

        try:
            yield begin
        finally:
            await provider.close()


async def cpu_per_step_us(client: Open, folder: Path, steps: int) -> float:
    async with client(folder) as begin:
        taken = [await begin() for _ in range(AT_ONCE)]

        async def work(step: Step, count: int) -> None:
            for _ in range(count):
                await step()

        async def all_of(count: int) -> None:
            await asyncio.gather(*(work(step, count // AT_ONCE) for step in taken))

        await all_of(4 * AT_ONCE)
        gc.collect()
        started = time.process_time()
        await all_of(steps)
        return (time.process_time() - started) / (steps // AT_ONCE * AT_ONCE) * 1e6


@contextmanager
def serving(*command: str | Path) -> Iterator[str]:
    """A server on a free port, which is put in place of PORT."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    started = [port if part == "PORT" else str(part) for part in command]
    server = subprocess.Popen(started, stdout=subprocess.DEVNULL, cwd=ROOT)
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=1).close()
                break
            except OSError:
                if time.monotonic() > until or server.poll() is not None:
                    raise
                time.sleep(0.1)
        yield url
    finally:
        server.terminate()
        server.wait()


def compare(server: str, clients: Mapping[str, Open], steps: int, rounds: int) -> None:
    """Print the rows of one server; the first client is the bare one."""
    costs: dict[str, list[float]] = {name: [] for name in clients}
    names = list(clients)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            with tempfile.TemporaryDirectory() as folder:
                work = cpu_per_step_us(clients[name], Path(folder), steps)
                costs[name].append(asyncio.run(work))
    for name, values in costs.items():
        pairs = zip(values, costs[names[0]], strict=True)
        ratio = statistics.median(ours / bare for ours, bare in pairs)
        added = statistics.median(values) - statistics.median(costs[names[0]])
        shown = f"{ratio:.2f}x" if server != "none" else f"+{added:.0f} us"
        print(f"| {server} | {name} | {statistics.median(values):.0f} us | {shown} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--openenv", help="interpreter with OpenEnv's server")
    given = parser.parse_args()
    take = partial(compare, steps=given.steps, rounds=given.rounds)
    kind = f"{Path(__file__).absolute()}:Crossing"
    print("| server | client | CPU per step | of the bare client |\n| --- | --- | --- | --- |")
    serve = (sys.executable, "-m", "agent_loop.environments.serve", kind, "--port", "PORT")
    with serving(*serve) as url:
        take(
            "ours, HTTP",
            {
                "bare aiohttp": partial(bare_http, url=url),
                "EnvironmentProvider": partial(ours, action=TEXT, use=url),
                WITHOUT: partial(ours, action=TEXT, has_limits=False, use=url),
            },
        )
    if given.openenv:
        program = ROOT / "tests/fakes/environment_hubs/openenv_server.py"
        with serving(given.openenv, program, "guess", "PORT", str(2 * AT_ONCE)) as url:
            options = {
                "url": url,
                "action": {"number": "{text}"},
                "observation": "text",
                "reset": {"lives": 1 << 30},
            }
            mine = partial(ours, action="51", use="openenv", options=options)
            take(
                "OpenEnv",
                {
                    "bare GenericEnvClient": partial(bare_openenv, url=url),
                    "EnvironmentProvider": mine,
                    WITHOUT: partial(mine, has_limits=False),
                },
            )
    in_loop = partial(ours, action=TEXT, use=kind, where="loop")
    in_process = partial(ours, action=TEXT, use=kind)
    take(
        "none",
        {
            "bare class": bare_class,
            "EnvironmentProvider, where: loop": in_loop,
            WITHOUT: partial(in_loop, has_limits=False),
            "EnvironmentProvider, where: process": in_process,
        },
    )
    print(f"\ngoal: {GOAL_OF_BARE}x of a bare client to the same server")


if __name__ == "__main__":
    main()
