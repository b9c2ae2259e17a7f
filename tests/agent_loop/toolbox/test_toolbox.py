"""Tools of a source: what the model sees, whose mistake a wrong call is, limits, state."""

import asyncio
import gc
import json
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent_loop.calls.client import ToolClient
from agent_loop.calls.own_limits import limited, own_state_path
from agent_loop.deadline import CLOSE_S
from agent_loop.row import Row
from agent_loop.toolbox.entries import toolbox_of
from agent_loop.toolbox.functions import definition_of
from agent_loop.toolbox.spec import ToolSpec, freed
from agent_loop.toolbox.toolbox import TrajectoryTools
from agent_loop.turns.turn_loop import Observation
from config.schema import MixedConfig, ToolConfig
from config.tool_entries import ToolEntry, as_entry
from rate_limit.stats import snapshot_of
from tests.agent_loop.toolbox.mcp_rig import LINES
from tests.fakes.tool_server import running
from tests.listening import listening
from tool_server.app import app_runner, create_app
from tool_server.settings import ServerSettings
from tool_server.wire.protocol import (
    ToolRejected,
    ToolTimeout,
    ToolUnavailable,
    cell_call,
    run_code_call,
)

ORDERS = Path(__file__).parents[2] / "fakes" / "orders.py"


def row(number: int, **extras: str) -> Row:
    info = {"extras": json.dumps(extras)}
    return Row(source="shop", row_id=f"shop:{number}", extra_info=info)


ROW = row(1)
SUM = {"result": "2"}


def entry(value: Any, **more: Any) -> ToolEntry:
    """An entry; a name alone is a function of the fake file."""
    if isinstance(value, str) and value.isidentifier() and value not in ("calculate", "run_code"):
        value = f"{ORDERS}:{value}"
    return ToolEntry.model_validate({**as_entry(value), **more})


class Box:
    """The toolbox of a source, opened."""

    def __init__(self, client: ToolClient, toolbox: Any) -> None:
        self.client, self.toolbox = client, toolbox

    async def call(self, name: str, row: Row = ROW, **arguments: Any) -> Observation:
        """One call in a trajectory of its own."""
        async with self.toolbox.begin(self.client, row) as tools:
            return await tools.call(name, arguments)


@asynccontextmanager
async def box(
    *entries: ToolEntry,
    url: str = "http://127.0.0.1:1",
    folder: Path | None = None,
    timeout_s: float = 60.0,
) -> AsyncIterator[Box]:
    tools = ToolConfig(server_url=url, timeout=timeout_s)
    sources = {"shop": {"ratio": 1, "tools": [each.model_dump() for each in entries]}}
    mixed = MixedConfig.model_validate(
        {"experiment": "x", "run_dir": str(folder or "/x"), "sources": sources}
    )
    limits = partial(limited, tools=tools, mixed=mixed)
    async with ToolClient(url, limiter=None, timeout_s=timeout_s, limits=limits) as client:
        toolbox = toolbox_of(entries, client, topk=2)
        await toolbox.open()
        yield Box(client, toolbox)


def test_the_schema_is_that_of_hints_and_docstring():
    spec = definition_of(str(ORDERS), "look_up").spec
    assert spec.schema == {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Find an order.",
            "parameters": {
                "type": "object",
                "properties": {
                    "order": {"type": "string", "description": "its number, as A1"},
                    "unit": {
                        "type": "string",
                        "enum": ["pieces", "boxes"],
                        "description": "what is counted",
                    },
                },
                "required": ["order"],
            },
        },
    }
    assert definition_of(str(ORDERS), "Cart").spec.name == "cart"


