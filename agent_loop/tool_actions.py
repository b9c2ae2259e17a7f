"""Calls of the tool server's tools, and their results as text for the model. No verl."""

from agent_loop.turns.observations import render_calculation, render_passages, render_run
from agent_loop.turns.turn_loop import Observation
from tool_server.wire.protocol import (
    ToolBackend,
    ToolCall,
    ToolUnavailable,
    cell_call,
    run_code_call,
)
from tool_server.wire.responses import replace_surrogates


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
            "state is lost: raise --max-sessions of `verl-mixed serve-tools`, or give it more "
            "cores",
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
    return Observation(text=f"error: {replace_surrogates(problem)}", rejected=True)
