"""Clients of other search engines: Search-R1's server and Serper's web search.

Their answers are checked: a wrong answer is reported as a fault, never as an empty result. Serper's
key is read from the environment and only sent in the request header.
"""

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import aiohttp
import msgspec
from yarl import URL

from config.compat import timeout
from tool_server.search.index import Passage
from tool_server.wire.http import Peer, plain_session, post, unreadable
from tool_server.wire.protocol import Again, ToolTimeout, ToolUnavailable
from tool_server.wire.responses import dumps, max_answer_bytes, read_json

KEY_VARIABLE = "SERPER_API_KEY"

SERPER_URL = "https://google.serper.dev/search"

MAX_BATCH_BYTES = 64 << 20
"""Bytes that the answer to a batch of queries may have."""

TIMEOUT_S = 30.0
"""Time for one request to an engine; a longer one is answered with 504."""

CONNECTIONS = 32
"""Requests to an engine at once; further requests wait."""

Form = TypeVar("Form")


class _Hits(msgspec.Struct):
    """Search-R1's answer with scores: a list of passages for each query."""

    result: list[list[Passage]]


class _Box(msgspec.Struct):
    title: str = ""
    link: str = ""
    answer: str | None = None
    snippet: str | None = None


class _Graph(msgspec.Struct, rename="camel"):
    title: str = ""
    description: str = ""
    description_link: str | None = None
    website: str | None = None


class _Page(msgspec.Struct):
    link: str
    title: str = ""
    snippet: str = ""


class Pages(msgspec.Struct, rename="camel"):
    """Serper's answer; nothing of it may be found."""

    organic: list[_Page]
    answer_box: _Box | None = None
    knowledge_graph: _Graph | None = None


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
    async def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """At most k results for each query, best first.

        Raises:
            ToolUnavailable: there is no valid answer.
        """

    async def _post(self, payload: Mapping[str, Any], form: type[Form], queries: int = 1) -> Form:
        """The engine's answer to so many queries."""
        assert self._session is not None
        peer = Peer(
            name="the engine",
            tool="retrieve",
            address_key="search_upstream",
            remedy=self.remedy,
            refused=self.remedy,
            shows=0,  # its words may repeat the key, or what is secret in the URL
        )
        data, limit = dumps(payload), min(queries * max_answer_bytes("retrieve"), MAX_BATCH_BYTES)
        try:
            async with timeout(TIMEOUT_S):
                raw, _ = await post(self._session, self._address, data, peer, limit=limit)
            return read_json(partial(msgspec.json.decode, type=form), raw)
        except (ValueError, RecursionError) as error:
            raise unreadable(error, peer) from error
        except TimeoutError as error:
            why = f"no answer within {TIMEOUT_S:g} s"
            raise ToolTimeout(why, tool="retrieve", again=Again.UNTIL_DEADLINE) from error


class SearchR1(Upstream):
    """Client of Search-R1's `retrieval_server.py`, or of another tool server of this repository.

    Source: https://github.com/PeterGriffinJin/Search-R1 search_r1/search/retrieval_server.py
    """

    kind, endpoint = "search_r1", "/retrieve"
    remedy = "is this Search-R1's server?"

    async def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        asked = {"queries": list(queries), "topk": k, "return_scores": True}
        found = (await self._post(asked, _Hits, len(queries))).result
        if len(found) != len(queries) or not all(
            isinstance(hit.document.get("contents"), str) for hits in found for hit in hits
        ):
            why = f"its answer has not {len(queries)} lists of documents with `contents`"
            raise ToolUnavailable(why, tool="retrieve")
        return [hits[:k] for hits in found]


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

    async def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        tasks = [asyncio.ensure_future(self._one(query, k)) for query in queries]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:  # if one query failed, the others are cancelled
                task.cancel()

    async def _one(self, query: str, k: int) -> list[Passage]:
        if not query.strip():
            return []
        pages = passages_of(await self._post({"q": query, "num": k}, Pages))
        return pages[:k]


def passages_of(found: Pages) -> list[Passage]:
    """The pages with a text, as passages whose first line is the title."""
    pages = [(page.link, page.title, page.snippet) for page in found.organic]
    if graph := found.knowledge_graph:
        link = graph.description_link or graph.website or ""
        pages.insert(0, (link, graph.title, graph.description))
    if box := found.answer_box:
        text = " ".join(filter(None, (box.answer, box.snippet)))
        pages.insert(0, (box.link, box.title, text))
    with_text = [page for page in pages if page[2]]
    return [
        Passage(document={"id": link, "contents": f'"{title}"\n{text}'}, score=1.0 / place)
        for place, (link, title, text) in enumerate(with_text, start=1)
    ]