@pytest.mark.parametrize(("kind", "first"), [("staticmethod", ""), ("classmethod", "cls, ")])
def test_all_arguments_of_a_call_without_an_instance_are_in_the_schema(
    kind: str, first: str, tmp_path: Path
):
    (tmp_path / "a.py").write_text(
        f"class A:\n    @{kind}\n    def call({first}x: int, y: int):\n"
        '        """Add.\n\n        Args:\n            x: one\n            y: two\n        """\n'
    )
    spec = definition_of(f"{tmp_path}/a.py", "A").spec
    assert spec.parameters["required"] == ["x", "y"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing", "has no function or class 'missing'"),
        ("no_hints", "needs a type hint"),
        ("no_docstring", "`Args:` in the docstring"),
        ("any_number", "orders: a schema names each argument"),
        ("ORDERS", "has no function or class 'ORDERS'"),
    ],
)
def test_a_function_that_makes_no_tool_is_refused_by_name(name: str, words: str):
    with pytest.raises(ValueError, match=rf"cannot load tool=.*orders\.py:{name}: ") as refused:
        definition_of(str(ORDERS), name)
    assert words in str(refused.value)


@pytest.mark.parametrize("where", [None, "process"])
@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("look_up", {"order": "A1"}, '{"order": "A1", "pieces": 3}'),
        ("later", {"text": "é\ud800"}, "É?"),
        ("sums", {"numbers": [1, 2.5], "scale": None}, "3.5"),
    ],
)
async def test_a_function_answers(where: Any, name: str, arguments: dict[str, Any], text: str):
    async with box(entry(name, where=where)) as tools:
        observation = await tools.call(name, **arguments)
    assert (observation.text, observation.rejected) == (text, False)
    assert observation.result is not None and observation.result.tool == name


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("look_up", {"order": "C3"}, "no order 'C3'"),
        ("look_up", {"order": 3}, "look_up.order: 3 is not of type 'string'"),
        ("look_up", {}, "look_up: 'order' is a required property"),
        ("look_up", {"order": "A1", "unit": "tons"}, "look_up.unit: 'tons' is not one of"),
        ("look_up", {"order": "A1", "x": 1}, "unknown argument x; there are: order, unit"),
        ("sums", {"numbers": [1, "2"]}, "sums.numbers[1]: '2' is not of type 'number'"),
        ("sums", {"numbers": [1], "scale": "x"}, "sums.scale: 'x' is not of type"),
        ("nothing", {}, "no tool 'nothing'; there are look_up, sums"),
    ],
)
async def test_a_wrong_call_is_the_model_s_mistake_and_it_reads_why(name, arguments, words):
    async with box(entry("look_up"), entry("sums")) as tools:
        try:
            text = (await tools.call(name, **arguments)).text
        except ToolRejected as rejected:  # the turn loop shows it to the model
            text = f"error: {rejected}"
    assert text.startswith("error: ") and words in text


@pytest.mark.parametrize(
    ("where", "how", "words"),
    [
        (None, "torn", "KeyError: 'torn'"),
        (None, "timeout", "TimeoutError: the database did not answer"),
        (None, "exit", "SystemExit: 3"),
        (None, "large", "returned more than 1 MiB of text"),
        ("process", "torn", "KeyError: 'torn'"),
        ("process", "die", "its process ended with exit code 7"),
    ],
)
async def test_what_a_function_raises_is_a_fault_of_the_tool(where: Any, how: str, words: str):
    async with box(entry("breaks", where=where)) as tools:
        with pytest.raises(ToolUnavailable) as fault:
            await tools.call("breaks", how=how)
    assert words in str(fault.value) and fault.value.tool == "breaks"


async def test_a_process_is_ended_at_the_deadline_and_the_next_call_is_answered():
    async with box(entry("hangs", where="process", slots=1)) as tools:
        first = await tools.call("hangs", seconds=0)  # the process starts, which takes seconds
        (tool,) = await tools.toolbox._providers[0][1].tools()
        hurried = replace(tool, route=tool.route.limited(timeout_s=2.0))
        with pytest.raises(
            ToolTimeout, match=r"orders\.py:hangs for tool='hangs' within timeout=2"
        ):
            await hurried.call(tools.client, {"seconds": 60})
        assert (await tools.call("hangs", seconds=0)).text != first.text


