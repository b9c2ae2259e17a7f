"""An MCP server of a few lines of plain Python, which starts at once and breaks rules when asked.

python tests/fakes/mcp_lines.py [--fails-once FILE | --silent | --exits | --deaf | --endless-list
    | --twice]
"""

import json
import os
import sys
import threading
import time
from typing import Any

TOOLS: dict[str, dict[str, Any]] = {
    "echo": {"readOnlyHint": True},
    "pid": {},
    "count": {},
    "env": {},
    "hang": {},
    "stuck": {},
    "seen": {},
    "die": {},
    "die_once": {"idempotentHint": True},
    "big": {},
    "endless": {},
    "notify": {},
    "print": {},
    "complain": {},
    "ask": {},
    "refuse": {},
    "break": {},
    "resources": {},
    "blob": {},
    "odd": {},
    "wild": {},
}
SCHEMA = {"type": "object", "properties": {"x": {}}}
seen: list[str] = []
state = {"count": 0}
lock = threading.Lock()


def send(message: Any) -> None:
    with lock:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


def text(value: Any) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": str(value)}]}


def flood() -> None:
    note = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"data": "x" * 1000}}
    while True:
        send(note)


def call(request_id: Any, name: str, x: Any) -> None:
    """Answer a call, or do something else."""
    result: dict[str, Any] | None = None
    match name:
        case "echo":
            result = text(x)
        case "pid":
            result = text(os.getpid())
        case "count":
            state["count"] += 1
            result = text(state["count"])
        case "env":
            result = text(os.environ.get(x, "not set"))
        case "stuck":
            time.sleep(60)
        case "seen":
            result = text(" ".join(seen))
        case "die":
            print("no more memory", file=sys.stderr, flush=True)
            os._exit(x)
        case "die_once":
            if not os.path.exists(x):
                open(x, "w").close()
                os._exit(3)
            result = text("alive")
        case "big":
            content = '{"content":[{"type":"text","text":"' + "x" * (50 << 20) + '"}]}'
            line = f'{{"jsonrpc":"2.0","id":{request_id},"result":{content}}}'
            if x == "id last":
                line = f'{{"result":{content},"jsonrpc":"2.0","id":{request_id}}}'
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
        case "endless":
            while True:
                sys.stdout.write("x" * (1 << 20))
        case "notify":
            threading.Thread(target=flood, daemon=True).start()
            result = text("started")
        case "print":
            print("hello, I am a server")
            result = text("printed")
        case "complain":
            for _ in range(200):
                sys.stderr.write("z" * 20_000)
            print("\nlast words", file=sys.stderr, flush=True)
            result = text("complained")
        case "ask":
            for method in ("sampling/createMessage", "elicitation/create", "roots/list", "ping"):
                send({"jsonrpc": "2.0", "id": method, "method": method, "params": {}})
            answers = [json.loads(sys.stdin.readline()) for _ in range(4)]
            result = text([a.get("error", {}).get("message", "answered") for a in answers])
        case "resources":
            link = {"type": "resource_link", "name": "readme", "uri": "file:///readme"}
            inside = {"uri": "file:///a", "mimeType": "text/plain", "text": "inside"}
            result = {"content": [link, {"type": "resource", "resource": inside}]}
        case "blob":
            inside = {"uri": "file:///a", "blob": "MTIz"}
            result = {"content": [{"type": "resource", "resource": inside}]}
        case "odd":
            result = {"content": 5}
        case "wild":
            send({"jsonrpc": "2.0", "id": request_id, "result": "done"})
    if name in ("refuse", "break"):
        code = -32602 if name == "refuse" else -32603
        error = {"code": code, "message": f"not with x={x}"}
        send({"jsonrpc": "2.0", "id": request_id, "error": error})
    elif result is not None:
        send({"jsonrpc": "2.0", "id": request_id, "result": result})


def listing(cursor: str | None) -> dict[str, Any]:
    """Ten tools a page."""
    first = int(cursor or 0)
    names = list(TOOLS)
    if "--endless-list" in sys.argv:
        names = [f"tool_{number}" for number in range(first + 11)]
    if "--twice" in sys.argv:
        names = ["echo", "echo"]
    page = names[first : first + 10]
    tools = [
        {"name": name, "inputSchema": SCHEMA, "annotations": TOOLS.get(name, {})} for name in page
    ]
    more = {"nextCursor": str(first + 10)} if len(names) > first + 10 else {}
    return {"tools": tools} | more


def main() -> None:
    if "--fails-once" in sys.argv:
        mark = sys.argv[sys.argv.index("--fails-once") + 1]
        if not os.path.exists(mark):
            open(mark, "w").close()
            sys.exit("not yet")
    if "--exits" in sys.argv:
        print("no licence\nbuy one", file=sys.stderr)
        sys.exit(9)
    if "--deaf" in sys.argv or "--silent" in sys.argv:
        print("thinking", file=sys.stderr, flush=True)
    while "--deaf" in sys.argv:
        time.sleep(1)
    for line in sys.stdin:
        message = json.loads(line)
        method, request_id = message.get("method"), message.get("id")
        seen.append(method)
        if "--silent" in sys.argv or request_id is None:
            continue
        params = message.get("params", {})
        if method == "initialize":
            about = {"name": "lines", "version": "1"}
            result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
            send({"jsonrpc": "2.0", "id": request_id, "result": result | {"serverInfo": about}})
        elif method == "tools/list":
            result = listing(params.get("cursor"))
            send({"jsonrpc": "2.0", "id": request_id, "result": result})
        elif method == "tools/call":
            call(request_id, params["name"], params.get("arguments", {}).get("x"))
        else:
            error = {"code": -32601, "message": f"no {method}"}
            send({"jsonrpc": "2.0", "id": request_id, "error": error})


if __name__ == "__main__":
    main()
