"""`POST /retrieve` and `/search` over real HTTP: an own index, and engines behind a URL."""

import asyncio
import gzip
import json
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from tests.listening import listening
from tool_server.app import ENDPOINTS, app_runner, create_app
from tool_server.retrieve import retrieve_answer, serper_answer
from tool_server.search import Passage
from tool_server.search.upstream import Pages, passages_of
from tool_server.settings import ServerSettings

KEY = "0123456789abcdef-secret"

CORPUS = [
    {"id": "0", "contents": '"Sapphire Bridge"\nA book by Lukas Barrow.'},
    {"id": "1", "contents": '"Sapphire Tower"\nA film by Ann Lee.'},
    {"id": "2", "contents": '"Iron Bridge"\nA song by Bo Ray.'},
]

PAGES = {
    "searchParameters": {"q": "iron", "type": "search"},
    "organic": [
        {"title": "Iron", "link": "https://a.example/iron", "snippet": "A metal.", "position": 1},
        {"title": "Ore", "link": "https://b.example/ore", "snippet": "A rock.", "position": 2},
    ],
}


@pytest.fixture(autouse=True)
def _no_sandbox(monkeypatch) -> None:
    """Search needs none, and making one takes time."""
    from tool_server.sandbox import SandboxUnavailable

    def denied(*rest: object, **named: object) -> None:
        raise SandboxUnavailable("not in these tests")

    monkeypatch.setattr("tool_server.run_code.choose_sandbox", denied)


@pytest.fixture
def corpus(tmp_path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(passage) + "\n" for passage in CORPUS))
    return path


def listen(app: web.Application) -> AbstractAsyncContextManager[str]:
    return listening(app_runner(app))


@pytest.fixture
async def url(corpus) -> AsyncIterator[str]:
    async with listen(create_app(ServerSettings(port=0, corpus_path=corpus))) as address:
        yield address


async def ask(url: str, body: object) -> tuple[int, Any, str]:
    """Status, JSON and `Retry-After` of an answer."""
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        wait = response.headers.get("Retry-After", "")
        return response.status, json.loads(await response.read()), wait


async def health(url: str) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as response:
        return await response.json()


# --- as Search-R1's server ------------------------------------------------------------------------


async def test_with_scores_a_result_is_a_document_and_its_score(url):
    asked = {"queries": ["iron bridge", "zzz"], "topk": 2, "return_scores": True}
    status, body, _ = await ask(f"{url}/retrieve", asked)
    assert status == 200
    (first, second), nothing = body.pop("result")
    assert body == {} and nothing == []
    assert first.keys() == second.keys() == {"document", "score"}
    assert (first["document"], second["document"]) == (CORPUS[2], CORPUS[0])
    assert first["score"] > second["score"] > 0


async def test_without_scores_a_result_is_the_document_alone(url):
    for asked in ({"queries": ["iron"]}, {"queries": ["iron"], "return_scores": False}):
        assert await ask(f"{url}/retrieve", asked) == (200, {"result": [[CORPUS[2]]]}, "")


@pytest.mark.parametrize("topk", [{}, {"topk": None}, {"topk": 0}])
async def test_three_passages_come_where_no_number_is_given(url, topk):
    asked = {"queries": ["sapphire by a"]} | topk
    (_, body, _) = await ask(f"{url}/retrieve", asked)
    assert len(body["result"][0]) == 3


async def test_no_queries_have_no_results(url):
    assert (await ask(f"{url}/retrieve", {"queries": []}))[1] == {"result": []}


async def test_the_queries_of_a_whole_batch_keep_their_order(url):
    queries = ["iron", "tower", "granite"] * 500
    _, body, _ = await ask(f"{url}/retrieve", {"queries": queries, "topk": 1})
    assert body["result"] == [[CORPUS[2]], [CORPUS[1]], []] * 500


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({}, "queries"),
        ({"queries": "iron"}, "queries"),
        ({"queries": ["iron"], "topk": -1}, "topk"),
        ({"queries": [None]}, "queries.0"),
        ([], "body"),
    ],
)
async def test_a_wrong_request_is_told_its_field(url, asked, field):
    status, body, _ = await ask(f"{url}/retrieve", asked)
    assert status == 400
    assert field in body["error"]