async def test_retries_and_cache_are_only_as_the_entry_says():
    counted = entry("later", cache=True)
    async with box(counted, entry("look_up")) as tools:
        results = [(await tools.call("later", text="a")).result for _ in range(2)]
        plain = [(await tools.call("look_up", order="A1")).result for _ in range(2)]
    assert [r.cached for r in results if r] == [False, True]
    assert [r.cached for r in plain if r] == [False, False]
    async with box(entry("breaks", retry=2)) as tools:
        with pytest.raises(ToolUnavailable, match="3 attempts"):
            await tools.call("breaks", how="torn")


async def test_a_cell_of_an_interpreter_is_run_each_time_whatever_the_cache_of_its_tool():
    client = ToolClient("http://x", limiter=None)
    on = client.on(client.limits(client.route, entry("run_code", cache=True)))
    assert on._is_pure(run_code_call("print(1)", ""))
    assert not on._is_pure(cell_call("x += 1", "", "session", began=True))


async def test_all_resources_of_a_client_are_closed_also_if_one_cannot_be():
    closed: list[str] = []

    class Torn:
        async def close(self) -> None:
            closed.append("torn")
            raise OSError("torn")

    class Whole:
        async def close(self) -> None:
            closed.append("whole")

    async with ToolClient("http://x", limiter=None) as client:
        client.resource("a", Torn)
        client.resource("b", Whole)
        session = client.session
    assert closed == ["torn", "whole"] and session.closed


async def test_each_trajectory_has_its_own_state_and_it_is_always_freed():
    ended = definition_of(str(ORDERS), "Cart").target.ended
    ended.clear()
    async with box(entry("Cart")) as tools:
        async with tools.toolbox.begin(tools.client, ROW) as one:
            async with tools.toolbox.begin(tools.client, row(2)) as two:
                await one.call("cart", {"item": "tea"})
                assert (await two.call("cart", {"item": "rice"})).text == '["rice"]'
            assert (await one.call("cart", {"item": "salt"})).text == '["tea", "salt"]'
        with pytest.raises(ToolUnavailable, match=r"OSError: .* \(line 80\), at the start of a tr"):
            await tools.call("cart", row(1, shop="closed"), item="tea")

        async def cancelled() -> None:
            async with tools.toolbox.begin(tools.client, row(3)):
                await asyncio.Event().wait()

        task = asyncio.ensure_future(cancelled())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        while not task.cancelled():
            task.cancel()
            await asyncio.wait([task])
    assert ended == ["shop:2", "shop:1", "shop:1", "shop:3"]


