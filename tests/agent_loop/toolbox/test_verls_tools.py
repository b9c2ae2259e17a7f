"""verl's tools: as tools of a source, and in verl's own loop, through the tool client."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

pytest.importorskip("verl")

from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from agent_loop.calls.client import ToolClient
from agent_loop.calls.routes import local_route
from agent_loop.native_agent_loop import NativeAgentLoop
from agent_loop.row import Row
from agent_loop.toolbox.functions import not_posted
from agent_loop.toolbox.spec import ToolProvider
from agent_loop.toolbox.toolbox import Toolbox
from agent_loop.training.verl_adapters import loop_worker
from agent_loop.training.verl_adapters import verl_tools as verls
from agent_loop.training.verl_adapters.engine_client import faults_of_trajectory
from agent_loop.training.verl_adapters.loop_worker import MixedAgentLoopWorker
from agent_loop.training.verl_adapters.verl_tools import (
    client_of_trajectory,
    through_client,
    tools_of,
    tools_of_file,
)
from config.schema import ToolConfig
from rate_limit.gcra import LimiterTimeout
from tests.agent_loop.test_passed_on import CALL, batched
from tests.fakes.engine import record_in
from tool_server.wire.protocol import ToolRejected, ToolTimeout, ToolUnavailable

SCHEMA = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a thing.",
        "parameters": {
            "type": "object",
            "properties": {"thing": {"type": "string", "description": "what"}},
            "required": ["thing"],
        },
    },
}


def schema_of(name: str) -> OpenAIFunctionToolSchema:
    function = {**SCHEMA["function"], "name": name}  # type: ignore[dict-item]
    return OpenAIFunctionToolSchema.model_validate({**SCHEMA, "function": function})


def answer(thing: str) -> Any:
    """What the tools of the tests say."""
    if thing == "broken":
        raise ValueError("the lens is broken")
    if thing == "mistake":
        raise ToolRejected("no such thing")
    if thing == "picture":
        return ToolResponse(text="see", image=["cat"])
    return ToolResponse(text=f"a {thing}")


class Looking(BaseTool):
    """A tool with instances; records what happened to each."""

    seen: ClassVar[list[tuple[str, str]]] = []

    async def create(self, instance_id: str | None = None, **_: Any) -> Any:
        self.seen.append(("create", str(len(self.seen))))
        return self.seen[-1][1], ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> Any:
        self.seen.append(("execute", instance_id))
        return answer(parameters["thing"]), 0.5, {}

    async def release(self, instance_id: str, **_: Any) -> None:
        self.seen.append(("release", instance_id))


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    Looking.seen.clear()


def function_tool() -> FunctionTool:
    return FunctionTool(name="look", fn=answer, tool_schema=schema_of("look"))


def base_tool() -> BaseTool:
    return Looking({}, schema_of("look"))


KINDS = pytest.mark.parametrize("make", [function_tool, base_tool])


class Counting:
    """A limiter and slots that record calls; a limiter that is `full` has no place."""

    def __init__(self, *, full: bool = False) -> None:
        self.full, self.acquired, self.held = full, list[str](), 0

    async def acquire_async(
        self, n: int = 1, timeout_s: float | None = None, source: str = ""
    ) -> float:
        if self.full:
            raise LimiterTimeout("no place")
        self.acquired.append(source)
        return 0.0

    async def penalise_async(self, retry_after_s: float = 0.0) -> None: ...

    @asynccontextmanager
    async def hold_async(self, timeout_s: float | None = None) -> AsyncIterator[None]:
        self.held += 1
        yield


@asynccontextmanager
async def called(*tools: Any, counting: Counting | None = None) -> AsyncIterator[Any]:
    """A function that calls a tool of verl's in a trajectory of the source `shop`."""
    url = "http://127.0.0.1:1"
    slots = None if counting is None else counting.hold_async
    async with ToolClient(url, limiter=counting, slots=slots, timeout_s=20.0) as client:
        route = local_route("tools.yaml", not_posted, key="k", timeout_s=20.0, clock=client.clock)
        provider = ToolProvider(tools_of(list(tools), "tools.yaml", route))
        toolbox = Toolbox([("tools.yaml", provider)])
        await toolbox.open()
        async with toolbox.begin(client.for_source("shop"), Row(source="shop")) as mine:
            yield lambda name, **arguments: mine.call(name, arguments)


