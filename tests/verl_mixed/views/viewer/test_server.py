"""The viewer answers only its user, and no foreign page."""

import sqlite3
from contextlib import closing
from pathlib import Path

import aiohttp
import pytest

from tests.verl_mixed.views.viewer.conftest import Serve
from tests.verl_mixed.views.viewer.episodes import line, write_run
from verl_mixed.views.viewer.server import HEADERS

PATHS = ("/", "/viewer.js", "/tokens.js", "/viewer.css", "/api/run", "/api/trajectories")


async def test_every_answer_carries_the_policy_and_allows_no_other_origin(
    tmp_path: Path, serve: Serve
):
    run_dir = write_run(tmp_path / "run", [line()])
    async with serve(run_dir) as url, aiohttp.ClientSession() as session:
        for path in (*PATHS, "/api/trajectories/1.1", "/api/trajectories/9.9", "/nothing"):
            async with session.get(url + path, headers={"Origin": "http://evil.com"}) as answer:
                assert {name: answer.headers[name] for name in HEADERS} == HEADERS
                assert "Access-Control-Allow-Origin" not in answer.headers
            async with session.get(url + path, headers={"Host": "evil.com"}) as answer:
                assert answer.status == 403
                assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(
            (host, 200)
            for host in ("127.0.0.1", "127.0.0.1:1", "localhost:8", "LOCALHOST", "[::1]:2")
        ),
        *(
            (host, 403)
            for host in ("evil.com", "127.0.0.1.evil.com", "localhost.evil.com:80", "[::2]")
        ),
        *(
            (host, 403)
            for host in ("evil.com@127.0.0.1.x", "[bad", "", "0.0.0.0", "evil.com#127.0.0.1")
        ),
    ],
)
async def test_only_loopback_names_are_answered(
    tmp_path: Path, serve: Serve, host: str, status: int
):
    async with (
        serve(write_run(tmp_path / "run", [line()])) as url,
        aiohttp.ClientSession() as session,
    ):
        for path in ("/", "/api/run"):
            async with session.get(url + path, headers={"Host": host}) as answer:
                assert answer.status == status


async def test_list_is_filtered_and_paged(tmp_path: Path, serve: Serve):
    lines = [
        line(source=source, step=step, member=member, reward=float(member))
        for source in ("math", "nq")
        for step in (1, 2)
        for member in range(2)
    ]
    run_dir = write_run(tmp_path / "run", lines)
    async with serve(run_dir) as url, aiohttp.ClientSession() as session:

        async def ask(**query: str) -> dict:
            async with session.get(f"{url}/api/trajectories", params=query) as answer:
                return await answer.json()

        assert (await ask())["total"] == 8
        solved = await ask(source="nq", step="2", outcome="solved", reward_min="0.5", text="answ")
        assert [(row["source"], row["step"], row["reward"]) for row in solved["rows"]] == [
            ("nq", 2, 1.0)
        ]
        page = await ask(offset="3", limit="2")
        assert page["total"] == 8
        assert [row["id"] for row in page["rows"]] == ["1.4", "2.1"]
        [group, *_] = {row["group"] for row in page["rows"]}
        assert (await ask(group=group))["total"] == 2


@pytest.mark.parametrize(
    "query",
    [
        *("step=x", "step=3-", "step=7-3", "step=" + "9" * 30, "step=" + "9" * 5000),
        *("reward_min=x", "reward_min=nan", "reward_max=inf", "reward_min=1&reward_max=0"),
        *(f"{name}={value}" for name in ("offset", "limit") for value in ("x", "-1", "9" * 30)),
    ],
)
async def test_filter_that_cannot_be_read_is_refused(tmp_path: Path, serve: Serve, query: str):
    async with (
        serve(write_run(tmp_path / "run", [line()])) as url,
        aiohttp.ClientSession() as session,
        session.get(f"{url}/api/trajectories?{query}") as answer,
    ):
        assert answer.status == 400
        assert (await answer.json())["error"]


async def test_an_answer_that_fails_says_why_and_carries_the_policy(
    tmp_path: Path, serve: Serve, caplog: pytest.LogCaptureFixture
):
    run_dir = write_run(tmp_path / "run", [line()])
    async with serve(run_dir) as url, aiohttp.ClientSession() as session:
        with closing(sqlite3.connect(run_dir / "viewer.sqlite")) as database, database:
            database.execute("DROP TABLE unreadable")
        async with session.get(f"{url}/api/run") as answer:
            assert answer.status == 500
            assert {name: answer.headers[name] for name in HEADERS} == HEADERS
            assert "no such table: unreadable" in (await answer.json())["error"]
    assert "cannot answer '/api/run'" in caplog.text


@pytest.mark.parametrize("name", ["1." + "9" * 30, "1." + "9" * 5000, "9" * 5000 + ".1", "1.²"])
async def test_names_that_no_trajectory_has_are_not_found(tmp_path: Path, serve: Serve, name: str):
    async with (
        serve(write_run(tmp_path / "run", [line()])) as url,
        aiohttp.ClientSession() as session,
        session.get(f"{url}/api/trajectories/{name}") as answer,
    ):
        assert answer.status == 404


@pytest.mark.parametrize("ids", [[-1], [2**40], [-(10**30)]])
async def test_tokens_that_no_tokenizer_has_are_shown_as_ids(
    tmp_path: Path, serve: Serve, ids: list[int]
):
    async with (
        serve(write_run(tmp_path / "run", [line(response_ids=ids)])) as url,
        aiohttp.ClientSession() as session,
        session.get(f"{url}/api/trajectories/1.1") as answer,
    ):
        shown = await answer.json()
        assert (answer.status, shown["tokens"], shown["response_ids"]) == (200, None, ids)
        assert any("cannot decode its tokens" in problem for problem in shown["problems"])


async def test_files_that_grow_or_go_are_followed(tmp_path: Path, serve: Serve):
    run_dir = write_run(tmp_path / "run", [line()])
    async with serve(run_dir) as url, aiohttp.ClientSession() as session:
        write_run(run_dir, [line(step=2), line(step=2, member=1)])
        async with session.get(f"{url}/api/trajectories") as answer:
            assert (await answer.json())["total"] == 3
        async with session.get(f"{url}/api/trajectories/2.2") as answer:
            assert (await answer.json())["key"].endswith("_1_0")
        (run_dir / "trajectories" / "1.jsonl").unlink()
        async with session.get(f"{url}/api/trajectories") as answer:
            assert (await answer.json())["total"] == 2
        async with session.get(f"{url}/api/trajectories/1.1") as answer:
            assert answer.status == 404 and "removed" in (await answer.json())["error"]
