"""What tests of environments of other projects need: an open provider, and programs that serve."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from agent_loop.calls.client import ToolClient
from agent_loop.environments.provider import EnvironmentProvider, Episode
from agent_loop.row import Row
from config.environments import EnvironmentEntry

HUBS = Path(__file__).parent
ROOT = HUBS.parents[2]
START_S = 180.0


def row(seed: int) -> Row:
    """A dataset's row of an environment with this seed."""
    return Row(
        source="game",
        messages=[{"role": "user", "content": "Play."}],
        row_id=f"game:{seed}",
        extra_info={"extras": json.dumps({"seed": seed})},
        came={"reward_model": {"ground_truth": "null"}},
    )


class Opened:
    """An open provider."""

    def __init__(self, provider: EnvironmentProvider, client: ToolClient) -> None:
        self.provider, self._client = provider, client

    async def begin(self, seed: int) -> Episode:
        return await self.provider.begin(self._client, row(seed)).__aenter__()


@asynccontextmanager
async def opened(**entry: Any) -> AsyncIterator[Opened]:
    """The provider of an entry. At the end, no process that it started is left."""
    before = set(psutil.Process().children(recursive=True))
    given = EnvironmentEntry.model_validate({"timeout": START_S, **entry})
    async with ToolClient("http://unused", limiter=None) as client:
        provider = EnvironmentProvider(given, client)
        try:
            yield Opened(provider, client)
        finally:
            await provider.close()
    for _ in range(100):
        left = [
            each
            for each in set(psutil.Process().children(recursive=True)) - before
            if each.status() != psutil.STATUS_ZOMBIE
        ]
        if not left:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"left running: {left}")


@asynccontextmanager
async def serving(
    command: Sequence[str | Path], url: str, **options: Any
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A program that answers at this address, until the end of the block."""
    program = await asyncio.create_subprocess_exec(
        *command, stderr=asyncio.subprocess.PIPE, **options
    )
    try:
        await _answering(program, url)
        yield program
    finally:
        await ended(program)


async def ended(program: asyncio.subprocess.Process) -> bytes:
    """End a program; the end of what it printed."""
    if program.returncode is None:
        program.kill()
    _, printed = await program.communicate()
    return printed[-2000:]


async def _answering(program: asyncio.subprocess.Process, url: str) -> None:
    loop = asyncio.get_running_loop()
    until = loop.time() + START_S
    async with aiohttp.ClientSession() as http:
        while loop.time() < until and program.returncode is None:
            try:
                async with http.get(f"{url}/health"):
                    return
            except aiohttp.ClientError:
                await asyncio.sleep(0.1)
    raise AssertionError(f"no server: {await ended(program)}")


def bare(python: Path, library: str, seed: int, actions: list[str], **options: Any) -> list[float]:
    """The rewards of an episode that the library plays alone."""
    done = subprocess.run(
        [python, HUBS / "bare.py", library, str(seed), json.dumps(actions)],
        capture_output=True,
        text=True,
        check=True,
        **options,
    )
    return json.loads(done.stderr.splitlines()[-1])


def client_packages(python: Path, folder: Path) -> Path:
    """A folder with OpenEnv's client, without the packages of its server."""
    packages = folder / "client"
    if not packages.exists():
        pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", packages]
        subprocess.run([*pip, "openenv==0.10.0", "websockets==17.4"], check=True)
    return packages


def forget_openenv() -> None:
    """Forget modules that were imported from a folder of a test."""
    for name in list(sys.modules):
        if name.split(".")[0] in ("openenv", "websockets") or name.endswith("openenv_client"):
            del sys.modules[name]
