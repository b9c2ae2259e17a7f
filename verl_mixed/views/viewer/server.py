"""The web server of the viewer, for the user of this machine alone.

The server listens on the loopback address and only reads. It refuses requests of foreign pages. Its
own page may load and run only the server's own files.
"""

import json
import logging
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from jinja2 import Environment, FileSystemLoader

from tool_server.wire.web_pages import web_page_fault
from verl_mixed.views.viewer.filters import Filter, parse_rewards, parse_steps
from verl_mixed.views.viewer.index import Index
from verl_mixed.views.viewer.tokens import Decode
from verl_mixed.views.viewer.views import run_view, trajectory_view

PAGE = Path(__file__).parent / "page"
SCRIPTS = ("filter.js", "tokens.js", "viewer.js")
TEMPLATE = Environment(
    loader=FileSystemLoader(PAGE), autoescape=True, trim_blocks=True, keep_trailing_newline=True
).get_template("index.html")
"""The page; with `data` it is a file that needs no server."""

MOST_ROWS = 500
"""Trajectories of a page of the list, at most."""

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

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Answers:
    """The answers about one run; arguments as in `create_app`."""

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
        return _json({"total": self._index.count(chosen), "rows": rows})

    async def trajectory(self, request: web.Request) -> web.Response:
        identity = request.match_info["identity"]
        self._index.refresh()
        try:
            record = self._index.record(identity)
            session = self._index.session(record.session)
        except KeyError:
            return _json(
                {"error": f"no trajectory {identity}: its file was rewritten or removed"},
                status=404,
            )
        except (OSError, ValueError) as error:
            return _json({"error": f"cannot read trajectory {identity}: {error}"}, status=422)
        return _json(trajectory_view(identity, record, self._decode, *session))


def create_app(name: str, index: Index, decode: Decode | None, note: str = "") -> web.Application:
    """The web application of one run; the caller closes the index.

    `decode` and `note` are those of `tokenizer_of`.
    """
    answers = _Answers(name, index, decode, note)
    app = web.Application(middlewares=[_guard])
    app.router.add_get("/", _text("html", TEMPLATE.render(title="Trajectories", scripts=SCRIPTS)))
    for file, kind in {"viewer.css": "css", **dict.fromkeys(SCRIPTS, "javascript")}.items():
        app.router.add_get(f"/{file}", _text(kind, (PAGE / file).read_text(encoding="utf-8")))
    app.router.add_get("/api/run", answers.run)
    app.router.add_get("/api/trajectories", answers.rows)
    app.router.add_get("/api/trajectories/{identity}", answers.trajectory)
    return app


@web.middleware
async def _guard(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Refuse foreign pages; add `HEADERS` to every answer."""
    try:
        # any port in Host, because an ssh tunnel may use another one
        if why := web_page_fault(request.headers, only_loopback=True, own_page=True):
            why = f"{why}; type the viewer's address, http://127.0.0.1:PORT\n"
            response = web.Response(status=403, text=why)
        else:
            response = await handler(request)
    except web.HTTPException as error:
        response = web.Response(status=error.status, text=f"{error.reason}\n")
    except Exception as error:  # aiohttp's own answer would lack HEADERS
        logging.getLogger(__name__).exception("cannot answer %r", request.path_qs)
        message = f"cannot answer: {type(error).__name__}: {error}"
        response = _json({"error": message}, status=500)
    response.headers.update(HEADERS)
    return response


def _text(kind: str, text: str) -> _Handler:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=text, content_type=f"text/{kind}", charset="utf-8")

    return answer


def _json(value: Any, status: int = 200) -> web.Response:
    # ASCII only, because a lone surrogate has an escape in JSON and no encoding in UTF-8
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return web.Response(text=text, status=status, content_type="application/json")


def _natural(name: str, text: str) -> int:
    if not re.fullmatch("[0-9]{1,15}", text):
        raise ValueError(f"{name}={text!r}: want a number from 0")
    return int(text)
