"""`verl-mixed tools` from its words to its exit code."""

import asyncio
import json
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agent_loop.toolbox.own import SPECS
from tests.fakes.tool_server import running
from tests.verl_mixed.conftest import REPO_ROOT, RunEnviron, write_source
from verl_mixed.cli import main
from verl_mixed.exit_codes import GOOD, NOT_GOOD, USAGE
from verl_mixed.launch.plan import Plan, make_plan

pytestmark = pytest.mark.slow

ORDERS = REPO_ROOT / "tests/fakes/orders.py"
VERLS = REPO_ROOT / "tests/fakes/verls_function.py"
CALCULATES = "mixed.sources.math.agent=react_agent", "+mixed.sources.math.tools=[calculate]"
LINES = f"{sys.executable} -S -I {REPO_ROOT / 'tests/fakes/mcp_lines.py'}"
SHOP = (
    "mixed.sources.taco.agent=react_agent",
    f"+mixed.sources.taco.tools=[{{tool: '{ORDERS}:look_up', rate: 6000/min, slots: 2}}, "
    f"'{ORDERS}:breaks', '{ORDERS}:Cart', {{mcp: '{LINES}', only: [echo], rate: 2/s}}]",
)


@pytest.fixture(autouse=True)
def environment(run_environ: RunEnviron, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in run_environ.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made once for the same words, because that takes seconds."""

    def make(overrides: list[str], environ: Mapping[str, str]) -> Plan:
        if (key := tuple(overrides)) not in PLANS:
            PLANS[key] = make_plan(overrides, environ)
        return PLANS[key]

    monkeypatch.setattr("verl_mixed.launch.plan.make_plan", make)


PLANS: dict[tuple[str, ...], Plan] = {}


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, list[str]]:
    """source -> names of its tools, as --json prints them."""
    assert main(["tools", "--json", *words]) == GOOD
    schemas: dict[str, Any] = json.loads(capsys.readouterr().out)
    return {name: [own["function"]["name"] for own in each] for name, each in schemas.items()}


@pytest.mark.usefixtures("planned_once")
def test_json_has_the_schemas_of_each_source_that_takes_part(capsys: pytest.CaptureFixture[str]):
    shop = ["look_up", "breaks", "cart", "echo"]
    assert listed(capsys, *CALCULATES, *SHOP) == {"taco": shop, "math": ["calculate"]}
    assert listed(capsys, *CALCULATES, *SHOP, "--source", "taco") == {"taco": shop}


def test_the_list_has_names_schemas_and_limits(capsys: pytest.CaptureFixture[str]):
    assert main(["tools", *CALCULATES, *SHOP]) == GOOD
    lines = capsys.readouterr().out.splitlines()
    assert "source=taco agent=react_agent: 4 tools" in lines
    assert "  look_up: Find an order." in lines
    (schema,) = [line for line in lines if '"enum": ["pieces", "boxes"]' in line]
    assert json.loads(schema)["required"] == ["order"]
    assert f"  {ORDERS}:look_up: rate=6000/min, slots=2" in lines
    assert f"  {LINES}: only=['echo'], rate=2/s" in lines


@pytest.mark.usefixtures("planned_once")
def test_verl_s_tools_and_those_of_agents_that_the_rows_name_are_listed_and_called(
    run_environ: RunEnviron, capsys: pytest.CaptureFixture[str]
):
    write_source(Path(run_environ["TRAIN_FILES"].split(",")[0]), "math", 12, agent="react_agent")
    words = [
        "mixed.sources.math.agent=null",  # the validation rows name math_agent
        "mixed.sources.taco.agent=tool_agent",
        "++agent_loops.react_agent.tool_names=[calculate,glance]",
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path={VERLS}",
    ]
    call = ["--source", "math", "--call", "glance", '{"thing": "tree"}']
    assert main(["tools", *words]) == GOOD
    lines = capsys.readouterr().out.splitlines()
    assert main(["tools", *words, *call]) == GOOD
    assert capsys.readouterr().out == "a tree\n"
    assert [line for line in lines if not line.startswith("    ")] == [
        "source=taco agent=tool_agent: 1 tools",
        "  glance: Look shortly.",
        "source=math agent=react_agent: 2 tools",
        f"  calculate: {SPECS['calculate'].description}",
        "  glance: Look shortly.",
        "source=math agent=math_agent: its model calls no tools by name",
    ]


@pytest.mark.usefixtures("planned_once")
@pytest.mark.parametrize(
    ("tool", "arguments", "code", "out", "err"),
    [
        (
            "look_up",
            '{"order": "A1"}',
            GOOD,
            '{"order": "A1", "pieces": 3}\n',
            "source=taco latenc",
        ),
        ("look_up", '{"order": 3}', NOT_GOOD, "error: look_up.order: 3 is not of type", ""),
        (
            "look_up",
            '{"order": "C3"}',
            NOT_GOOD,
            "",
            "tool='look_up' of source=taco: no order 'C3'",
        ),
        ("breaks", '{"how": "torn"}', NOT_GOOD, "", "KeyError: 'torn'"),
        ("cart", '{"item": "tea"}', GOOD, '["tea"]\n', ""),
        ("look_up", "{order}", USAGE, "", "the arguments are no JSON"),
        ("look_up", "[]", USAGE, "", "the arguments are no JSON object"),
        ("run_code", "{}", USAGE, "", "no source has a tool of this name"),
    ],
)
def test_a_call_says_what_the_model_would_read_and_whose_mistake_it_is(
    tool: str,
    arguments: str,
    code: int,
    out: str,
    err: str,
    capsys: pytest.CaptureFixture[str],
):
    assert main(["tools", *CALCULATES, *SHOP, "--call", tool, arguments]) == code
    screen = capsys.readouterr()
    assert screen.out.startswith(out) and bool(screen.out) == bool(out)
    assert err in screen.err


@pytest.mark.usefixtures("planned_once")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            [*CALCULATES, *SHOP, "--source", "nq"],  # its ratio is 0
            "--source nq: no such source takes part in the mixture; name one of taco, math",
        ),
        ([*CALCULATES[:1], "+mixed.sources.math.tools=['gone.py:f']"], "mixed.sources.math.tools:"),
    ],
)
def test_what_cannot_be_listed_is_named(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["tools", *words]) == USAGE
    assert said in capsys.readouterr().err


def test_a_call_prints_no_json(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["tools", "--json", "--call", "calculate", "{}"])
    assert ended.value.code == USAGE and "not allowed with" in capsys.readouterr().err


@pytest.fixture
def calculator() -> Iterator[Any]:
    """A tool server whose calculations are 4."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    found: list[Any] = []
    over = asyncio.Event()

    async def serve() -> None:
        async with running([{"result": "4"}]) as server:
            found.append(server)
            ready.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=[serve()])
    thread.start()
    ready.wait(20)
    yield found[0]
    loop.call_soon_threadsafe(over.set)
    thread.join()
    loop.close()


def test_a_tool_of_the_tool_server_is_called_where_the_run_would_call_it(
    calculator: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TOOL_SERVER_URL", calculator.url)
    assert main(["tools", *CALCULATES, "--call", "calculate", '{"expression": "2+2"}']) == GOOD
    assert capsys.readouterr().out == "4\n"
    ((path, body),) = calculator.seen
    assert path == "/calculate" and "2+2" in body.values()
