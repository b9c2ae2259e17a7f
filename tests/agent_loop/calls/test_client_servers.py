"""Several servers, calls that may happen once, refusals, tokens and numbers."""

import asyncio
import multiprocessing
import threading
from collections.abc import Sequence
from contextlib import AsyncExitStack
from email.utils import formatdate
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.calls import client as client_module
from agent_loop.calls.client import ToolClient, shared_client
from agent_loop.calls.loop_throttle import LoopThrottle
from agent_loop.calls.routes import local_route
from agent_loop.calls.servers import FAILED_LATELY_S, OVERDUE_S, Server, Servers
from config.schema import ToolCacheConfig, ToolConfig
from tests.agent_loop.calls.test_client import (
    CALL,
    GOOD,
    NOBODY,
    Clock,
    RecordingLimiter,
    client,
    mixed_in,
)
from tests.fakes.tool_server import running
from tool_server.wire.protocol import (
    Fault,
    ToolCall,
    ToolRejected,
    ToolResult,
    ToolTimeout,
    ToolUnavailable,
    end_session_call,
    run_code_call,
)
from tool_server.wire.responses import RETRY_AFTER_CAP_S, retry_after_s

ONCE = ToolCall(tool="calculate", payload={"expression": "1+1"}, idempotent=False)
RAN = {"status": "Success", "run_result": {"status": "Finished", "stdout": "1\n"}}


def servers_away(tools: ToolClient) -> int:
    return sum(server.away_since is not None for server in tools.route.servers.all)


def away(server: Server, now: float = 0.0) -> None:
    server.note_failure(now, ToolUnavailable("gone", is_away=True, executed=False))


def chosen(servers: Servers, call: ToolCall, tried: Sequence[Server] = ()) -> Server | float:
    """The server that may be asked now, or the seconds to wait for it."""
    server = servers.choose(call, tried)
    return server.take_turn(servers._clock()) or server


def of(servers: Servers, index: int) -> Any:
    return servers.all[index]


async def test_a_request_that_failed_goes_to_another_server():
    async with (
        running([500]) as bad,
        running([GOOD]) as good,
        client([NOBODY, bad.url, good.url]) as tools,
    ):
        result = await tools.call(CALL)
    assert (result.body, result.attempts) == (GOOD, 2)  # nothing was executed at the first one
    assert (len(bad.seen), len(good.seen)) == (1, 1)


async def test_calls_spread_over_servers_by_their_load():
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(running(["hang"])) for _ in range(3)]
        tools = await stack.enter_async_context(
            client([server.url for server in servers], caches=False)
        )
        calls = [asyncio.ensure_future(tools.call(CALL)) for _ in range(9)]
        while sum(len(server.seen) for server in servers) < 9:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert [len(server.seen) for server in servers] == [3, 3, 3]
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        assert [server.in_flight for server in tools.route.servers.all] == [0, 0, 0]


@pytest.mark.slow
async def test_a_server_that_hangs_costs_half_of_the_time_where_there_is_another():
    async with (
        running(["hang"]) as hangs,
        running([GOOD]) as good,
        client([hangs.url, good.url], timeout_s=6.0) as tools,
    ):
        assert (await tools.call(CALL)).attempts == 2


async def test_a_server_that_asks_for_a_pause_has_it_while_the_other_goes_on():
    limiter, clock = RecordingLimiter(), Clock()
    async with (
        running([(429, {"Retry-After": "60"}), GOOD]) as busy,
        running([GOOD]) as free,
        client([busy.url, free.url], limiter=limiter, clock=clock, caches=False) as tools,
    ):
        for _ in range(4):
            await tools.call(CALL)
        assert (len(busy.seen), len(free.seen)) == (1, 4)
        assert limiter.pauses == [0.0]  # an overload, and no pause for all
        clock.now += 61
        await tools.call(CALL)
        assert len(busy.seen) == 2


