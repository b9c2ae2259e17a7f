"""Environments of other projects: OpenEnv, verifiers, gymnasium and TextArena, without Ray.

Each project is in an environment of its own. An episode's rewards are those that the project gives
for the same seed and actions without this one.
"""

import asyncio
import os
import random
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.environment_hubs.rig import (
    HUBS,
    ROOT,
    bare,
    client_packages,
    forget_openenv,
    opened,
    serving,
)
from tests.fakes.pinned_environment import cache_of, python_with
from tests.ports import free_ports
from tool_server.wire.protocol import ToolRejected, ToolUnavailable

pytestmark = [pytest.mark.environments, pytest.mark.slow, pytest.mark.timeout(900)]

WORDS = ("able", "water", "stone", "light", "house", "river", "bread", "glass")


def python_of(name: str) -> Path:
    return python_with(HUBS / name, cache_of([HUBS / name], "environments"))


@pytest.fixture(scope="module")
def games() -> Path:
    """The interpreter with gymnasium and TextArena."""
    return python_of("games.txt")


@pytest.fixture(scope="module")
def verifiers() -> Path:
    return python_of("verifiers.txt")


@pytest.fixture(scope="module")
def openenv_server() -> Path:
    """The interpreter with OpenEnv's server; its client can be imported here."""
    return python_of("openenv.txt")


