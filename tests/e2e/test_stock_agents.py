"""Clients and agents that others wrote, through the gateway with the laptop's engine.

Each is a program of an environment of its own, written as its documentation says; only the address,
the key and the name of the model are the session's. The model is the demo's, which calls its tool
and says nonsense to prompts that it was not taught. So a program may end by its framework's own
rule, and prints that it gave up.
"""

import asyncio
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent_loop.turns.trajectory import StopReason
from tests.fakes.pinned_environment import cache_of, python_with
from tests.listening import listening

pytestmark = [pytest.mark.agents, pytest.mark.slow, pytest.mark.timeout(900)]

AGENTS = Path(__file__).parents[1] / "fakes/agents"
ROWS = 4


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter with the pinned clients and agents."""
    pins = AGENTS / "requirements.txt"
    return python_with(pins, cache_of([pins], "agents"))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A demo whose model was taught for a short time to call the tools of nq and math, and to
    leave no call out."""
    from verl_mixed.demo.model import prepare_demo
    from verl_mixed.demo.recipe import Recipe

    folder = tmp_path_factory.mktemp("demo") / "native"
    recipe = Recipe(
        traces=4000,
        min_steps=400,
        max_steps=400,
        floor=0.0,
        probe_prompts=2,
        shares={"math": 0.6, "nq": 0.4},
        careful={"math": 1.0, "nq": 1.0},
        forms={"nq": "native", "math": "native"},
    )
    prepare_demo(folder, 0, recipe=recipe, threads=1, progress=lambda line: None)
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the gateway sees of a program, whatever the model says."""

    causes: tuple[str, ...]
    """Why each of its rows began."""

    ignored: set[str]
    """Fields that it sends and that have no effect."""

    calls: bool = True
    """Whether the model was taught prompts like this program's, and so calls its tool in most
    sessions and ends its messages."""

    source: str = "math"


PROGRAMS = {
    # chat completions, then the Responses API with another question
    "openai_chat.py": Expected(causes=("", "new conversation"), ignored=set()),
    "anthropic_messages.py": Expected(causes=("",), ignored={"tools.cache_control"}),
    "openai_agents.py": Expected(causes=("",), ignored=set()),
    "langgraph_tools.py": Expected(causes=("",), ignored=set()),
    # A CodeAgent and a ToolCallingAgent. The request for the answer after the last step has another
    # system message. That of the second agent has the words of that of the first before its own.
    "smolagents_tools.py": Expected(
        causes=("", "new conversation", "new conversation", "rewritten"),
        ignored=set(),
        calls=False,  # the instructions are thousands of tokens
    ),
    "nq_smolagents.py": Expected(causes=("",), ignored=set(), source="nq"),
    "math.sh": Expected(causes=("",), ignored=set()),
}


@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_program_that_others_wrote_becomes_clean_rows(
    name: str, python: Path, demo: Path, tmp_path: Path
):
    from tests.fakes.gateway_rig import gateway_rig

    if name.endswith(".sh") and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    expected = PROGRAMS[name]
    command = [AGENTS / name] if name.endswith(".sh") else [python, AGENTS / name]
    async with gateway_rig(demo, tmp_path) as rig:
        sessions = [await rig.run(command, expected.source, row) for row in range(ROWS)]
    for session in sessions:
        assert session.program.exit_code == 0, session.program.stderr
        last = session.records[-1]
        assert last.fault is None
        # a model that was not taught the prompt writes until its last message is cut
        is_cut = not expected.calls and last.stop_reason == StopReason.RESPONSE_BUDGET
        assert last.answer == (None if is_cut else session.program.answer)
        assert tuple(session.causes) == expected.causes
        assert session.ignored == expected.ignored
        trained = [sum(record.response_mask) for record in session.records]
        assert all(trained) and session.requests >= len(trained)
        assert {status for _, status in session.calls} <= {"ok", "rejected"}
    if expected.calls:
        assert sum(bool(session.calls) for session in sessions) > ROWS / 2
    report = rig.audit()
    assert report.ok and report.trajectories == ROWS, report.problems


async def test_the_stock_client_of_mcp_lists_and_calls_a_session_s_tools(
    python: Path, demo: Path, tmp_path: Path
):
    from tests.fakes.gateway_rig import gateway_rig

    async with gateway_rig(demo, tmp_path) as rig:
        session = await rig.run([python, AGENTS / "mcp_client.py"])
    assert session.program.exit_code == 0, session.program.stderr
    assert session.program.answer == str([(["calculate"], "42")] * 2)
    assert session.requests == 0


async def test_the_clients_of_openai_and_anthropic_read_each_part_of_a_reply(python: Path):
    from tests.fakes.scripted_gateway import scripted_gateway

    async with listening(scripted_gateway()) as url:
        checks = await asyncio.create_subprocess_exec(
            python, AGENTS / "wire_checks.py", url, stdout=asyncio.subprocess.PIPE
        )
        printed, _ = await checks.communicate()
    assert checks.returncode == 0, printed.decode()
