"""Calls of the tool server's tools, and their results as text for the model. No verl."""

import json
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_loop.tools.protocol import (
    ToolBackend,
    ToolCall,
    ToolUnavailable,
    cell_call,
    run_code_call,
)
from agent_loop.turns.observations import render_calculation, render_passages, render_run
from agent_loop.turns.turn_loop import Observation


async def run_code(
    tools: ToolBackend,
    code: str,
    stdin: str,
    session: str | None = None,
    *,
    session_began: bool = False,
) -> Observation:
    """Run a program in the sandbox, or a cell in a session's interpreter.

    Args:
        session_began: whether an earlier cell of the session was answered.

    Raises:
        ToolUnavailable: the server has no sessions, or has ended this one for its own reasons (too
            many sessions, a long wait of the trajectory, an overloaded machine); or see
            `ToolBackend.call`.
    """
    if session is None:
        call = run_code_call(code, stdin)
    else:
        call = cell_call(code, stdin, session, began=session_began)
    result = await tools.call(call)
    if session is not None and "session" not in result.body:
        raise ToolUnavailable(
            "persistent_interpreter=true, but the tool server keeps no sessions: use the one of "
            "`verl-mixed serve-tools`, or set it to false",
            tool="run_code",
        )
    about = result.body.get("session") or {}
    if session_began and about.get("new") and not about.get("ended_by_program"):
        raise ToolUnavailable(
            "the tool server ended the interpreter of this trajectory between two cells, and its "
            "state is lost: raise --max-sessions or --session-idle-s of `verl-mixed serve-tools`, "
            "or give it more cores",
            tool="run_code",
        )
    return Observation(text=render_run(result.body), result=result)


async def search(tools: ToolBackend, query: str, topk: int) -> Observation:
    if not query:
        return mistake("the query is empty")
    payload = {"queries": [query], "topk": topk, "return_scores": True}
    result = await tools.call(ToolCall(tool="retrieve", payload=payload))
    return Observation(text=render_passages(result.body["result"][0]), result=result)


async def calculate(tools: ToolBackend, expression: str) -> Observation:
    result = await tools.call(ToolCall(tool="calculate", payload={"expression": expression}))
    return Observation(text=render_calculation(result.body), result=result)


def mistake(problem: str) -> Observation:
    """The result of an action that the model wrote wrongly: no tool was called."""
    return Observation(text=f"error: {problem}", rejected=True)


def argument_mistake(
    arguments: Mapping[str, Any], allowed: Sequence[str], needed: Collection[str]
) -> Observation | None:
    """What the model reads if arguments are unknown or missing; None if they are right."""
    unknown = sorted(arguments.keys() - set(allowed))
    missing = sorted(set(needed) - arguments.keys())
    if not unknown and not missing:
        return None
    takes = ", ".join(allowed)
    return mistake(f"missing {missing}, unknown {unknown}; the arguments are {takes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTool:
    """A tool that is called by name, with named arguments."""

    description: str
    arguments: Mapping[str, str]
    """Name -> description. All are strings; all are needed but those in `optional`."""

    run: Callable[[ToolBackend, Mapping[str, str]], Awaitable[Observation]]
    optional: frozenset[str] = frozenset()

    async def call(self, tools: ToolBackend, arguments: Mapping[str, Any]) -> Observation:
        """Run the tool; if an argument is unknown or missing, return the mistake instead."""
        needed = self.arguments.keys() - self.optional
        wrong = argument_mistake(arguments, list(self.arguments), needed)
        if wrong is not None:
            return wrong
        return await self.run(tools, {name: str(value) for name, value in arguments.items()})


def describe(name: str, description: str, arguments: Mapping[str, str] | Sequence[str]) -> str:
    """A tool in one line, for a prompt."""
    return f"{name}: {description}; {json.dumps(arguments)}"


def named_tools(topk: int) -> dict[str, NamedTool]:
    """The tools of the tool server, by name; a search gives `topk` passages."""
    return {
        "run_code": NamedTool(
            description="run a Python program and read what it prints",
            arguments={"code": "the program", "stdin": "its input"},
            run=lambda tools, given: run_code(tools, given["code"], given.get("stdin", "")),
            optional=frozenset({"stdin"}),
        ),
        "search": NamedTool(
            description="find passages",
            arguments={"query": "what to look for"},
            run=lambda tools, given: search(tools, given["query"], topk),
        ),
        "calculate": NamedTool(
            description="the value of an arithmetic expression",
            arguments={"expression": "as in 2 * (3 + 4)"},
            run=lambda tools, given: calculate(tools, given["expression"]),
        ),
    }