@pytest.fixture
def openenv(openenv_server: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    packages = client_packages(openenv_server, cache_of([HUBS / "openenv.txt"], "environments"))
    monkeypatch.syspath_prepend(str(packages))
    forget_openenv()
    yield openenv_server
    forget_openenv()


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus `words` in NLTK's format, which the games of words would download."""
    folder = tmp_path / "nltk/corpora/words"
    folder.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (folder / name).write_text("\n".join(WORDS) + "\n")
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nltk"))
    return tmp_path / "nltk"


@asynccontextmanager
async def openenv_serving(python: Path, kind: str, most: int) -> AsyncIterator[tuple[str, Any]]:
    url = f"http://127.0.0.1:{(port := free_ports(1)[0])}"
    command = [python, HUBS / "openenv_server.py", kind, str(port), str(most)]
    async with serving(command, url) as program:
        yield url, program


GUESS = {"action": {"number": "{text}"}, "observation": "text"}


async def test_an_episode_of_openenv_is_that_of_its_own_client(openenv: Path):
    seed = 7
    number = random.Random(seed).randint(1, 50)
    actions = [number - 1, number + 1, number]
    async with (
        openenv_serving(openenv, "guess", 4) as (url, _),
        opened(use="openenv", options={"url": url, **GUESS}) as hub,
    ):
        episode = await hub.begin(seed)
        assert episode.start.messages == [
            {"role": "user", "content": "Guess a number from 1 to 50."}
        ]
        said = [(await episode.step(str(actions[0])))[0].observation]
        with pytest.raises(ToolRejected, match="does not take the action"):
            await episode.step("ten")
        said += [(await episode.step(str(action)))[0].observation for action in actions[1:]]
        await episode.end()

        from agent_loop.environments.openenv_client import client_class

        async with client_class()(base_url=url) as alone:
            await alone.reset(seed=seed)
            steps = [await alone.step({"number": action}) for action in actions]
    assert said == ["higher", "lower", "right"] == [each.observation["text"] for each in steps]
    assert episode.rewards == [each.reward for each in steps] == [-0.125, -0.125, 1.0]
    assert episode.is_over and steps[-1].done and episode.reward == 0.75
    assert not {"gradio", "fastmcp"} & set(sys.modules)


async def test_arguments_of_openenv_s_reset_and_the_whole_observation(openenv: Path):
    options = {"action": "json", "reset": {"lives": 1}}
    async with (
        openenv_serving(openenv, "guess", 1) as (url, _),
        opened(use="openenv", options={"url": url, **options}) as hub,
    ):
        episode = await hub.begin(0)
        with pytest.raises(ToolRejected, match="no JSON object"):
            await episode.step("[3]")
        step, _ = await episode.step('{"number": 51}')
        await episode.end()
    assert '"left": 1' in episode.start.messages[0]["content"]
    assert '"text": "lower"' in step.observation and step.done


async def test_tools_of_an_openenv_environment_are_called(openenv: Path):
    async with (
        openenv_serving(openenv, "notes", 1) as (url, _),
        opened(use="openenv", options={"url": url, "action": "mcp"}) as hub,
    ):
        episode = await hub.begin(0)
        [tool] = episode.start.tools
        assert tool["name"] == "write" and "text" in tool["parameters"]["properties"]
        step, _ = await episode.step({"name": "write", "arguments": {"text": "a"}})
        with pytest.raises(ToolRejected, match="call one of the tools"):
            await episode.step("hello")
        await episode.end()
    assert "1 notes" in step.observation


async def test_faults_of_an_openenv_server_are_typed_and_leave_no_session(openenv: Path):
    async with openenv_serving(openenv, "guess", 1) as (url, program):
        options = {"url": url, **GUESS}
        async with opened(use="openenv", options=options, timeout=3.0) as hub:
            episode = await hub.begin(0)
            with pytest.raises(ToolUnavailable, match="the game is broken"):
                await episode.step("13")
            await episode.end()
            episode = await hub.begin(0)  # the server has one session: that before has ended
            with pytest.raises(ToolUnavailable, match="CAPACITY_REACHED"):
                await hub.begin(1)
            hanging = asyncio.create_task(episode.step("0"))
            with pytest.raises(ToolUnavailable, match="no answer"):
                await hanging
            program.kill()
            await program.wait()
            for _ in range(2):  # it does not connect to a server that started again
                with pytest.raises(ToolUnavailable):
                    await episode.step("1")
            await episode.end()


@asynccontextmanager
async def verifiers_entry(
    how: str, python: Path, options: dict[str, Any]
) -> AsyncIterator[tuple[dict[str, Any], Any]]:
    """The entry of an environment of verifiers, in a process of the run or at a server."""
    if how == "process":
        env = ["PYTHONPATH", *(name for name in ("NLTK_DATA",) if name in os.environ)]
        yield {"use": "verifiers", "python": str(python), "env": env, "options": options}, None
        return
    url = f"http://127.0.0.1:{(port := free_ports(1)[0])}"
    module = "agent_loop.environments.verifiers_task:VerifiersTask"
    command = [python, "-m", "agent_loop.environments.serve", module, "--port", str(port)]
    async with serving(command, url, stdout=asyncio.subprocess.DEVNULL) as program:
        yield {"use": url, "options": options}, program


@pytest.fixture
def tasksets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{HUBS / 'tasksets'}")


@pytest.mark.parametrize("how", ["process", "http"])
async def test_an_episode_of_verifiers_bundled_taskset_has_the_reward_of_the_game(
    how: str, verifiers: Path, tasksets: None, words: Path
):
    seed, actions = 3, ["[t]", "[a] or so", "[e]", "[light]"]
    options = {"taskset": "textarena", "config": {"game": "Hangman-v0"}}
    async with verifiers_entry(how, verifiers, options) as (entry, _), opened(**entry) as hub:
        episode = await hub.begin(seed)
        assert [each["role"] for each in episode.start.messages] == ["system", "user"]
        assert "Hangman" in episode.start.messages[1]["content"]
        steps = [(await episode.step(action))[0] for action in actions]
        await episode.end()
    alone = bare(verifiers, "hangman", seed, actions, env={**os.environ})
    assert episode.rewards == alone and alone[-1] == 1.0
    assert steps[-1].done and steps[-1].info == {"game_reward": 1.0}


@pytest.mark.parametrize("how", ["process", "http"])
async def test_an_episode_of_a_taskset_of_one_s_own(how: str, verifiers: Path, tasksets: None):
    seed = 2
    number = random.Random(seed).randint(1, 20)
    options = {"taskset": "mixed-guess", "config": {"most": 20}, "env": {"lives": 2}}
    async with verifiers_entry(how, verifiers, options) as (entry, _), opened(**entry) as hub:
        won, lost = await asyncio.gather(hub.begin(seed), hub.begin(seed))
        said, _ = await won.step(str(number + 1))
        last, _ = await won.step(str(number))
        for _ in range(2):
            await lost.step("I do not know")
        await asyncio.gather(won.end(), lost.end())
        with pytest.raises(ToolUnavailable, match="no task with this number"):
            await hub.begin(4)
    assert won.start.messages[0] == {"role": "system", "content": "Write the number alone."}
    assert said.observation == "lower"
    assert (won.rewards, lost.rewards) == ([0.0, 1.5], [0.0, 0.0])
    assert last.info == {"guessed": 1.5, "lives": 2.0}


async def test_a_task_of_verifiers_with_a_tool(verifiers: Path, tasksets: None):
    options = {"taskset": "mixed-sums"}
    async with (
        verifiers_entry("process", verifiers, options) as (entry, _),
        opened(**entry) as hub,
    ):
        episode = await hub.begin(1)
        [tool] = episode.start.tools
        name = tool["function"]["name"]
        called, _ = await episode.step({"name": name, "arguments": {"a": 1, "b": 2}})
        last, _ = await episode.step("It is 3.")
        given_up = await hub.begin(1)  # its tool's process ends with the provider
        assert not given_up.is_over
    assert called.observation == "3" and last.done and episode.reward == 1.0


async def test_an_episode_that_a_time_limit_of_verifiers_cut_is_lost(
    verifiers: Path, tasksets: None
):
    options = {"taskset": "mixed-guess", "config": {"limit_s": 1.0}}
    async with (
        verifiers_entry("process", verifiers, options) as (entry, _),
        opened(**entry) as hub,
    ):
        episode = await hub.begin(0)
        await asyncio.sleep(1.5)  # the engine is slow
        with pytest.raises(ToolUnavailable, match="a time limit of verifiers cut the episode"):
            await episode.step("1")


async def test_faults_of_verifiers_are_typed(verifiers: Path, tasksets: None):
    options = {"taskset": "mixed-guess"}
    async with (
        verifiers_entry("http", verifiers, options) as (entry, program),
        opened(**entry) as hub,
    ):
        episode = await hub.begin(0)
        with pytest.raises(ToolUnavailable, match="the game is broken"):
            await episode.step("crash")
        episode = await hub.begin(0)
        program.kill()
        await program.wait()
        with pytest.raises(ToolUnavailable):
            await episode.step("1")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"taskset": "harbor"}, "containers of Docker"),
        ({"taskset": "nemo_gym", "config": {"dataset": "rows.jsonl"}}, "downloads NeMo Gym"),
        ({"taskset": "openenv", "config": {"env": "echo"}}, "use: openenv"),
        ({"taskset": "nowhere"}, "not found"),
        (
            {"taskset": "mixed-guess", "env": {"player": {"runtime": {"type": "docker"}}}},
            "needs containers or an account",
        ),
        (
            {"taskset": "mixed-guess", "env": {"player": {"timeout": {"rollout": 60}}}},
            "env.player.timeout cuts episodes",
        ),
        (
            {"taskset": "mixed-guess", "env": {"timeout": {"episode": 60}}},
            "env.timeout cuts episodes",
        ),
        (
            {"taskset": "mixed-guess", "env": {"id": "agentic_judge"}},
            "the policy plays one role",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_what_needs_a_network_or_an_account_is_refused_by_name(
    options: dict[str, Any], said: str, verifiers: Path, tasksets: None
):
    async with (
        verifiers_entry("process", verifiers, options) as (entry, _),
        opened(**entry) as hub,
    ):
        with pytest.raises(ToolUnavailable, match=said):
            await hub.begin(0)


async def test_an_environment_of_gymnasium(games: Path):
    seed, actions = 1, ["down", "down", "right", "right", "down", "right"]
    entry = {"use": f"{ROOT}/docs/examples/frozen_lake.py:FrozenLake", "python": str(games)}
    async with opened(**entry, options={"slippery": False}) as hub:
        episode = await hub.begin(seed)
        assert "[S]" in episode.start.messages[0]["content"]
        with pytest.raises(ToolRejected, match="write exactly one of"):
            await episode.step("swim")
        for action in actions:
            if not episode.is_over:
                await episode.step(f"I go {action}.")
        await episode.end()
    taken = actions[: len(episode.rewards)]
    assert episode.rewards == bare(games, "frozen_lake", seed, taken) == [0.0] * 5 + [1.0]
    assert episode.is_over


async def test_a_game_of_textarena(games: Path):
    seed, actions = 5, ["[1 2 3 4]", "[2 1 4 3]", "[5 5 5 5]", "[1 1 2 2]"]
    options = {"game": "Mastermind-v0", "max_turns": 4}
    async with opened(use="textarena", python=str(games), options=options) as hub:
        episode = await hub.begin(seed)
        for action in actions:
            if not episode.is_over:
                await episode.step(action)
        await episode.end()
    async with opened(use="textarena", python=str(games), options={"game": "TicTacToe-v0"}) as hub:
        with pytest.raises(ToolUnavailable, match="several players"):
            await hub.begin(seed)
    assert episode.is_over and episode.rewards == bare(games, "mastermind", seed, actions)
    assert 0 < episode.reward < 1
