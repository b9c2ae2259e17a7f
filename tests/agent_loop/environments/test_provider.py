"""Sessions of an environment: three ways to run it, one meaning."""

import asyncio
import os
from dataclasses import replace
from typing import Any

import psutil
import pytest
from aiohttp.test_utils import TestClient, TestServer

from agent_loop.calls.client import ToolClient
from agent_loop.environments.instances import class_of
from agent_loop.environments.provider import EnvironmentProvider
from agent_loop.environments.serve import EnvironmentServer
from config.compat import timeout
from config.environments import EnvironmentEntry
from tests.agent_loop.environments.conftest import ROW, WORLDS, provider_for
from tests.fakes.environments import FAULTS, HARD_FAULTS
from tool_server.wire.protocol import ToolRejected, ToolTimeout, ToolUnavailable

WHERE = pytest.mark.parametrize("where", ["process", "loop", "http"])


def servers() -> list[psutil.Process]:
    """Processes below this one that serve environments."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "agent_loop.environments.session_process" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            pass
    return found


def new_server(before: set[int]) -> psutil.Process:
    """The server that a backend started: below its guard, above its sessions."""
    [guard] = [e for e in servers() if e.pid not in before and e.ppid() == os.getpid()]
    [server] = guard.children()
    return server


@WHERE
async def test_an_episode_has_the_rewards_of_its_steps(
    where: str, client: ToolClient, guess_url: str
):
    episode = await provider_for(client, where, guess_url).begin(client, ROW).__aenter__()
    assert [message["role"] for message in episode.start.messages] == ["system", "user"]
    with pytest.raises(ToolRejected, match="write a number"):
        await episode.step("five")
    said = [(await episode.step(guess))[0] for guess in ("2", "9", "5")]
    assert [step.observation for step in said] == ["higher", "lower", "right"]
    assert episode.rewards == [0.25, 0.0, 1.0] and episode.reward == 1.25
    assert episode.is_over and episode.info == {"acc": 1.0, "x": 2.0}
    await episode.__aexit__()


async def test_the_last_reward_may_be_the_trajectorys(client: ToolClient):
    provider = provider_for(client, "loop", "", reward="last")
    episode = await provider.begin(client, ROW).__aenter__()
    assert episode.reward == 0.0
    for guess in ("2", "9"):
        await episode.step(guess)
    assert episode.reward == 0.0
    await episode.step("5")
    assert episode.reward == 1.0


async def test_the_sum_of_the_rewards_keeps_their_bound(client: ToolClient):
    provider = provider_for(client, "loop", "", options={"mode": "sums up"})
    episode = await provider.begin(client, ROW).__aenter__()
    await episode.step("5")
    with pytest.raises(ToolUnavailable, match=r"steps sum to 1\.2e\+09: want a finite number"):
        await episode.step("5")
    last = provider_for(client, "loop", "", options={"mode": "sums up"}, reward="last")
    episode = await last.begin(client, ROW).__aenter__()
    await episode.step("5")
    await episode.step("5")
    assert episode.reward == 6e8


@WHERE
@pytest.mark.parametrize("mode", [*FAULTS, *HARD_FAULTS, "no start", "fails at once"])
async def test_an_environment_that_fails_is_a_fault(
    where: str, mode: str, client: ToolClient, guess_url: str
):
    if mode in HARD_FAULTS and where == "loop":
        pytest.skip("an instance in the loop's process takes it along")
    timeout = 1.0 if mode == "hangs" else None
    provider = provider_for(client, where, guess_url, options={"mode": mode}, timeout=timeout)
    with pytest.raises(ToolUnavailable) as caught:
        episode = await provider.begin(client, ROW).__aenter__()
        await episode.step("5")
    words = {"no start": "reset returned []", "fails at once": "reset raised OSError: no board"}
    assert (FAULTS | HARD_FAULTS | words)[mode] in str(caught.value)
    assert caught.value.tool == ("environment" if where == "http" else "Guess")
    assert isinstance(caught.value, ToolTimeout) == (mode == "hangs")
    fresh = await provider_for(client, where, guess_url).begin(client, ROW).__aenter__()
    assert (await fresh.step("5"))[0].done, "the other sessions live on"
    await fresh.__aexit__()


async def test_what_an_environment_prints_goes_nowhere(client: ToolClient):
    provider = provider_for(client, "process", "", options={"mode": "prints"})
    episode = await provider.begin(client, ROW).__aenter__()
    assert (await episode.step("5"))[0].observation == "more"


@pytest.mark.slow
async def test_no_process_of_an_episode_is_left(client: ToolClient):
    async with ToolClient("http://127.0.0.1:1", limiter=None, timeout_s=4) as own:
        before = {each.pid for each in servers()}
        provider = provider_for(own, "process", "", options={"mode": "hangs"})
        episodes = [await provider.begin(own, ROW).__aenter__() for _ in range(3)]
        assert len({each.pid for each in servers()} - before) == 2 * 4  # each has a guard
        with pytest.raises(ToolTimeout):
            await episodes[0].step("5")
        await episodes[1].__aexit__()
        await _until(lambda: len({each.pid for each in servers()} - before) == 2 * 2)
    await _until(lambda: {each.pid for each in servers()} <= before)


async def test_no_process_of_a_start_that_is_refused_is_left(client: ToolClient):
    before = {each.pid for each in servers()}
    provider = provider_for(client, "process", "", options={"mode": "refuses"})
    for _ in range(3):
        with pytest.raises((ToolRejected, ToolUnavailable), match="no such board"):
            await provider.begin(client, ROW).__aenter__()
    await _until(lambda: len({each.pid for each in servers()} - before) == 2)  # the program's


async def test_a_server_that_was_killed_starts_again_and_its_episodes_are_lost(client: ToolClient):
    before = {each.pid for each in servers()}
    provider = provider_for(client, "process", "")
    lost = await provider.begin(client, ROW).__aenter__()
    new_server(before).kill()
    await _until(lambda: {each.pid for each in servers()} <= before)
    with pytest.raises(ToolUnavailable, match="killed, and this episode with it"):
        await lost.step("5")
    await lost.__aexit__()
    assert (await (await provider.begin(client, ROW).__aenter__()).step("5"))[0].done


async def _until(holds: Any) -> None:
    async with timeout(20):
        while not holds():  # noqa: ASYNC110 (no process tells us that it ended)
            await asyncio.sleep(0.02)


async def test_all_episodes_of_a_row_meet_one_random_state(client: ToolClient, tmp_path: Any):
    path = tmp_path / "dice.py"
    path.write_text(
        "import random, os\n"
        "class Dice:\n"
        "    def reset(self, row): return str(random.random())\n"
        "    def step(self, action): return str(random.random()), 0.0, False\n"
    )

    provider = EnvironmentProvider(EnvironmentEntry(use=f"{path}:Dice"), client)
    said = []
    for row_id in ("a", "a", "b"):
        row = replace(ROW, row_id=row_id)
        episode = await provider.begin(client, row).__aenter__()
        said.append((episode.start.messages[0]["content"], (await episode.step(""))[0].observation))
    await provider.close()
    assert said[0] == said[1] != said[2] and len(set(said[0])) == 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("{folder}/none.py:Guess", "no file"),
        ("{worlds}:None_", "has no class 'None_', but"),
        ("{worlds}:FAULTS", "has no class 'FAULTS', but"),
        ("{worlds}:NoStep", "the class has no step"),
        ("{folder}/broken.py:Guess", "the file is not Python: SyntaxError"),
        ("no_such_module:Guess", "No module named"),
    ],
)
def test_a_class_that_is_none_is_named(name: str, words: str, tmp_path: Any):
    (tmp_path / "broken.py").write_text("class Guess(")
    with pytest.raises(ValueError, match="cannot load environment=") as caught:
        class_of(name.format(folder=tmp_path, worlds=WORLDS))
    assert words in str(caught.value)


async def test_options_that_a_class_does_not_take_are_named(client: ToolClient):
    for where in ("process", "loop"):
        provider = provider_for(client, where, "", options={"hight": 3})
        with pytest.raises((ToolUnavailable, ValueError), match=r"does not take options=.*hight"):
            await provider.begin(client, ROW).__aenter__()


async def test_a_server_that_cannot_start_says_why(client: ToolClient, monkeypatch: Any):

    for given, words in (
        ({"use": f"{WORLDS}:NoStep"}, "the class has no step"),
        ({"use": f"{WORLDS}:Guess", "python": "/no/python"}, "cannot be started"),
    ):
        provider = EnvironmentProvider(EnvironmentEntry.model_validate(given), client)
        with pytest.raises(ToolUnavailable, match=words):
            await provider.begin(client, ROW).__aenter__()
    monkeypatch.delenv("NOT_SET", raising=False)
    assert "NOT_SET" not in os.environ
    entry = EnvironmentEntry(use=f"{WORLDS}:Guess", env=["NOT_SET"])
    with pytest.raises(ValueError, match="NOT_SET"):
        await EnvironmentProvider(entry, client).begin(client, ROW).__aenter__()


@pytest.mark.slow
async def test_the_start_of_a_server_is_not_in_the_time_of_a_reset(
    client: ToolClient, tmp_path: Any
):
    path = tmp_path / "slow.py"
    path.write_text(
        "import time\n"
        "time.sleep(4)\n"
        "class Slow:\n"
        "    def reset(self, row): return 'go'\n"
        "    def step(self, action): return 'over', 1.0, True\n"
    )
    provider = EnvironmentProvider(EnvironmentEntry(use=f"{path}:Slow", timeout=3.0), client)
    episode = await provider.begin(client, ROW).__aenter__()
    assert (await episode.step("x"))[0].done
    await provider.close()


async def test_a_reset_at_a_server_that_dies_is_tried_at_the_next(client: ToolClient):
    before = {each.pid for each in servers()}
    provider = EnvironmentProvider(EnvironmentEntry(use=f"{WORLDS}:Guess"), client)
    await provider.begin(client, ROW).__aenter__()
    server = new_server(before)
    server.suspend()  # the kernel takes requests for it
    again = asyncio.ensure_future(provider.begin(client, ROW).__aenter__())
    for _ in range(100):  # the request is sent
        await asyncio.sleep(0)
    server.kill()
    await again
    await provider.close()


async def test_no_more_sessions_than_allowed_start_at_once():
    served = EnvironmentServer(f"{WORLDS}:Guess", max_sessions=2)
    async with TestClient(TestServer(served.app())) as http:
        asked = [http.post("/reset", json={"row": ROW.visible()}) for _ in range(12)]
        answers = [await each for each in asyncio.as_completed(asked)]
        told = [(each.status, each.headers.get("X-Executed")) for each in answers]
        assert sorted(told, key=str) == [(200, None)] * 2 + [(503, "no")] * 10
