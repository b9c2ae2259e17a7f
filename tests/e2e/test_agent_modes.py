"""Frameworks from PyPI and npm in all their modes, through the gateway with a scripted policy.

What each makes of the policy's messages is in MODES; docs/gateway.md has the table.
"""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from agent_loop.gateway.server import Gateway
from agent_loop.gateway.session import Session
from tests.agent_loop.gateway.test_session import session_of
from tests.fakes.pinned_environment import cache_of, npm_packages, python_with

pytestmark = [pytest.mark.agents, pytest.mark.slow, pytest.mark.timeout(900)]

AGENTS = Path(__file__).parents[1] / "fakes/agents"
PARIS = '{"city": "Paris"}'


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ADD = call("add", '{"a": 1, "b": 2}')
BOTH = ADD + call("search", '{"query": "x"}')
MODES = {
    "text": (["hello"], "hello"),
    "stream": (["hello"], "hello"),
    "tools": ([ADD, "so 3"], "so 3"),
    "stream_tools": ([ADD, "so 3"], "so 3"),
    "parallel": ([BOTH, "so 3"], "so 3"),
    "structured": ([PARIS], "Paris"),
    "stream_structured": ([PARIS], "Paris"),
    "structured_tools": ([ADD, PARIS], "Paris"),
    "required": ([ADD, "so 3"], "so 3"),
}
"""Mode -> what the policy says, and what the framework makes of it."""

DEMANDS = {"structured", "stream_structured", "structured_tools", "required"}
"""Modes in which each reply has a form to keep to."""

PLACE = ([call("place", PARIS)], "Paris")
CITY = ([call("City", PARIS)], "Paris")
FINAL = [ADD, call("final_answer", '{"answer": "so 3"}')]
ALL = list(MODES)
FRAMEWORKS: dict[str, tuple[dict[str, list[str]], dict[str, Any]]] = {
    "pydantic-ai": (dict.fromkeys(("chat", "responses", "messages"), ALL), {"required": PLACE}),
    "openai-agents": (dict.fromkeys(("chat", "responses"), ALL), {}),
    "autogen": ({"chat": [each for each in ALL if each != "required"]}, {}),
    "dspy": (
        {"chat": ["text"], "responses": ["structured"], "messages": ["text"]},
        {
            "text": (['{"answer": "hello"}'], "hello"),
            "structured": (['{"answer": "hello"}'], "hello"),
        },
    ),
    "langchain": (dict.fromkeys(("chat", "responses", "messages"), ALL), {"required": CITY}),
    "smolagents": (
        {"chat": ["required", "stream_required"]},
        {"required": (FINAL, "so 3"), "stream_required": (FINAL, "so 3")},
    ),
    "ai": (dict.fromkeys(("chat", "responses", "messages"), ALL), {"required": ([ADD], "add")}),
    "openai-agents-js": (dict.fromkeys(("chat", "responses"), ALL), {}),
    "mastra": (
        {each: [m for m in ALL if m != "required"] for each in ("chat", "responses", "messages")},
        {},
    ),
}
"""Framework -> the modes that it has of each protocol, and the modes with a script of their own."""

SEVERAL_ROWS = {"smolagents": ["", "rewritten"]}
"""smolagents writes its calls into its history as text."""


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter with the frameworks from PyPI."""
    pins = AGENTS / "requirements.txt"
    return python_with(pins, cache_of([pins], "agents"))


@pytest.fixture(scope="module")
def node() -> list[str | Path]:
    """The command of the frameworks from npm, whose program must lie beside them."""
    pins = AGENTS / "package.json"
    folder = npm_packages(pins, cache_of([pins], "agents-npm")).parent
    return ["node", shutil.copy(AGENTS / "modes.mjs", folder)]


@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_a_framework_works_in_all_its_modes(framework: str, request: pytest.FixtureRequest):
    protocols, scripts = FRAMEWORKS[framework]
    is_python = framework not in ("ai", "openai-agents-js", "mastra")
    if is_python:
        command = [request.getfixturevalue("python"), AGENTS / "modes.py"]
    else:
        command = request.getfixturevalue("node")
    gateway, addresses = Gateway(), dict[str, dict[str, str]]()
    sessions, expected = dict[str, Session](), dict[str, str]()
    try:
        for protocol, mode in [(p, mode) for p, modes in protocols.items() for mode in modes]:
            name = f"{protocol}.{mode}"
            turns, expected[name] = scripts.get(mode) or MODES[mode]
            said = [f"{turn}<|im_end|>" for turn in turns]
            session = session_of("hermes", said, prompt_length=99_999, response_length=99_999)
            address = await gateway.open(session)
            sessions[name] = session
            addresses[name] = {"openai": address.openai, "url": address.url, "key": address.key}
        program = await asyncio.create_subprocess_exec(
            *command, framework, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        printed, _ = await program.communicate(json.dumps(addresses).encode())
    finally:
        await gateway.close()
    lines = [line for line in printed.decode().splitlines() if line.startswith('["')]
    assert dict(json.loads(line) for line in lines) == expected
    for name, session in sessions.items():
        rows = session.rollouts()
        assert [row.cause for row in rows] == SEVERAL_ROWS.get(framework, [""]), name
        misfits = {turn.misfit for row in rows for turn in row.turns}
        assert misfits <= {None, ""}, name
        if name.split(".")[1] in DEMANDS:
            assert None not in misfits, name
