"""What the answers of an environment's server mean; `tool_server.wire.http` has the rest."""

from typing import Any

import pytest
from aiohttp import web

from agent_loop.calls.client import ToolClient
from agent_loop.environments.backends import HttpBackend
from agent_loop.environments.provider import EnvironmentProvider
from config.environments import EnvironmentEntry
from tests.agent_loop.environments.conftest import ROW
from tests.fakes.tool_server import running
from tests.ports import free_ports
from tool_server.wire.http import plain_session
from tool_server.wire.protocol import Again, Fault, ToolRejected, ToolUnavailable

TOKEN = "sesame"


async def failed(url: str) -> Fault:
    """The fault of a step at a server."""
    entry = EnvironmentEntry(use=url, token="GAME_TOKEN")
    async with plain_session() as session:
        with pytest.raises(Fault) as caught:
            await HttpBackend(entry, session, TOKEN).step("s", "left")
    assert caught.value.tool == entry.name and TOKEN not in str(caught.value)
    return caught.value


def error(status: int, text: str = f"no {TOKEN}", **headers: str) -> web.Response:
    return web.json_response({"error": text}, status=status, headers=headers)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (error(422, "write a number"), "write a number"),
        (web.Response(status=422, text="write a number"), "write a number"),
        (web.Response(status=422, text='["a"]'), '["a"]'),
        (error(422, "half \ud800"), "half ?"),
        (error(422, "ü" * 4000), "ü" * 1500),
        (error(422, "x" * 100_000), "x" * 1500),
    ],
)
async def test_the_model_reads_why_its_action_is_invalid(answer: web.Response, words: str):
    async with running([answer]) as server:
        found = await failed(server.url)
    assert isinstance(found, ToolRejected) and str(found) == words


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("headers", [{}, {"X-Executed": "no"}, {"X-Executed": "maybe"}])
async def test_a_server_that_says_come_later_has_done_nothing_if_it_says_so(
    status: int, headers: Any
):
    async with running([error(status, "full", **headers, **{"Retry-After": "3"})]) as server:
        found = await failed(server.url)
    assert isinstance(found, ToolUnavailable) and str(found) == f"HTTP {status} full"
    assert (found.again, found.retry_after_s) == (Again.UNTIL_DEADLINE, 3.0)
    assert found.executed == (headers != {"X-Executed": "no"})


async def test_a_server_that_nobody_runs_is_asked_again():
    [port] = free_ports(1)
    found = await failed(f"http://127.0.0.1:{port}")
    assert (found.executed, found.again, found.is_away) == (False, Again.UNTIL_DEADLINE, True)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (error(500, "step: its process ended by signal 9"), "HTTP 500 step: its process ended"),
        (error(500, "x" * 4000), f"HTTP 500 {'x' * 1500}"),
        (error(503), "HTTP 503 no ***"),
        (error(429, **{"X-Executed": "maybe"}), "HTTP 429"),
        (error(400), "{name} refuses the request (HTTP 400 no ***); is it a server of env"),
        (error(404, "no session 's'"), "HTTP 404 no session 's'; is it a server of environments"),
        (error(401), "{name} answers HTTP 401; is it a server of environments, and GAME_TOKEN"),
        (error(408), "HTTP 408"),
        (error(502), "HTTP 502"),
        ("drop", "ServerDisconnectedError"),
        (web.json_response([1]), "its answer is no JSON object"),
        (web.Response(text="<html>"), "JSONDecodeError"),
        (web.Response(body=b"[" * 200_000), "RecursionError"),
    ],
)
async def test_a_step_that_may_have_been_executed_is_not_repeated(
    answer: Any, words: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("GAME_TOKEN", TOKEN)
    start = {"session": "s", "messages": "go", "tools": []}
    async with (
        running([start, answer, {"observation": "once more"}]) as server,
        ToolClient("http://127.0.0.1:1", limiter=None, timeout_s=30) as client,
    ):
        entry = EnvironmentEntry(use=server.url, token="GAME_TOKEN")
        episode = await EnvironmentProvider(entry, client).begin(client, ROW).__aenter__()
        with pytest.raises(ToolUnavailable) as caught:
            await episode.step("left")
    assert [path for path, _ in server.seen] == ["/reset", "/step"]
    found = str(caught.value)
    assert words.replace("{name}", f"environment={entry.name} at {server.url}") in found
    assert server.url in found and caught.value.tool == entry.name and TOKEN not in found


async def test_numbers_that_are_none_are_passed_on_for_the_check_of_the_step():
    said = web.Response(text='{"reward": NaN, "observation": "\\ud800"}')
    async with running([said]) as server, plain_session() as session:
        backend = HttpBackend(EnvironmentEntry(use=server.url), session)
        answer = await backend.step("s", "left")
    assert answer["reward"] != answer["reward"] and answer["observation"] == "\ud800"
