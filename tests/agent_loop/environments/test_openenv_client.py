"""The client of OpenEnv servers, with a stand-in for OpenEnv's own."""

import asyncio
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agent_loop.environments.episode import InvalidAction, InvalidAnswer, step_of
from agent_loop.environments.instances import class_of
from config.environments import ADAPTERS
from tool_server.wire.protocol import Again, ToolUnavailable

PACKAGE = Path(__file__).parents[2] / "fakes/openenv_package"
URL = "http://127.0.0.1:1"
ROW = {"extras": {"seed": 3}}


@pytest.fixture
def openenv(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, with the stand-in."""
    monkeypatch.syspath_prepend(str(PACKAGE))
    _forget()
    yield importlib.import_module("agent_loop.environments.openenv_client")
    _forget()


def _forget() -> None:
    for name in list(sys.modules):
        if name.split(".")[0] == "openenv" or name.endswith(".openenv_client"):
            del sys.modules[name]


def scripted(*answers: Any) -> Any:
    """The stand-in's class, with these answers."""
    module = importlib.import_module("openenv.core.generic_client")
    module.GenericEnvClient.script = [
        module.StepResult(*each) if isinstance(each, tuple) else each for each in answers
    ]
    module.GenericEnvClient.made.clear()
    return module.GenericEnvClient


def said_by_server(code: str) -> RuntimeError:
    return RuntimeError(f"Server error: no (code: {code})")


@pytest.fixture
def client(openenv: ModuleType) -> Any:
    sys.modules["openenv.core"] = ModuleType("openenv.core")  # so that the test finds the stand-in
    sys.modules["openenv.core"].__path__ = [str(PACKAGE / "openenv/core")]
    return openenv.OpenEnv


async def test_text_becomes_a_field_of_the_action(client: Any):
    kind = scripted(({"text": "go"},), ({"text": "won", "n": 1}, 0.5, True))
    env = client(URL, {"message": "{text}", "unit": 2}, "text", {"size": 9})
    assert await env.reset(ROW) == "go"
    step = await env.step("left")
    [made] = kind.made
    assert made.asked == [{"size": 9, "seed": 3}, {"message": "left", "unit": 2}]
    assert (step.observation, step.reward, step.done) == ("won", 0.5, True)


async def test_all_fields_of_an_observation_are_json(client: Any):
    scripted(({"é": 1},), ({"n": [2]}, None, False))
    env = client(URL, "json")
    assert await env.reset(ROW) == '{"é": 1}'
    step = await env.step('{"a": 1}')
    assert (step.observation, step.reward) == ('{"n": [2]}', 0.0)


@pytest.mark.parametrize(
    ("rewards", "summed"), [([None, 0.5], 0.5), ([0.5, None], 0.5), ([None, None], None)]
)
async def test_an_episode_has_a_reward_when_one_of_its_steps_has(
    client: Any, rewards: list[Any], summed: float | None
):
    first, last = rewards
    scripted(({},), ({"n": 1}, first, False), ({"n": 2}, last, True))
    env = client(URL, {"message": "{text}"})
    await env.reset(ROW)
    steps = [await env.step("a"), await env.step("b")]
    if summed is None:
        with pytest.raises(InvalidAnswer, match="reward=None"):
            step_of(steps[-1])
    else:
        assert sum(step_of(step).reward for step in steps) == summed


async def test_tools_are_listed_and_called(client: Any):
    tool = {"name": "add", "description": "Add.", "input_schema": {"type": "object"}}
    kind = scripted(({},), ({"tools": [tool]},), ({"result": 3},))
    env = client(URL, "mcp")
    await env.reset(ROW)
    assert env.tools == [{"name": "add", "description": "Add.", "parameters": {"type": "object"}}]
    await env.step({"name": "add", "arguments": {"a": 1}})
    assert kind.made[0].asked[-1] == {
        "type": "call_tool",
        "tool_name": "add",
        "arguments": {"a": 1},
    }
    with pytest.raises(InvalidAction, match="call one of the tools"):
        await env.step("add 1")


@pytest.mark.parametrize("text", ["{", "[1]", "[" * 100_000])
async def test_an_action_that_is_no_json_object_is_the_model_s_mistake(client: Any, text: str):
    scripted(({},))
    env = client(URL, "json")
    await env.reset(ROW)
    with pytest.raises(InvalidAction, match="JSON"):
        await env.step(text)


async def test_an_action_that_the_server_does_not_take_is_the_model_s_mistake(client: Any):
    refused = said_by_server("VALIDATION_ERROR")
    scripted(({},), ({"text": "on"},), ({},), refused, ({"text": "on"},))
    first, env = (client(URL, {"number": "{text}"}) for _ in range(2))
    await first.reset(ROW)
    await first.step("1")
    await env.reset(ROW)
    with pytest.raises(InvalidAction, match=r'does not take the action .*"x"'):
        await env.step("x")
    assert (await env.step("1")).observation == '{"text": "on"}'


async def test_a_template_of_which_no_action_was_taken_is_a_fault(client: Any):
    refused = said_by_server("VALIDATION_ERROR")
    scripted(({},), ({"text": "on"},), ({},), refused)
    other, env = client(URL, {"message": "{text}"}), client(URL, {"mesage": "{text}"})
    await other.reset(ROW)
    await other.step("x")
    await env.reset(ROW)
    with pytest.raises(
        RuntimeError, match=r'action=.*"mesage".*Server error: no.*correct `action`'
    ):
        await env.step("x")


@pytest.mark.parametrize(
    ("action", "written"), [("json", "{}"), ("mcp", {"name": "add", "arguments": {}})]
)
async def test_an_action_that_the_model_forms_is_its_own_mistake_from_the_first_on(
    client: Any, action: str, written: Any
):
    tools = [({"tools": []},)] if action == "mcp" else []
    scripted(({},), *tools, said_by_server("VALIDATION_ERROR"))
    env = client(URL, action)
    await env.reset(ROW)
    with pytest.raises(InvalidAction, match="does not take the action"):
        await env.step(written)


async def test_a_reset_that_the_server_does_not_take_is_a_fault(client: Any):
    scripted(said_by_server("VALIDATION_ERROR"))
    with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
        await client(URL, "json").reset(ROW)


async def test_a_server_at_capacity_is_asked_again(client: Any):
    kind = scripted(said_by_server("CAPACITY_REACHED"))
    with pytest.raises(ToolUnavailable) as caught:
        await client(URL, "json").reset(ROW)
    fault = caught.value
    assert fault.is_overload and not fault.executed and fault.again is Again.UNTIL_DEADLINE
    assert kind.made[0].socket.is_aborted


async def test_a_step_given_up_closes_the_socket_and_no_later_step_opens_another(client: Any):
    kind = scripted(({},), None, ({},))
    env = client(URL, "json")
    await env.reset(ROW)
    [made] = kind.made
    socket = made.socket
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(env.step("{}"), 0.01)
    assert socket.is_aborted
    with pytest.raises(ConnectionError, match="closed"):
        await env.step("{}")
    assert made.socket is socket
    await env.close()


async def test_an_episode_that_is_over_at_its_reset_is_a_fault(client: Any):
    scripted(({}, 0.0, True))
    with pytest.raises(RuntimeError, match="over after its reset"):
        await client(URL, "json").reset(ROW)


async def test_a_field_that_the_observation_has_not_is_named(client: Any):
    scripted(({"text": "a", "left": 1},))
    with pytest.raises(RuntimeError, match="'said': the environment's observation has text, left"):
        await client(URL, "json", "said").reset(ROW)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "echo-env:latest", "action": "json"}, "are not started here"),
        ({"url": URL, "action": "text"}, "or json, or mcp"),
        ({"url": URL, "action": {"message": "text"}}, "what the model writes would be lost"),
    ],
)
def test_wrong_options_are_refused(client: Any, options: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        client(**options)


def test_messages_are_bounded(client: Any):
    kind = scripted()
    client(URL, "json")
    assert kind.made[0].settings["max_message_size_mb"] == 8


def test_without_the_package_it_is_named(monkeypatch: pytest.MonkeyPatch):
    _forget()
    monkeypatch.setitem(sys.modules, "openenv", None)  # type: ignore[arg-type]
    module = importlib.import_module("agent_loop.environments.openenv_client")
    with pytest.raises(ImportError, match="pip install --no-deps openenv"):
        module.OpenEnv(URL, "json")


@pytest.mark.parametrize(
    ("use", "says"),
    {
        "openenv": "needs OpenEnv's client",
        "textarena": "install the extra `textarena` of this project",
    }.items(),
)
def test_without_its_package_an_environment_is_refused_when_it_is_named(use: str, says: str):
    with pytest.raises(ValueError, match=f"^cannot load environment=.*: use: {use} .*{says}"):
        class_of(ADAPTERS[use])
