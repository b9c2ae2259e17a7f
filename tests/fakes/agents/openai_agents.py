"""The OpenAI Agents SDK with its chat completions model and the session's MCP server.

As in the guides "Models", "MCP" and "Streaming" of its documentation; tracing is off.
"""

import asyncio
import json
import os
import sys

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    OpenAIChatCompletionsModel,
    Runner,
    set_tracing_disabled,
)
from agents.mcp import MCPServerStreamableHttp
from openai import AsyncOpenAI

set_tracing_disabled(True)


async def main(question: str) -> None:
    async with MCPServerStreamableHttp(params={"url": os.environ["MIXED_MCP_URL"]}) as server:
        agent = Agent(
            name="Assistant",
            model=OpenAIChatCompletionsModel(model="policy", openai_client=AsyncOpenAI()),
            mcp_servers=[server],
        )
        try:
            whole = await Runner.run(agent, question, max_turns=3)
            print("whole:", whole.final_output)
            streamed = Runner.run_streamed(
                agent, [*whole.to_input_list(), {"role": "user", "content": "Sure?"}], max_turns=3
            )
            async for event in streamed.stream_events():
                if event.type == "raw_response_event":
                    print(event.data.type)
            print("answer:", " ".join(str(streamed.final_output).split()))
        except (MaxTurnsExceeded, ModelBehaviorError) as error:
            print(f"gave up: {type(error).__name__}")


asyncio.run(main(json.load(sys.stdin)["prompt"][0]["content"]))
