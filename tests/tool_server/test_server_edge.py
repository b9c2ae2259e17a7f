"""The server's edge over real HTTP: places and their line, the token, errors, health."""

import asyncio
import base64
import contextlib
import io
import json
import os
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import SecretStr

from agent_loop.calls.client import ToolClient
from tests.listening import listening
from tool_server.app import ENDPOINTS, app_runner, create_app
from tool_server.calculate import Calculate
from tool_server.connections import CONNECTIONS, Connections
from tool_server.edge import DRAIN
from tool_server.http import BODIES, Bodies, RequestSlots, json_answer
from tool_server.sandbox import Limits, Program, RunResult, Sandbox
from tool_server.settings import ServerSettings
from tool_server.submission import same_lines
from tool_server.wire.protocol import EXECUTED, ToolCall, ToolUnavailable
from tool_server.wire.tokens import (
    is_loopback,
    listeners,
    token_for,
    user_token,
    user_token_file,
)

pytestmark = pytest.mark.sandbox  # the servers have one

TOKEN = "a-long-secret"
JSON = {"Content-Type": "application/json"}
SLOW = "expand((a+b)^100000)"
"""Takes until the time limit."""


@pytest.fixture(autouse=True)
def slow_algebra(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(wall_s=600.0, memory_mb=1024)
    monkeypatch.setattr("tool_server.calculate.ALGEBRA", limits)


def calculator_of(app: web.Application) -> Calculate:
    (endpoint,) = (endpoint for endpoint in app[ENDPOINTS] if isinstance(endpoint, Calculate))
    return endpoint


@contextlib.asynccontextmanager
async def server(
    most: int | None = None, bodies: Bodies | None = None, **settings: Any
) -> AsyncIterator[tuple[aiohttp.ClientSession, web.Application]]:
    """A client's session whose base is a new server, and that server."""
    app = create_app(ServerSettings(port=0, **settings))
    if bodies is not None:
        app[BODIES] = bodies
    if most is not None:
        app[CONNECTIONS] = Connections(most)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        listening(app_runner(app)) as url,
        aiohttp.ClientSession(url, connector=connector) as session,
    ):
        yield session, app


async def until(true: Any) -> None:
    while not true():  # noqa: ASYNC110
        await asyncio.sleep(0)


@given(st.text(), st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.binary()))
def test_files_are_in_base64(said: str, files: dict[str, bytes]):
    answer = json_answer({"said": said, "files": files})

    encoded = {path: base64.b64encode(content).decode() for path, content in files.items()}
    assert isinstance(answer.body, bytes)
    assert json.loads(answer.body) == {"said": said, "files": encoded}


async def test_places_go_to_who_came_first():
    places, order = RequestSlots(2, queue_length=10), []

    async def visit(number: int) -> None:
        async with places.hold():
            order.append(number)
            await asyncio.sleep(0)

    await asyncio.gather(*(visit(number) for number in range(10)))
    assert order == list(range(10))
    assert (places.active, places.queued) == (0, 0)


async def test_who_is_cancelled_leaves_the_line():
    places = RequestSlots(1, queue_length=10)
    async with places.hold():
        waiting = [asyncio.ensure_future(places.hold().__aenter__()) for _ in range(3)]
        await until(lambda: places.queued == 3)
        waiting[1].cancel()
        await asyncio.wait([waiting[1]])
        assert places.queued == 2
    await waiting[0]
    assert (places.active, places.queued) == (1, 1)


async def test_a_place_that_comes_as_its_waiter_leaves_goes_to_the_next():
    places = RequestSlots(1, queue_length=10)
    holder = places.hold()
    await holder.__aenter__()
    first, second = (asyncio.ensure_future(places.hold().__aenter__()) for _ in range(2))
    await until(lambda: places.queued == 2)
    await holder.__aexit__(None, None, None)  # the place is handed to the first
    first.cancel()  # who leaves before it ran
    await asyncio.wait([first])
    assert first.cancelled()
    await second
    assert (places.active, places.queued) == (1, 0)


async def test_a_full_line_sends_away_with_a_time_to_come_back():
    places = RequestSlots(1, queue_length=0)
    async with places.hold():
        with pytest.raises(web.HTTPTooManyRequests) as sent_away:
            await places.hold().__aenter__()
    assert 1 <= int(sent_away.value.headers["Retry-After"]) <= 60
    async with places.hold():
        assert places.active == 1


