"""`POST /calculate`: arithmetic here, algebra in processes that can be killed."""

from typing import Any

from aiohttp import web
from pydantic import BaseModel

from agent_loop.tools.algebra.pool import AlgebraPool
from agent_loop.tools.calculator import CalculationError, NotArithmetic, calculate
from agent_loop.tools.server.http import Places, body_of
from agent_loop.tools.server.settings import ServerSettings


class CalculateRequest(BaseModel):
    """One expression."""

    expression: str


class Calculate:
    """Arithmetic and algebra. A wrong expression is an answer too: the model reads why."""

    name = "calculate"

    def __init__(self, settings: ServerSettings) -> None:
        self.places = Places(settings.algebra_workers, settings.queue_length)
        self.algebra = AlgebraPool(settings.algebra_s, settings.algebra_memory_mb)

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/calculate", self._calculate)

    def health(self) -> dict[str, Any]:
        return {"algebra_workers": self.algebra.workers}

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        await self.algebra.close()

    async def _calculate(self, request: web.Request) -> web.Response:
        asked = await body_of(request, CalculateRequest)
        try:
            answer = {"result": calculate(asked.expression)}
        except NotArithmetic:
            async with self.places.place():
                answer = await self.algebra.answer(asked.expression)
        except CalculationError as error:
            answer = {"error": str(error)}
        return web.json_response(answer)


def calculation_answer(expression: str) -> dict[str, Any]:
    """What `POST /calculate` says, as far as no algebra is needed."""
    try:
        return {"result": calculate(expression)}
    except CalculationError as error:
        return {"error": str(error)}
