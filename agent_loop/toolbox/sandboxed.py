"""Python functions in the tool server's sandbox (`where: sandbox`), for code that is not trusted.

Each call is a program: the text of the function's file, and a call that prints the result as JSON.
So the file can import only what the sandbox has, and keeps no state from call to call.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agent_loop.calls.client import ToolClient
from agent_loop.calls.routes import Route
from agent_loop.toolbox.functions import Definition
from agent_loop.toolbox.results import observation_of, text_body, text_of
from agent_loop.toolbox.spec import ToolSpec
from agent_loop.turns.turn_loop import Observation
from samplers.module_file import line_in
from tool_server.wire.protocol import (
    MAX_RUN_S,
    Fault,
    ToolRejected,
    ToolUnavailable,
    run_code_call,
)

_MARK = "\x1etool-result:"

_PROGRAM = """\
import sys, types
class ToolRejected(Exception): pass
for name in ("tool_server", "tool_server.wire", "agent_loop", "agent_loop.tools"):
    sys.modules[name] = types.ModuleType(name)
for name in ("tool_server.wire.protocol", "agent_loop.tools.protocol"):  # the second is that of 1.1
    module = sys.modules[name] = types.ModuleType(name)
    module.ToolRejected = ToolRejected
def main():
    import asyncio, inspect, json
    out, sys.stdout = sys.stdout, sys.stderr
    module = sys.modules["tool"] = types.ModuleType("tool")
    exec(compile({source!r}, {file!r}, "exec"), module.__dict__)
    try:
        value = getattr(module, {name!r})(**json.loads({arguments!r}))
        value = asyncio.run(value) if inspect.iscoroutine(value) else value
        found = ["ok", value]
    except ToolRejected as error:
        found = ["rejected", str(error)]
    print("\\n" + {mark!r} + json.dumps(found), file=out, flush=True)
main()
"""
"""The file is a module of its own, as in a loop. It may import only `ToolRejected` of this project.
What it prints goes to stderr, whose length is limited by itself."""


class SandboxTool:
    """A Python function that runs in the sandbox.

    Args:
        route: to the tool servers, with the limits of the entry.
        caches: whether equal calls may share a result.
        run_s: seconds that the program may run; None: the server's default.

    Raises:
        ValueError: the server runs no program for so long.
    """

    def __init__(
        self,
        definition: Definition,
        route: Route,
        *,
        caches: bool,
        run_s: float | None,
    ) -> None:
        if run_s is not None and run_s > MAX_RUN_S:
            raise ValueError(
                f"tool={definition.place!r}: timeout={run_s:g}: the sandbox ends a program after "
                f"at most {MAX_RUN_S:g} s; lower it, or use where: process"
            )
        self.definition, self._route = definition, route
        self._caches, self._run_s = caches, run_s
        self._source = definition.path.read_text(encoding="utf-8")

    @property
    def spec(self) -> ToolSpec:
        return self.definition.spec

    async def call(self, client: ToolClient, arguments: Mapping[str, Any]) -> Observation:
        program = _PROGRAM.format(
            source=self._source,
            file=self.definition.path.name,
            name=self.definition.name,
            arguments=json.dumps(dict(arguments)),
            mark=_MARK,
        )
        call = run_code_call(program, "", self._caches, self._run_s)
        try:
            result = await client.on(self._route).call(call)
        except Fault as error:
            error.tool = self.spec.name  # counted as this tool, not as run_code
            raise
        run = result.body.get("run_result") or {}
        lines = [line for line in (run.get("stdout") or "").split("\n") if line[:1] == _MARK[0]]
        try:
            kind, value = json.loads(lines[-1].removeprefix(_MARK))
        except (IndexError, ValueError, TypeError) as error:
            trace = run.get("stderr") or ""
            words = trace.strip().splitlines()[-1:] or [run.get("status", "")]
            line = line_in(trace, self.definition.path.name)
            raise ToolUnavailable(
                f"{self.definition.place} gave no result in the sandbox: {words[0]:.200}{line}; "
                "run the function by itself, return what `json` writes, and see which packages "
                "the sandbox has",
                tool=self.spec.name,
            ) from error
        if kind == "rejected":
            raise ToolRejected(str(value), tool=self.spec.name)
        body = text_body(text_of(value, self.spec.name), self.spec.name)
        return observation_of(replace(result, body=body, tool=self.spec.name))
