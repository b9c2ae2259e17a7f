"""`POST /calculate`."""

from typing import Any

from aiohttp import web
from pydantic import BaseModel

from agent_loop.tools.calculator import CalculationError, calculate
from agent_loop.tools.server.http import body_of
from agent_loop.tools.server.settings import ServerSettings


class CalculateRequest(BaseModel):
    """One expression."""

    expression: str


class Calculate:
    """Arithmetic."""

    name = "calculate"

    def __init__(self, settings: ServerSettings) -> None:
        pass

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/calculate", self._calculate)

    def health(self) -> dict[str, Any]:
        return {}

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def _calculate(self, request: web.Request) -> web.Response:
        asked = await body_of(request, CalculateRequest)
        return web.json_response(calculation_answer(asked.expression))


def calculation_answer(expression: str) -> dict[str, Any]:
    """What `POST /calculate` says."""
    try:
        return {"result": calculate(expression)}
    except CalculationError as error:
        return {"error": str(error)}