# --- in the loops of this project -----------------------------------------------------------------


@KINDS
async def test_a_tool_answers_through_limiter_and_slots(make: Any):
    counting = Counting()
    async with called(make(), counting=counting) as call:
        observation = await call("look", thing="tree")
        wrong = await call("look", thing=3)
    assert (observation.text, observation.rejected) == ("a tree", False)
    assert wrong.text == "error: look.thing: 3 is not of type 'string'"
    assert (counting.acquired, counting.held) == (["shop"], 1)


@KINDS
@pytest.mark.parametrize(
    ("thing", "error", "words"),
    [
        ("broken", ToolUnavailable, "tools.yaml:look raised ValueError: the lens is broken"),
        ("mistake", ToolRejected, "no such thing"),
        ("picture", ToolUnavailable, "tool='look' returned images or videos"),
    ],
)
async def test_what_a_tool_raises_and_images_have_a_name(make, thing, error, words):
    async with called(make()) as call:
        with pytest.raises(error) as raised:
            await call("look", thing=thing)
    assert words in str(raised.value) and raised.value.tool == "look"


@pytest.mark.parametrize("thing", ["tree", "broken", "mistake"])
async def test_an_instance_is_released_after_its_call_whatever_happens(thing: str):
    async with called(base_tool()) as call:
        await asyncio.gather(call("look", thing=thing), return_exceptions=True)
    assert Looking.seen == [("create", "0"), ("execute", "0"), ("release", "0")]


YAML = f"""
tools:
  - class_name: {__name__}.Looking
    config: {{type: native}}
    tool_schema:
      type: function
      function:
        name: look_twice
        description: Look twice.
        parameters:
          type: object
          properties: {{thing: {{type: string, description: what}}}}
          required: [thing]
"""
FILE = Path(__file__).parents[2] / "fakes" / "verls_function.py"
PYTHON = FILE.read_text().replace("glance", "glimpse")  # verl takes a name once in a process


@pytest.mark.parametrize(
    ("file", "text", "name"), [("t.yaml", YAML, "look_twice"), ("t.py", PYTHON, "glimpse")]
)
async def test_the_tools_of_a_file_are_loaded_as_verl_loads_them(
    tmp_path: Path, file: str, text: str, name: str
):
    (tmp_path / file).write_text(text)
    tools = tools_of_file(str(tmp_path / file))
    spec = verls.spec_of(tools[0])
    assert (spec.name, [*spec.parameters["properties"]]) == (name, ["thing"])
    async with called(*tools) as call:
        assert (await call(name, thing="tree")).text == "a tree"


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("gone.yaml", None, "no file /.*gone.yaml; correct the path"),
        ("t.yaml", "tools: [{class_name: no.Where}]", "verl cannot load it"),
        ("t.py", "1 / 0", "verl cannot load it .*ZeroDivisionError"),
    ],
)
def test_a_file_that_verl_cannot_load_is_named(tmp_path: Path, file: str, text: Any, words: str):
    if text is not None:
        (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match=f"verl='.*{file}': {words}"):
        tools_of_file(str(tmp_path / file))


# --- in verl's own loop ---------------------------------------------------------------------------


async def run_as_verl(tool: Any, thing: str) -> Any:
    """A call as verl's loop makes it."""
    if isinstance(tool, FunctionTool):
        return await tool.call({"thing": thing})
    instance_id, _ = await tool.create()
    try:
        return (await tool.execute(instance_id, {"thing": thing}))[0]
    finally:
        await tool.release(instance_id)