@pytest.mark.parametrize("close_s", [CLOSE_S, 0.01])
async def test_what_a_cancelled_start_still_makes_in_its_thread_is_freed_after_it(
    close_s: float, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr("agent_loop.toolbox.spec.CLOSE_S", close_s)
    (tmp_path / "shop.py").write_text(_SLOW_START)
    async with box(entry(f"{tmp_path}/shop.py:Shop")) as tools:
        shop = definition_of(f"{tmp_path}/shop.py", "Shop").target

        async def trajectory() -> None:
            async with tools.toolbox.begin(tools.client, ROW):
                pass

        task = asyncio.ensure_future(trajectory())
        while not shop.log:  # noqa: ASYNC110
            await asyncio.sleep(0)
        task.cancel()
        if close_s == CLOSE_S:
            shop.may_start.set()
        await asyncio.wait([task])
        shop.may_start.set()
        while shop.log[-1] != "closed":  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert task.cancelled() and shop.log == ["made", "started", "closed"]


_SLOW_START = """\
import threading

class Shop:
    log = []
    may_start = threading.Event()

    def __init__(self):
        assert threading.current_thread() is not threading.main_thread()
        self.log.append("made")

    def start(self, row):
        self.may_start.wait()
        self.log.append("started")

    def call(self, item: str) -> str:
        \"\"\"Buy.

        Args:
            item: what
        \"\"\"
        return item

    def close(self):
        self.log.append("closed")
"""


_TWO = """\
log = []

class Tea:
    def start(self, row):
        log.append(type(self).__name__)

    def call(self) -> str:
        \"\"\"Make it.\"\"\"

class Rice(Tea): ...
"""


async def test_all_trajectories_start_their_state_in_one_order(tmp_path: Path):
    """Otherwise two could wait for each other's server."""
    (tmp_path / "two.py").write_text(_TWO)
    for names in (("Tea", "Rice"), ("Rice", "Tea")):
        entries = [entry(f"{tmp_path}/two.py:{name}") for name in names]
        async with box(*entries) as tools, tools.toolbox.begin(tools.client, ROW):
            pass
    made = definition_of(f"{tmp_path}/two.py", "Tea").target
    assert made.start.__globals__["log"] == ["Rice", "Tea", "Rice", "Tea"]


async def test_all_state_is_freed_if_the_trajectory_is_cancelled_while_the_first_is_freed():
    ended: list[str] = []
    begun, may_end = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def slow(name: str) -> AsyncIterator[list[Any]]:
        yield []
        begun.set()
        await may_end.wait()
        ended.append(name)

    async def trajectory() -> None:
        states = [slow(name) for name in "abc"]
        async with TrajectoryTools({}, ToolClient("http://x", limiter=None), states):
            pass

    task = asyncio.ensure_future(trajectory())
    await begun.wait()
    task.cancel()
    await asyncio.sleep(0)
    may_end.set()
    await asyncio.wait([task])
    assert task.cancelled() and sorted(ended) == ["a", "b", "c"]


async def test_all_state_is_freed_at_once_and_what_is_not_is_named(monkeypatch, caplog):
    begun = [asyncio.Event(), asyncio.Event()]

    @asynccontextmanager
    async def state(own: int) -> AsyncIterator[list[Any]]:
        yield []
        begun[own].set()
        await freed(f"state {own}", begun[1 - own].wait())  # the end of the other has begun too

    async def away() -> None:
        raise ToolUnavailable("no connection")

    client = ToolClient("http://x", limiter=None)
    async with TrajectoryTools({}, client, [state(0), state(1)]):
        monkeypatch.setattr("agent_loop.toolbox.spec.CLOSE_S", 1.0)
    assert caplog.text == ""
    monkeypatch.setattr("agent_loop.toolbox.spec.CLOSE_S", 0.01)
    await freed("tool=a", asyncio.Event().wait())
    await freed("tool=b", away())
    assert "tool=a did not close: not within 0.01 s" in caplog.text
    assert "tool=b did not close: no connection" in caplog.text


async def test_a_tool_with_a_short_timeout_still_waits_for_its_rate_and_is_tried_again(
    tmp_path: Path,
):
    hurried = entry("look_up", rate="600/min", timeout=20.0)
    async with box(hurried, folder=tmp_path) as tools:  # the run's timeout is 60 s
        found = await asyncio.gather(*[tools.call("look_up", order="A1") for _ in range(4)])
    assert len(found) == 4
    async with box(entry("breaks", retry=1, timeout=4.0)) as tools:
        with pytest.raises(ToolUnavailable, match="2 attempts"):
            await tools.call("breaks", how="torn")


async def test_a_tool_has_a_rate_of_its_own_under_the_one_limit(tmp_path: Path):
    limited = entry("calculate", rate="6000/min", slots=1)
    async with running([SUM]) as server, box(limited, url=server.url, folder=tmp_path) as tools:
        for number in range(3):
            assert (await tools.call("calculate", expression=f"{number}")).text == "2"
    config = ToolConfig(server_url=server.url)
    mixed = MixedConfig.model_validate(
        {"experiment": "x", "run_dir": str(tmp_path), "sources": {"shop": {"ratio": 1}}}
    )
    state = own_state_path("calculate", config, mixed)
    assert snapshot_of(state).granted == 3
    assert state.with_suffix(".slots").exists()


@pytest.mark.parametrize(
    "entries",
    [
        [entry("look_up"), entry("look_up", timeout=1.0)],
        [entry({"mcp": f"{LINES} --twice"})],
    ],
)
async def test_two_tools_of_one_name_are_refused(entries: list[ToolEntry]):
    with pytest.raises(ValueError, match="two tools are called"):
        async with box(*entries):
            pass


@pytest.mark.parametrize("name", ["answer", "malformed", "two words", "", "1st"])
def test_a_name_that_no_model_can_call_is_refused(name: str):
    with pytest.raises(ValueError, match="rename the tool"):
        ToolSpec(name=name, description="", parameters={"type": "object"})


def spec(**parameters: Any) -> ToolSpec:
    return ToolSpec(name="t", description="", parameters={"type": "object", **parameters})


@pytest.mark.parametrize("ref", ["http://host.invalid/s.json", "file:///etc/hostname", "#/$defs/b"])
def test_a_schema_that_refers_to_what_is_not_in_it_is_refused_and_nothing_is_fetched(ref: str):
    with pytest.raises(ValueError, match="is not in the schema, and nothing is fetched"):
        spec(properties={"x": {"type": "array", "items": {"$ref": ref}}}, **{"$defs": {"a": {}}})


def test_arguments_that_the_library_cannot_check_are_the_model_s_mistake():
    nested: list[Any] = []
    for _ in range(400):
        nested = [nested]
    tree = {"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}
    for checked in (
        spec(properties={"x": {"$ref": "#/$defs/a"}}, **tree),
        spec(properties={"x": {}}),
    ):
        assert "nested too deeply" in str(checked.mistake({"x": nested}))
        assert checked.mistake({"x": [[[[]]]]}) is None
    price = spec(properties={"x": {"type": "number", "multipleOf": 0.1}})
    for number in (10**400, 10**5000, float("nan"), float("inf")):
        assert "a number is too large" in str(price.mistake({"x": number}))
    assert "a number is too large" in str(
        spec(properties={"x": {"enum": []}}).mistake({"x": 10**5000})
    )


def test_arguments_may_be_named_outside_properties():
    query = {"properties": {"q": {"type": "string"}}}
    for parameters in (
        {"$ref": "#/$defs/a", "$defs": {"a": query}},
        {"allOf": [query]},
        {"patternProperties": {"^q": {"type": "string"}}},
    ):
        assert spec(**parameters).mistake({"q": "tea"}) is None
        assert "is not of type 'string'" in str(spec(**parameters).mistake({"q": 1}))
    assert spec(properties={"any": True}).line.endswith('["any"]')


def test_agents_of_a_source_share_a_toolbox_only_if_they_are_set_alike():
    pytest.importorskip("verl")
    from agent_loop.named_tools_loop import NamedToolsLoop

    client = ToolClient("http://x", limiter=None)
    settings = SimpleNamespace(mixed=SimpleNamespace(sources={}), tools=SimpleNamespace(timeout=1))

    def toolbox(*, persistent: bool) -> Any:
        class Loop(NamedToolsLoop):
            def __init__(self) -> None: ...

            def language(self) -> Any: ...

        loop: Any = Loop()
        loop.client, loop.settings = client, settings
        loop._tool_names, loop._topk, loop._verls, loop._persistent = None, 3, [], persistent
        return loop._toolbox("nq")

    kept = toolbox(persistent=True)
    assert toolbox(persistent=True) is kept and toolbox(persistent=False) is not kept


async def test_the_tools_of_a_trajectory_are_waited_for_until_its_deadline():
    pytest.importorskip("verl")
    from agent_loop.native_agent_loop import NativeAgentLoop

    class Away:
        async def open(self, deadline: Any) -> None:
            raise ToolUnavailable(f"away until {deadline}")

    loop: Any = object.__new__(NativeAgentLoop)
    loop._toolbox, loop._deadline = lambda source: Away(), "its deadline"
    with pytest.raises(ToolUnavailable, match="away until its deadline"):
        await loop.begin(ROW)


BROKEN = '''
def _share(number):
    return 1 / number

def plain(number: int):
    """Share.

    Args:
        number: of parts
    """
    try:
        return _share(number)
    except ZeroDivisionError as error:
        raise KeyError("parts") from error

async def waits(number: int):
    """Share.

    Args:
        number: of parts
    """
    return _share(number)

class Kept:
    """Share."""

    def call(self, number: int):
        """Share.

        Args:
            number: of parts
        """
        return _share(number)
'''


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("plain", {}, "KeyError: 'parts' (line 14)"),
        ("plain", {"where": "process"}, "KeyError: 'parts' (line 14)"),
        ("plain", {"retry": 1}, "KeyError: 'parts' (line 14)"),
        ("waits", {}, "ZeroDivisionError: division by zero (line 3)"),
        ("Kept", {}, "ZeroDivisionError: division by zero (line 3)"),
    ],
)
async def test_a_function_that_raises_is_a_short_fault_with_the_line_of_its_file(
    tmp_path: Path, name: str, more: dict[str, Any], words: str
):
    file = tmp_path / "broken.py"
    file.write_text(BROKEN)
    async with box(entry(f"{file}:{name}", **more), folder=tmp_path) as tools:
        with pytest.raises(ToolUnavailable) as raised:
            await tools.call(name.lower(), number=0)
    said = f"{file}:{name} raised {words}"
    assert said in str(raised.value) and ("retry" in more or str(raised.value) == said)