@example(count=1, queue_length=1, steps=[("come", 0), ("come", 1), ("end", 0), ("cancel", 1)])
@given(
    count=st.integers(1, 4),
    queue_length=st.integers(0, 4),
    steps=st.lists(st.tuples(st.sampled_from(["come", "end", "cancel"]), st.integers(0, 20))),
)
async def test_places_are_never_overbooked_nor_lost(count, queue_length, steps):
    places, ends, tasks = RequestSlots(count, queue_length), [], []

    async def visit(end: asyncio.Event) -> None:
        async with places.hold():
            await end.wait()

    async def settle() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    for step, which in steps:
        live = [index for index, task in enumerate(tasks) if not task.done()]
        if step == "come":
            ends.append(asyncio.Event())
            tasks.append(asyncio.ensure_future(visit(ends[-1])))
        elif live and step == "end":
            ends[live[which % len(live)]].set()
        elif live:
            tasks[live[which % len(live)]].cancel()
        if which % 2:
            await settle()
        assert 0 <= places.active <= count and places.queued <= queue_length
    await settle()
    waits = sum(not task.done() for task in tasks) - places.active
    assert places.queued == waits and (not waits or places.active == count)
    for end in ends:
        end.set()
    for task, outcome in zip(
        tasks, await asyncio.gather(*tasks, return_exceptions=True), strict=True
    ):
        sent_away = isinstance(outcome, web.HTTPTooManyRequests)
        assert outcome is None or task.cancelled() or sent_away
    assert (places.active, places.queued) == (0, 0)


async def test_a_storm_on_a_full_line_is_429_and_the_rest_is_answered():
    async with server(sandbox_workers=1) as (session, app):
        places = calculator_of(app).slots
        places.queue_length = 8

        async def ask(number: int) -> tuple[int, str | None]:
            async with session.post("/calculate", json={"expression": f"x={number}"}) as answer:
                await answer.read()
                return answer.status, answer.headers.get("Retry-After")

        answers = await asyncio.gather(*(ask(number) for number in range(100)))
        sent_away = [after for status, after in answers if status == 429]
        served = [after for status, after in answers if status == 200]
        assert len(served) + len(sent_away) == 100
        assert len(served) >= 9 and len(sent_away) >= 1
        assert all(after is not None and int(after) >= 1 for after in sent_away)
        assert (places.active, places.queued) == (0, 0)
        assert (await ask(7))[0] == 200


async def test_the_queue_is_seen_and_a_client_that_goes_away_leaves_it():
    async with server(sandbox_workers=1) as (session, app):
        places = calculator_of(app).slots
        asked = {"expression": SLOW, "code": "while True: pass", "run_timeout": 60}
        calls = [
            asyncio.ensure_future(session.post(path, json=asked))
            for path in ("/calculate", "/calculate", "/run_code")
        ]
        await until(lambda: places.queued == 2)
        health = await (await session.get("/health")).json()
        about = health["tools"]["calculate"]
        assert about.pop("fingerprint")
        assert about == {"up": True, "places": 1, "active": 1, "queued": 2}
        assert 'tool_queued{tool="calculate"} 2.0' in await (await session.get("/metrics")).text()
        for call in calls:
            call.cancel()
        await until(lambda: (places.active, places.queued) == (0, 0))
        assert 'tool_queued{tool="calculate"} 0.0' in await (await session.get("/metrics")).text()
        answer = await session.post("/calculate", json={"expression": "2x=1"})
        assert await answer.json() == {"result": "x = 0.5"}


async def test_a_full_line_says_that_the_call_was_not_executed():
    async with server(sandbox_workers=1) as (session, app):
        calculator_of(app).slots.queue_length = 0
        slow = asyncio.ensure_future(session.post("/calculate", json={"expression": SLOW}))
        await until(lambda: calculator_of(app).slots.active == 1)
        answer = await session.post("/calculate", json={"expression": SLOW})
        assert (answer.status, answer.headers[EXECUTED]) == (429, "no")
        slow.cancel()
        await asyncio.wait([slow])