@asynccontextmanager
async def trajectory(counting: Counting, timeout_s: float = 20.0) -> AsyncIterator[list[Any]]:
    """The faults of a trajectory of the source `shop`."""
    url = "http://127.0.0.1:1"
    slots = counting.hold_async
    async with ToolClient(url, limiter=counting, slots=slots, timeout_s=timeout_s) as client:
        token = client_of_trajectory.set(client.for_source("shop"))
        faults: list[Any] = []
        faults_token = faults_of_trajectory.set(faults)
        try:
            yield faults
        finally:
            client_of_trajectory.reset(token)
            faults_of_trajectory.reset(faults_token)


@KINDS
async def test_a_wrapped_tool_passes_the_trajectory_s_client(make: Any):
    counting = Counting()
    (tool,) = through_client([make()], 20.0)
    assert (tool.name, tool.tool_schema) == ("look", schema_of("look"))
    async with trajectory(counting) as faults:
        response = await run_as_verl(tool, "tree")
    assert response.text == "a tree" and faults == []
    assert (counting.acquired, counting.held) == (["shop"], 1)
    assert (await run_as_verl(tool, "bush")).text == "a bush"  # outside a trajectory
    assert len(counting.acquired) == 1


@KINDS
async def test_what_a_wrapped_tool_raises_reaches_verl_unchanged(make: Any):
    (tool,) = through_client([make()], 20.0)
    async with trajectory(Counting()) as faults:
        with pytest.raises(ValueError, match=r"^the lens is broken$"):
            await run_as_verl(tool, "broken")
        assert (await run_as_verl(tool, "picture")).image == ["cat"]
    assert faults == []


@KINDS
async def test_a_call_that_gets_no_place_is_a_fault_of_the_trajectory(make: Any):
    (tool,) = through_client([make()], 20.0)
    async with trajectory(Counting(full=True)) as faults:
        with pytest.raises(ToolTimeout, match=r"for tool='look' .*no place in"):
            await run_as_verl(tool, "tree")
    assert [type(fault) for fault in faults] == [ToolTimeout]


class Keeping:
    """A loop that keeps the tools it is given."""

    def __init__(self, *, tools: Any, **_: Any) -> None:
        self.tools = tools.tools


class KeepingOurs(NativeAgentLoop):
    def __init__(self, *, tools: Any, **_: Any) -> None:
        self.tools = tools.tools


@pytest.mark.parametrize(("kind", "is_wrapped"), [(Keeping, True), (KeepingOurs, False)])
def test_only_loops_that_are_not_ours_get_wrapped_tools(kind, is_wrapped, monkeypatch):
    target = f"{__name__}.{kind.__name__}"
    monkeypatch.setitem(_agent_loop_registry, "kept", {"_target_": target})
    worker: Any = object.__new__(MixedAgentLoopWorker)
    worker.config = SimpleNamespace(data={})
    worker.settings = SimpleNamespace(tools=ToolConfig(server_url="http://127.0.0.1:1"))
    names = ("llm_client", "tokenizer", "processor", "hf_model_type", "dataset_cls")
    vars(worker).update(dict.fromkeys(names))
    for tool in (function_tool(), base_tool()):
        worker.tools = [tool]
        (given,) = worker._make_loop("kept").tools
        assert (given is not tool) == is_wrapped and given.name == "look"


@pytest.mark.parametrize("is_full", [False, True])
async def test_verl_s_own_loop_calls_its_tools_through_the_client(
    is_full: bool, monkeypatch: pytest.MonkeyPatch
):
    """The call of `tool_agent` passes the limiter; without a place its trajectory is lost."""
    counting, set_client = Counting(full=is_full), client_of_trajectory.set
    async with ToolClient("http://127.0.0.1:1", limiter=counting, timeout_s=20.0) as client:
        monkeypatch.setattr(
            loop_worker,
            "client_of_trajectory",
            SimpleNamespace(set=lambda _: set_client(client.for_source("nq"))),
        )
        row = await batched("tool_agent", monkeypatch, CALL, "ab<|im_end|>")
    record = record_in(row)
    assert counting.acquired == ([] if is_full else ["nq"])
    assert any(row["response_mask"]) is not is_full
    assert record.fault_tool == ("look" if is_full else "")
