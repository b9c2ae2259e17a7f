"""Serves a class of environments over HTTP: `python -m agent_loop.environments.serve FILE:CLASS`.

| request | answer |
| --- | --- |
| `POST /reset {"row", "options"}` | `{"session", "messages", "tools"}` |
| `POST /step {"session", "action"}` | `{"observation", "reward", "done", "info"}` |
| `POST /close {"session"}` | `{}` |
| `GET /health` | `{"environment", "sessions"}` |

Errors are `{"error": text}`: 422 the model's action is invalid, 404 there is no such session, 500
the environment failed and its session is over, 503 there are too many sessions.

Each session is a process (`processes`). A request that its client gives up, or that passes the time
limit, ends it. The package aiohttp is all that an interpreter needs for this program.
"""

import argparse
import asyncio
import hmac
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import uuid4

from aiohttp import web

from agent_loop.environments.processes import (
    MAX_ANSWER_BYTES,
    SessionProcess,
    SessionProcesses,
    StartFailed,
)
from tool_server.wire.web_pages import web_page_fault

_SWEEP_S = 30.0


@dataclass(slots=True)
class _Served:
    """A session, also one that is about to begin."""

    process: SessionProcess | None = None
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    used_at: float = field(default_factory=time.monotonic)

    def end(self) -> None:
        if self.process is not None:
            self.process.end()


