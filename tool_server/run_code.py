"""Program execution in SandboxFusion's protocol: `POST /run_code`, `/submit`.

An extension: a request to `/run_code` with a `session` runs in an interpreter that keeps its state
until `POST /end_session`.
"""

import asyncio
import math
from typing import Any

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from tool_server.http import (
    RequestSlots,
    body_of,
    fingerprint_of,
    json_answer,
    json_error,
)
from tool_server.interpreters import InterpreterGone, Interpreters, InterpretersFull
from tool_server.sandbox import (
    WALL_FACTOR,
    Limits,
    NotSupported,
    PackageUnusable,
    Program,
    RunResult,
    RunStatus,
    Sandbox,
    SandboxUnavailable,
    choose_sandbox,
)
from tool_server.settings import ServerSettings
from tool_server.submission import SubmitRequest, same_lines
from tool_server.wire.fenced import extract_code
from tool_server.wire.protocol import CACHEABLE, MAX_RUN_S, NOT_EXECUTED
from tool_server.wire.responses import is_repeatable

MIN_MEMORY_MB = 64
"""Smallest memory limit; the interpreter does not start with less."""

MAX_SUBMIT_CHARS = 4 << 20
"""Characters of programs' outputs in an answer of `/submit`. Without this bound, a program that
fills stdout and stderr in each of 200 tests made an answer of 2.4 GB, and the event loop stood
still for 30 s."""

CUT_MARK = "\n[... cut: the outputs of all tests are too long]"
SHORT_CHARS = 1000
"""Characters that are kept of each output above this bound."""


class RunCodeRequest(BaseModel):
    """SandboxFusion's request; other fields are ignored, as SandboxFusion does."""

    model_config = ConfigDict(val_json_bytes="base64")

    code: str
    language: str = "python"
    stdin: str | None = ""
    compile_timeout: float = Field(default=10.0, gt=0, le=MAX_RUN_S)
    run_timeout: float = Field(default=5.0, gt=0, le=MAX_RUN_S)
    memory_limit_MB: int = Field(-1, le=4096)
    files: dict[str, bytes | None] = Field(default_factory=dict)
    """Relative path -> content in base64."""

    fetch_files: list[str] = Field(default_factory=list)
    session: str | None = Field(default=None, min_length=1, max_length=256)
    """Extension: name of the interpreter, which is kept until it is ended or unused for long."""

    session_began: bool = False
    """Extension: an earlier cell was answered, so nothing is run if the interpreter is gone."""


class EndSessionRequest(BaseModel):
    """The session to end."""

    session: str


