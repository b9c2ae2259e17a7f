"""The gateway's HTTP server: one in each agent loop worker, with an address for each session.

`http://127.0.0.1:PORT/s/<id>/v1` speaks OpenAI's Chat Completions and Responses and Anthropic's
Messages, and `/s/<id>/mcp` has the tools of the source. `/s/<another id>/reward` takes the agent's
answer or its own number: who knows the first address does not know this one. The ids are
unguessable, the server listens on loopback, there and in the network of each sandbox, and an
answer says nothing of other sessions. All requests of one session are paced, refused ones too, so
that a flood by one agent does not slow the others.
"""

import asyncio
import logging
import math
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http import HttpProcessingError

from agent_loop.calls.child_process import uninterrupted
from agent_loop.gateway import anthropic_messages, chat_completions, mcp, responses
from agent_loop.gateway.demands import check_schemas, demand_of, with_demand
from agent_loop.gateway.session import Session
from agent_loop.gateway.wire import WireError
from tool_server.wire.responses import read_json
from tool_server.wire.web_pages import web_page_fault

MAX_BODY_BYTES = 8 << 20
"""A history of 100,000 tokens is half a megabyte. Reading a body of this size takes the event loop
about 50 ms."""

MOST_VALUES = 200_000
"""Brackets and commas of a body, because 8 MiB of empty lists take the parser, and with it the
event loop, a second. No context holds a text with so many."""

AT_ONCE = 16
"""Requests of one session that are worked on at the same time."""

MOST_WAITING = 256
"""Requests of one session that may wait for their turn; a further one is refused."""

REFUSAL_S = 1.0
"""Wait before a request is refused, because a flood would go on at once."""

PER_SECOND, BURST = 50.0, 100
"""Requests of one session: a small one costs about a millisecond of the event loop, so a flood
takes at most a twentieth of it."""

CONNECTIONS_PER_SECOND, MOST_NEW = 500.0, 1000
"""Connections from this host, of all sessions together, and those that may come at once. From a
sandbox they are paced for each session."""

MAX_CONNECTIONS = 64
"""Of one sandbox at once; more are closed at once. Each takes a descriptor of the worker."""

BYTES_OF_REQUEST = 16 << 10
"""A body counts as one request more for each of these bytes, which take about as long to read."""

MOST_HEADER = 1000
"""Characters of a header that names ignored fields."""

Handler = Callable[["Served", web.BaseRequest], Awaitable[web.StreamResponse]]


class Pace:
    """After a burst, so many in a second."""

    def __init__(self, per_second: float = PER_SECOND, burst: float = BURST) -> None:
        self._interval_s, self._burst_s = 1 / per_second, burst / per_second
        self._next_at = -math.inf

    def wait_s(self, now: float, cost: float = 1.0) -> float:
        """Count what came, and return the seconds until its turn. `now` is on the loop's clock."""
        self._next_at = max(self._next_at, now - self._burst_s) + cost * self._interval_s
        return max(0.0, self._next_at - now)


@dataclass(eq=False, slots=True, kw_only=True)
class _Sender:
    """Whose requests wait for one another."""

    turn: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    waiting: int = 0
    pace: Pace = field(default_factory=Pace)


