"""`POST /retrieve`, as Search-R1 has it, and the same results as `POST /search`, as Serper has it.

Over an own index, or by another search engine: who asks cannot tell.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp import web
from pydantic import BaseModel, Field

from agent_loop.tools.search import PassageIndex
from agent_loop.tools.search.upstream import Found, UpstreamFault, upstream_of
from agent_loop.tools.server.http import Places, body_of, json_error
from agent_loop.tools.server.settings import ServerSettings

TOPK = 3
"""As Search-R1's server has it."""

NO_ENGINE = "this server has no corpus: start it with --corpus FILE, or with --search-upstream URL"

QUERIES_A_HOP = 32
"""Searched by one thread before another request has its turn."""


class RetrieveRequest(BaseModel):
    """Search-R1's request: it sends the queries of a whole batch at once, or none."""

    queries: list[str] = Field(max_length=8192)
    topk: int | None = Field(default=None, ge=0, le=1000)
    """None and 0 are `TOPK`."""

    return_scores: bool = False


class SearchRequest(BaseModel):
    """Serper's request; what we do not know is ignored."""

    q: str
    num: int = Field(default=10, ge=1, le=1000)


class Retrieve:
    """Passages of an index or of another search engine; 503 without either.

    Raises:
        FileNotFoundError, ValueError: the corpus cannot be indexed or the index opened; the
            engine's URL is wrong or its key missing.
    """

    name = "retrieve"

    def __init__(self, settings: ServerSettings) -> None:
        path, url = settings.corpus_path, settings.search_upstream
        self.index = None if path is None else PassageIndex.of(path)
        self.upstream = None
        if url is not None:
            self.upstream = upstream_of(
                url,
                settings.search_upstream_kind,
                timeout_s=settings.search_timeout_s,
                connections=settings.search_connections,
            )
        self.fault = "" if path or url else NO_ENGINE
        count = settings.search_workers if url is None else settings.search_connections
        self.places = Places(count, settings.queue_length)
        self._threads = ThreadPoolExecutor(settings.search_workers, thread_name_prefix="search")

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/retrieve", self._retrieve)
        router.add_post("/search", self._search)

    def health(self) -> dict[str, Any]:
        engine = None if self.index is None else "index"
        return {
            "search": self.upstream.name if self.upstream else engine,
            "passages": self.index.size if self.index else 0,
        }

    async def start(self) -> None:
        if self.upstream is not None:
            await self.upstream.open()

    async def close(self) -> None:
        if self.upstream is not None:
            await self.upstream.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _retrieve(self, request: web.Request) -> web.Response:
        asked = await body_of(request, RetrieveRequest)
        found = await self._found(asked.queries, asked.topk or TOPK)
        return web.json_response(retrieve_answer(found, asked.return_scores))

    async def _search(self, request: web.Request) -> web.Response:
        asked = await body_of(request, SearchRequest)
        (found,) = await self._found([asked.q], asked.num)
        return web.json_response(serper_answer(asked.q, found))

    async def _found(self, queries: Sequence[str], topk: int) -> list[list[Found]]:
        if self.fault:
            raise json_error(web.HTTPServiceUnavailable, self.fault)
        if not queries:
            return []
        async with self.places.place():
            if self.upstream is None:
                return await self._in_threads(queries, topk)
            try:
                return await self.upstream.search(queries, topk)
            except UpstreamFault as fault:
                raise _refusal(fault) from fault

    async def _in_threads(self, queries: Sequence[str], topk: int) -> list[list[Found]]:
        """By the index, which lets go of the GIL while it searches."""
        assert self.index is not None
        loop = asyncio.get_running_loop()
        hops = [
            loop.run_in_executor(
                self._threads, _by_index, self.index, queries[i : i + QUERIES_A_HOP], topk
            )
            for i in range(0, len(queries), QUERIES_A_HOP)
        ]
        return [found for hop in await asyncio.gather(*hops) for found in hop]


def search_answer(
    index: PassageIndex, queries: Sequence[str], topk: int, return_scores: bool
) -> dict[str, Any]:
    """What `POST /retrieve` says where there is an index."""
    return retrieve_answer(_by_index(index, queries, topk), return_scores)


def retrieve_answer(found: Sequence[Sequence[Found]], return_scores: bool) -> dict[str, Any]:
    """Per query the best passages, as Search-R1 has them."""
    if return_scores:
        return {
            "result": [[{"document": f.document, "score": f.score} for f in own] for own in found]
        }
    return {"result": [[f.document for f in own] for own in found]}


def serper_answer(query: str, found: Sequence[Found]) -> dict[str, Any]:
    """The passages as Serper has pages: the first line is the title."""
    pages = []
    for position, one in enumerate(found, start=1):
        title, _, text = one.document["contents"].partition("\n")
        page = {"title": title.strip('"'), "link": str(one.document.get("id", ""))}
        pages.append(page | {"snippet": text or title, "position": position})
    return {"searchParameters": {"q": query, "type": "search"}, "organic": pages}


def _by_index(index: PassageIndex, queries: Sequence[str], topk: int) -> list[list[Found]]:
    return [
        [
            Found(document={"id": p.id, "contents": p.contents}, score=p.score)
            for p in index.search(query, topk)
        ]
        for query in queries
    ]


def _refusal(fault: UpstreamFault) -> web.HTTPException:
    kinds = {
        429: web.HTTPTooManyRequests,
        503: web.HTTPServiceUnavailable,
        504: web.HTTPGatewayTimeout,
    }
    wait = {} if fault.retry_after_s is None else {"Retry-After": str(fault.retry_after_s)}
    return json_error(kinds.get(fault.status, web.HTTPBadGateway), str(fault), wait)