@pytest.mark.parametrize("drain_s", [0.0, 1000.0])
async def test_a_server_that_drains_says_which_calls_it_may_have_executed(drain_s: float):
    async with server(sandbox_workers=1) as (session, app):
        slow = asyncio.ensure_future(session.post("/calculate", json={"expression": SLOW}))
        await until(lambda: calculator_of(app).slots.active == 1)
        drained = asyncio.ensure_future(app[DRAIN].finish(drain_s))
        await until(lambda: app[DRAIN].began)
        late = await session.post("/calculate", json={"expression": "1"})
        assert (late.status, late.headers[EXECUTED]) == (503, "no")
        if drain_s:
            app[DRAIN].cancel()
        await drained
        assert app[DRAIN].cancelled == 1
        assert ((await slow).status, (await slow).headers[EXECUTED]) == (503, "maybe")


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("", 401),
        (TOKEN, 401),
        (f"Basic {TOKEN}", 401),
        (f"Bearer {TOKEN}x", 401),
        ("Bearer \xe4", 401),
        (f"Bearer {TOKEN}", 200),
        (f"bearer  {TOKEN}", 200),
    ],
)
async def test_with_a_token_only_who_has_it_is_served(header, status):
    headers = {} if header is None else {"Authorization": header}
    async with server(token=TOKEN) as (session, _):
        for method, path in (("POST", "/calculate"), ("GET", "/metrics"), ("GET", "/nothing")):
            answer = await session.request(method, path, json={"expression": "1"}, headers=headers)
            await answer.read()
            assert (answer.status == 401) == (status == 401)
            if status == 401:
                assert answer.headers["WWW-Authenticate"] == "Bearer"
                assert "token" in (await answer.json())["error"]


async def test_health_says_more_to_who_has_the_token():
    async with server(token=TOKEN) as (session, _):
        stranger = await (await session.get("/health")).json()
        assert stranger == {"status": "ok", "draining": False}
        headers = {"Authorization": f"Bearer {TOKEN}"}
        health = await (await session.get("/health", headers=headers)).json()
        assert health["tools"].keys() >= {"run_code", "retrieve", "calculate"}
        assert {"version", "uptime_s", "sandbox", "sandbox_why", "passages"} <= health.keys()


@pytest.mark.parametrize("token", ["", "two words", "caf\xe9", "line\n"])
def test_a_token_that_fits_no_header_is_refused(token):
    with pytest.raises(ValueError, match="visible ASCII"):
        ServerSettings.model_validate({"token": token})


def test_a_token_is_not_printed():
    assert TOKEN not in repr(ServerSettings.model_validate({"token": TOKEN}))


@pytest.mark.parametrize(
    ("host", "only_here"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.4", False),
        ("tools.example", False),
    ],
)
def test_loopback_is_what_only_this_machine_reaches(host, only_here):
    assert is_loopback(host) == only_here


async def test_an_unknown_path_or_method_is_told_what_there_is():
    async with server() as (session, _):
        unknown = await session.post("/run", json={})
        assert unknown.status == 404
        said = (await unknown.json())["error"]
        assert "no /run here" in said and "POST /run_code" in said and "GET /health" in said
        wrong = await session.get("/run_code")
        assert (wrong.status, await wrong.json()) == (
            405,
            {"error": "/run_code takes POST, not GET"},
        )
        assert wrong.headers["Allow"] == "POST"


async def test_too_large_a_body_is_413(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tool_server.app.MOST_BODY_BYTES", 1 << 20)
    async with server() as (session, _):
        answer = await session.post("/calculate", data=io.BytesIO(b"1" * (2 << 20)), headers=JSON)
        assert answer.status == 413
        assert "/calculate" in (await answer.json())["error"]


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"expression": 5}', b"\xff\xfe", b"null"])
async def test_a_body_that_is_no_request_is_400_in_one_line(body):
    async with server() as (session, _):
        answer = await session.post("/calculate", data=body, headers=JSON)
        assert answer.status == 400
        said = (await answer.json())["error"]
        assert said.startswith("POST /calculate: ") and "\n" not in said


async def test_a_fault_of_ours_is_500_with_its_name_and_the_server_goes_on(monkeypatch, caplog):
    def broken(expression: str) -> str:
        raise KeyError("secret detail")

    monkeypatch.setattr("tool_server.calculate.calculate", broken)
    async with server() as (session, _):
        answer = await session.post("/calculate", json={"expression": "1"})
        assert answer.status == 500
        assert await answer.json() == {
            "error": "/calculate: internal error (KeyError); see the server's log"
        }
        assert "secret detail" in caplog.text
        assert (await session.get("/health")).status == 200


# --- connections ----------------------------------------------------------------------------------

HEADERS = b"POST /calculate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


