"""The viewer's web page: a server for this machine's user alone.

It listens on the loopback address, answers only requests that name a loopback host (a foreign page
whose name was rebound to 127.0.0.1 is refused), only reads, and lets its page load and run nothing
but its own files.
"""

import json
import logging
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from verl_mixed.views.viewer.filters import Filter, parse_rewards, parse_steps
from verl_mixed.views.viewer.index import Index
from verl_mixed.views.viewer.tokens import Decode
from verl_mixed.views.viewer.views import row_view, run_view, trajectory_view

PAGE = Path(__file__).parent / "page"

MOST_ROWS = 500
"""Of one answer."""

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})

_FILES = {"/": "index.html", "/viewer.css": "viewer.css"} | {
    f"/{name}": name for name in ("filter.js", "tokens.js", "viewer.js")
}

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Answers:
    """One run's pages.

    Args:
        name: of the run.
        index: its trajectories.
        decode: its tokenizer; None shows ids.
        note: why there is none.
    """

    def __init__(self, name: str, index: Index, decode: Decode | None, note: str) -> None:
        self._name, self._index, self._decode, self._note = name, index, decode, note

    async def run(self, request: web.Request) -> web.Response:
        self._index.refresh()
        return _json(run_view(self._name, self._index, self._note))

    async def rows(self, request: web.Request) -> web.Response:
        self._index.refresh()
        asked = request.query
        try:
            least, most = parse_rewards(asked.get("reward_min", ""), asked.get("reward_max", ""))
            chosen = Filter(
                source=asked.get("source", ""),
                steps=parse_steps(asked.get("step", "")),
                outcome=asked.get("outcome", ""),
                reward_min=least,
                reward_max=most,
                text=asked.get("text", ""),
                group=asked.get("group", ""),
            )
            offset = _natural("offset", asked.get("offset", "0"))
            limit = min(MOST_ROWS, max(1, _natural("limit", asked.get("limit", "100"))))
        except ValueError as error:
            return _json({"error": str(error)}, status=400)
        rows = self._index.rows(chosen, offset=offset, limit=limit)
        return _json({"total": self._index.count(chosen), "rows": [row_view(row) for row in rows]})

    async def trajectory(self, request: web.Request) -> web.Response:
        identity = request.match_info["identity"]
        self._index.refresh()
        try:
            record = self._index.record(identity)
        except KeyError:
            return _json({"error": f"no trajectory {identity}: its file was rewritten"}, status=404)
        except (OSError, ValueError) as error:
            return _json({"error": f"cannot read trajectory {identity}: {error}"}, status=422)
        return _json(trajectory_view(identity, record, self._decode))


def create_app(name: str, index: Index, decode: Decode | None, note: str = "") -> web.Application:
    """The application of one run.

    Args:
        name: of the run.
        index: its trajectories; not closed here.
        decode: its tokenizer; None shows ids.
        note: what to say where there is none.
    """
    answers = _Answers(name, index, decode, note)
    app = web.Application(middlewares=[_guard])
    for path, file in _FILES.items():
        app.router.add_get(path, _file(PAGE / file))
    app.router.add_get("/api/run", answers.run)
    app.router.add_get("/api/trajectories", answers.rows)
    app.router.add_get("/api/trajectories/{identity}", answers.trajectory)
    return app


@web.middleware
async def _guard(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Refuse foreign hosts; say on every answer what the page may do."""
    if _host_name(request) not in _LOOPBACK:
        response = web.Response(status=403, text="open the viewer as http://127.0.0.1\n")
        response.headers.update(HEADERS)
        return response
    try:
        response = await handler(request)
    except web.HTTPException as error:
        response = web.Response(status=error.status, text=f"{error.reason}\n")
    except Exception as error:  # aiohttp's own answer to it has no policy
        logging.getLogger(__name__).exception("cannot answer %r", request.path_qs)
        what = f"cannot answer: {type(error).__name__}: {error}"
        response = _json({"error": what}, status=500)
    response.headers.update(HEADERS)
    return response


def _host_name(request: web.Request) -> str | None:
    """Of the Host header, without its port: ssh may bring the page to another one."""
    try:
        return urlsplit(f"//{request.host}").hostname
    except ValueError:
        return None


def _file(path: Path) -> _Handler:
    kind = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}[path.suffix]
    text = path.read_text(encoding="utf-8")

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=text, content_type=kind, charset="utf-8")

    return answer


def _json(value: Any, status: int = 200) -> web.Response:
    # ASCII only: half a character has an escape, and no encoding
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return web.Response(text=text, status=status, content_type="application/json")


def _natural(name: str, text: str) -> int:
    if not re.fullmatch("[0-9]{1,15}", text):
        raise ValueError(f"{name}={text!r}: want a number from 0")
    return int(text)
