"""Environments of tests/fakes/environments.py, in the loop, in processes, and behind HTTP."""

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_loop.calls.client import ToolClient
from agent_loop.environments.provider import EnvironmentProvider
from agent_loop.row import Row
from config.environments import EnvironmentEntry

WORLDS = Path(__file__).parents[2] / "fakes" / "environments.py"
ROW = Row(
    source="guess",
    messages=[{"role": "user", "content": "play"}],
    row_id="guess:1",
    extra_info={"extras": '{"seed": 4}'},
    came={"reward_model": {"ground_truth": '{"answer": "5"}'}},
)


@pytest.fixture(scope="session")
def guess_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of `Guess` that a user has started."""
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "agent_loop.environments.serve"),
            *(f"{WORLDS}:Guess", "--port", "0", "--limit-s", "60"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    with server.stdout as printed:
        yield printed.readline().strip("= \n").removeprefix("Running on ")
    server.terminate()
    assert server.wait(20) == 0


@pytest.fixture
async def client() -> AsyncIterator[ToolClient]:
    async with ToolClient("http://127.0.0.1:1", limiter=None, timeout_s=30) as client:
        yield client


def provider_for(client: ToolClient, where: str, url: str, **entry: Any) -> EnvironmentProvider:
    """The environment `Guess`; `where` is process, loop or http."""
    use = {"use": url} if where == "http" else {"use": f"{WORLDS}:Guess", "where": where}
    made = EnvironmentEntry(**use, **entry)
    return client.resource(made.model_dump_json(), lambda: EnvironmentProvider(made, client))
