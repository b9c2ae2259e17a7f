"""Text of a tool's result, as the model reads it. Pure functions; no verl, no I/O.

A mistake of the model becomes a short text, from which it can learn. A fault of the infrastructure
has no text, because it ends the trajectory (`agent_loop.turns.turn_loop`).
"""

from collections.abc import Mapping, Sequence
from typing import Any


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
