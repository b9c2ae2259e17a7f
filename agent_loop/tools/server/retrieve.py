"""`POST /retrieve`, as Search-R1 has it."""

from collections.abc import Sequence
from typing import Any

from aiohttp import web
from pydantic import BaseModel, Field

from agent_loop.tools.search import PassageIndex
from agent_loop.tools.server.http import body_of
from agent_loop.tools.server.settings import ServerSettings


class RetrieveRequest(BaseModel):
    """Search-R1's request."""

    queries: list[str] = Field(min_length=1, max_length=256)
    topk: int | None = Field(default=3, ge=1, le=100)
    return_scores: bool = False


class Retrieve:
    """Passages of the corpus; 503 without one.

    Raises:
        FileNotFoundError, ValueError: the corpus cannot be indexed.
    """

    name = "retrieve"

    def __init__(self, settings: ServerSettings) -> None:
        path = settings.corpus_path
        self.index = None if path is None else PassageIndex.build(path)

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/retrieve", self._retrieve)

    def health(self) -> dict[str, Any]:
        return {"passages": self.index.size if self.index else 0}

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def _retrieve(self, request: web.Request) -> web.Response:
        asked = await body_of(request, RetrieveRequest)
        if self.index is None:
            raise web.HTTPServiceUnavailable(
                text="this server has no corpus: start it with --corpus FILE"
            )
        topk = asked.topk or 3
        answer = search_answer(self.index, asked.queries, topk, asked.return_scores)
        return web.json_response(answer)


def search_answer(
    index: PassageIndex, queries: Sequence[str], topk: int, return_scores: bool
) -> dict[str, Any]:
    """What `POST /retrieve` says: per query the best passages, as Search-R1 has them."""
    found = [index.search(query, topk) for query in queries]
    documents = [[{"id": p.id, "contents": p.contents} for p in passages] for passages in found]
    if not return_scores:
        return {"result": documents}
    scored = [
        [
            {"document": document, "score": passage.score}
            for document, passage in zip(own, passages, strict=True)
        ]
        for own, passages in zip(documents, found, strict=True)
    ]
    return {"result": scored}
