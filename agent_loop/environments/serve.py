"""Serves a class of environments over HTTP: `python -m agent_loop.environments.serve FILE:CLASS`.

| request | answer |
| --- | --- |
| `POST /reset {"row", "options"}` | `{"session", "messages", "tools"}` |
| `POST /step {"session", "action"}` | `{"observation", "reward", "done", "info"}` |
| `POST /close {"session"}` | `{}` |
| `GET /health` | `{"environment", "sessions"}` |

Errors are `{"error": text}`: 422 the model's action is invalid, 404 there is no such session, 500
the environment failed and its session is over, 503 there are too many sessions.

Each session is a process, forked from this one, which has imported the class. A request that its
client gives up, or that passes the time limit, ends the process. The package aiohttp is all that an
interpreter needs for this program, so that an environment may have packages of its own.
"""

import argparse
import asyncio
import hmac
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from aiohttp import web

from agent_loop.environments.episode import MAX_OBSERVATION_BYTES
from agent_loop.environments.instances import class_of
from agent_loop.environments.session_process import HEAD, serve_forked
from tool_server.wire.web_pages import web_page_fault

CLOSE_S = 5.0
"""Longest wait for `close` of an instance; then its process is killed."""

MAX_ANSWER_BYTES = 8 * MAX_OBSERVATION_BYTES
"""Bytes of an answer of a session's process; JSON writes a character in six bytes at most."""

_REAP_S = 0.005
_SWEEP_S = 30.0


class ProcessFailed(Exception):
    """The session's process failed, and was ended."""