@pytest.mark.sandbox
async def test_a_function_runs_in_the_sandbox():
    async with (
        listening(app_runner(create_app(ServerSettings(port=0)))) as url,
        box(entry("look_up", where="sandbox"), entry("breaks", where="sandbox"), url=url) as tools,
    ):
        found = await tools.call("look_up", order="A1", unit="boxes")
        assert json.loads(found.text) == {"order": "A1", "boxes": 3}
        with pytest.raises(ToolRejected, match="no order 'C3'"):
            await tools.call("look_up", order="C3")
        with pytest.raises(ToolUnavailable, match=r"in the sandbox: KeyError: 'torn' \(line 49\)"):
            await tools.call("breaks", how="torn")
    # nobody listens, and such a call is tried again until its deadline
    async with box(entry("look_up", where="sandbox", retry=0), timeout_s=1.0) as tools:
        with pytest.raises(ToolUnavailable) as caught:
            await tools.call("look_up", order="A1")
    assert caught.value.tool == "look_up"


_SHARED = """\
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Line:
    text: str

def said(text: str) -> str:
    \"\"\"Say.

    Args:
        text: what
    \"\"\"
    print("working...", end="")
    return Line(text).text

def cpu_limit() -> int:
    \"\"\"The longest CPU time, in seconds.\"\"\"
    import resource
    return resource.getrlimit(resource.RLIMIT_CPU)[0]

if __name__ == "__main__":
    raise SystemExit("this file was run")
"""


