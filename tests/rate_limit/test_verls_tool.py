"""The limiter in a tool of verl's own kind, `verl.tools.base_tool.BaseTool`."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from rate_limit.file_limiter import FileRateLimiter
from tests.rate_limit.fake_clock import FakeClock

SCHEMA = OpenAIFunctionToolSchema.model_validate(
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a word up.",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    }
)


class LookUp(BaseTool):
    """Limited together with all tools that name the same file."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema) -> None:
        super().__init__(config, tool_schema)
        clock: FakeClock = config["clock"]
        self.limiter = FileRateLimiter(
            config["rate_limit_file"],
            config["per_minute"],
            clock_ns=clock,
            sleep_async=clock.sleep_async,
        )

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        waited_s = await self.limiter.acquire_async()
        return ToolResponse(text="found"), 0.0, {"waited_s": waited_s}


async def test_two_tools_of_verl_with_one_file_are_limited_together(tmp_path: Path):
    clock = FakeClock()
    config = {"rate_limit_file": tmp_path / "look_up.state", "per_minute": 60, "clock": clock}
    tools = [LookUp(config, SCHEMA), LookUp(config, SCHEMA)]
    waited_s = []
    for tool in [*tools, *tools]:
        instance, _ = await tool.create()
        response, _, metrics = await tool.execute(instance, {})
        assert response.text == "found"
        waited_s.append(metrics["waited_s"])
    assert waited_s == [0.0, 1.0, 1.0, 1.0]
