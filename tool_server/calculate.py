"""`POST /calculate`: arithmetic in this process, algebra in interpreters of the sandbox."""

import asyncio
import json
import signal
from importlib import metadata
from pathlib import Path
from typing import Any

from aiohttp import web
from pydantic import BaseModel

from tool_server.calculator import (
    MAX_BITS,
    MAX_LENGTH,
    CalculationError,
    NotArithmetic,
    calculate,
)
from tool_server.http import body_of, fingerprint_of, json_answer, json_error
from tool_server.interpreters import Interpreters
from tool_server.run_code import RunCode
from tool_server.sandbox import Limits, RunStatus, SandboxUnavailable
from tool_server.settings import ServerSettings

ALGEBRA = Limits(wall_s=5.0, memory_mb=1024)
"""Limits of one algebra expression."""

_FOLDER = Path(__file__).parent
_FILES = {
    f"{_FOLDER.name}/{name}": (_FOLDER / name).read_bytes()
    for name in ("__init__.py", "calculator.py", "algebra.py")
}
_CELL = """import json, resource
from tool_server.algebra import answer
said = answer({!r})
print(json.dumps([said, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10]))"""


class CalculateRequest(BaseModel):
    """One expression."""

    expression: str


class Calculate:
    """The tool for arithmetic and algebra. A wrong expression is answered with 200 and its
    error.

    Algebra runs in a sandbox like that of `run_code`, whose zygote has loaded sympy, and in the
    places of `run_code`. Interpreters are kept between calls, because sympy's caches make a call
    several times faster.
    """

    name, fault = "calculate", ""

    def __init__(self, settings: ServerSettings, run_code: RunCode) -> None:
        self.slots = run_code.slots
        self._run_code = run_code
        self._free = [str(number) for number in range(settings.sandbox_workers)]
        self._starting: asyncio.Future[Interpreters] | None = None
        self.fingerprint = fingerprint_of(
            "calculate", metadata.version("sympy"), (ALGEBRA, MAX_LENGTH, MAX_BITS)
        )

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/calculate", self._calculate)

    def health(self) -> dict[str, Any]:
        return {}

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        if self._starting is not None:
            interpreters = await self._starting
            await interpreters.close()
            interpreters.sandbox.close()

    async def _calculate(self, request: web.Request) -> web.Response:
        asked = await body_of(request, CalculateRequest)
        try:
            answer = {"result": calculate(asked.expression)}
        except NotArithmetic:
            answer = await self.answer(asked.expression)
        except CalculationError as error:
            answer = {"error": str(error)}
        return json_answer(answer)

    async def answer(self, expression: str) -> dict[str, str]:
        """`{"result": text}` or `{"error": text}` of algebra.

        Raises:
            web.HTTPInternalServerError: the sandbox failed, or an interpreter was killed twice.
        """
        if self._run_code.fault:
            return {"error": "only arithmetic is calculated here: there is no sandbox for algebra"}
        async with self.slots.hold():
            name = self._free.pop()
            try:
                return await self._ask(name, expression)
            except SandboxUnavailable as error:
                raise json_error(web.HTTPInternalServerError, str(error)) from error
            finally:
                self._free.append(name)

    async def _ask(self, name: str, expression: str, attempt: int = 1) -> dict[str, str]:
        interpreters = await self._interpreters()
        cell = _CELL.format(expression)
        result, _ = await interpreters.run_cell(name, cell, "", _FILES, ALGEBRA)
        if result.status is RunStatus.FINISHED and result.stdout:
            answer, peak_mb = json.loads(result.stdout.splitlines()[-1])
            if peak_mb >= ALGEBRA.memory_mb // 2:  # sympy's caches keep what it used
                await interpreters.end(name)
            return answer
        await interpreters.end(name)
        if result.status is RunStatus.TIME_LIMIT:
            limit = f"the calculation took longer than {ALGEBRA.wall_s:g} s"
            return {"error": f"time limit: {limit}"}
        if attempt == 1:  # an interpreter that has calculated before may be to blame
            return await self._ask(name, expression, attempt=2)
        if result.return_code == 128 + signal.SIGKILL and not result.killed:
            raise SandboxUnavailable(
                "an algebra interpreter was killed twice: see whether the machine has memory left"
            )
        return {"error": "the calculation crashed twice"}

    async def _interpreters(self) -> Interpreters:
        """The first call prepares their sandbox; if it is cancelled, it leaves that to the next."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(asyncio.to_thread(self._start))
        return await asyncio.shield(self._starting)

    def _start(self) -> Interpreters:
        kind = type(self._run_code.sandbox)  # which was tested on this machine
        return Interpreters(kind(packages=("sympy",)), self.slots.count)