@pytest.mark.parametrize("others", [[], [NOBODY]])
async def test_a_server_that_goes_away_while_a_call_waits_for_its_turn_costs_no_grant(others):
    class Slow(RecordingLimiter):
        async def acquire_async(
            self, n: int = 1, timeout_s: float | None = None, source: str = ""
        ) -> float:
            away(of(tools.route.servers, 0))
            return await super().acquire_async(n, timeout_s, source)

    limiter = Slow()
    async with running([GOOD]) as server, client([*others, server.url], limiter=limiter) as tools:
        assert (await tools.call(CALL)).body == GOOD
    assert limiter.acquired == 1


async def test_a_session_that_ended_with_its_server_keeps_no_other_call_waiting():
    async def post(call: ToolCall, server: Server) -> ToolResult:
        raise ToolUnavailable("the session is gone", is_away=True)

    async with client(NOBODY) as tools:
        route = local_route("environment", post, key="e", timeout_s=30.0, clock=tools.clock)
        with pytest.raises(ToolUnavailable):
            await tools.on(route).call(ONCE)
    assert route.servers.all[0].away_since is None


async def test_the_end_of_a_session_does_not_wait_for_a_server_that_is_away():
    clock = Clock()
    async with client(NOBODY, clock=clock) as tools:
        away(of(tools.route.servers, 0))
        with pytest.raises(ToolUnavailable):
            await tools.call(end_session_call("s"))
    assert clock.now == 0.0


def test_a_server_that_is_away_is_tried_by_one_caller_after_growing_pauses():
    now = [0.0]
    servers = Servers(["http://a"], 30.0, lambda: now[0])
    server = of(servers, 0)
    assert chosen(servers, CALL) is server
    for _ in range(50):  # those that were under way
        away(server)
    tries = []
    while now[0] < 10:
        wait_s = chosen(servers, CALL)
        if wait_s is server:
            tries.append(now[0])
            away(server, now[0])
            wait_s = chosen(servers, CALL)
        assert isinstance(wait_s, float)
        now[0] += wait_s
    assert tries == [0.25, 0.75, 1.75, 3.75, 5.75, 7.75, 9.75]
    server.note_answer()
    assert chosen(servers, CALL) is chosen(servers, CALL) is server


def test_a_call_that_may_happen_once_does_not_try_a_server_that_is_away():
    now = [0.0]
    servers = Servers(["http://a", "http://b"], 30.0, lambda: now[0])
    away(of(servers, 0))
    assert [chosen(servers, CALL) for _ in range(3)] == [of(servers, 1)] * 3
    now[0] += 1.0
    assert chosen(servers, ONCE) is of(servers, 1)
    assert chosen(servers, CALL) is of(servers, 0)  # tries
    assert chosen(servers, CALL) is of(servers, 1)  # and the others go on with the other one
    now[0] += 0.5 + OVERDUE_S
    assert chosen(servers, ONCE) is of(servers, 0)  # nobody else does


def test_a_server_that_failed_some_time_ago_is_asked_again():
    now = [0.0]
    servers = Servers(["http://a", "http://b"], 30.0, lambda: now[0])
    for _ in range(20):
        of(servers, 0).note_failure(now[0])
    of(servers, 1).in_flight = 10
    assert chosen(servers, CALL) is of(servers, 1)
    now[0] += FAILED_LATELY_S
    assert chosen(servers, CALL) is of(servers, 0)


@given(
    loads=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    tried=st.sets(st.integers(0, 4)),
)
def test_the_least_loaded_server_that_did_not_fail_the_call_is_chosen(loads, tried):
    servers = Servers([f"http://{i}" for i in range(len(loads))], 30.0, lambda: 0.0)
    for server, load in zip(servers.all, loads, strict=True):
        server.in_flight = load
    failed = [server for i, server in enumerate(servers.all) if i in tried]
    fresh = [server for server in servers.all if server not in failed] or servers.all
    least = min(server.in_flight for server in fresh)
    server = chosen(servers, CALL, failed)
    assert isinstance(server, Server) and server in fresh and server.in_flight == least


