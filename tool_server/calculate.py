"""`POST /calculate`: arithmetic in this process, algebra in interpreters of the sandbox."""

import asyncio
import json
import time
from contextlib import AsyncExitStack, suppress
from functools import partial
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
from tool_server.http import (
    RequestSlots,
    body_of,
    fingerprint_of,
    json_answer,
    json_error,
)
from tool_server.run_code import RunCode
from tool_server.sandbox import (
    Interpreter,
    Limits,
    RunStatus,
    Sandbox,
    SandboxUnavailable,
    choose_sandbox,
)
from tool_server.settings import ServerSettings

ALGEBRA = Limits(wall_s=5.0, memory_mb=1024)
"""Limits of one algebra expression."""

IDLE_S = 300.0
"""How often the interpreters that are not in use are ended: each costs some processor time, because
the sandbox watches it."""

RENEW_S = 1800.0
"""Age at which an interpreter is replaced, because the sandbox ends each after an hour."""

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

    Algebra runs in a sandbox like that of `run_code`, whose zygote has loaded sympy. Interpreters
    are kept between calls, because sympy's caches make a call several times faster.
    """

    name, fault = "calculate", ""

    def __init__(self, settings: ServerSettings, run_code: RunCode) -> None:
        self.slots = RequestSlots(settings.sandbox_workers)
        self._settings, self._run_code = settings, run_code
        self._sandbox: asyncio.Future[Sandbox] | None = None
        self.idle: list[tuple[AsyncExitStack, Interpreter]] = []
        self._cleaner: asyncio.Task[None] | None = None
        self.fingerprint = fingerprint_of(
            "calculate", metadata.version("sympy"), (ALGEBRA, MAX_LENGTH, MAX_BITS)
        )

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/calculate", self._calculate)

    def health(self) -> dict[str, Any]:
        return {}

    async def start(self) -> None:
        self._cleaner = asyncio.create_task(self._clean())

    async def _clean(self) -> None:
        while True:
            await asyncio.sleep(IDLE_S)
            await self.end_idle()

    async def end_idle(self) -> None:
        while self.idle:
            stack, _ = self.idle.pop()
            await stack.aclose()

    async def close(self) -> None:
        if self._cleaner is not None:
            self._cleaner.cancel()
        await self.end_idle()
        if self._sandbox is not None:
            with suppress(SandboxUnavailable):
                (await self._sandbox).close()

    async def _calculate(self, request: web.Request) -> web.Response:
        asked = await body_of(request, CalculateRequest)
        try:
            answer = {"result": calculate(asked.expression)}
        except NotArithmetic:
            async with self.slots.hold():
                answer = await self.answer(asked.expression)
        except CalculationError as error:
            answer = {"error": str(error)}
        return json_answer(answer)

    async def answer(self, expression: str) -> dict[str, str]:
        """`{"result": text}` or `{"error": text}` of algebra.

        Raises:
            web.HTTPInternalServerError: the sandbox failed, maybe because of the expression.
        """
        if self._run_code.fault:
            return {"error": "only arithmetic is calculated here: there is no sandbox for algebra"}
        try:
            stack, interpreter = await self._take()
            async with stack:  # ends the interpreter, unless it is kept
                result = await interpreter.run_cell(_CELL.format(expression), wall_s=ALGEBRA.wall_s)
                if result.status is RunStatus.TIME_LIMIT:
                    limit = f"the calculation took longer than {ALGEBRA.wall_s:g} s"
                    return {"error": f"time limit: {limit}"}
                if result.status is not RunStatus.FINISHED:
                    raise SandboxUnavailable(f"the calculation died: {result.stderr[-200:]}")
                answer, peak_mb = json.loads(result.stdout.splitlines()[-1])
                if peak_mb < ALGEBRA.memory_mb // 2:  # sympy's caches keep what it used
                    self.idle.append((stack.pop_all(), interpreter))
                return answer
        except SandboxUnavailable as error:
            raise json_error(web.HTTPInternalServerError, str(error)) from error

    async def _take(self) -> tuple[AsyncExitStack, Interpreter]:
        """An interpreter, and what ends it."""
        while self.idle:
            stack, interpreter = self.idle.pop()
            if interpreter.is_alive and time.monotonic() - interpreter.began < RENEW_S:
                return stack, interpreter
            await stack.aclose()
        if self._sandbox is None:
            start = partial(choose_sandbox, self._settings.sandbox, packages=("sympy",))
            self._sandbox = asyncio.ensure_future(asyncio.to_thread(start))
        try:  # a call that is cancelled leaves the start to the next
            sandbox = await asyncio.shield(self._sandbox)
        except SandboxUnavailable:
            self._sandbox = None
            raise
        stack = AsyncExitStack()
        return stack, await stack.enter_async_context(sandbox.interpreter(ALGEBRA, _FILES))
