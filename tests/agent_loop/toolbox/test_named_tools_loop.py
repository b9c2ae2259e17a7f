"""Which tools the agents that call by name have: those of the source, else those of the agent."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

from agent_loop.calls.client import ToolClient
from agent_loop.native_agent_loop import NativeAgentLoop, format_of
from agent_loop.row import Row
from agent_loop.toolbox.own import SPECS
from agent_loop.turns.call_formats import FORMATS
from agent_loop.turns.tags import Action
from config.schema import MixedConfig, ToolConfig
from tests.agent_loop.toolbox.test_toolbox import ORDERS
from tests.agent_loop.toolbox.test_verls_tools import base_tool, function_tool, schema_of
from tests.listening import listening
from tool_server.app import app_runner, create_app
from tool_server.settings import ServerSettings

ROW = Row(source="shop", row_id="shop:1")
ALL = ["run_code", "search", "calculate"]


@asynccontextmanager
async def trajectory(
    tools: Sequence[Any] | None = None,
    *,
    url: str = "http://127.0.0.1:1",
    verls: Sequence[Any] = (),
    names: Sequence[str] | None = None,
    persistent: bool = False,
) -> AsyncIterator[Any]:
    """A loop that began a trajectory of the source `shop`, which has these `tools`."""
    sources = {"shop": {"ratio": 1, "tools": tools}}
    mixed = {"experiment": "x", "run_dir": "/x", "sources": sources}
    loop: Any = object.__new__(NativeAgentLoop)
    loop.settings = SimpleNamespace(
        mixed=MixedConfig.model_validate(mixed), tools=ToolConfig(server_url=url)
    )
    loop._tool_names, loop._topk, loop._verls = names, 3, list(verls)
    loop._persistent, loop._held, loop._deadline = persistent, AsyncExitStack(), None
    async with ToolClient(url, limiter=None, timeout_s=60.0) as client:
        loop.client = client.for_source("shop")
        try:
            await loop.begin(ROW)
            yield loop
        finally:
            await loop.end()


@pytest.mark.parametrize(
    ("tools", "settings", "names"),
    [
        (["calculate", f"{ORDERS}:look_up"], {"names": ["search"]}, ["calculate", "look_up"]),
        ([], {}, []),
        (None, {}, ALL),
        (None, {"names": []}, []),
        (None, {"names": ["search"]}, ["search"]),
        (None, {"verls": [function_tool()]}, [*ALL, "look"]),
        (None, {"verls": [base_tool()], "names": ["look", "search"]}, ["search", "look"]),
        ([f"{ORDERS}:look_up"], {"verls": [function_tool()]}, ["look_up"]),
    ],
)
async def test_a_source_s_own_list_comes_before_the_agent_s(tools, settings, names):
    async with trajectory(tools, **settings) as loop:
        assert [*loop.specs] == names
        assert [each["function"]["name"] for each in loop.tool_schemas()] == names


async def test_names_that_nobody_has_are_refused():
    with pytest.raises(ValueError, match=r"unknown tool_names=\['find'\]: known are .*'look'"):
        async with trajectory(names=["find", "search"], verls=[function_tool()]):
            pass


async def test_a_tool_of_verl_s_takes_the_place_of_a_tool_of_the_server_with_its_name():
    search = function_tool()
    search.name, search.tool_schema = "search", schema_of("search")
    for names in (None, ["search"], ["search", "search"]):
        async with trajectory(verls=[search], names=names) as loop:
            assert sorted(loop.specs) == (sorted(ALL) if names is None else ["search"])
            assert loop.specs["search"].parameters != SPECS["search"].parameters
            found = await loop.act(Action(kind="search", content="", arguments={"thing": "b"}), {})
            assert found.text == "a b"


@pytest.mark.sandbox
@pytest.mark.parametrize("tools", [None, ["run_code"]])
@pytest.mark.parametrize("persistent", [True, False])
async def test_an_interpreter_keeps_its_state_if_it_is_persistent(tools: Any, persistent: bool):
    async def run(loop: Any, code: str) -> str:
        action = Action(kind="run_code", content=code, arguments={"code": code})
        return (await loop.act(action, {})).text

    async with listening(app_runner(create_app(ServerSettings(port=0)))) as url:
        async with trajectory(tools, url=url, persistent=persistent) as loop:
            await run(loop, "x = 41")
            assert ("42" in await run(loop, "print(x + 1)")) == persistent
        async with trajectory(tools, url=url, persistent=persistent) as loop:
            assert "NameError" in await run(loop, "print(x)")


@pytest.mark.parametrize("name", [None, "herms", ""])
def test_a_format_that_nobody_reads_is_refused_with_all_names(name: Any):
    with pytest.raises(ValueError, match=f"multi_turn.format to one of {', '.join(FORMATS)}"):
        format_of(name)
