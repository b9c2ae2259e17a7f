"""A tool as the model sees it, the check of its arguments, and the interface of what answers.

Arguments are checked by the library jsonschema. A mistake of the model becomes a text that names
the argument and the rule.
"""

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Protocol

from agent_loop.deadline import CLOSE_S
from agent_loop.json_schemas import CheckTooLong, broken_rule, check_schema, validator_of
from agent_loop.row import Row
from agent_loop.turns.tags import ActionKind
from config.compat import timeout
from tool_server.wire.protocol import Fault

if TYPE_CHECKING:
    from agent_loop.calls.client import ToolClient
    from agent_loop.turns.turn_loop import Observation

logger = logging.getLogger(__name__)

MAX_DEPTH = 64
"""Lists and objects of an argument inside each other. A tool may fail at more, as many JSON
libraries do; a shared MCP server would fail for all trajectories."""

MAX_MISTAKE = 300
"""Characters of a mistake that the model reads; a value in it may be long."""

CHECK_S = 0.8
"""Most CPU time of the check of a call's arguments. 10,000 numbers or texts take 0.15 s."""

IN_LOOP_S = 0.02
"""The part of it in the event loop, which must go on after 50 ms."""

_NAME = re.compile(r"[A-Za-z_][\w.-]{0,127}")
_TAKEN = frozenset({ActionKind.ANSWER, ActionKind.MALFORMED})

_NAMES_ELSEWHERE = frozenset(
    {
        *("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if"),
        *("dependentSchemas", "patternProperties"),
    }
)
"""Keys of a schema that may name arguments outside `properties`."""