@pytest.mark.sandbox
async def test_in_the_sandbox_a_file_is_a_module_and_may_print(tmp_path: Path):
    (tmp_path / "shared.py").write_text(_SHARED)
    said = entry(f"{tmp_path}/shared.py:said", where="sandbox")
    limit = entry(f"{tmp_path}/shared.py:cpu_limit", where="sandbox", timeout=70)
    async with (
        listening(app_runner(create_app(ServerSettings(port=0)))) as url,
        box(said, limit, url=url) as tools,
    ):
        assert (await tools.call("cpu_limit")).text == "70"
        assert (await tools.call("said", text="{a} \x1e")).text == "{a} \x1e"


UNTRUSTED = """
import os
from typing import Annotated, Literal
os.environ["RAN_HERE"] = "yes"

def half(
    number: Annotated[int, "how many"],
    unit: Literal["a", "b"] = "a",
    more: "list[str] | None" = None,
) -> float:
    \"\"\"Half of it.

    Args:
        number: to be halved
        unit: of it
        more: words
    \"\"\"
    print("x" * 3_000_000)
    return number / 2
"""


async def test_a_file_for_the_sandbox_is_read_and_not_run_here(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("RAN_HERE", raising=False)
    file = tmp_path / "half.py"
    file.write_text(UNTRUSTED)
    async with box(entry(f"{file}:half", where="sandbox")) as tools:
        schema = tools.toolbox.specs["half"].parameters
    assert schema["required"] == ["number"] and schema["properties"]["unit"]["enum"] == ["a", "b"]
    assert "RAN_HERE" not in os.environ
    with pytest.raises(ValueError, match="timeout=121: the sandbox ends a program after at most"):
        async with box(entry(f"{ORDERS}:look_up", where="sandbox", timeout=121)):
            pass


@pytest.mark.parametrize(
    "hint",
    [
        "os.system('true')",
        '"os.system()"',
        "list['().__class__']",
        '"Literal[1].x"',
        "\"list['a b']\"",
        "typing.list[int]",
        "Annotated['os.system()', 1]",
    ],
)
def test_a_type_hint_of_untrusted_code_that_could_run_is_refused(tmp_path: Path, hint: str):
    """typing evaluates hints that are texts."""
    (tmp_path / "half.py").write_text(UNTRUSTED.replace('Annotated[int, "how many"]', hint))
    with pytest.raises(ValueError, match="the file is not run to read it; write another hint"):
        definition_of(f"{tmp_path}/half.py", "half", is_run=False)


async def test_a_function_that_hangs_blocks_no_other_tool(monkeypatch):
    monkeypatch.setattr("agent_loop.toolbox.functions.THREADS", 1)
    slow = entry("hangs", timeout=0.2)
    async with box(slow, entry("look_up")) as tools:
        for _ in range(2):
            with pytest.raises(ToolTimeout):
                await tools.call("hangs", seconds=1)
        assert "A1" in (await tools.call("look_up", order="A1")).text
    threads = [thread for thread in threading.enumerate() if thread.name == f"tool {slow.tool}"]
    assert threads and all(thread.daemon for thread in threads)  # the process can end


async def test_an_async_function_that_ignores_its_cancellation_is_left_alone_and_named(
    monkeypatch, caplog
):
    monkeypatch.setattr("agent_loop.toolbox.functions.CANCEL_S", 0.01)
    async with box(entry("stays", timeout=0.1)) as tools:
        with pytest.raises(ToolTimeout, match="within timeout"):
            await tools.call("stays", text="a")
    assert f"{ORDERS}:stays ignores its cancellation and goes on" in caplog.text


async def test_what_an_async_function_raises_at_its_cancellation_is_heard_by_nobody(
    tmp_path: Path, caplog
):
    file = tmp_path / "torn.py"
    file.write_text(_TORN_AT_THE_END)
    async with box(entry(f"{file}:torn", timeout=0.1)) as tools:
        with pytest.raises(ToolTimeout, match="within timeout"):
            await tools.call("torn")
    gc.collect()
    await asyncio.sleep(0)
    assert caplog.text == ""


_TORN_AT_THE_END = """\
import asyncio

async def torn() -> str:
    \"\"\"Wait.\"\"\"
    try:
        await asyncio.Event().wait()
    finally:
        raise OSError("torn")
"""