@dataclass(slots=True)
class EnvironmentProcess:
    """The process of one session, as the server sees it."""

    pid: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    used_at: float = field(default_factory=time.monotonic)

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Raises `ProcessFailed` if the process ends, or answers too much."""
        self.used_at = time.monotonic()
        data = json.dumps(request).encode()
        try:
            self.writer.write(HEAD.pack(len(data)) + data)
            await self.writer.drain()
            (size,) = HEAD.unpack(await self.reader.readexactly(HEAD.size))
            if size > MAX_ANSWER_BYTES:
                raise ProcessFailed(f"it answered with {size} bytes")
            return json.loads(await self.reader.readexactly(size))
        except (OSError, asyncio.IncompleteReadError) as error:
            raise ProcessFailed(f"its process ended {await self.end()}") from error

    async def end(self) -> str:
        """Kill the process and all that it has started; how it ended, in words."""
        self.writer.transport.abort()
        return await gone(self.pid)


async def gone(pid: int) -> str:
    """Wait for the end of a session whose socket is closed; how it ended, in words."""
    while True:
        try:
            done, status = os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222 (never waits)
        except ChildProcessError:
            return "before"
        if done:
            code = os.waitstatus_to_exitcode(status)
            return f"by signal {-code}" if code < 0 else f"with exit code {code}"
        await asyncio.sleep(_REAP_S)


class EnvironmentServer:
    """The sessions of one class.

    Args:
        kind: the class.
        name: as it was given.
        token: bearer token of requests; "" for none.
        max_sessions: sessions at once; a further reset is told to come later.
        idle_s: seconds without a request after which a session is ended.
        limit_s: seconds of one request.
    """

    def __init__(
        self,
        kind: Any,
        name: str,
        *,
        token: str = "",
        max_sessions: int = 4096,
        idle_s: float = 3600.0,
        limit_s: float = 3600.0,
    ) -> None:
        self._kind, self._name, self._token = kind, name, token
        self._max_sessions, self._idle_s, self._limit_s = max_sessions, idle_s, limit_s
        self._processes: dict[str, EnvironmentProcess] = {}
        self._starting = 0
        """Sessions whose process is forked and not in the table yet."""

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
        yield
        sweeper.cancel()
        await asyncio.gather(*(self._end(name) for name in list(self._processes)))

    async def _sweep(self) -> None:
        """End sessions that nobody uses any more."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            before = time.monotonic() - self._idle_s
            idle = [
                name
                for name, process in self._processes.items()
                if process.used_at < before and not process.busy.locked()
            ]
            await asyncio.gather(*map(self._end, idle))

    async def _reset(self, request: web.Request) -> web.Response:
        given = await self._body(request)
        row, options = given.get("row"), given.get("options", {})
        if not isinstance(row, dict) or not isinstance(options, dict):
            return _error(400, "want {row: object, options: object}")
        if len(self._processes) + self._starting >= self._max_sessions:
            return _error(503, f"{self._max_sessions} sessions are open; raise --max-sessions")
        name = uuid4().hex
        self._starting += 1
        try:
            self._processes[name] = await self._forked()
        finally:
            self._starting -= 1
        return await self._answer(name, {"op": "reset", "row": row, "options": options})

    async def _step(self, request: web.Request) -> web.Response:
        given = await self._body(request)
        return await self._answer(
            str(given.get("session")), {"op": "step", "action": given.get("action")}
        )

    async def _close(self, request: web.Request) -> web.Response:
        name = str((await self._body(request)).get("session"))
        if (process := self._processes.get(name)) is not None:
            try:
                if not process.busy.locked():
                    await asyncio.wait_for(process.ask({"op": "close"}), CLOSE_S)
            except (ProcessFailed, asyncio.TimeoutError):
                pass
            finally:
                await self._end(name)
        return web.json_response({})

    async def _health(self, request: web.Request) -> web.Response:
        self._admit(request)
        return web.json_response({"environment": self._name, "sessions": len(self._processes)})

    async def _answer(self, name: str, asked: dict[str, Any]) -> web.Response:
        """Ask a session. It is ended by a fault, by the time limit, and if the client is gone."""
        if (process := self._processes.get(name)) is None:
            return _error(404, f"no session {name[:64]!r}: it has ended, or the server is new")
        is_whole = False
        said: dict[str, Any] = {}
        try:
            async with process.busy:
                said = await asyncio.wait_for(process.ask(asked), self._limit_s)
            is_whole = "error" not in said
        except ProcessFailed as error:
            said = {"error": f"{asked['op']}: {error}"}
        except asyncio.TimeoutError:
            said = {"error": f"{asked['op']}: no answer within {self._limit_s:g} s"}
        finally:
            if not is_whole:
                await self._end(name)
        if "invalid" in said:
            return _error(422, said["invalid"])
        if "error" in said:
            return _error(500, said["error"])
        return web.json_response(dict(said["answer"], session=name))

    async def _forked(self) -> EnvironmentProcess:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if not pid:
            serve_forked(theirs, self._kind)
        theirs.close()
        ours.setblocking(False)
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            await asyncio.shield(gone(pid))
            raise
        return EnvironmentProcess(pid, reader, writer)

    async def _end(self, name: str) -> None:
        if (process := self._processes.pop(name, None)) is not None:
            await asyncio.shield(process.end())

    async def _body(self, request: web.Request) -> dict[str, Any]:
        self._admit(request)
        if request.content_type != "application/json":
            why = f"send Content-Type application/json, not {request.content_type}"
            raise web.HTTPUnsupportedMediaType(text=json.dumps({"error": why}))
        try:
            given = await request.json()
        except ValueError as error:
            raise web.HTTPBadRequest(text=json.dumps({"error": f"no JSON: {error}"})) from error
        if not isinstance(given, dict):
            raise web.HTTPBadRequest(text=json.dumps({"error": "want a JSON object"}))
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
    """Serve until SIGTERM, SIGINT or, with --unix, the end of stdin."""
    parser = argparse.ArgumentParser(prog="python -m agent_loop.environments.serve")
    parser.add_argument("environment", help="path/to/file.py:Class, or module:Class")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9000)
    unix = "path of a Unix socket in place of host and port; its folder is removed at the end"
    parser.add_argument("--unix", help=unix)
    parser.add_argument("--token-variable", help="environment variable with the bearer token")
    parser.add_argument("--max-sessions", type=int, default=4096)
    parser.add_argument("--idle-s", type=float, default=3600.0)
    parser.add_argument("--limit-s", type=float, default=3600.0)
    given = parser.parse_args(argv)
    token = os.environ.get(given.token_variable, "") if given.token_variable else ""
    if given.token_variable and not token:
        parser.error(f"--token-variable {given.token_variable}: it is not set")
    if not given.unix and not token and given.host not in ("127.0.0.1", "::1", "localhost"):
        parser.error(f"--host {given.host}: others could reach it; set --token-variable")
    try:
        kind = class_of(given.environment)
    except ValueError as error:
        sys.exit(str(error))
    server = EnvironmentServer(
        kind,
        given.environment,
        token=token,
        max_sessions=given.max_sessions,
        idle_s=given.idle_s,
        limit_s=given.limit_s,
    )
    try:
        asyncio.run(_serve(server.app(), given))
    finally:
        if given.unix:
            # If the process that started this one was killed, nobody else removes the folder.
            shutil.rmtree(Path(given.unix).parent, ignore_errors=True)


async def _serve(app: web.Application, given: argparse.Namespace) -> None:
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    await runner.setup()
    try:
        if given.unix:
            site: web.BaseSite = web.UnixSite(runner, given.unix)
            loop.add_reader(0, lambda: os.read(0, 4096) or over.set())
        else:
            site = web.TCPSite(runner, given.host, given.port)
        await site.start()
        print(f"ready {site.name}", flush=True)
        await over.wait()
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    main()