async def test_the_loop_answers_while_a_search_takes_its_time(corpus, monkeypatch):
    monkeypatch.setattr("tool_server.retrieve.THREADS", 1)
    app = create_app(ServerSettings(port=0, corpus_path=corpus))
    app[ENDPOINTS][1].slots.queue_length = 1
    began, go_on = threading.Event(), threading.Event()

    def slow(self: object, query: str, k: int) -> list[Any]:
        began.set()
        go_on.wait()
        return []

    monkeypatch.setattr("tool_server.search.index.PassageIndex.search", slow)
    async with listen(app) as url:
        tasks = {
            asyncio.create_task(ask(f"{url}/retrieve", {"queries": ["iron"]})) for _ in range(5)
        }
        try:
            while not began.is_set():
                await health(url)  # answered, though a search is under way
            done: set[asyncio.Task[Any]] = set()
            while len(done) < 3:  # one is worked on, one waits, the others have no room
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                await health(url)
        finally:
            go_on.set()
        for status, body, wait in map(asyncio.Task.result, done):
            assert status == 429 and int(wait) >= 1 and "queue full" in body["error"]
        assert (
            sorted(status for status, _, _ in await asyncio.gather(*tasks)) == [200] * 2 + [429] * 3
        )


# --- an index folder, an engine -------------------------------------------------------------------


async def test_an_index_folder_serves_without_its_corpus(corpus, tmp_path):
    from tool_server.search import PassageIndex

    PassageIndex.build(corpus, tmp_path / "index")
    corpus.unlink()
    app = create_app(ServerSettings(port=0, corpus_path=tmp_path / "index"))
    async with listen(app) as url:
        assert (await ask(f"{url}/retrieve", {"queries": ["iron"]}))[1] == {"result": [[CORPUS[2]]]}
        assert (await health(url))["passages"] == 3


async def test_without_an_engine_search_says_so():
    async with listen(create_app(ServerSettings(port=0))) as url:
        status, body, _ = await ask(f"{url}/retrieve", {"queries": ["x"]})
        assert (status, (await health(url))["tools"]["retrieve"]["up"]) == (503, False)
    assert "--corpus" in body["error"] and "--search-upstream" in body["error"]


def test_a_folder_that_is_no_index_is_named_at_the_start(tmp_path):
    with pytest.raises(ValueError, match="not an index of passages"):
        create_app(ServerSettings(port=0, corpus_path=tmp_path))


def test_two_engines_are_one_too_many(tmp_path):
    with pytest.raises(ValueError, match="give one of them"):
        ServerSettings(corpus_path=tmp_path, search_upstream="http://127.0.0.1:1")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host/x", "http://", "http://[", ""])
def test_an_upstream_that_is_no_url_is_named_at_the_start(url):
    with pytest.raises(ValueError, match="search_upstream"):
        create_app(ServerSettings(port=0, search_upstream=url))


# --- another Search-R1 server ---------------------------------------------------------------------


def upstream_settings(url: str) -> ServerSettings:
    return ServerSettings(port=0, search_upstream=url)


@pytest.mark.parametrize("path", ["", "/", "/retrieve"])
@pytest.mark.parametrize("return_scores", [True, False])
async def test_who_asks_cannot_tell_an_upstream_from_an_index(url, path, return_scores):
    asked = {"queries": ["iron bridge", "zzz"], "topk": 2, "return_scores": return_scores}
    async with listen(create_app(upstream_settings(url + path))) as own:
        for tool, body in (("retrieve", asked), ("search", {"q": "iron"})):
            assert await ask(f"{own}/{tool}", body) == await ask(f"{url}/{tool}", body)
        assert (await health(own))["search"] == f"search_r1 {url}/retrieve"


