"""The tools of the tool server (`run_code`, `search`, `calculate`) as tools that a model names."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from agent_loop.row import Row
from agent_loop.tool_actions import calculate, run_code, search
from agent_loop.toolbox.spec import Tool, ToolProvider, ToolSpec, ToolState, freed
from agent_loop.turns.turn_loop import Observation
from tool_server.wire.protocol import Fault, end_session_call

if TYPE_CHECKING:  # the checks of a config need only the specs
    from agent_loop.calls.client import ToolClient
    from agent_loop.calls.routes import Route


def _text_arguments(needed: Mapping[str, str], optional: Mapping[str, str]) -> dict[str, Any]:
    """The JSON schema of arguments that are texts: name -> description."""
    texts = {**needed, **optional}
    properties = {name: {"type": "string", "description": text} for name, text in texts.items()}
    return {"type": "object", "properties": properties, "required": [*needed]}


SPECS = {
    "run_code": ToolSpec(
        name="run_code",
        description="run a Python program and read what it prints",
        parameters=_text_arguments({"code": "the program"}, {"stdin": "its input"}),
    ),
    "search": ToolSpec(
        name="search",
        description="find passages",
        parameters=_text_arguments({"query": "what to look for"}, {}),
    ),
    "calculate": ToolSpec(
        name="calculate",
        description="the value of an arithmetic expression",
        parameters=_text_arguments({"expression": "as in 2 * (3 + 4)"}, {}),
    ),
}
"""Name -> the tool as the model sees it."""


class CodeRunner:
    """Runs the code of one trajectory: each time a program, or cells of one interpreter.

    Args:
        persistent: whether the cells share an interpreter, which keeps its state.
    """

    def __init__(self, *, persistent: bool) -> None:
        self._session = uuid4().hex if persistent else None
        self._was_used = self._began = False

    async def run(self, client: "ToolClient", code: str, stdin: str) -> Observation:
        """Run Python; see `tool_actions.run_code` for errors."""
        self._was_used, began = True, self._began
        observation = await run_code(client, code, stdin, self._session, session_began=began)
        self._began = True
        return observation

    async def close(self, client: "ToolClient") -> None:
        """End the interpreter. If the call fails, the server ends it after some idle time."""
        if self._session is not None and self._was_used:
            self._was_used = False
            with suppress(Fault):
                await client.call(end_session_call(self._session))


_Run = Callable[["ToolClient", Mapping[str, Any]], Awaitable[Observation]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ServerTool:
    spec: ToolSpec
    run: _Run
    route: "Route | None"
    """With limits of its own; None: the client's."""

    async def call(self, client: "ToolClient", arguments: Mapping[str, Any]) -> Observation:
        return await self.run(client if self.route is None else client.on(self.route), arguments)


class ToolServerProvider(ToolProvider):
    """Tools of the tool server.

    Args:
        names: of the tools.
        topk: passages of a search.
        route: to the tool servers, with limits of its own; None: the client's.
        persistent: whether the code of a trajectory runs in one interpreter, which keeps its state.
    """

    def __init__(
        self, names: Sequence[str], *, topk: int, route: "Route | None" = None, persistent: bool
    ) -> None:
        self._names, self._topk, self._route = names, topk, route
        super().__init__(self.tools_with(CodeRunner(persistent=False)))
        self._keeps_state = persistent and "run_code" in names

    def tools_with(self, runner: CodeRunner) -> list[Tool]:
        runs: dict[str, _Run] = {
            "run_code": lambda client, a: runner.run(client, a["code"], a.get("stdin", "")),
            "search": lambda client, a: search(client, a["query"], self._topk),
            "calculate": lambda client, a: calculate(client, a["expression"]),
        }
        return [_ServerTool(spec=SPECS[n], run=runs[n], route=self._route) for n in self._names]

    def begin(self, client: "ToolClient", row: Row) -> ToolState | None:
        return self._interpreter(client) if self._keeps_state else None

    @asynccontextmanager
    async def _interpreter(self, client: "ToolClient") -> AsyncIterator[Sequence[Tool]]:
        runner = CodeRunner(persistent=True)
        try:
            yield self.tools_with(runner)
        finally:
            await freed("interpreter", runner.close(client))