@dataclass(eq=False, slots=True, kw_only=True)
class Served(_Sender):
    """A session with an address."""

    session: Session
    tasks: set["asyncio.Task[Any] | None"] = field(default_factory=set)
    """Of requests under way, each that of its connection. An idle connection may be another
    session's next: functions of one process may share a client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where an agent finds its session."""

    url: str
    """`http://127.0.0.1:PORT/s/<id>`: the base URL of Anthropic's clients."""

    key: str
    """What clients send as their API key. The address itself is the secret."""

    reward: str
    """Takes `{"answer": text}` or `{"reward": number}`. It does not follow from `url`."""

    @property
    def openai(self) -> str:
        """The base URL of OpenAI's clients."""
        return f"{self.url}/v1"

    @property
    def mcp(self) -> str:
        """The MCP server with the tools of the source."""
        return f"{self.url}/mcp"

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of a program."""
        return {
            "OPENAI_BASE_URL": self.openai,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
            "MIXED_MCP_URL": self.mcp,
            "MIXED_REWARD_URL": self.reward,
        }


class Gateway:
    """The server of one event loop; it starts with its first session."""

    def __init__(self) -> None:
        self._served: dict[str, Served] = {}
        self._rewarded: dict[str, Served] = {}
        """By the id of the address that takes the reward."""

        self._strangers = _Sender()
        """All who ask for a session that there is not."""

        self._starting: asyncio.Task[None] | None = None
        self._runner: web.ServerRunner | None = None
        self.port = 0

    async def open(self, session: Session) -> Address:
        """Give a session its address."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        await asyncio.shield(self._starting)
        served = Served(session=session)
        self._served[session.id] = self._rewarded[session.reward_id] = served
        sessions = f"http://127.0.0.1:{self.port}/s"
        return Address(
            url=f"{sessions}/{session.id}",
            key=session.id,
            reward=f"{sessions}/{session.reward_id}/reward",
        )

    async def shut(self, session: Session) -> None:
        """Take the address away, and end the session's requests and connections."""
        session.is_closed = True
        served = self._served.pop(session.id, None)
        self._rewarded.pop(session.reward_id, None)
        if served is None:
            return
        tasks = [task for task in served.tasks if task is not None and not task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    @asynccontextmanager
    async def serving(self, listener: socket.socket) -> AsyncIterator[None]:
        """Answer also what comes at a socket, while it is open.

        It listens in the network of a sandbox. So an idle session needs no process that listens,
        and the program reaches nothing but HTTP.
        """
        server, loop, pace = self._server(), asyncio.get_running_loop(), Pace()

        async def accept() -> None:
            # Not by the loop's own server, which takes all connections that come, 100 in a pass.
            while True:
                await asyncio.sleep(pace.wait_s(loop.time()))
                with suppress(OSError):  # no descriptor is left, or the program has hung up
                    connection, _ = await loop.sock_accept(listener)
                    if len(server.connections) < MAX_CONNECTIONS:
                        await loop.connect_accepted_socket(server, connection)
                    else:
                        connection.close()

        listener.setblocking(False)
        accepting = asyncio.ensure_future(accept())
        try:
            yield
        finally:
            accepting.cancel()
            for connection in server.connections:
                connection.force_close()
            try:
                await uninterrupted(asyncio.wait([accepting]))
            finally:
                listener.close()

    async def close(self) -> None:
        for served in list(self._served.values()):
            await self.shut(served.session)
        if self._runner is not None:
            await self._runner.cleanup()

    async def _start(self) -> None:
        self._runner = web.ServerRunner(self._server(Pace(CONNECTIONS_PER_SECOND, MOST_NEW)))
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]

    def _server(self, pace: Pace | None = None) -> "_Server":
        make = partial(
            web.BaseRequest, loop=asyncio.get_running_loop(), client_max_size=MAX_BODY_BYTES
        )
        return _Server(
            self._handle, pace=pace, request_factory=make, access_log=None, logger=_http_log
        )

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request of a known session, in its turn, with errors in the protocol's form."""
        session_id, _, path = request.path.removeprefix("/s/").partition("/")
        place = "v1/models" if path.startswith("v1/models/") else path
        protocol = _PATHS.get(place, _PATHS["v1/models"])[1]
        served = (self._rewarded if place == "reward" else self._served).get(session_id)
        try:
            if served is None:
                async with _paced(self._strangers):
                    raise WireError("no such session", status=404, code="not_found")
            return await _in_turn(served, request, place)
        except (ConnectionError, web.RequestPayloadError) as error:  # the agent hung up
            failed = WireError(f"the request cannot be read: {error}", code="broken")
            return _json(protocol.error_body(failed), 400, NO_RETRY)
        except WireError as error:
            if served is not None:
                served.session.refusal = error.message
            return _json(protocol.error_body(error), error.status, NO_RETRY)
        except (Exception, asyncio.TimeoutError) as error:
            assert served is not None
            session = served.session
            if not session.is_closed:
                session.crash = session.crash or error
                session.over.set()
            failed = WireError(f"{type(error).__name__}: {error}", status=500, code="internal")
            return _json(protocol.error_body(failed), 500, NO_RETRY)