class Engine:
    """An upstream that says what it is told to, and keeps what it was asked."""

    def __init__(self) -> None:
        self.answer: web.Response | None = None
        self.asked: list[Any] = []
        self.keys: list[str | None] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.url = ""

    async def _handle(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        self.keys.append(request.headers.get("X-API-KEY"))
        await self.hold.wait()
        if self.answer is None:
            return web.json_response(PAGES)
        # a response is sent once, so each request has its own
        return web.Response(
            status=self.answer.status,
            body=self.answer.body,
            headers={k: v for k, v in self.answer.headers.items() if k in SENT},
        )


SENT = ("Retry-After", "Location", "Content-Type", "Content-Encoding")


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    made = Engine()
    app = web.Application()
    app.router.add_post("/retrieve", made._handle)
    app.router.add_post("/search", made._handle)
    async with listening(web.AppRunner(app)) as address:
        made.url = address
        yield made
        made.hold.set()


async def test_documents_of_an_upstream_are_passed_on_with_all_they_have(engine):
    document = {"title": "Iron", "text": "A metal.", "contents": '"Iron"\nA metal.'}  # no id: BM25
    engine.answer = web.json_response({"result": [[{"document": document, "score": 7}]]})
    async with listen(create_app(upstream_settings(engine.url))) as own:
        asked = {"queries": ["iron"], "return_scores": True}
        _, body, _ = await ask(f"{own}/retrieve", asked)
    assert body == {"result": [[{"document": document, "score": 7.0}]]}
    assert engine.asked == [{"queries": ["iron"], "topk": 3, "return_scores": True}]
    assert engine.keys == [None]


REFUSALS = [
    (web.Response(status=429, headers={"Retry-After": "7"}), 429, "7"),
    (web.Response(status=429, headers={"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}), 429, "1"),
    (web.Response(status=503, headers={"Retry-After": "5"}), 429, "5"),
    (web.Response(status=429, headers={"Retry-After": "86400"}), 429, "600"),
    (web.Response(status=429, headers={"Retry-After": "9" * 5000}), 429, "600"),
    (web.Response(status=429, headers={"Retry-After": "inf"}), 429, "600"),
    (web.Response(status=503, headers={"Retry-After": "-5"}), 429, "1"),
    (
        web.Response(status=503, headers={"Retry-After": "Fri, 31 Dec 9999 23:59:59 GMT"}),
        429,
        "600",
    ),
    (web.Response(status=500, headers={"Retry-After": "5"}), 502, ""),
    (web.Response(status=502), 503, "1"),
    (web.Response(status=403), 502, ""),
    (web.Response(status=404), 502, ""),
    (web.Response(status=302, headers={"Location": "http://elsewhere.invalid"}), 502, ""),
    (web.Response(body=b"<html>"), 502, ""),
    (web.Response(body=b'{"result": '), 502, ""),
    (web.Response(body=b"\xff\xfe"), 502, ""),
    (web.json_response([]), 502, ""),
    (web.json_response({}), 502, ""),
    (
        web.Response(body=b'{"result": [[]], "organic": [], "x": "' + b"a" * 5_000_000 + b'"}'),
        502,
        "",
    ),
    (
        web.Response(
            body=gzip.compress(b'{"result": [[]], "organic": []}'),
            headers={"Content-Encoding": "gzip"},
        ),
        502,
        "",
    ),
]

FALSE_RESULTS = [
    {"result": None},
    {"result": []},
    {"result": [[], []]},
    {"result": [None]},
    {"result": ["text"]},
    {"result": [[{"id": "0", "contents": "without a score"}]]},
    {"result": [[{"document": {"id": "0"}, "score": 1}]]},
    {"result": [[{"document": {"contents": 5}, "score": 1}]]},
    {"result": [[{"document": {"contents": "x"}, "score": "high"}]]},
    {"result": [[{"document": {"contents": "x"}, "score": float("nan")}]]},
]

FALSE_PAGES = [
    {"message": "Unauthorized."},
    {"organic": None},
    {"organic": ["text"]},
    {"organic": [{"title": "without a link", "snippet": "x"}]},
    {"organic": [{"link": 5, "title": "x", "snippet": "x"}]},
    {"organic": [], "answerBox": "42"},
]


@pytest.mark.parametrize(("said", "status", "wait"), REFUSALS)
@pytest.mark.parametrize("path", ["/retrieve", "/search"])
async def test_a_fault_of_an_upstream_is_told_as_one(engine, monkeypatch, said, status, wait, path):
    monkeypatch.setenv("SERPER_API_KEY", KEY)
    engine.answer = said
    async with listen(create_app(upstream_settings(engine.url + path))) as own:
        got = await ask(f"{own}/retrieve", {"queries": ["iron"]})
    assert (got[0], got[2]) == (status, wait)
    assert got[1].keys() == {"error"}
    assert engine.url in got[1]["error"] and KEY not in got[1]["error"]


@pytest.mark.parametrize(
    ("path", "answer"),
    [("/retrieve", a) for a in FALSE_RESULTS] + [("/search", a) for a in FALSE_PAGES],
)
async def test_an_answer_that_is_none_is_never_an_empty_result(engine, monkeypatch, path, answer):
    monkeypatch.setenv("SERPER_API_KEY", KEY)
    engine.answer = web.json_response(answer)
    async with listen(create_app(upstream_settings(engine.url + path))) as own:
        status, body, _ = await ask(f"{own}/retrieve", {"queries": ["iron"]})
    assert (status, list(body)) == (502, ["error"])


async def test_a_batch_of_queries_may_have_a_larger_answer(engine):
    passages = [[{"document": {"contents": "a" * 10_000}, "score": 1}]] * 600
    engine.answer = web.json_response({"result": passages})
    async with listen(create_app(upstream_settings(engine.url))) as own:
        status, body, _ = await ask(f"{own}/retrieve", {"queries": ["x"] * 600})
    assert status == 200 and len(body["result"]) == 600


async def test_nobody_there_is_503_and_nobody_in_time_is_504(engine, monkeypatch):
    async with listen(create_app(upstream_settings("http://127.0.0.1:9"))) as own:
        assert (await ask(f"{own}/retrieve", {"queries": ["x"]}))[::2] == (503, "1")
    engine.hold.clear()
    monkeypatch.setattr("tool_server.search.upstream.TIMEOUT_S", 0.05)
    async with listen(create_app(upstream_settings(engine.url))) as own:
        status, body, _ = await ask(f"{own}/retrieve", {"queries": ["x"]})
    assert status == 504 and "within 0.05 s" in body["error"]


async def test_an_upstream_gets_so_many_requests_at_once_and_no_more(engine, monkeypatch):
    monkeypatch.setattr("tool_server.retrieve.CONNECTIONS", 2)
    engine.hold.clear()
    engine.answer = web.json_response({"result": [[]]})
    async with listen(create_app(upstream_settings(engine.url))) as own:
        tasks = [asyncio.create_task(ask(f"{own}/retrieve", {"queries": ["x"]})) for _ in range(6)]
        while len(engine.asked) < 2:
            await health(own)
        for _ in range(20):
            await health(own)
        assert len(engine.asked) == 2
        engine.hold.set()
        assert [status for status, _, _ in await asyncio.gather(*tasks)] == [200] * 6


# --- Serper ---------------------------------------------------------------------------------------


async def test_pages_of_serper_are_passages(engine, monkeypatch):
    monkeypatch.setenv("SERPER_API_KEY", f" {KEY}\n")
    async with listen(create_app(upstream_settings(f"{engine.url}/search"))) as own:
        asked = {"queries": ["iron", " "], "topk": 2, "return_scores": True}
        _, body, _ = await ask(f"{own}/retrieve", asked)
        assert (await health(own))["search"] == f"serper {engine.url}/search"
    iron = {"id": "https://a.example/iron", "contents": '"Iron"\nA metal.'}
    ore = {"id": "https://b.example/ore", "contents": '"Ore"\nA rock.'}
    results = [{"document": iron, "score": 1.0}, {"document": ore, "score": 0.5}]
    assert body == {"result": [results, []]}
    assert engine.asked == [{"q": "iron", "num": 2}]  # nothing is asked for no words
    assert engine.keys == [KEY]


async def test_the_answer_box_and_the_knowledge_graph_come_first(engine, monkeypatch):
    monkeypatch.setenv("SERPER_API_KEY", KEY)
    engine.answer = web.json_response(
        PAGES
        | {
            "answerBox": {
                "title": "Melting point",
                "answer": "1538 °C",
                "link": "https://c.example",
            },
            "knowledgeGraph": {
                "title": "Iron",
                "type": "Element",
                "description": "Symbol Fe.",
                "descriptionLink": "https://d.example",
            },
        }
    )
    async with listen(create_app(upstream_settings(f"{engine.url}/search"))) as own:
        _, body, _ = await ask(f"{own}/retrieve", {"queries": ["iron"], "topk": 3})
    assert [document["contents"] for document in body["result"][0]] == [
        '"Melting point"\n1538 °C',
        '"Iron"\nSymbol Fe.',
        '"Iron"\nA metal.',
    ]


async def test_half_a_character_of_an_engine_becomes_a_question_mark(engine, monkeypatch):
    monkeypatch.setenv("SERPER_API_KEY", KEY)
    page = b'{"organic": [{"link": "x", "title": "T", "snippet": "cut \\ud83d"}]}'
    engine.answer = web.Response(body=page)
    async with listen(create_app(upstream_settings(f"{engine.url}/search"))) as own:
        _, body, _ = await ask(f"{own}/retrieve", {"queries": ["iron"]})
    assert body["result"][0][0]["contents"] == '"T"\ncut ?'


@pytest.mark.parametrize("key", [None, "", "  ", "two\nlines", "clé"])
def test_without_a_key_the_start_says_so(monkeypatch, key):
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("SERPER_API_KEY", key)
    with pytest.raises(ValueError, match="SERPER_API_KEY is not") as caught:
        create_app(upstream_settings("https://google.serper.dev/search"))
    assert "two" not in str(caught.value) and "cl" not in str(caught.value)


async def test_a_wrong_key_is_named_but_not_shown(engine, monkeypatch, caplog):
    monkeypatch.setenv("SERPER_API_KEY", KEY)
    engine.answer = web.json_response({"message": f"Unauthorized: {KEY}"}, status=403)
    async with listen(create_app(upstream_settings(f"{engine.url}/search"))) as own:
        status, body, _ = await ask(f"{own}/retrieve", {"queries": ["iron", "ore"]})
        told = json.dumps([body, await health(own)]) + caplog.text
    assert status == 502
    assert "check SERPER_API_KEY" in body["error"]
    assert KEY not in told


async def test_what_is_secret_in_a_url_is_not_shown(engine):
    secret = engine.url.replace("http://", "http://me:hunter2@") + "/?token=hunter2"
    engine.answer = web.Response(status=500)
    async with listen(create_app(upstream_settings(secret))) as own:
        told = json.dumps([await ask(f"{own}/retrieve", {"queries": ["x"]}), await health(own)])
    assert engine.url in told and "hunter2" not in told


# --- as Serper ------------------------------------------------------------------------------------


async def test_an_index_answers_as_serper_does(url):
    _, body, _ = await ask(f"{url}/search", {"q": "iron bridge", "num": 1, "gl": "us"})
    assert body["organic"] == [
        {"title": "Iron Bridge", "link": "2", "snippet": "A song by Bo Ray.", "position": 1}
    ]
    assert (await ask(f"{url}/search", {"num": 1}))[0] == 400


@given(
    st.lists(
        st.tuples(
            st.from_regex(r"\w{1,5}", fullmatch=True),
            st.from_regex(r"\w[\w\n]{0,9}", fullmatch=True),
        ),
        max_size=4,
    )
)
def test_pages_made_of_passages_are_those_passages(passages):
    found = [
        Passage(document={"id": title, "contents": f'"{title}"\n{text}'}, score=1 / place)
        for place, (title, text) in enumerate(passages, start=1)
    ]
    assert passages_of(msgspec.convert(serper_answer("q", found), Pages)) == found
    assert retrieve_answer([found], False)["result"] == [[one.document for one in found]]
