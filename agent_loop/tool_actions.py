"""Calls of the tool server's tools, and their results as text for the model. No verl.

A mistake of the model becomes a short text, from which it can learn. A fault of the infrastructure
has no text, because it ends the trajectory (`agent_loop.turns.turn_loop`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

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


def render_run(body: Mapping[str, Any]) -> str:
    """Text for SandboxFusion's answer of `POST /run_code`: its output, or its error's last line."""
    result = body.get("run_result") or {}
    if result.get("status") == "TimeLimitExceeded":
        return "time limit exceeded"
    stdout = str(result.get("stdout") or "").strip()
    if body.get("status") == "Success":
        return stdout or "no output"
    stderr = str(result.get("stderr") or "").strip()
    last = stderr.splitlines()[-1] if stderr else str(body.get("message") or "failed")
    return f"{stdout}\n{last}".strip()


def render_calculation(body: Mapping[str, Any]) -> str:
    """Text for an answer of `POST /calculate`: `{"result": str}` or `{"error": str}`."""
    return str(body["result"]) if "result" in body else f"error: {body.get('error', 'failed')}"


def render_passages(passages: Sequence[Mapping[str, Any]]) -> str:
    """Text for one query's answer of `POST /retrieve`, in Search-R1's form: a numbered line for
    each passage."""
    lines = [
        f"({rank}) {' '.join(str(item['document']['contents']).split())}"
        for rank, item in enumerate(passages, start=1)
    ]
    return "\n".join(lines) if lines else "nothing found"
