"""Tools that verl loads, called by the ReAct agent: whose mistake a wrong call is."""

import json
from typing import Any

import pytest

pytest.importorskip("verl")

from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema

from agent_loop.react_agent_loop import ReactAgentLoop, _call_of_verl
from agent_loop.tool_actions import named_tools
from agent_loop.tools.protocol import ToolCall, ToolRejected, ToolResult

SCHEMA = OpenAIFunctionToolSchema.model_validate(
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "a plus b",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "one"},
                    "b": {"type": ["integer", "number"], "description": "two"},
                    "sign": {"type": "string", "enum": ["plus", "minus"]},
                },
                "required": ["a"],
            },
        },
    }
)


def add(a: int, b: float = 0, sign: str = "plus") -> str:
    return str(a + b if sign == "plus" else a - b)


def of_a_gateway(a: int) -> str:
    return json.loads("<html>502 Bad Gateway</html>")


def broken(a: int) -> str:
    raise OSError("the disk of the tool is full")


def choosy(a: int) -> str:
    raise ToolRejected("a is too large")


def tool(function: Any) -> FunctionTool:
    return FunctionTool(name="add", fn=function, tool_schema=SCHEMA)


async def test_a_function_tool_is_called_with_what_the_model_named():
    observation = await _call_of_verl(tool(add), {"a": 2, "b": 0.5, "sign": "minus"})
    assert (observation.text, observation.rejected) == ("1.5", False)


@pytest.mark.parametrize(
    "arguments",
    [
        {"x": 1, "b": 2},
        {},
        {"a": "one"},
        {"a": None},
        {"a": True},
        {"a": 1, "b": [1]},
        {"a": 1, "sign": "times"},
    ],
)
async def test_wrong_arguments_are_the_model_s_mistake_and_it_reads_why(arguments):
    observation = await _call_of_verl(tool(add), arguments)
    assert observation.rejected and observation.text.startswith("error: ")


@pytest.mark.parametrize(
    ("function", "error"),
    [(broken, OSError), (of_a_gateway, ValueError), (choosy, ToolRejected)],
)
async def test_what_a_function_tool_raises_is_not_taken_for_a_mistake(function, error):
    """The turn loop knows `ToolRejected`; anything else is an error of the loop."""
    with pytest.raises(error):
        await _call_of_verl(tool(function), {"a": 1})


class Backend:
    async def call(self, call: ToolCall) -> ToolResult:
        return ToolResult(body={"result": call.payload["expression"]})


async def test_a_tool_of_the_server_names_the_arguments_it_wants():
    calculate = named_tools(2)["calculate"]
    assert (await calculate.call(Backend(), {"expression": "1+1"})).text == "1+1"
    wrong = await calculate.call(Backend(), {"query": "1+1"})
    assert wrong.rejected
    assert "missing ['expression'], unknown ['query']" in wrong.text


def test_a_prompt_names_arguments_in_the_order_of_the_schema_in_every_process():
    loop = object.__new__(ReactAgentLoop)
    loop.tools = {"add": tool(add)}
    assert loop._descriptions() == ['add: a plus b; ["a", "b", "sign"]']
