"""verl's tools (`BaseTool` and function tools), through our tool client.

verl adapter: verl/tools/{base_tool,function_tool,tool_registry,schemas}.py at 0.9.1. A tool in
`mixed.sources.<name>.tools` is called as the other tools are. For verl's own loops,
`through_client` wraps the tools that verl loaded, so that their calls pass the same limits; there
verl's contract holds, in which what a tool raises is a text that the model reads.
"""

import dataclasses
import hashlib
import inspect
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from verl.tools.function_tool import FunctionTool, normalize_function_tool_return
from verl.tools.tool_registry import load_all_tools

from agent_loop.calls.client import ToolClient
from agent_loop.calls.routes import Route, local_route
from agent_loop.calls.servers import Server
from agent_loop.toolbox.functions import local_tool
from agent_loop.toolbox.spec import Tool, ToolSpec
from agent_loop.training.verl_adapters.engine_client import faults_of_trajectory
from tool_server.wire.protocol import ToolCall, ToolResult, ToolUnavailable


def tools_of_file(file: str) -> list[Any]:
    """The tools of a file, as verl loads them.

    Raises:
        ValueError: there is no such file, or verl cannot load it.
    """
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"verl={file!r}: no file {path.absolute()}; correct the path")
    is_python = path.suffix == ".py"
    try:
        tools = load_all_tools(
            tool_config_path=None if is_python else str(path),
            function_tool_path=str(path) if is_python else None,
        )
    except (Exception, SystemExit) as error:  # the file's own code and Hydra raise anything
        raise ValueError(
            f"verl={file!r}: verl cannot load it ({type(error).__name__}: {error}); correct it"
        ) from error
    if not tools:
        raise ValueError(f"verl={file!r}: verl finds no tool in it; register one, or leave it out")
    return tools


def key_of(file: str) -> str:
    """The key of the tools' route. It changes with the file; what the file imports is not looked
    at."""
    path = Path(file)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""
    return f"verl:{file}:{digest}"


def spec_of(tool: Any) -> ToolSpec:
    """The schema of one of verl's tools."""
    function = tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True)["function"]
    empty = {"type": "object", "properties": {}}
    return ToolSpec(
        name=tool.name,
        description=function.get("description", ""),
        parameters=function.get("parameters") or empty,
    )


def tools_of(tools: list[Any], name: str, route: Route) -> list[Tool]:
    """Tools that verl loaded. An instance of a `BaseTool` is made and released for each call, as by
    verl's own loop.

    Args:
        name: of the file, in messages.
        route: see `local_tool`.
    """

    def tool_of(tool: Any) -> Tool:
        async def run(arguments: dict[str, Any]) -> str:
            return _text_of(await _executed(tool, arguments), tool.name)

        function = tool.fn if isinstance(tool, FunctionTool) else type(tool).execute
        code = getattr(inspect.unwrap(function), "__code__", None)
        file = Path(name if code is None else code.co_filename)
        return local_tool(spec_of(tool), route, run, f"{name}:{tool.name}", file)

    return [tool_of(tool) for tool in tools]


async def _executed(tool: Any, arguments: dict[str, Any]) -> Any:
    """verl's `ToolResponse` of a call."""
    if isinstance(tool, FunctionTool):
        return normalize_function_tool_return(await tool.call(arguments))[0]
    instance_id, _ = await tool.create()
    try:
        response, _, _ = await tool.execute(instance_id, arguments)
    finally:
        await tool.release(instance_id)
    return response


def _text_of(response: Any, tool: str) -> str:
    if response.image or response.video:
        raise ToolUnavailable(
            f"tool={tool!r} returned images or videos: this agent gives the model text only; leave "
            "the tool out with `only`, or use verl's tool_agent",
            tool=tool,
        )
    return response.text or ""


# --- for verl's own loops -------------------------------------------------------------------------


client_of_trajectory: ContextVar[ToolClient | None] = ContextVar("client", default=None)
"""The tool client of the current trajectory."""


def through_client(tools: list[Any], timeout_s: float) -> list[Any]:
    """verl's tools whose calls pass limiter, slots and deadline of `client_of_trajectory`.

    A fault of the limits (no place in time, the deadline) is recorded for the trajectory, which is
    then lost, because verl's loop would give it to the model as a text.
    """
    return [_wrapped(tool, timeout_s) for tool in tools]


def _wrapped(tool: Any, timeout_s: float) -> Any:
    async def passed(work: Callable[[], Awaitable[Any]], arguments: Mapping[str, Any]) -> Any:
        outcome: list[Any] = []

        async def post(call: ToolCall, server: Server) -> ToolResult:
            try:
                outcome.append(await work())
            except Exception as error:  # verl's loop makes a text of whatever a tool raises
                outcome.append(error)
            return ToolResult(body={}, tool=call.tool, cacheable=False)

        client = client_of_trajectory.get()
        if client is None:  # outside a trajectory
            return await work()
        call = ToolCall(tool=tool.name, payload=dict(arguments), idempotent=False)
        name = f"verl:{tool.name}"
        route = local_route(name, post, key=name, timeout_s=timeout_s, clock=client.clock)
        try:
            await client.on(route).call(call)
        except ToolUnavailable as error:
            if (faults := faults_of_trajectory.get()) is not None:
                faults.append(error)
            raise
        if isinstance(outcome[-1], Exception):
            raise outcome[-1]
        return outcome[-1]

    if isinstance(tool, FunctionTool):

        async def called(**arguments: Any) -> Any:
            return await passed(lambda: tool.call(arguments), arguments)

        return dataclasses.replace(tool, fn=called, is_async=True)
    return _LimitedTool(tool, passed)


class _LimitedTool:
    """A `BaseTool` whose `execute` passes the client."""

    def __init__(self, tool: Any, passed: Callable[..., Awaitable[Any]]) -> None:
        self._tool, self._passed = tool, passed

    async def execute(self, instance_id: str, parameters: dict[str, Any], **more: Any) -> Any:
        return await self._passed(
            lambda: self._tool.execute(instance_id, parameters, **more), parameters
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tool, name)
