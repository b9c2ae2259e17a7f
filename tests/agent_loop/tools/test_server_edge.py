"""The server's edge over real HTTP: places and their line, the token, errors, health."""

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import example, given
from hypothesis import strategies as st

from agent_loop.tools.protocol import EXECUTED
from agent_loop.tools.server import ServerSettings, app_runner, create_app
from agent_loop.tools.server.app import ENDPOINTS
from agent_loop.tools.server.calculate import Calculate
from agent_loop.tools.server.edge import DRAIN, is_loopback
from agent_loop.tools.server.http import RequestSlots
from tests.listening import listening

pytestmark = pytest.mark.sandbox  # the servers have one

TOKEN = "a-long-secret"
SLOW = "expand((a+b)^100000)"
"""Takes until the time limit."""


def calculator_of(app: web.Application) -> Calculate:
    (endpoint,) = (endpoint for endpoint in app[ENDPOINTS] if isinstance(endpoint, Calculate))
    return endpoint


@contextlib.asynccontextmanager
async def server(**settings: Any) -> AsyncIterator[tuple[aiohttp.ClientSession, web.Application]]:
    """A client's session whose base is a new server, and that server."""
    app = create_app(ServerSettings(port=0, **settings))
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        listening(app_runner(app)) as url,
        aiohttp.ClientSession(url, connector=connector) as session,
    ):
        yield session, app


async def until(true: Any) -> None:
    while not true():  # noqa: ASYNC110
        await asyncio.sleep(0)


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
    async with server(algebra_workers=1, queue_length=8) as (session, app):
        places = calculator_of(app).slots

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
    async with server(algebra_workers=1, algebra_s=60) as (session, app):
        places = calculator_of(app).slots
        calls = [
            asyncio.ensure_future(session.post("/calculate", json={"expression": SLOW}))
            for _ in range(3)
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


async def test_a_worker_that_does_not_start_is_503(monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    async with server() as (session, _):
        answer = await session.post("/calculate", json={"expression": "2x=1"})
        assert answer.status == 503 and "does not start" in (await answer.json())["error"]
        assert answer.headers[EXECUTED] == "maybe"


async def test_a_full_line_says_that_the_call_was_not_executed():
    async with server(algebra_workers=1, algebra_s=60, queue_length=0) as (session, app):
        slow = asyncio.ensure_future(session.post("/calculate", json={"expression": SLOW}))
        await until(lambda: calculator_of(app).slots.active == 1)
        answer = await session.post("/calculate", json={"expression": SLOW})
        assert (answer.status, answer.headers[EXECUTED]) == (429, "no")
        slow.cancel()
        await asyncio.wait([slow])


async def test_a_server_that_drains_says_which_calls_it_may_have_executed():
    async with server(algebra_workers=1, algebra_s=60) as (session, app):
        slow = asyncio.ensure_future(session.post("/calculate", json={"expression": SLOW}))
        await until(lambda: calculator_of(app).slots.active == 1)
        drained = asyncio.ensure_future(app[DRAIN].finish(1000.0, hurry := asyncio.Event()))
        await until(lambda: app[DRAIN].began)
        late = await session.post("/calculate", json={"expression": "1"})
        assert (late.status, late.headers[EXECUTED]) == (503, "no")
        hurry.set()
        assert await drained == 1
        assert ((await slow).status, (await slow).headers[EXECUTED]) == (503, "maybe")


async def test_a_hostile_expression_is_the_models_to_read():
    async with server(algebra_s=0.2) as (session, _):
        answer = await session.post("/calculate", json={"expression": SLOW})
        assert (answer.status, await answer.json()) == (
            200,
            {"error": "time limit: the calculation took longer than 0.2 s"},
        )


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


async def test_too_large_a_body_is_413():
    async with server(max_body_mb=1) as (session, _):
        answer = await session.post("/calculate", data=io.BytesIO(b"1" * (2 << 20)))
        assert answer.status == 413
        assert "/calculate" in (await answer.json())["error"]


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"expression": 5}', b"\xff\xfe", b"null"])
async def test_a_body_that_is_no_request_is_400_in_one_line(body):
    async with server() as (session, _):
        answer = await session.post("/calculate", data=body)
        assert answer.status == 400
        said = (await answer.json())["error"]
        assert said.startswith("POST /calculate: ") and "\n" not in said


async def test_a_fault_of_ours_is_500_with_its_name_and_the_server_goes_on(monkeypatch, caplog):
    def broken(expression: str) -> str:
        raise KeyError("secret detail")

    monkeypatch.setattr("agent_loop.tools.server.calculate.calculate", broken)
    async with server() as (session, _):
        answer = await session.post("/calculate", json={"expression": "1"})
        assert answer.status == 500
        assert await answer.json() == {
            "error": "/calculate: internal error (KeyError); see the server's log"
        }
        assert "secret detail" in caplog.text
        assert (await session.get("/health")).status == 200