class EnvironmentServer:
    """The sessions of one class.

    Args:
        name: the class, as `path/to/file.py:Class` or `module:Class`.
        token: bearer token of requests; "" for none.
        max_sessions: sessions at once; a further reset is told to come later.
        idle_s: seconds without a request after which a session is ended.
        limit_s: seconds of one request.
    """

    def __init__(
        self,
        name: str,
        *,
        token: str = "",
        max_sessions: int = 4096,
        idle_s: float = 3600.0,
        limit_s: float = 3600.0,
    ) -> None:
        self._name, self._token = name, token
        self._max_sessions, self._idle_s, self._limit_s = max_sessions, idle_s, limit_s
        self._processes = SessionProcesses(name, sys.executable, os.environ)
        self._sessions: dict[str, _Served] = {}

    def app(self) -> web.Application:
        """The application, whose cleanup ends all sessions."""
        app = web.Application(client_max_size=MAX_ANSWER_BYTES)
        app.router.add_post("/reset", self._reset)
        app.router.add_post("/step", self._step)
        app.router.add_post("/close", self._close)
        app.router.add_get("/health", self._health)
        app.cleanup_ctx.append(self._sweeping)
        return app

    async def _sweeping(self, app: web.Application) -> AsyncIterator[None]:
        sweeper = asyncio.ensure_future(self._sweep())
        try:
            await self._processes.ready()
            yield
        finally:
            sweeper.cancel()
            await self._processes.close()

    async def _sweep(self) -> None:
        """End sessions that nobody uses any more."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            before = time.monotonic() - self._idle_s
            for name, served in list(self._sessions.items()):
                if served.used_at < before and not served.busy.locked():
                    self._sessions.pop(name).end()

    async def _reset(self, request: web.Request) -> web.Response:
        given = await self._body(request)
        row, options = given.get("row"), given.get("options", {})
        if not isinstance(row, dict) or not isinstance(options, dict):
            return _error(400, "want {row: object, options: object}")
        if len(self._sessions) >= self._max_sessions:
            return _error(503, f"{self._max_sessions} sessions are open; raise --max-sessions")
        name = uuid4().hex
        return await self._answer(name, {"op": "reset", "row": row, "options": options}, _Served())

    async def _step(self, request: web.Request) -> web.Response:
        given = await self._body(request)
        name = str(given.get("session"))
        if (served := self._sessions.get(name)) is None:
            return _error(404, f"no session {name[:64]!r}: it has ended, or the server is new")
        return await self._answer(name, {"op": "step", "action": given.get("action")}, served)

    async def _close(self, request: web.Request) -> web.Response:
        name = str((await self._body(request)).get("session"))
        if (served := self._sessions.pop(name, None)) is not None:
            if served.process is not None and not served.busy.locked():
                await served.process.close()
            served.end()
        return web.json_response({})

    async def _health(self, request: web.Request) -> web.Response:
        self._admit(request)
        return web.json_response({"environment": self._name, "sessions": len(self._sessions)})

    async def _answer(self, name: str, asked: dict[str, Any], served: _Served) -> web.Response:
        """Ask a session. It is over after a fault, after the time limit, and if the client is
        gone."""
        self._sessions[name], served.used_at = served, time.monotonic()
        said: dict[str, Any] = {"error": ""}
        try:
            async with served.busy:
                said = await asyncio.wait_for(self._asked(served, asked), self._limit_s)
        except (ConnectionError, StartFailed) as error:
            said = {"error": f"{asked['op']}: {error}"}
        except asyncio.TimeoutError:
            said = {"error": f"{asked['op']}: no answer within {self._limit_s:g} s"}
        finally:
            if "error" in said:
                self._sessions.pop(name, None)
                served.end()
        if "invalid" in said:
            return _error(422, said["invalid"])
        if "error" in said:
            return _error(500, said["error"])
        return web.json_response(dict(said["answer"], session=name))

    async def _asked(self, served: _Served, asked: dict[str, Any]) -> dict[str, Any]:
        if served.process is None:
            served.process = await self._processes.open()
        return await served.process.ask(asked)

    async def _body(self, request: web.Request) -> dict[str, Any]:
        self._admit(request)
        if request.content_type != "application/json":
            why = f"send Content-Type application/json, not {request.content_type}"
            raise web.HTTPUnsupportedMediaType(text=json.dumps({"error": why}))
        try:
            given = await request.json()
            if not isinstance(given, dict):
                raise ValueError("want an object")
        except ValueError as error:
            raise web.HTTPBadRequest(text=json.dumps({"error": f"no JSON: {error}"})) from error
        return given

    def _admit(self, request: web.Request) -> None:
        """Refuse requests without the token, and those of web pages."""
        if why := web_page_fault(request.headers, only_loopback=not self._token):
            raise web.HTTPForbidden(text=json.dumps({"error": why}))
        given = request.headers.get("Authorization", "").encode()
        if self._token and not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            raise web.HTTPUnauthorized(text=json.dumps({"error": "wrong or no bearer token"}))


def _error(status: int, text: str) -> web.Response:
    headers = {"Retry-After": "1", "X-Executed": "no"} if status == 503 else {}
    return web.json_response({"error": text}, status=status, headers=headers)


def main(argv: list[str] | None = None) -> None:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m agent_loop.environments.serve")
    parser.add_argument("environment", help="path/to/file.py:Class, or module:Class")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("--token-variable", help="environment variable with the bearer token")
    parser.add_argument("--max-sessions", type=int, default=4096)
    parser.add_argument("--idle-s", type=float, default=3600.0)
    parser.add_argument("--limit-s", type=float, default=3600.0)
    given = parser.parse_args(argv)
    token = os.environ.get(given.token_variable, "") if given.token_variable else ""
    if given.token_variable and not token:
        parser.error(f"--token-variable {given.token_variable}: it is not set")
    if not token and given.host not in ("127.0.0.1", "::1", "localhost"):
        parser.error(f"--host {given.host}: others could reach it; set --token-variable")
    server = EnvironmentServer(
        given.environment,
        token=token,
        max_sessions=given.max_sessions,
        idle_s=given.idle_s,
        limit_s=given.limit_s,
    )
    try:
        web.run_app(
            server.app(),
            host=given.host,
            port=given.port,
            access_log=None,
            handler_cancellation=True,
            print=partial(print, flush=True),
        )
    except StartFailed as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
