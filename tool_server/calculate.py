"""`POST /calculate`: arithmetic in this process, algebra in processes that can be killed."""

from importlib import metadata
from typing import Any

from aiohttp import web
from pydantic import BaseModel

from tool_server.algebra.pool import AlgebraPool, Overloaded, WorkerLost
from tool_server.calculator import (
    MAX_BITS,
    MAX_LENGTH,
    CalculationError,
    NotArithmetic,
    calculate,
)
from tool_server.http import (
    RequestSlots,
    body_of,
    fingerprint_of,
    json_answer,
    json_error,
)
from tool_server.settings import ServerSettings


class CalculateRequest(BaseModel):
    """One expression."""

    expression: str


class Calculate:
    """The tool for arithmetic and algebra. A wrong expression is answered with 200 and its
    error."""

    name, fault = "calculate", ""

    def __init__(self, settings: ServerSettings) -> None:
        self.slots = RequestSlots(settings.algebra_workers)
        self.algebra = AlgebraPool(settings.algebra_s, settings.algebra_memory_mb)
        self.fingerprint = fingerprint_of(
            "calculate",
            metadata.version("sympy"),
            (settings.algebra_s, settings.algebra_memory_mb, MAX_LENGTH, MAX_BITS),
        )

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
            async with self.slots.hold():
                try:
                    answer = await self.algebra.answer(asked.expression)
                except Overloaded as error:
                    raise json_error(web.HTTPServiceUnavailable, str(error)) from error
                except WorkerLost as error:  # maybe because of the expression
                    raise json_error(web.HTTPInternalServerError, str(error)) from error
        except CalculationError as error:
            answer = {"error": str(error)}
        return json_answer(answer)