def asking(body: bytes, more: bytes = b"", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return HEADERS + more + f"Content-Length: {size}\r\n\r\n".encode() + body


ASK = asking(b'{"expression": "6*7"}')


@contextlib.asynccontextmanager
async def connected(
    session: aiohttp.ClientSession, *sent: bytes
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A raw connection to the session's server, over which something was sent."""
    base = session._base_url
    assert base is not None
    reader, writer = await asyncio.open_connection(base.host, base.port)
    try:
        for data in sent:
            writer.write(data)
            await writer.drain()
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def rest(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the server closes the connection."""
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while data := await reader.read(1 << 16):
            got += data
    return got


async def answer_of(reader: asyncio.StreamReader) -> bytes:
    """The next response, which has a length."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(re.findall(rb"Content-Length: (\d+)", head)[0])
    return head + await reader.readexactly(length)


@pytest.mark.parametrize(
    "sent",
    [asking(b"{", length=50), HEADERS + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"],
)
async def test_a_body_that_does_not_end_is_408(sent: bytes):
    bodies = Bodies(whole_s=0.05)
    async with server(bodies=bodies) as (session, _), connected(session, sent) as (reader, _):
        assert b"408 Request Timeout" in await answer_of(reader)
        assert bodies.held == 0


async def test_silent_connections_make_room_for_one_that_asks():
    async with server(most=8) as (session, _), contextlib.AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(connected(session)) for _ in range(20)]
        assert (await session.post("/calculate", json={"expression": "1"})).status == 200
        for reader, _ in silent[:12]:
            assert await rest(reader) == b""
        assert (await session.post("/calculate", json={"expression": "2"})).status == 200


async def test_connections_that_were_admitted_are_kept_and_a_new_one_is_cut():
    async with server(most=2) as (session, _), contextlib.AsyncExitStack() as stack:
        known = [await stack.enter_async_context(connected(session, ASK)) for _ in range(2)]
        for reader, _ in known:
            assert b"42" in await answer_of(reader)
        async with connected(session) as (late, _):
            assert await rest(late) == b""
        for reader, writer in known:
            writer.write(ASK)
            assert b"42" in await answer_of(reader)


async def test_a_request_without_the_token_does_not_make_its_connection_known():
    bearer = f"Authorization: Bearer {TOKEN}\r\n".encode()
    async with server(most=2, token=TOKEN) as (session, _), contextlib.AsyncExitStack() as stack:
        for _ in range(2):
            reader, _ = await stack.enter_async_context(connected(session, ASK))
            assert b"401" in await answer_of(reader)
        body = asking(b'{"expression": "6*7"}', bearer)
        reader, _ = await stack.enter_async_context(connected(session, body))
        assert b"42" in await answer_of(reader)


async def test_bodies_hold_a_bounded_number_of_bytes():
    half = asking(bytes(600), length=1200)
    async with server(bodies=Bodies(most_bytes=1000)) as (session, app):
        async with connected(session, half):
            await until(lambda: app[BODIES].held == 600)
            async with connected(session, half) as (reader, _):
                refused = await answer_of(reader)
                assert b"503" in refused and b"Retry-After: 1" in refused
                assert b"X-Executed: no" in refused
            assert app[BODIES].held == 600
        await until(lambda: app[BODIES].held == 0)
        assert (await session.post("/calculate", json={"expression": "1"})).status == 200


async def test_bodies_of_requests_that_wait_count_until_their_answer():
    ask = asking(json.dumps({"expression": SLOW, "more": "1" * 600}).encode())
    async with server(bodies=Bodies(most_bytes=1000), sandbox_workers=1) as (session, app):
        async with connected(session, ask):
            await until(lambda: app[BODIES].held > 600)
            async with connected(session, ask) as (reader, _):
                assert b"503" in await answer_of(reader)
            assert (await session.post("/calculate", json={"expression": "1"})).status == 200
        await until(lambda: app[BODIES].held == 0)


async def test_the_body_of_a_stranger_is_not_waited_for():
    half = asking(b"{", length=1 << 20)
    async with server(token=TOKEN) as (session, app), connected(session, half) as (reader, _):
        assert b"401" in await answer_of(reader)
        assert app[BODIES].held == 0


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Encoding": "gzip"}, 415),
        ({"Content-Encoding": "identity"}, 200),
    ],
)
async def test_only_json_that_is_not_compressed_is_taken(headers: dict[str, str], status: int):
    async with server() as (session, _):
        answer = await session.post(
            "/calculate", data=b'{"expression": "1"}', headers=JSON | headers
        )
        assert answer.status == status, await answer.text()


async def test_a_server_that_others_reach_has_any_name():
    async with server(host="0.0.0.0", token=TOKEN) as (session, _):
        for path in ("/health", "/metrics"):
            headers = {"Host": "node7:8100", "Authorization": f"Bearer {TOKEN}"}
            assert (await session.get(path, headers=headers)).status == 200


# --- bodies ---------------------------------------------------------------------------------------


async def test_half_a_character_in_a_body_becomes_a_question_mark():
    async with server() as (session, _):
        code = "print(ascii('a\ud800b\U0001f600'))"
        answer = await session.post("/run_code", json={"code": code})
        assert answer.status == 200
        assert (await answer.json())["run_result"]["stdout"] == "'a?b\\U0001f600'\n"


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"expression": "\\ud800", "more": ' + b"[" * 100_000,
        b'{"expression": "\\ud800"',
        b'{"expression": "\xff\\ud800"}',
        b'{"expression": ' + b"9" * 5000 + b', "more": "\\ud800"}',
        b"NaN",
    ],
)
async def test_a_strange_body_is_400(body: bytes):
    async with server() as (session, _):
        answer = await session.post("/calculate", data=body, headers=JSON)
        assert answer.status == 400 and "error" in await answer.json()


