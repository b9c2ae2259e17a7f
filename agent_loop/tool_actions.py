"""What an action asks of its tool, and what the model reads of the answer. No verl."""

from agent_loop.observations import render_calculation, render_passages, render_run
from agent_loop.tools.protocol import ToolBackend, ToolCall, run_code_call
from agent_loop.turn_loop import Observation


async def run_code(tools: ToolBackend, code: str, stdin: str) -> Observation:
    """Run a program in the sandbox."""
    result = await tools.call(run_code_call(code, stdin))
    return Observation(text=render_run(result.body), result=result)


async def search(tools: ToolBackend, query: str, topk: int) -> Observation:
    """The `topk` best passages for a query."""
    payload = {"queries": [query], "topk": topk, "return_scores": True}
    result = await tools.call(ToolCall(tool="retrieve", payload=payload))
    return Observation(text=render_passages(result.body["result"][0]), result=result)


async def calculate(tools: ToolBackend, expression: str) -> Observation:
    """The value of an arithmetic expression."""
    result = await tools.call(ToolCall(tool="calculate", payload={"expression": expression}))
    return Observation(text=render_calculation(result.body), result=result)