class _Server(web.Server):
    """Does not read from connections that come too fast. What is sent there may be no HTTP."""

    def __init__(self, *args: Any, pace: Pace | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pace = pace

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        loop = asyncio.get_running_loop()
        if self._pace is not None and (wait_s := self._pace.wait_s(loop.time())):
            transport.pause_reading()
            loop.call_later(wait_s, transport.resume_reading)


def _could_be_read(record: logging.LogRecord) -> bool:
    """aiohttp writes what was sent, and a traceback, of each request that it cannot read."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


_http_log = logging.getLogger(f"{__name__}.http")
_http_log.addFilter(_could_be_read)


async def _in_turn(served: Served, request: web.BaseRequest, place: str) -> web.StreamResponse:
    task = asyncio.current_task()
    served.tasks.add(task)
    for variable, value in served.session.context.items():  # of the session's trajectory
        variable.set(value)
    try:
        async with _paced(served):
            if place not in _PATHS:
                known = ", ".join(_PATHS)
                raise WireError(f"no such path; want one of {known}", status=404, code="not_found")
            method, _, handler = _PATHS[place]
            if request.method != method:
                raise WireError(f"{place} takes {method}", status=405, code="not_allowed")
            if why := web_page_fault(request.headers, only_loopback=True):
                raise WireError(why, status=403, code="web_page")
            return await handler(served, request)
    finally:
        served.tasks.discard(task)


@asynccontextmanager
async def _paced(served: _Sender) -> AsyncIterator[None]:
    """The turn of a request of this sender."""
    if served.waiting >= MOST_WAITING:
        await asyncio.sleep(REFUSAL_S)
        raise WireError(
            f"{MOST_WAITING} requests of this session wait; send fewer at once",
            status=429,
            code="rate_limit",
        )
    loop = asyncio.get_running_loop()
    served.waiting += 1
    try:
        if wait_s := served.pace.wait_s(loop.time()):  # a pass of the event loop costs as well
            await asyncio.sleep(wait_s)
        await served.turn.acquire()
    finally:
        served.waiting -= 1
    try:
        yield
    finally:
        served.turn.release()


async def _body(served: Served, request: web.BaseRequest) -> Any:
    """The JSON of a request, which is charged to its session.

    Raises:
        WireError: it is too large, or no JSON.
    """
    try:
        raw = await request.read()
        served.pace.wait_s(asyncio.get_running_loop().time(), len(raw) / BYTES_OF_REQUEST)
        if sum(map(raw.count, (b"[", b"{", b","))) > MOST_VALUES:
            raise WireError("the body has too many values", status=413, code="too_large")
        return read_json(msgspec.json.decode, raw)
    except web.HTTPRequestEntityTooLarge as error:
        raise WireError(
            f"the body is larger than {MAX_BODY_BYTES >> 20} MiB", status=413, code="too_large"
        ) from error
    except (ValueError, RecursionError) as error:
        raise WireError(f"the body is no JSON: {error}") from error


NO_RETRY = {"x-should-retry": "false"}
"""OpenAI's and Anthropic's clients repeat some requests unless they are told not to."""


def _json(
    body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body),
        status=status,
        content_type="application/json",
        headers=headers,
    )


def _say(protocol: ModuleType) -> Handler:
    """The handler of a protocol's requests to the policy."""

    async def handle(served: Served, request: web.BaseRequest) -> web.StreamResponse:
        asked = protocol.parse(await _body(served, request))
        await check_schemas(asked)
        reply = await served.session.reply(asked)
        headers = {}
        if asked.ignored:
            names = ", ".join(asked.ignored)[:MOST_HEADER]
            headers["x-ignored-fields"] = re.sub(r"[^ -~]", "?", names)
        if not asked.stream:
            return _json(protocol.reply_body(reply), headers=headers)
        stream = web.StreamResponse(
            headers={"content-type": "text/event-stream", "cache-control": "no-cache", **headers}
        )
        with suppress(ConnectionError):  # an agent may hang up
            await stream.prepare(request)
            for event in protocol.reply_events(reply, asked.include_usage):
                await stream.write(event.encode())
            await stream.write_eof()
        return stream

    return handle


async def _count(served: Served, request: web.BaseRequest) -> web.StreamResponse:
    asked = anthropic_messages.parse_count(await _body(served, request))
    messages = with_demand(asked.messages, demand_of(asked))
    ids = served.session.policy.template.prompt_ids(messages, asked.tools)
    return _json({"input_tokens": len(ids)})


async def _models(served: Served, request: web.BaseRequest) -> web.StreamResponse:
    """A model of any name is the policy; clients that list them get one."""
    if name := request.path.partition("/v1/models/")[2]:  # it may have slashes
        return _json(_facts(name))
    listed = {"object": "list", "data": [_facts("policy")]}
    ends = {"has_more": False, "first_id": "policy", "last_id": "policy"}
    return _json(listed | ends)


def _facts(name: str) -> dict[str, Any]:
    """What OpenAI and Anthropic say of a model; each client reads its own fields."""
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "policy"}
    dated = {"created_at": "1970-01-01T00:00:00Z"}
    return {**openai, "type": "model", "display_name": name, **dated}


async def _reward(served: Served, request: web.BaseRequest) -> web.StreamResponse:
    body = await _body(served, request)
    served.session.take_post(body if isinstance(body, Mapping) else {})
    return _json({"ok": True})


async def _mcp(served: Served, request: web.BaseRequest) -> web.StreamResponse:
    answer = await mcp.answer(served.session, await _body(served, request))
    return web.Response(status=202) if answer is None else _json(answer)


_PATHS: dict[str, tuple[str, ModuleType, Handler]] = {
    "v1/chat/completions": ("POST", chat_completions, _say(chat_completions)),
    "v1/responses": ("POST", responses, _say(responses)),
    "v1/messages": ("POST", anthropic_messages, _say(anthropic_messages)),
    "v1/messages/count_tokens": ("POST", anthropic_messages, _count),
    "v1/models": ("GET", chat_completions, _models),
    "reward": ("POST", chat_completions, _reward),
    "mcp": ("POST", chat_completions, _mcp),
}
"""What a session has at its address."""
