"""Which of several tool servers gets the calls of a session."""

from collections import Counter

import pytest

from agent_loop.calls import servers as servers_module
from agent_loop.calls.client import ToolClient
from agent_loop.calls.servers import FIRST_PAUSE_S, Server, Servers
from agent_loop.tool_actions import run_code
from tests.agent_loop.calls.test_client import NOBODY, Clock, client
from tests.agent_loop.calls.test_client_servers import away
from tests.fakes.tool_server import running
from tool_server.wire.protocol import ToolCall, ToolUnavailable, cell_call, end_session_call

URLS = ["http://a", "http://b", "http://c"]
RAN = {
    "status": "Success",
    "run_result": {"status": "Finished", "stdout": "1\n"},
    "session": {"id": "s", "new": False},
}


def cell(session: str) -> ToolCall:
    return cell_call("1", "", session, began=True)


def asked(servers: Servers, call: ToolCall, *, was_executed: bool = True) -> Server:
    """The server of a request that has ended."""
    server = servers.choose(call)
    servers.begin(server, call)
    servers.end(server, call, was_executed=was_executed)
    return server


def pins(tools: ToolClient) -> dict[str, object]:
    return dict(tools.route.servers._pins)


def test_new_sessions_are_spread_evenly_and_each_stays_at_its_server():
    servers = Servers(URLS, 30.0, Clock())
    names = [f"session {number}" for number in range(30)]
    first = {name: asked(servers, cell(name)) for name in names}
    assert Counter(server.url for server in first.values()) == dict.fromkeys(URLS, 10)
    for name in reversed(names):
        first[name].in_flight += 5  # its load moves no session
        assert asked(servers, cell(name)) is first[name]
        assert asked(servers, end_session_call(name)) is first[name]


def test_processes_that_do_not_know_of_each_other_begin_at_different_servers():
    begun = {asked(Servers(URLS, 30.0, Clock()), cell(f"s{n}")).url for n in range(20)}
    assert begun == set(URLS)


def test_a_new_session_avoids_servers_that_are_dead_fail_or_ask_for_a_pause():
    servers = Servers([*URLS, "http://d"], 30.0, Clock())
    dead, failing, paused, healthy = servers.all
    away(dead)
    failing.note_failure(0.0)
    paused.ask_at = 60.0
    assert {asked(servers, cell(f"s{number}")) for number in range(20)} == {healthy}


def test_a_session_whose_server_is_away_waits_for_it_and_gets_no_other():
    clock = Clock()
    servers = Servers(URLS, 30.0, clock)
    server = asked(servers, cell("s"))
    away(server)
    assert servers.choose(cell("s")) is server
    wait_s = server.take_turn(clock.now)
    assert wait_s == FIRST_PAUSE_S
    assert asked(servers, cell("another")) is not server
    clock.now += wait_s
    assert asked(servers, cell("s")) is server  # tries: if it runs, the session may be there


def test_a_session_moves_only_while_no_server_can_have_executed_a_cell():
    servers = Servers(URLS, 30.0, Clock())
    first = servers.choose(cell("s"))
    servers.begin(first, cell("s"))
    servers.begin(first, cell("s"))  # a second action of the same turn
    servers.end(first, cell("s"), was_executed=False)
    assert servers.choose(cell("s"), [first]) is first
    servers.end(first, cell("s"), was_executed=False)
    assert [server.sessions for server in servers.all] == [0, 0, 0]
    second = servers.choose(cell("s"), [first])
    assert second is not first
    servers.begin(second, cell("s"))
    servers.end(second, cell("s"), was_executed=True)
    assert asked(servers, cell("s"), was_executed=False) is second
    assert servers.choose(cell("s"), [second]) is second


def test_a_session_that_ended_is_forgotten_and_the_number_of_sessions_is_bounded(monkeypatch):
    monkeypatch.setattr(servers_module, "MAX_PINS", 5)
    servers = Servers(URLS, 30.0, Clock())
    for number in range(20):
        asked(servers, cell(f"s{number}"))
        asked(servers, cell("s0"))
    assert list(servers._pins) == ["s16", "s17", "s18", "s19", "s0"]
    assert sum(server.sessions for server in servers.all) == 5
    for name in ("s0", "s0", *list(servers._pins)):
        servers.forget(name)
    assert [server.sessions for server in servers.all] == [0, 0, 0] and not servers._pins


async def test_a_first_cell_that_reached_nobody_begins_its_session_at_another_server():
    async with running([RAN]) as server, client([NOBODY, NOBODY, server.url]) as tools:
        for number in range(6):
            assert (await run_code(tools, "1", "", f"s{number}")).text == "1"
            assert (await run_code(tools, "1", "", f"s{number}", session_began=True)).text == "1"
    assert len(server.seen) == 12


async def test_a_session_whose_server_ends_in_mid_run_is_lost_and_named():
    async with running([RAN]) as other:
        async with running([RAN]) as server:
            tools = await client([server.url, other.url]).__aenter__()
            names = [f"s{number}" for number in range(8)]
            for name in names:
                await run_code(tools, "1", "", name)
            (mine, theirs) = (s for s in tools.route.servers.all)
            assert (mine.sessions, theirs.sessions) == (4, 4)
            held = [name for name in names if tools.route.servers._pins[name].server is mine]
        before = len(other.seen)
        for name in held:
            with pytest.raises(ToolUnavailable, match=f"{server.url} for tool='run_code'") as lost:
                await run_code(tools, "1", "", name, session_began=True)
            assert lost.value.tool == "run_code"
        assert len(other.seen) == before  # nothing was sent to the server without the state
        for name in names:
            if name not in held:
                await run_code(tools, "1", "", name, session_began=True)
        await tools.__aexit__(None, None, None)


async def test_a_client_forgets_a_session_with_its_end_however_the_call_went():
    ends = {"ended": True}
    async with running([RAN, RAN, ends, 404]) as server, client([server.url, server.url]) as tools:
        for name in ("s", "t"):
            await run_code(tools, "1", "", name)
        assert set(pins(tools)) == {"s", "t"}
        await tools.call(end_session_call("s"))
        assert set(pins(tools)) == {"t"}
        with pytest.raises(ToolUnavailable):
            await tools.call(end_session_call("t"))
        assert pins(tools) == {}
