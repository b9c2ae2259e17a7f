"""Environments of other projects: OpenEnv, verifiers, gymnasium and TextArena, without Ray.

Each project is in an environment of its own. An episode's rewards are those that the project gives
for the same seed and actions without this one.
"""

import asyncio
import json
import os
import random
import shlex
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_loop.gateway.program import AgentProgram
from agent_loop.gateway.server import Gateway
from agent_loop.gateway.session import Session
from config.gateway import GatewayOptions
from tests.agent_loop.gateway.test_session import session_of
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
        await episode.__aexit__()

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
        await episode.__aexit__()
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
        await episode.__aexit__()
    assert "1 notes" in step.observation


async def test_faults_of_an_openenv_server_are_typed_and_leave_no_session(openenv: Path):
    async with openenv_serving(openenv, "guess", 1) as (url, program):
        options = {"url": url, **GUESS}
        async with opened(use="openenv", options=options, timeout=3.0) as hub:
            episode = await hub.begin(0)
            with pytest.raises(ToolUnavailable, match="the game is broken"):
                await episode.step("13")
            await episode.__aexit__()
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
            await episode.__aexit__()


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


async def played(python: Path, said: list[str], seed: int, *settings: str) -> tuple[Any, Session]:
    """A task of verifiers as an agent of the gateway in which the policy says this: how the program
    ended, and the session."""
    session = session_of(
        "hermes",
        [f"{text}<|im_end|>" for text in said],
        prompt_length=99_999,
        response_length=99_999,
        takes_reward=True,
    )
    gateway = Gateway()
    command = [str(python), f"{ROOT}/docs/examples/verifiers_agent.py", *settings]
    env = [name for name in ("PYTHONPATH", "NLTK_DATA") if name in os.environ]
    program = AgentProgram(GatewayOptions(command=shlex.join(command), where="host", env=env))
    try:
        address = await gateway.open(session)
        row = json.dumps({"extras": {"seed": seed}}).encode()
        end = await program.run(address.variables, row, port=gateway.port, serve=gateway.serving)
    finally:
        await gateway.close()
    return end, session


@pytest.fixture
def tasksets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HUBS / "tasksets"))


async def test_a_game_of_verifiers_bundled_taskset_has_its_reward(
    verifiers: Path, tasksets: None, words: Path
):
    seed, actions = 3, ["[t]", "[a] or so", "[e]", "[light]"]
    end, session = await played(verifiers, actions, seed, "textarena", '{"game": "Hangman-v0"}')
    assert end.exit_code == 0, end.stderr
    [alone] = bare(verifiers, "hangman", seed, actions, env={**os.environ})[-1:]
    [row] = session.rollouts()
    assert session.reward == alone == 1.0 and len(row.turns) == len(actions)


NUMBER = random.Random(2).randint(1, 20)
PLAYED = {
    "won": ([f"{NUMBER + 1}", f"{NUMBER}"], "mixed-guess", 1.5),
    "lost": (["I do not know"] * 2, "mixed-guess", 0.0),
    "with a tool": ([call("calculator_add", '{"a": 2, "b": 2}'), "It is 4."], "mixed-sums", 1.0),
}


@pytest.mark.parametrize("how", PLAYED)
async def test_a_taskset_of_one_s_own(how: str, verifiers: Path, tasksets: None):
    said, taskset, reward = PLAYED[how]
    settings = ['{"most": 20}', '{"lives": 2}'] if taskset == "mixed-guess" else []
    end, session = await played(verifiers, said, 2, taskset, *settings)
    assert end.exit_code == 0, end.stderr
    [row] = session.rollouts()
    assert session.reward == reward and len(row.turns) == 2


@pytest.mark.parametrize(
    ("said", "config", "why"),
    [
        (["crash"], "{}", "the game is broken"),
        (["1"], '{"limit_s": 0.01}', "cut by a time limit"),
    ],
)
async def test_an_episode_of_verifiers_that_says_nothing_of_the_policy_has_no_reward(
    said: list[str], config: str, why: str, verifiers: Path, tasksets: None
):
    end, session = await played(verifiers, said, 0, "mixed-guess", config)
    assert end.exit_code == 1 and why in end.stderr and session.reward is None


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
        await episode.__aexit__()
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
        await episode.__aexit__()
    async with opened(use="textarena", python=str(games), options={"game": "TicTacToe-v0"}) as hub:
        with pytest.raises(ToolUnavailable, match="several players"):
            await hub.begin(seed)
    assert episode.is_over and episode.rewards == bare(games, "mastermind", seed, actions)
    assert 0 < episode.reward < 1
