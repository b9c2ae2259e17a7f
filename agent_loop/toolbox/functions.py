"""Python functions and classes as tools: `tools: [path/to/file.py:name]`.

The schema comes from type hints and docstring (`transformers.utils.get_json_schema`). A function
runs in the agent loop's process (here), in a process of its own (`processes`) or in the sandbox
(`sandboxed`). What it raises is a fault of the tool; `ToolRejected` is a mistake of the model.
"""

import asyncio
import copy
import hashlib
import inspect
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import MethodType
from typing import Any

from agent_loop.calls.client import ToolClient
from agent_loop.calls.routes import Route
from agent_loop.calls.servers import Server
from agent_loop.daemon_threads import DaemonThreads
from agent_loop.row import Row
from agent_loop.toolbox.results import observation_of, text_body, text_of
from agent_loop.toolbox.signatures import function_of
from agent_loop.toolbox.spec import Tool, ToolProvider, ToolSpec, freed
from agent_loop.turns.turn_loop import Observation
from samplers.module_file import line_in, named_in, trace_of
from tool_server.wire.protocol import (
    Again,
    Fault,
    ToolCall,
    ToolRejected,
    ToolResult,
    ToolUnavailable,
)
from tool_server.wire.responses import MAX_FAULT

logger = logging.getLogger(__name__)

