"""Clients of other search engines: Search-R1's server and Serper's web search.

Their answers are checked: a wrong answer is reported as a fault, never as an empty result. Serper's
key is read from the environment and only sent in the request header.
"""

import asyncio
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from yarl import URL

from tool_server.wire.http import Peer, plain_session, post
from tool_server.wire.protocol import ToolUnavailable
from tool_server.wire.responses import dumps, max_answer_bytes

KEY_VARIABLE = "SERPER_API_KEY"

SERPER_URL = "https://google.serper.dev/search"

MAX_QUERY_BYTES = 1 << 16
"""Bytes that an answer may have for each query after the first: 16 passages of 4 KB."""

MAX_BATCH_BYTES = 64 << 20
"""Bytes that the answer to a batch of queries may have."""

TIMEOUT_S = 30.0
"""Time for one request to an engine; a longer one is answered with 504."""

CONNECTIONS = 32
"""Requests to an engine at once; further requests wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchHit:
    """One search result, in Search-R1's form."""

    document: Mapping[str, Any]
    """Has `contents`, `id` if the engine gives one, and further fields of the engine."""

    score: float


def upstream_of(url: str) -> "Upstream":
    """The client of an engine: Serper for a URL that ends in `/search`, else Search-R1.

    Args:
        url: URL of a Search-R1 server or of its `/retrieve`, or of Serper's `/search`.

    Raises:
        ValueError: the URL is wrong, or the key is missing.
    """
    try:
        address = URL(url)
    except ValueError as error:
        raise ValueError(f"search_upstream is not a URL: {error}") from error
    if address.scheme not in ("http", "https") or not address.host:
        raise ValueError("search_upstream is not an http:// or https:// URL with a host")
    return Serper(address) if address.path.endswith("/search") else SearchR1(address)


def serper_key(environ: Mapping[str, str]) -> str | None:
    """The key of Serper; None if it is not set, or cannot be one."""
    key = environ.get(KEY_VARIABLE, "").strip()
    return key if key and key.isascii() and key.isprintable() else None


class Upstream(ABC):
    """A search engine behind a URL: a pooled HTTP session, and checks of responses."""

    kind: str
    endpoint: str
    remedy: str
    headers: Mapping[str, str] = {}

    def __init__(self, address: URL) -> None:
        if not address.path.endswith(self.endpoint):
            address = address.with_path(address.path.rstrip("/") + self.endpoint)
        self._address = address
        self._session: aiohttp.ClientSession | None = None
        # without user, password and query, which may be secret
        shown = address.with_user(None).with_query(None).with_fragment(None)
        self.name = f"{self.kind} {shown}"
        """Kind and URL of the engine."""

    async def open(self) -> None:
        self._session = plain_session(self.headers, limit=CONNECTIONS)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    @abstractmethod
    async def search(self, queries: Sequence[str], k: int) -> list[list[SearchHit]]:
        """At most k results for each query, best first.

        Raises:
            ToolUnavailable: there is no valid answer.
        """

    async def _post(self, payload: Mapping[str, Any], queries: int = 1) -> Any:
        """The JSON of the engine's answer to so many queries."""
        assert self._session is not None
        peer = Peer(
            name="the engine",
            tool="retrieve",
            address_key="search_upstream",
            remedy=self.remedy,
            refused=self.remedy,
            shows=0,  # its words may repeat the key, or what is secret in the URL
        )
        limit = max_answer_bytes("retrieve") + (queries - 1) * MAX_QUERY_BYTES
        raw, _ = await post(
            self._session,
            self._address,
            dumps(payload),
            peer,
            limit=min(limit, MAX_BATCH_BYTES),
            timeout_s=TIMEOUT_S,
        )
        try:
            return json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise _invalid("its answer is not JSON") from error


def _invalid(what: str) -> ToolUnavailable:
    """The engine would answer the same again."""
    return ToolUnavailable(what, tool="retrieve")


class SearchR1(Upstream):
    """Client of Search-R1's `retrieval_server.py`, or of another tool server of this repository.

    Source: https://github.com/PeterGriffinJin/Search-R1 search_r1/search/retrieval_server.py
    """

    kind, endpoint = "search_r1", "/retrieve"
    remedy = "is this Search-R1's server?"

    async def search(self, queries: Sequence[str], k: int) -> list[list[SearchHit]]:
        body = await self._post(
            {"queries": list(queries), "topk": k, "return_scores": True}, len(queries)
        )
        result = body.get("result") if isinstance(body, dict) else None
        if not isinstance(result, list) or len(result) != len(queries):
            raise _invalid(f"its answer has no `result` of {len(queries)} lists")
        return [self._hits(items)[:k] for items in result]

    def _hits(self, items: Any) -> list[SearchHit]:
        try:
            hits = [SearchHit(document=i["document"], score=float(i["score"])) for i in items]
            is_good = all(isinstance(hit.document["contents"], str) for hit in hits)
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise _invalid("one of its results has no document or score") from error
        if not is_good or not all(math.isfinite(hit.score) for hit in hits):
            raise _invalid("one of its results has no text or no score")
        return hits


class Serper(Upstream):
    """Client of Serper's web search. Its answer box and knowledge graph come before the pages.

    Source: https://serper.dev
    """

    kind, endpoint = "serper", "/search"
    remedy = f"check {KEY_VARIABLE} and the account's credits"

    def __init__(self, address: URL) -> None:
        super().__init__(address)
        key = serper_key(os.environ)
        if key is None:
            is_set = os.environ.get(KEY_VARIABLE, "").strip()
            raise ValueError(
                f"cannot search by {self.name}: {KEY_VARIABLE} is "
                f"{'not a key' if is_set else 'not set'}; export it where the tool server starts"
            )
        self.headers = {"X-API-KEY": key}

    async def search(self, queries: Sequence[str], k: int) -> list[list[SearchHit]]:
        tasks = [asyncio.ensure_future(self._one(query, k)) for query in queries]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:  # if one query failed, the others are cancelled
                task.cancel()

    async def _one(self, query: str, k: int) -> list[SearchHit]:
        if not query.strip():
            return []
        body = await self._post({"q": query, "num": k})
        try:
            pages = _pages(body)
        except (TypeError, KeyError, AttributeError) as error:
            raise _invalid("its answer is not a list of pages") from error
        return [
            SearchHit(document={"id": link, "contents": f'"{title}"\n{text}'}, score=1.0 / place)
            for place, (link, title, text) in enumerate(pages[:k], start=1)
        ]


def _pages(body: Any) -> list[tuple[str, str, str]]:
    """(link, title, text) of the pages in Serper's answer, which may be none.

    Raises:
        TypeError, KeyError, AttributeError: this is not Serper's answer.
    """
    pages = []
    if box := body.get("answerBox"):
        text = " ".join(filter(None, (box.get("answer"), box.get("snippet"))))
        pages.append((box.get("link", ""), box.get("title", ""), text))
    if graph := body.get("knowledgeGraph"):
        link = graph.get("descriptionLink") or graph.get("website") or ""
        pages.append((link, graph.get("title", ""), graph.get("description", "")))
    for page in body["organic"]:
        pages.append((page["link"], page.get("title", ""), page.get("snippet", "")))
    if not all(isinstance(part, str) for page in pages for part in page):
        raise TypeError("a link, title or text is not a string")
    return [page for page in pages if page[2]]
