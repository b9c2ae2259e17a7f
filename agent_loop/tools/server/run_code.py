"""`POST /run_code`, as SandboxFusion has it."""

import math
from typing import Any

from aiohttp import web
from pydantic import BaseModel, Field

from agent_loop.tools.sandbox import (
    Limits,
    RunResult,
    Sandbox,
    SandboxUnavailable,
    choose_sandbox,
)
from agent_loop.tools.server.http import Places, body_of
from agent_loop.tools.server.settings import ServerSettings

LEAST_MEMORY_MB = 64
"""A program that asks for less gets this: the interpreter would not start."""


class RunCodeRequest(BaseModel):
    """SandboxFusion's request; what we do not know is ignored, as SandboxFusion does."""

    code: str
    language: str = "python"
    stdin: str | None = ""
    compile_timeout: float = Field(default=10.0, gt=0)
    run_timeout: float = Field(default=5.0, gt=0, le=120)
    memory_limit_MB: int = Field(-1, le=4096)
    files: dict[str, str | None] = Field(default_factory=dict)
    fetch_files: list[str] = Field(default_factory=list)


class RunCode:
    """Programs in the strongest sandbox that works here; 503 where none does."""

    name = "run_code"

    def __init__(self, settings: ServerSettings) -> None:
        self.sandbox: Sandbox | None = None
        self.fault = ""
        self.places = Places(settings.sandbox_workers, settings.queue_length)
        try:
            self.sandbox = choose_sandbox(settings.sandbox)
        except SandboxUnavailable as error:
            self.fault = str(error)  # fails closed

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/run_code", self._run_code)

    def health(self) -> dict[str, Any]:
        return {
            "sandbox": self.sandbox.name if self.sandbox else None,
            "sandbox_why": self.sandbox.why if self.sandbox else self.fault,
        }

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def _run_code(self, request: web.Request) -> web.Response:
        asked = await body_of(request, RunCodeRequest)
        if self.sandbox is None:
            raise web.HTTPServiceUnavailable(text=self.fault)
        if unsupported := _unsupported(asked):
            return web.json_response(_run_answer("SandboxError", unsupported, None))
        memory_mb = max(LEAST_MEMORY_MB, asked.memory_limit_MB)
        limits = Limits(
            wall_s=asked.run_timeout,
            cpu_s=math.ceil(asked.run_timeout),
            memory_mb=memory_mb if asked.memory_limit_MB > 0 else Limits().memory_mb,
        )
        try:
            async with self.places.place():
                result = await self.sandbox.run_python(asked.code, asked.stdin or "", limits)
        except SandboxUnavailable as error:
            answer = _run_answer("SandboxError", str(error), None)
            return web.json_response(answer, status=503)
        return web.json_response(run_answer(result))


def _unsupported(asked: RunCodeRequest) -> str:
    if asked.language != "python":
        return f"language={asked.language!r} is not supported: this server runs python"
    if asked.files or asked.fetch_files:
        return "files and fetch_files are not supported by this server"
    return ""


def run_answer(result: RunResult) -> dict[str, Any]:
    """What `POST /run_code` says of a program that ran."""
    good = result.status == "Finished" and result.return_code == 0
    return _run_answer("Success" if good else "Failed", "", result)


def _run_answer(status: str, message: str, result: RunResult | None) -> dict[str, Any]:
    """SandboxFusion's `RunCodeResponse`."""
    run = None
    if result is not None:
        run = {
            "status": result.status,
            "execution_time": result.execution_time_s,
            "return_code": result.return_code,
            "stdout": result.stdout,
            "stderr": result.stderr,
        }
    return {
        "status": status,
        "message": message,
        "compile_result": None,
        "run_result": run,
        "executor_pod_name": None,
        "files": {},
    }
