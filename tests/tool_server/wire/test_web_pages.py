"""No server of ours takes a request that a page in somebody's browser could have sent."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from agent_loop.environments.serve import EnvironmentServer
from agent_loop.gateway.server import Gateway
from tests.agent_loop.environments.conftest import ROW, WORLDS
from tests.agent_loop.gateway.test_session import session_of
from tests.listening import listening
from tests.verl_mixed.views.viewer.conftest import served
from tests.verl_mixed.views.viewer.episodes import line, write_run
from tool_server.app import app_runner, create_app
from tool_server.settings import ServerSettings

Ask = Callable[[dict[str, str]], Awaitable[int]]
JSON = {"Content-Type": "application/json"}


def asking(http: aiohttp.ClientSession, method: str, url: str, body: object) -> Ask:
    async def ask(headers: dict[str, str]) -> int:
        data = json.dumps(body).encode()
        async with http.request(method, url, data=data, headers=JSON | headers) as answer:
            return answer.status

    return ask


@asynccontextmanager
async def tool_server(http: aiohttp.ClientSession, folder: Path) -> AsyncIterator[Ask]:
    async with listening(app_runner(create_app(ServerSettings(port=0)))) as url:
        yield asking(http, "POST", f"{url}/calculate", {"expression": "1"})


@asynccontextmanager
async def environment(http: aiohttp.ClientSession, folder: Path) -> AsyncIterator[Ask]:
    served = EnvironmentServer(f"{WORLDS}:Guess")
    async with listening(web.AppRunner(served.app())) as url:
        yield asking(http, "POST", f"{url}/reset", {"row": ROW.visible()})


@asynccontextmanager
async def gateway(http: aiohttp.ClientSession, folder: Path) -> AsyncIterator[Ask]:
    gateway, session = Gateway(), session_of("hermes", [], takes_reward=True)
    address = await gateway.open(session)
    yield asking(http, "POST", address.reward, {"reward": 0.5})
    await gateway.close()


@asynccontextmanager
async def viewer(http: aiohttp.ClientSession, folder: Path) -> AsyncIterator[Ask]:
    async with served(write_run(folder / "run", [line()])) as url:
        yield asking(http, "GET", f"{url}/api/run", None)


SERVERS = [tool_server, environment, gateway, viewer]
TAKEN = (
    *({}, {"Sec-Fetch-Site": "none"}, {"Sec-Fetch-Mode": "cors"}, {"Host": "localhost:8100"}),
    *({"Host": "LOCALHOST"}, {"Host": "[::1]:8100"}, {"Host": "127.0.0.1"}),
)
OF_A_PAGE = (
    *({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": "http://127.0.0.1:8100"}),
    *({"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}),
    *({"Host": "evil.example"}, {"Host": "127.0.0.1.evil.example:80"}, {"Host": ""}),
    *(
        {"Host": "evil.example", "Sec-Fetch-Site": "same-origin"},
        {"Host": "localhost.evil.example"},
        {"Host": "[::1].evil.example"},
        {"Host": "127.0.0.1:80@evil.example:80"},
    ),
    {"Content-Type": "text/plain", "Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"},
)


@pytest.mark.sandbox  # the tool server has one
@pytest.mark.parametrize("server", SERVERS)
async def test_only_requests_of_programs_are_taken(server: Callable, tmp_path: Path):
    async with aiohttp.ClientSession() as http, server(http, tmp_path) as ask:
        taken = [await ask(headers) for headers in TAKEN]
        assert taken == [200] * len(TAKEN)
        assert [await ask(headers) for headers in OF_A_PAGE] == [403] * len(OF_A_PAGE)
        # a page's own request reaches the server that has a page, and no other
        assert await ask({"Sec-Fetch-Site": "same-origin"}) == (200 if server is viewer else 403)


@pytest.mark.sandbox
@pytest.mark.parametrize("server", [tool_server, environment])
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_body_that_a_page_may_send_without_asking_is_refused(
    server: Callable, kind: str, tmp_path: Path
):
    async with aiohttp.ClientSession() as http, server(http, tmp_path) as ask:
        assert await ask({"Content-Type": kind}) == 415
        assert await ask({"Content-Type": "application/json; charset=utf-8"}) == 200