async def test_any_body_is_answered_and_the_connection_is_kept():
    texts = st.text(st.characters(codec=None)).map(lambda text: json.dumps(text).encode())
    paths = ["/calculate", "/submit", "/retrieve", "/end_session", "/search"]
    values = st.recursive(st.none() | st.floats() | st.integers() | st.text(), st.lists)
    asked = st.dictionaries(st.sampled_from(["expression", "q", "session", "queries"]), values)
    bodies = st.binary() | texts | asked.map(lambda value: json.dumps(value).encode())
    async with server() as (session, _):
        loop = asyncio.get_running_loop()

        async def post(path: str, body: bytes) -> int:
            async with session.post(path, data=body, headers=JSON) as answer:
                await answer.read()
                return answer.status

        @given(path=st.sampled_from(paths), body=bodies)
        def law(path: str, body: bytes) -> None:
            status = asyncio.run_coroutine_threadsafe(post(path, body), loop).result()
            no_engine = path in ("/retrieve", "/search") and status == 503
            assert status in (200, 400) or no_engine

        await asyncio.to_thread(law)


# --- the token of a user --------------------------------------------------------------------------


def test_a_users_token_is_made_once_and_others_cannot_read_it(tmp_path: Path):
    home = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert token_for("http://127.0.0.1:8100", home) == ""
    token = user_token(home)
    assert len(token) == 32 and user_token(home) == token
    path = user_token_file(home)
    assert path.stat().st_mode & 0o777 == 0o600 and list(path.parent.iterdir()) == [path]
    path.chmod(0o644)
    with pytest.raises(ValueError, match="others can read"):
        user_token(home)


def _is_a_link(path: Path) -> None:
    secret = path.parent.parent / "secret"
    secret.write_text("another-secret-of-the-user")
    secret.chmod(0o600)
    path.parent.chmod(0o777)
    path.symlink_to(secret)


def _holds(content: bytes, mode: int = 0o600) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(content)
        path.chmod(mode)

    return make


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_is_a_link, "others can change this folder"),
        (lambda path: path.mkdir(0o700), "Is a directory"),
        (_holds(b"token", 0o640), "others can read"),
        (_holds(b""), "holds no token"),
        (_holds(b"two words"), "holds no token"),
        (_holds(b"two\nlines"), "holds no token"),
        (_holds(b"\xff\xfe\0"), "holds no token"),
    ],
)
def test_a_file_that_another_user_may_have_made_is_no_token(
    make: Callable[[Path], None], said: str, tmp_path: Path
):
    home = {"XDG_CONFIG_HOME": str(tmp_path)}
    path = user_token_file(home)
    path.parent.mkdir()
    make(path)
    assert token_for("http://127.0.0.1:8100", home) == ""
    with pytest.raises((OSError, ValueError), match=said):
        user_token(home)


def test_a_start_that_was_killed_leaves_nothing_in_the_way(tmp_path: Path):
    home = {"XDG_CONFIG_HOME": str(tmp_path)}
    path = user_token_file(home)
    path.parent.mkdir()
    path.with_name(f"{path.name}.{os.getpid()}").write_text("a draft")
    assert len(user_token(home)) == 32


