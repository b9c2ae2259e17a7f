"""The tools of a source as an MCP server: `POST /s/<id>/mcp`, streamable HTTP without a stream.

The calls pass the source's toolbox, and with it the limiters, slots, caches and deadlines that the
calls of all other agents pass. A mistake of the model is a result with `isError`. A fault of the
infrastructure loses the session. A server without state between requests: no session id is given.

Protocol: Model Context Protocol, revision 2025-06-18, sections Lifecycle, Tools and Transports.
"""

import json
from collections.abc import Mapping
from typing import Any

from agent_loop.gateway.session import Session
from agent_loop.records.trajectory_record import Call
from agent_loop.turns.tags import Action
from agent_loop.turns.turn_loop import run_call
from agent_loop.watchdog import waits_for
from tool_server.wire.protocol import Fault

VERSIONS = ("2025-06-18", "2025-03-26", "2024-11-05")
"""Revisions that are spoken, the newest first."""

_INVALID_REQUEST, _NO_METHOD, _INVALID_PARAMS, _INTERNAL = -32600, -32601, -32602, -32603


async def answer(session: Session, message: Any) -> dict[str, Any] | None:
    """The answer to one MCP message of a session; None to a notification."""
    if not isinstance(message, Mapping) or not isinstance(message.get("method"), str):
        return _error(None, _INVALID_REQUEST, "want one JSON-RPC request")
    if (request_id := message.get("id")) is None:
        return None
    params = message.get("params")
    params = params if isinstance(params, Mapping) else {}
    match method := message["method"]:
        case "initialize":
            asked = params.get("protocolVersion")
            begun = {
                "protocolVersion": asked if asked in VERSIONS else VERSIONS[0],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "mixed-gateway", "version": "1"},
            }
            return _result(request_id, begun)
        case "ping":
            return _result(request_id, {})
        case "tools/list":
            tools = [
                {"name": name, "description": spec.description, "inputSchema": spec.parameters}
                for name, spec in session.specs.items()
            ]
            return _result(request_id, {"tools": tools})
        case "tools/call":
            return await _called(session, request_id, params)
    return _error(request_id, _NO_METHOD, f"no method {method[:80]!r}")


async def _called(session: Session, request_id: Any, params: Mapping[str, Any]) -> dict[str, Any]:
    name, arguments = params.get("name"), params.get("arguments") or {}
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        return _error(request_id, _INVALID_PARAMS, "want a name and an object of arguments")
    text = json.dumps(arguments, ensure_ascii=False)
    action = Action(kind=name, content=text, arguments=dict(arguments))
    call = Call(turn=0, action=name, arguments=text)
    session.note(call)
    try:
        said = await run_call(call, action, session.act)
    except Fault as error:
        return _error(request_id, _INTERNAL, session.lose(error).message)
    finally:
        waits_for("agent")
    content = [{"type": "text", "text": said}]
    return _result(request_id, {"content": content, "isError": call.status != "ok"})


def _result(request_id: Any, result: Mapping[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": request_id, "result": result}


def _error(request_id: Any, code: int, message: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "message": message}}
