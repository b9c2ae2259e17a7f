"""Passage search: `POST /retrieve` in Search-R1's protocol, `POST /search` in Serper's.

The results come from an index of this server or from another search engine; their form is the same.
"""

import asyncio
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any

import msgspec
from aiohttp import web
from pydantic import BaseModel, Field

from tool_server.http import (
    RequestSlots,
    body_of,
    fingerprint_of,
    json_answer,
    json_error,
)
from tool_server.search import Passage, PassageIndex
from tool_server.search.upstream import CONNECTIONS, upstream_of
from tool_server.settings import ServerSettings
from tool_server.wire.protocol import NOT_EXECUTED, Again, ToolTimeout, ToolUnavailable

TOPK = 3
"""Results per query if the request names no number; the default of Search-R1's server."""

NO_ENGINE = (
    "the server has no corpus: start it with --corpus FILE, with --search-upstream URL, or with "
    "SERPER_API_KEY"
)

THREADS = 2
"""Threads that search the corpus; further requests wait."""

QUERIES_PER_JOB = 32
"""Queries of a request that one thread searches before it takes another request's queries."""


class RetrieveRequest(BaseModel):
    """Search-R1's request, with the queries of a whole batch."""

    queries: list[str] = Field(max_length=8192)
    topk: int | None = Field(default=None, ge=0, le=1000)
    """Results per query; None and 0 mean `TOPK`."""

    return_scores: bool = False


class SearchRequest(BaseModel):
    """Serper's request; other fields are ignored."""

    q: str
    num: int = Field(default=10, ge=1, le=1000)


class Retrieve:
    """The tool for passage search, with an index or another engine; without either it answers 503.

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
            self.upstream = upstream_of(url)
        self.fault = "" if path or url else NO_ENGINE
        self.fingerprint = fingerprint_of(
            "retrieve",
            # not the name and time of the corpus file, because a copy has the same passages
            (self.index.corpus.sha256, self.index.corpus.limit, self.index.size)
            if self.index
            else None,
            metadata.version("tantivy"),
            self.upstream.name if self.upstream else None,
            TOPK,
        )
        self.slots = RequestSlots(THREADS if url is None else CONNECTIONS)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="search")

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
        hits = await self._hits(asked.queries, asked.topk or TOPK)
        return json_answer(retrieve_answer(hits, asked.return_scores))

    async def _search(self, request: web.Request) -> web.Response:
        asked = await body_of(request, SearchRequest)
        (hits,) = await self._hits([asked.q], asked.num)
        return json_answer(serper_answer(asked.q, hits))

    async def _hits(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        if self.fault:
            raise json_error(web.HTTPServiceUnavailable, self.fault, NOT_EXECUTED)
        if not queries:
            return []
        async with self.slots.hold():
            if self.upstream is None:
                return await self._in_threads(queries, topk)
            try:
                return await self.upstream.search(queries, topk)
            except ToolUnavailable as fault:
                raise _refusal(fault, self.upstream.name) from fault

    async def _in_threads(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        """Search the index in threads; tantivy releases the GIL while it searches."""
        assert self.index is not None
        search, loop = self.index.search, asyncio.get_running_loop()

        def found(part: Sequence[str]) -> list[list[Passage]]:
            return [search(query, topk) for query in part]

        parts = (queries[i : i + QUERIES_PER_JOB] for i in range(0, len(queries), QUERIES_PER_JOB))
        jobs = [loop.run_in_executor(self._threads, found, part) for part in parts]
        return [hits for job in await asyncio.gather(*jobs) for hits in job]


def retrieve_answer(hits: Sequence[Sequence[Passage]], return_scores: bool) -> dict[str, Any]:
    """The answer of `POST /retrieve`: a list of passages for each query."""
    if return_scores:
        return {"result": msgspec.to_builtins(hits)}
    return {"result": [[passage.document for passage in found] for found in hits]}


def serper_answer(query: str, hits: Sequence[Passage]) -> dict[str, Any]:
    """The answer of `POST /search`; the first line of a passage becomes the title of a page."""
    pages = []
    for position, one in enumerate(hits, start=1):
        title, _, text = one.document["contents"].partition("\n")
        page = {"title": title.strip('"'), "link": str(one.document.get("id", ""))}
        pages.append(page | {"snippet": text or title, "position": position})
    return {"searchParameters": {"q": query, "type": "search"}, "organic": pages}


def _refusal(fault: ToolUnavailable, engine: str) -> web.HTTPException:
    """The answer for a fault of another engine: 429 if it is overloaded and 503 if it is away, for
    which all callers wait; 504 for no answer in time, 502 if it failed or answered wrongly."""
    why = f"cannot search by {engine}: {fault}"
    if fault.again is not Again.UNTIL_DEADLINE:
        return json_error(web.HTTPBadGateway, why)
    if isinstance(fault, ToolTimeout):
        return json_error(web.HTTPGatewayTimeout, why)
    kind = web.HTTPTooManyRequests if fault.is_overload else web.HTTPServiceUnavailable
    pause_s = max(1, math.ceil(fault.retry_after_s or 0))
    return json_error(kind, why, {"Retry-After": str(pause_s)})