Run = Callable[[dict[str, Any]], Awaitable[Any]]
"""Runs a function with these arguments; raises what the function raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """A function or class of a file, as a tool."""

    path: Path
    name: str
    target: Any
    spec: ToolSpec

    @property
    def is_class(self) -> bool:
        return inspect.isclass(self.target)

    @property
    def place(self) -> str:
        return f"{self.path}:{self.name}"

    @property
    def digest(self) -> str:
        """Changes with the file, because then the results may change."""
        return hashlib.sha256(self.path.read_bytes() + self.name.encode()).hexdigest()[:32]


def definition_of(file: str, name: str, *, is_run: bool = True) -> Definition:
    """Load a function or class and make its schema.

    Args:
        is_run: whether the file may be run here; else only the signature of a function is read.

    Raises:
        ValueError: there is no such file or name, or the name, its type hints or its docstring do
            not make a tool.
    """
    text = f"{file}:{name}"
    target = named_in(text, "tool", _may_be_tool, "function or class") if is_run else None
    try:
        target = function_of(Path(file), name) if target is None else target
        spec = _spec_of(target, name)
    except ValueError as error:
        raise ValueError(f"cannot load tool={text}: {error}") from error
    return Definition(path=Path(file), name=name, target=target, spec=spec)


def _may_be_tool(value: Any) -> bool:
    return inspect.isroutine(value) or inspect.isclass(value)


def _spec_of(target: Any, name: str) -> ToolSpec:
    from transformers.utils.chat_template_utils import get_json_schema

    function = target
    if inspect.isclass(target):
        name = getattr(target, "name", None) or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
        function = getattr(target, "call", None)
        if not inspect.isroutine(function):
            raise ValueError(
                "a class needs a method call(...), and may have start(row) and close()"
            )
        if not isinstance(inspect.getattr_static(target, "call"), staticmethod | classmethod):
            function = MethodType(function, target)  # without `self`, which is no argument
    parameters = list(inspect.signature(function).parameters.values())
    if variadic := [p.name for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]:
        raise ValueError(f"{', '.join(variadic)}: a schema names each argument; write them out")
    if positional := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]:
        raise ValueError(f"{', '.join(positional)}: a model calls by name; remove the /")
    try:
        found = get_json_schema(function)
    except Exception as error:  # type hints are code of the user's
        raise ValueError(
            f"{' '.join(str(error).split())}; each argument needs a type hint, and a line below "
            "`Args:` in the docstring"
        ) from error
    about = found["function"]
    return ToolSpec(
        name=name, description=about["description"], parameters=_valid(about["parameters"])
    )


def _valid(schema: Any) -> Any:
    """transformers' schema as JSON Schema: its `nullable` is a type `null`."""
    if isinstance(schema, list):
        return [_valid(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: _valid(value) for key, value in schema.items() if key != "nullable"}
    if schema.get("nullable") and "type" in plain:
        kinds = plain["type"]
        plain["type"] = [*(kinds if isinstance(kinds, list) else [kinds]), "null"]
    elif schema.get("nullable") and "anyOf" in plain:
        plain["anyOf"] = [*plain["anyOf"], {"type": "null"}]
    return plain


THREADS = 64
"""Most calls at once of one function that is not async."""

CANCEL_S = 1.0
"""Time in which an async function must end after it was cancelled; then it is left alone."""


@cache
def _threads(place: str) -> DaemonThreads:
    """Of one function, because one that never returns would block those of others."""
    return DaemonThreads(f"tool {place}", THREADS)


async def run_in_loop(
    function: Callable[..., Any], place: str, arguments: Mapping[str, Any]
) -> Any:
    """Run a function: on the event loop if it is async, else in a thread of `place`. At the
    deadline an async function is cancelled; a thread cannot be ended and runs on."""
    if inspect.iscoroutinefunction(function):
        return await _awaited(function(**arguments), place)
    value = await _threads(place).run(partial(function, **arguments))
    return await _awaited(value, place) if inspect.isawaitable(value) else value


async def _awaited(work: Awaitable[Any], place: str) -> Any:
    """The result of an async function, which may ignore its cancellation."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody waits
        await asyncio.wait([task], timeout=CANCEL_S)
        if not task.done():
            logger.warning("%s ignores its cancellation and goes on; see what it catches", place)
        raise
    return task.result()


def _raised(place: str, file: Path, error: BaseException) -> str:
    line = line_in(trace_of(error), str(file.resolve()))
    return f"{place} raised {type(error).__name__}: {error!s:.{MAX_FAULT}}{line}"


_logged: set[tuple[str, str]] = set()


def _log_once(place: str, error: BaseException) -> None:
    """Log the traceback of the first error of a kind; the messages of the calls count the rest."""
    if (kind := (place, type(error).__name__)) not in _logged:
        _logged.add(kind)
        logger.error("tool raised tool=%s", place, exc_info=error)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTool:
    """A tool that is not behind the tool servers."""

    spec: ToolSpec
    route: Route
    idempotent: bool = False
    """Whether a call may be executed twice."""

    async def call(self, client: ToolClient, arguments: Mapping[str, Any]) -> Observation:
        call = ToolCall(tool=self.spec.name, payload=dict(arguments), idempotent=self.idempotent)
        return observation_of(await client.on(self.route).call(call))


def local_tool(spec: ToolSpec, route: Route, run: Run, place: str, file: Path) -> LocalTool:
    """A tool whose function runs on this node. `ToolRejected` is the model's mistake; whatever else
    it raises is a fault, as is a result that is too large, no JSON, or has images.

    Args:
        route: with its limits; from `local_route` with `not_posted`.
        place: of the function, in messages.
        file: the user's file, whose line is named.
    """
    may_retry = route.max_retries > 0
    may_repeat = bool(route.caches) or may_retry

    async def post(call: ToolCall, server: Server) -> ToolResult:
        try:
            value = await run(copy.deepcopy(call.payload))  # another attempt gets them unchanged
        except ToolRejected as error:
            raise ToolRejected(str(error), tool=spec.name) from error
        except (Exception, SystemExit) as error:
            if not isinstance(error, Fault):
                _log_once(place, error)
            again = Again.COUNTED if may_retry else Again.NEVER
            raise ToolUnavailable(
                _raised(place, file, error), tool=spec.name, again=again
            ) from error
        body = text_body(text_of(value, spec.name), spec.name)
        return ToolResult(body=body, tool=spec.name, cacheable=True)

    return LocalTool(spec=spec, route=route.limited(post=post), idempotent=may_repeat)


async def not_posted(call: ToolCall, server: Server) -> ToolResult:
    raise RuntimeError(f"tool={call.tool!r} has state: it is called in a trajectory")


class ClassProvider(ToolProvider):
    """A class as a tool, of which each trajectory has an instance.

    Args:
        route: see `local_tool`.
    """

    def __init__(self, definition: Definition, route: Route) -> None:
        super().__init__([LocalTool(spec=definition.spec, route=route)])
        self._definition, self._route = definition, route

    @asynccontextmanager
    async def begin(self, client: ToolClient, row: Row) -> AsyncIterator[list[Tool]]:
        about, made = self._definition, []

        def make() -> Any:
            """Make the instance and start it; an async `start` is returned, for the event loop."""
            made.append(about.target())
            start = getattr(made[0], "start", None)
            if start is None or inspect.iscoroutinefunction(start):
                return start
            start(row=row.visible())
            return None

        async def run(arguments: dict[str, Any]) -> Any:
            return await run_in_loop(made[0].call, about.place, arguments)

        async def end() -> None:
            await asyncio.wait([making])  # a thread cannot be ended
            making.exception()
            if made and (close := getattr(made[0], "close", None)) is not None:
                try:
                    await run_in_loop(close, about.place, {})
                except (Exception, SystemExit) as error:
                    _log_once(about.place, error)

        making = asyncio.ensure_future(run_in_loop(make, about.place, {}))
        try:
            try:
                if (start := await asyncio.shield(making)) is not None:
                    await run_in_loop(start, about.place, {"row": row.visible()})
            except (Exception, SystemExit) as error:
                _log_once(about.place, error)
                problem = _raised(about.place, about.path, error)
                raise ToolUnavailable(
                    f"{problem}, at the start of a trajectory", tool=about.spec.name
                ) from error
            yield [local_tool(about.spec, self._route, run, about.place, about.path)]
        finally:
            await freed(f"tool={about.place}", asyncio.shield(end()))