@pytest.mark.parametrize(
    "fault",
    [
        *(429, 500, 502, 503, "drop", [1, 2]),
        (503, {"X-Executed": "maybe"}),
        (503, {"X-Executed": "maybe", "Retry-After": "0"}),
    ],
    ids=str,
)
async def test_a_call_that_may_happen_once_is_not_sent_again_when_it_may_have_happened(fault):
    async with running([fault, GOOD]) as server, client(server.url) as tools:
        with pytest.raises(ToolUnavailable, match="may have been executed"):
            await tools.call(ONCE)
    assert len(server.seen) == 1


@pytest.mark.parametrize("status", [429, 503])
async def test_a_call_that_may_happen_once_is_sent_again_when_it_surely_did_not(status):
    async with (
        running([(status, {"X-Executed": "no"}), GOOD]) as server,
        client([NOBODY, server.url]) as tools,
    ):
        assert (await tools.call(ONCE)).attempts == 1
    assert len(server.seen) == 2


async def test_calls_that_may_happen_once_share_no_result():
    async with running([GOOD]) as server, client(server.url) as tools:
        await asyncio.gather(*(tools.call(ONCE) for _ in range(3)))
        assert not (await tools.call(ONCE)).cached
    assert len(server.seen) == 4


@pytest.mark.parametrize("mark", [True, False])
async def test_a_programs_result_is_kept_unless_it_is_marked_as_not_deterministic(mark):
    call = run_code_call("print(1)", "", deterministic=mark)
    async with running([RAN]) as server, client(server.url) as tools:
        await tools.call(call)
        assert (await tools.call(call)).cached == mark


async def test_a_program_that_was_killed_runs_again():
    killed = {"status": "Failed", "run_result": {"status": "Error", "return_code": -9}}
    async with running([killed, RAN]) as server, client(server.url) as tools:
        bodies = [(await tools.call(run_code_call("1", ""))).body for _ in range(2)]
    assert bodies == [killed, RAN]


@pytest.mark.parametrize("message", ["language='cobol' is not supported: ...", "Unsupported: x"])
async def test_what_a_sandbox_never_takes_is_refused_once(message):
    refused = {"status": "SandboxError", "message": message, "run_result": None}
    async with running([refused]) as server, client(server.url) as tools:
        with pytest.raises(ToolRejected, match="upported"):
            await tools.call(run_code_call("1", ""))
    assert len(server.seen) == 1


@pytest.mark.parametrize("begin", ["not supported: ", "exception "])
async def test_a_long_message_of_a_sandbox_is_shortened(begin):
    fault = {"status": "SandboxError", "message": begin + "a" * 1_000_000, "run_result": None}
    async with running([fault]) as server, client(server.url, max_retries=0) as tools:
        with pytest.raises(Fault) as raised:
            await tools.call(run_code_call("1", ""))
    assert begin in str(raised.value) and len(str(raised.value)) < 3000


async def test_a_program_cannot_pass_for_a_refusal_or_for_a_server_that_is_away():
    message = "exception on running code raise Exception('not supported')"
    broken = {"status": "SandboxError", "message": message, "run_result": None}
    async with running([broken]) as server, client(server.url, max_retries=1) as tools:
        with pytest.raises(ToolUnavailable, match="exception on"):
            await tools.call(run_code_call("1", ""))
        assert (len(server.seen), servers_away(tools)) == (2, 0)


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_server_that_does_not_know_us_is_no_mistake_of_the_model(status):
    async with running([status]) as server, client(server.url) as tools:
        with pytest.raises(ToolUnavailable, match="TOOL_SERVER_TOKEN"):
            await tools.call(CALL)
    assert len(server.seen) == 1


