"""ReAct agent loop: thought, action with JSON arguments, observation; any tools.

The tools are those of the tool server, and those that verl loads from
`rollout.multi_turn.tool_config_path` and `function_tool_path`.
"""

from collections.abc import Sequence
from typing import Any

from verl.tools.function_tool import FunctionTool, normalize_function_tool_return

from agent_loop.tool_actions import NamedTool, argument_mistake, describe, mistake, named_tools
from agent_loop.turn_agent_loop import TurnAgentLoop
from agent_loop.turns.react import OBSERVATION, ReAct, instructions
from agent_loop.turns.tags import Action, Language
from agent_loop.turns.turn_loop import Observation


class ReactAgentLoop(TurnAgentLoop):
    """Actions are names of tools.

    Args:
        tool_names: tools that may be used, none for an empty list; None: all.
        topk: passages of a search.
        kwargs: `system_prompt` is a text before the instructions; one that contains `{tools}`
            replaces the instructions, and `{tools}` is replaced by the list of tools.
    """

    def __init__(
        self,
        *args: Any,
        tool_names: Sequence[str] | None = None,
        topk: int = 3,
        tools: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, tools=tools, **kwargs)
        known: dict[str, Any] = {**named_tools(topk)}
        known |= {tool.name: tool for tool in (tools.tools if tools else ())}
        if unknown := sorted(set(tool_names or ()) - known.keys()):
            raise ValueError(
                f"unknown tool_names={unknown} of the ReAct agent: known are {sorted(known)}; "
                "set them in rollout.agent.agent_loop_config_path"
            )
        self.tools = {name: known[name] for name in (known if tool_names is None else tool_names)}

    def language(self) -> Language:
        return ReAct(max_actions=self.settings.max_actions)

    def markers(self) -> tuple[str, str]:
        return f"\n{OBSERVATION} ", "\n"

    def system_text(self) -> str:
        return instructions(super().system_text(), self._descriptions())

    async def act(self, action: Action, extras: dict[str, Any]) -> Observation:
        tool = self.tools.get(action.kind)
        if tool is None:
            there = ", ".join(self.tools) or "none"
            return mistake(f"no tool {action.kind!r}; there are {there}")
        if isinstance(tool, NamedTool):
            return await tool.call(self.client, action.arguments)
        return await _call_of_verl(tool, dict(action.arguments))

    def _descriptions(self) -> list[str]:
        lines = []
        for name, tool in self.tools.items():
            if isinstance(tool, NamedTool):
                lines.append(describe(name, tool.description, tool.arguments))
            else:
                function = tool.tool_schema.function
                names = list(function.parameters.properties)
                lines.append(describe(name, function.description, names))
        return lines


async def _call_of_verl(tool: Any, arguments: dict[str, Any]) -> Observation:
    """Call a tool that verl loaded: a function, or a class with `create` and `release`.

    Arguments that differ from the tool's schema are the model's mistake. What the tool raises is an
    error of the loop, also a ValueError, because a JSON error of a gateway is one. verl's own loop
    takes both for mistakes of the model. A tool that looks at its arguments itself raises
    `ToolRejected` for a mistake, and `ToolUnavailable` for a fault of the infrastructure.
    """
    parameters = tool.tool_schema.function.parameters
    known = parameters.properties
    wrong = argument_mistake(arguments, sorted(known), parameters.required or ())
    if wrong is not None:
        return wrong
    for name, value in arguments.items():
        kinds = [known[name].type] if isinstance(known[name].type, str) else known[name].type
        if not any(_is_of(value, kind) for kind in kinds):
            return mistake(f"{name}={value!r} is not of type {' or '.join(kinds)}")
        if known[name].enum and value not in known[name].enum:
            return mistake(f"{name}={value!r} is none of {known[name].enum}")
    if isinstance(tool, FunctionTool):
        response, _, _ = normalize_function_tool_return(await tool.call(arguments))
        return Observation(text=response.text or "")
    instance_id, _ = await tool.create()
    try:
        response, _, _ = await tool.execute(instance_id, arguments)
    finally:
        await tool.release(instance_id)
    return Observation(text=response.text or "")


_TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": int | float,
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


def _is_of(value: Any, kind: str) -> bool:
    """Whether a value has a type of JSON Schema; any value has an unknown type."""
    if isinstance(value, bool):
        return kind == "boolean" or kind not in _TYPES
    return isinstance(value, _TYPES.get(kind, object))