class RunCode:
    """The tool that runs programs; without a working sandbox it answers 503."""

    name = "run_code"

    def __init__(self, settings: ServerSettings) -> None:
        self.fault = self.fingerprint = ""
        self.slots = RequestSlots(settings.sandbox_workers)
        self._settings = settings
        self._sandbox: Sandbox | None = None
        try:
            self._sandbox = choose_sandbox(
                settings.sandbox,
                workers=settings.sandbox_workers,
                packages=settings.sandbox_packages,
            )
        except PackageUnusable:
            raise  # a mistake of whoever starts the server
        except SandboxUnavailable as error:
            self.fault = str(error)  # without isolation nothing runs
        else:
            self.fingerprint = fingerprint_of(
                "run_code",
                self._sandbox.name,
                self._sandbox.languages,
                self._sandbox.versions,
                (Limits(), MIN_MEMORY_MB, MAX_RUN_S, WALL_FACTOR),
            )
            self.interpreters = Interpreters(self._sandbox, settings.max_sessions)

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/run_code", self._run_code)
        router.add_post("/submit", self._submit)
        router.add_post("/end_session", self._end_session)

    def health(self) -> dict[str, Any]:
        sandbox = self._sandbox
        if sandbox is None:
            return {"sandbox": None, "sandbox_why": self.fault}
        return {
            "sandbox": sandbox.name,
            "sandbox_why": sandbox.why,
            "languages": sandbox.languages,
            "packages": list(sandbox.packages),
            "sessions": len(self.interpreters),
            "max_sessions": self._settings.max_sessions,
        }

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        if self._sandbox is not None:
            await self.interpreters.close()
            self._sandbox.close()

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox.

        Raises:
            web.HTTPServiceUnavailable: no sandbox works on this machine.
        """
        if self._sandbox is None:
            raise json_error(web.HTTPServiceUnavailable, self.fault, NOT_EXECUTED)
        return self._sandbox

    async def _run_code(self, request: web.Request) -> web.Response:
        asked = await body_of(request, RunCodeRequest)
        limits = _limits_of(asked)
        files = {path: content or b"" for path, content in asked.files.items()}
        try:
            if asked.session is not None:
                return _ran(await self._run_cell(asked, asked.session, files, limits))
            program = Program(
                code=asked.code,
                language=asked.language,
                stdin=asked.stdin or "",
                files=files,
                fetch=tuple(asked.fetch_files),
            )
            return _ran(run_answer(await self._run(program, limits)))
        except NotSupported as error:
            return json_answer(not_supported(str(error)))
        except SandboxUnavailable as error:
            # Not 503, which would say that the server does not answer anybody now. The program may
            # be the reason, and a part of it may have run.
            return json_answer(sandbox_error(str(error)), status=500)

    async def _run(self, program: Program, limits: Limits) -> RunResult:
        sandbox = self.sandbox
        async with self.slots.hold():
            return await sandbox.run(program, limits)

    async def _run_cell(
        self, asked: RunCodeRequest, name: str, files: dict[str, bytes], limits: Limits
    ) -> dict[str, Any]:
        if asked.language != "python" or asked.fetch_files:
            raise NotSupported(
                "a session runs python and has no fetch_files: print the content instead"
            )
        _ = self.sandbox
        async with self.slots.hold():
            try:
                result, about = await self.interpreters.run_cell(
                    name, asked.code, asked.stdin or "", files, limits, began=asked.session_began
                )
            except InterpreterGone as gone:
                return sandbox_error(str(gone)) | {"session": {"id": name, "gone": True}}
            except InterpretersFull as full:
                # Without Retry-After the client takes it for a matter of this call alone: the
                # cells of the other sessions must go on, so that sessions end.
                raise json_error(web.HTTPTooManyRequests, str(full), NOT_EXECUTED) from full
        return run_answer(result) | {"session": {"id": name, **about}}

    async def _end_session(self, request: web.Request) -> web.Response:
        asked = await body_of(request, EndSessionRequest)
        _ = self.sandbox
        return json_answer({"ended": await self.interpreters.end(asked.session)})

    async def _submit(self, request: web.Request) -> web.Response:
        asked = await body_of(request, SubmitRequest)
        config, tests = asked.config, asked.config.provided_data
        code = extract_code(asked.completion, config.language)
        limits = Limits(
            wall_s=config.run_timeout or 10.0,
            cpu_s=math.ceil(config.run_timeout or 10.0),
            compile_s=config.compile_timeout or 10.0,
        )
        outcomes, free_chars = list[dict[str, Any]](), MAX_SUBMIT_CHARS
        for test in tests:
            program = Program(code=code, language=config.language, stdin=test.input["stdin"])
            passed = False
            try:
                result = await self._run(program, limits)
            except NotSupported as error:
                done = not_supported(str(error))
            except SandboxUnavailable as error:  # 500 is no verdict: the caller tries again
                raise json_error(web.HTTPInternalServerError, str(error)) from error
            else:
                done = run_answer(result)
                if done["status"] == "Success":
                    # In a thread, because a megabyte of numbers takes 0.2 s.
                    passed = await asyncio.to_thread(
                        same_lines, result.stdout, test.output["stdout"]
                    )
            free_chars -= _bound_outputs(done, free_chars)
            outcomes.append({"passed": passed, "exec_info": done, "test_info": test.model_dump()})
            if not passed and not config.extra.get("run_all_cases"):
                break
        return json_answer(
            {
                "id": asked.id,
                "accepted": len(outcomes) == len(tests) and all(o["passed"] for o in outcomes),
                "extracted_code": code,
                "full_code": None,
                "test_code": None,
                "tests": outcomes,
                "extracted_type": None,
                "extra": None,
            }
        )


def _bound_outputs(answer: dict[str, Any], most: int) -> int:
    """Shorten the outputs in an answer if they have more than `most` characters in all; returns
    their characters."""
    commands = [answer[key] for key in ("compile_result", "run_result") if answer[key]]
    outputs = [(command, name) for command in commands for name in ("stdout", "stderr")]
    if sum(len(command[name]) for command, name in outputs) > most:
        for command, name in outputs:
            if len(command[name]) > SHORT_CHARS:
                command[name] = command[name][:SHORT_CHARS] + CUT_MARK
    return sum(len(command[name]) for command, name in outputs)


def _ran(answer: dict[str, Any]) -> web.Response:
    """The response with a program's result, marked whether the caller may cache it."""
    files = answer.pop("files")  # the last field, also behind a session
    response = json_answer(answer | {"files": files})
    response.headers[CACHEABLE] = "yes" if is_repeatable(answer) else "no"
    return response


def _limits_of(asked: RunCodeRequest) -> Limits:
    memory_mb = max(MIN_MEMORY_MB, asked.memory_limit_MB)
    return Limits(
        wall_s=asked.run_timeout,
        compile_s=asked.compile_timeout,
        cpu_s=math.ceil(max(asked.run_timeout, asked.compile_timeout)),
        memory_mb=memory_mb if asked.memory_limit_MB > 0 else Limits().memory_mb,
    )


def run_answer(result: RunResult) -> dict[str, Any]:
    """The answer of `POST /run_code`: SandboxFusion's `RunCodeResponse`.

    A program that ended by itself has the status Finished, with any exit code. A program that was
    killed for its memory, files or output has the status Error.
    """
    compiled = result.compiled
    has_run = compiled is None or compiled.return_code == 0
    is_good = result.status is RunStatus.FINISHED
    return {
        "status": "Success" if is_good else "Failed",
        "message": "",
        "compile_result": None if compiled is None else _command(compiled),
        "run_result": _command(result) if has_run else None,
        "executor_pod_name": None,
        "files": result.files,
    }


def _command(result: RunResult) -> dict[str, Any]:
    is_own_error = result.status is RunStatus.ERROR and not result.killed
    return {
        "status": "Finished" if is_own_error else result.status,
        "execution_time": result.execution_time_s,
        "cpu_time": result.cpu_time_s,
        "return_code": result.return_code,
        "stdout": result.stdout,
        "stderr": result.stderr,
    }


def sandbox_error(message: str) -> dict[str, Any]:
    """An answer that says nothing about the program, because the sandbox failed."""
    return {
        "status": "SandboxError",
        "message": message,
        "compile_result": None,
        "run_result": None,
        "executor_pod_name": None,
        "files": {},
    }


def not_supported(what: str) -> dict[str, Any]:
    """An answer to a request that is never accepted; callers look for the words `not supported`."""
    return sandbox_error(f"not supported: {what}")