@pytest.mark.parametrize(("token", "sent"), [("s3cret", "Bearer s3cret"), ("", None)])
async def test_the_token_of_the_environment_goes_with_every_request(
    monkeypatch, tmp_path, token, sent
):
    monkeypatch.setenv("TOOL_SERVER_TOKEN", token)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))  # else a token of this user is sent
    async with running([GOOD]) as server, client(server.url) as tools:
        await tools.call(CALL)
    assert server.headers[0].get("Authorization") == sent
    assert server.headers[0]["Content-Type"] == "application/json"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"Retry-After": "7"}, 7.0),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": formatdate(1060, usegmt=True), "Date": formatdate(1000)}, 60.0),
        ({"Retry-After": formatdate(940, usegmt=True), "Date": formatdate(1000)}, 0.0),
        ({"Retry-After": formatdate(4e9, usegmt=True), "Date": "?"}, RETRY_AFTER_CAP_S),
    ],
    ids=str,
)
def test_a_pause_may_be_asked_for_in_seconds_or_until_a_date(headers, seconds):
    assert retry_after_s(headers) == seconds


@given(st.text(max_size=60))
def test_any_retry_after_is_a_sane_number_of_seconds_or_none(text):
    seconds = retry_after_s({"Retry-After": text})
    assert seconds is None or 0 <= seconds <= RETRY_AFTER_CAP_S


async def test_the_time_before_the_door_is_part_of_the_calls_time(monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    async with running([GOOD]) as server, client(server.url, clock=clock) as tools:

        async def enter() -> None:
            await clock.sleep(tools.route.timeout_s)

        monkeypatch.setattr(tools._throttle, "enter", enter)
        with pytest.raises(ToolTimeout):
            await tools.call(CALL)
    assert server.seen == []


async def test_a_door_lets_a_portion_in_per_turn_in_order_and_forgets_who_left():
    throttle, inside = LoopThrottle(3), list[int]()

    async def come(number: int) -> None:
        await throttle.enter()
        inside.append(number)

    tasks = [asyncio.ensure_future(come(number)) for number in range(10)]
    sizes = []
    while len(inside) < 9:
        await asyncio.sleep(0)
        sizes.append(len(inside))
        tasks[4].cancel()
    assert inside == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert max(b - a for a, b in zip([0, *sizes], sizes, strict=False)) == 3
    await asyncio.wait(tasks)
    await throttle.enter()


# --- processes, threads, loops ----------------------------------------------------------------

FORK = multiprocessing.get_context("fork")


def config_of(url: str) -> ToolConfig:
    return ToolConfig(server_url=url, cache=ToolCacheConfig(store="memory"))


async def ask_shared(url: str, folder: Path) -> dict[str, Any]:
    tools = await shared_client(config_of(url), mixed_in(folder))
    return (await tools.call(CALL)).body


def ask_in_a_loop_of_its_own(url: str, folder: Path, report: Connection) -> None:
    report.send(asyncio.run(ask_shared(url, folder)))


async def test_a_forked_child_has_a_client_of_its_own_and_leaves_its_parents_alone(tmp_path):
    async with running([GOOD]) as server:
        tools = await shared_client(config_of(server.url), mixed_in(tmp_path))
        other = ToolCall(tool="calculate", payload={"expression": "2"})
        await tools.call(CALL)
        ours, theirs = FORK.Pipe()
        child = FORK.Process(target=ask_in_a_loop_of_its_own, args=(server.url, tmp_path, theirs))
        child.start()
        assert await asyncio.to_thread(ours.poll, 60) and ours.recv() == GOOD
        await asyncio.to_thread(child.join)
        assert child.exitcode == 0
        assert (await tools.call(other)).body == GOOD  # over the connection that was open
        assert len(server.seen) == 3
        await tools.__aexit__(None, None, None)


async def test_threads_have_clients_of_their_own_which_end_with_their_loops(tmp_path):
    before = len(client_module._shared)
    bodies = []

    def work() -> None:
        bodies.append(asyncio.run(ask_shared(server.url, tmp_path)))

    async with running([GOOD]) as server:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join)
        sessions = [shared.opened.requests for shared in client_module._shared.values()]
        assert bodies == [GOOD] * 4 and len(server.seen) == 4
        assert [session for session in sessions if session is not None] == []
        await ask_shared(server.url, tmp_path)
    assert len(client_module._shared) == before + 1
    tools = await shared_client(config_of(server.url), mixed_in(tmp_path))
    await tools.__aexit__(None, None, None)