@pytest.mark.parametrize(
    ("url", "variable", "sent"),
    [
        ("http://127.0.0.1:8100", "", "own"),
        ("http://localhost:1", "", "own"),
        ("http://[::1]:1", "", "own"),
        ("http://10.0.0.4:8100", "", ""),
        ("http://127.0.0.1.example", "", ""),
        ("http://127.0.0.1:8100", "given", "given"),
        ("http://10.0.0.4:8100", "given", "given"),
    ],
)
def test_a_users_token_is_sent_to_this_machine_only(
    url: str, variable: str, sent: str, tmp_path: Path
):
    home = {"XDG_CONFIG_HOME": str(tmp_path), "TOOL_SERVER_TOKEN": variable}
    expected = {"own": user_token(home)}.get(sent, sent)
    assert token_for(url, home) == expected


async def test_a_client_of_the_same_user_finds_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("TOOL_SERVER_TOKEN", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    async with listening(
        app_runner(create_app(ServerSettings(port=0, token=SecretStr(user_token(os.environ)))))
    ) as url:
        async with ToolClient(url, limiter=None) as tools:
            asked = ToolCall(tool="calculate", payload={"expression": "6*7"})
            assert (await tools.call(asked)).body == {"result": "42"}
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))
        async with ToolClient(url, limiter=None) as stranger:
            with pytest.raises(ToolUnavailable, match="TOOL_SERVER_TOKEN"):
                await stranger.call(asked)


async def test_the_outputs_of_all_tests_are_bounded_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tool_server.run_code.MAX_SUBMIT_CHARS", 5000)
    test = {"input": {"stdin": ""}, "output": {"stdout": "a" * 2000}}
    config = {"language": "python", "provided_data": {"test": [test] * 6}}
    config["extra"] = {"run_all_cases": True}
    asked = {"completion": "print('a' * 2000)", "config": config}
    async with server(sandbox_workers=1) as (session, _):
        answer = await (await session.post("/submit", json=asked)).json()
    sizes = [len(one["exec_info"]["run_result"]["stdout"]) for one in answer["tests"]]
    assert sizes[:2] == [2001, 2001] and all(1000 < size < 1100 for size in sizes[2:])
    assert answer["accepted"]  # the whole outputs were compared


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        ("A\nb", "a\nB", True),
        ("\u0130", "i\u0307", True),
        ("i\u0307", "\u0130", True),
        ("ab", "a", False),
        ("1.000000", "1", True),
        (" x \n y", "X\nY ", True),
    ],
)
def test_outputs_are_compared_without_case(got: str, expected: str, same: bool):
    assert same_lines(got, expected) is same


def test_an_output_that_is_too_long_to_be_equal_is_not_lowered():
    class Text(str):
        def strip(self, *_: object) -> "Text":  # pyright: ignore[reportIncompatibleMethodOverride]
            return self

        def split(self, *_: object) -> "list[Text]":  # pyright: ignore[reportIncompatibleMethodOverride]
            return [self]

        def lower(self) -> str:
            raise AssertionError("lowered")

    assert not same_lines(Text("\u0130" * 50), "yes")


async def test_tests_behind_a_failed_one_are_not_run(monkeypatch: pytest.MonkeyPatch):
    runs: list[Program] = []
    run = Sandbox.run

    async def noted(self: Sandbox, program: Program, limits: Limits) -> RunResult:
        runs.append(program)
        return await run(self, program, limits)

    monkeypatch.setattr(Sandbox, "run", noted)
    test = {"input": {"stdin": ""}, "output": {"stdout": "2"}}
    config = {"language": "python", "provided_data": {"test": [test] * 50}}
    async with server(sandbox_workers=2) as (session, _):
        answer = await session.post("/submit", json={"completion": "print(1)", "config": config})
        outcomes = (await answer.json())["tests"]
        assert [outcome["passed"] for outcome in outcomes] == [False]
        assert sum(program.code == "print(1)" for program in runs) == 1  # not the probe's


def test_the_users_token_is_not_sent_to_a_server_of_another_user(tmp_path, monkeypatch):
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n"
    line = (
        "   0: 0100007F:{port} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000 {uid}\n"
    )
    (tmp_path / "tcp").write_text(
        head
        + line.format(port="1FA4", state="0A", uid=1000)
        + line.format(port="1FA4", state="01", uid=7)
        + line.format(port="1FA5", state="0A", uid=1001)
    )
    assert [listeners(port, tmp_path) for port in (8100, 8101, 8102)] == [{1000}, {1001}, set()]
    home = {"HOME": str(tmp_path)}
    token = user_token(home)
    for users, sent in (({os.geteuid()}, token), (set(), token), ({os.geteuid(), 1}, "")):
        monkeypatch.setattr("tool_server.wire.tokens.listeners", lambda port, users=users: users)
        assert token_for("http://127.0.0.1:8100", home) == sent