@dataclass(frozen=True, kw_only=True)
class ToolSpec:
    """A tool as the model sees it.

    Raises:
        ValueError: the name is not one that a model can call, or `parameters` is no JSON schema.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments, which are an object."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name in _TAKEN:
            raise ValueError(
                f"tool={self.name!r}: a name begins with a letter, has letters, digits, _, . and "
                f"-, and is none of {', '.join(sorted(_TAKEN))}; rename the tool"
            )
        check_schema(self.parameters, f"tool={self.name!r}: parameters")

    @cached_property
    def schema(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        return {"type": "function", "function": function}

    @property
    def line(self) -> str:
        """The tool in one line, for a prompt: its arguments with their descriptions, or only their
        names if an argument has no description."""
        properties = self.parameters.get("properties", {})
        texts = {
            name: about.get("description") if isinstance(about, Mapping) else None
            for name, about in properties.items()
        }
        shown = texts if all(texts.values()) else [*texts]
        return f"{self.name}: {self.description}; {json.dumps(shown)}"

    @cached_property
    def _validator(self) -> Any:
        return validator_of(self.parameters)

    async def mistake_in_loop(self, arguments: Mapping[str, Any]) -> str | None:
        """As `mistake`. A check that takes long is made again in a thread."""
        try:
            return self._mistake(arguments, IN_LOOP_S)
        except CheckTooLong:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(check_thread(), self.mistake, arguments)

    def mistake(self, arguments: Mapping[str, Any]) -> str | None:
        """Why these arguments break the schema: the path of the argument and the rule; None if they
        are right. An argument that the schema does not name is refused too, unless the schema may
        name it in another place. So are arguments whose check takes `CHECK_S`."""
        try:
            return self._mistake(arguments, CHECK_S)
        except CheckTooLong:
            return f"{self.name}: the arguments take too long to check; write simpler ones"

    def _mistake(self, arguments: Mapping[str, Any], limit_s: float) -> str | None:
        if _is_deep(arguments):
            return f"{self.name}: an argument is nested too deeply"
        known = self.parameters.get("properties", {})
        takes_more = self.parameters.get("additionalProperties", False)
        if _NAMES_ELSEWHERE & self.parameters.keys():
            takes_more = None  # the validator knows
        if takes_more is False and (unknown := sorted(arguments.keys() - known.keys())):
            there = ", ".join(known) or "none"
            return f"{self.name}: unknown argument {', '.join(unknown)}; there are: {there}"[
                :MAX_MISTAKE
            ]
        try:
            error = broken_rule(self._validator, dict(arguments), limit_s)
        except (RecursionError, OverflowError, ValueError):  # NaN, or too long to be written
            return f"{self.name}: an argument is nested too deeply, or a number is too large"
        if error is None:
            return None
        place = "".join(f"[{p!r}]" if isinstance(p, int) else f".{p}" for p in error.absolute_path)
        problem = f"{self.name}{place}: {error.message}"
        if len(problem) > MAX_MISTAKE:  # the rule stands after the value
            problem = f"{problem[: MAX_MISTAKE // 2]} ... {problem[-MAX_MISTAKE // 2 :]}"
        return problem


async def mistake_of(
    name: str, arguments: Mapping[str, Any], specs: Mapping[str, ToolSpec]
) -> str | None:
    """Why a call is the model's mistake: an unknown tool, or arguments that break its schema; None
    if it is right."""
    if (spec := specs.get(name)) is None:
        return f"no tool {name!r}; there are {', '.join(specs) or 'none'}"
    return await spec.mistake_in_loop(arguments)


def specs_of_tools(tools: Sequence[Mapping[str, Any]]) -> list[ToolSpec]:
    """Tools from their JSON schemas, with or without `{"type": "function", "function": ...}`.

    Raises:
        ValueError: a schema is not one that a model can use, or two tools have one name.
    """
    specs: list[ToolSpec] = []
    for tool in tools:
        about = tool.get("function", tool)
        name = about.get("name") if isinstance(about, Mapping) else None
        if not isinstance(name, str) or any(spec.name == name for spec in specs):
            raise ValueError(f"tool={tool!r:.200}: a tool needs a name of its own; add one")
        parameters = about.get("parameters") or {"type": "object", "properties": {}}
        description = str(about.get("description") or "")
        specs.append(ToolSpec(name=name, description=description, parameters=parameters))
    return specs


@cache
def check_thread() -> ThreadPoolExecutor:
    """One thread, because each thread that computes delays the event loop by 5 ms."""
    return ThreadPoolExecutor(1, "checks of arguments")


def _is_deep(arguments: Mapping[str, Any]) -> bool:
    level: list[Any] = [arguments]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True


class Tool(Protocol):
    """Something that answers the calls of one tool."""

    @property
    def spec(self) -> ToolSpec: ...

    async def call(self, client: "ToolClient", arguments: Mapping[str, Any]) -> "Observation":
        """Answer a call whose arguments fit the schema. The call goes through `client`.

        Raises:
            ToolRejected: a mistake of the model, which it reads.
            ToolUnavailable: a fault of the tool, which ends the trajectory.
        """
        ...


ToolState = AbstractAsyncContextManager[Sequence[Tool]]
"""What the tools of an entry keep during one trajectory: an instance of a class, a server, an
interpreter. It is made and freed by `async with`, which gives the tools of this trajectory, with
the specs of `ToolProvider.tools`."""


class ToolProvider:
    """The tools of one entry of `mixed.sources.<name>.tools`, shared by the trajectories of an
    event loop.

    Args:
        tools: what `tools` returns.
        close: frees what answers.
    """

    def __init__(
        self, tools: Sequence[Tool] = (), close: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self._tools, self._close = tools, close

    async def tools(self) -> Sequence[Tool]:
        """The tools of the entry; a tool with state gives those of a trajectory in `begin`.

        Raises:
            ToolUnavailable: they cannot be listed now.
            ValueError: the entry is wrong.
        """
        return self._tools

    def begin(self, client: "ToolClient", row: Row) -> ToolState | None:
        """The state of one trajectory; None if the tools have none.

        Args:
            client: of the trajectory's source.
            row: the fields of the dataset's row.
        """
        return None

    async def close(self) -> None:
        if self._close is not None:
            await self._close()


async def freed(what: str, work: Awaitable[object]) -> None:
    """Free the state of a trajectory. What fails then is logged, because the trajectory is
    complete; after `CLOSE_S` nobody waits any longer, and the work is cancelled."""
    try:
        async with timeout(CLOSE_S):
            await work
    except (Fault, TimeoutError) as error:
        logger.warning("%s did not close: %s", what, str(error) or f"not within {CLOSE_S:g} s")


def chosen(only: Sequence[str] | None, tools: Sequence[Any]) -> list[Any]:
    """Of tools of an SDK, those that an entry offers; None: all.

    Raises:
        ValueError: `only` names what is not there.
    """
    if only is None:
        return list(tools)  # two of one name are refused later
    there = {tool.name: tool for tool in tools}
    if unknown := sorted(set(only) - there.keys()):
        raise ValueError(f"only={unknown}: no such tools; there are {', '.join(sorted(there))}")
    return [there[name] for name in only]
