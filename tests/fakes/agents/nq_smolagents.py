"""A smolagents ToolCallingAgent that searches and answers questions of nq.

    agent_loops:
      smol: {function: tests/fakes/agents/nq_smolagents.py:solve}

It needs `smolagents[openai]` beside the trainer. As a program it answers the row on stdin. Its
prompts are short, because the demo's model was taught with the question and the tool alone.
"""

import asyncio
import json
import os
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from session_tools import call
from smolagents import (
    ChatMessage,
    LogLevel,
    OpenAIServerModel,
    PromptTemplates,
    ToolCallingAgent,
    tool,
)
from smolagents.models import ChatMessageToolCall, ChatMessageToolCallFunction

PROMPTS: PromptTemplates = {
    "system_prompt": "",
    "planning": {
        "initial_plan": "",
        "update_plan_pre_messages": "",
        "update_plan_post_messages": "",
    },
    "managed_agent": {"task": "{{task}}", "report": "{{final_answer}}"},
    "final_answer": {"pre_messages": "", "post_messages": "{{task}}"},
}
MAX_STEPS = 3


class PlainModel(OpenAIServerModel):
    """Asks as the demo's model was taught: without an empty system message, without the words
    before the question, without the demand of a call, and without the tool `final_answer`. Calls
    and results are sent back as the API's own messages, not as texts. A message without a call is
    the final answer."""

    said: list[Any]
    """The messages with calls so far."""

    def generate(
        self,
        messages: list[ChatMessage],
        *args: Any,
        tools_to_call_from: Any = None,
        **settings: Any,
    ) -> ChatMessage:
        plain = [
            replace(message, content=text.removeprefix("New task:\n"))
            for message in messages
            if (text := message.content[0]["text"])
        ]
        tools = [each for each in tools_to_call_from or () if each.name != "final_answer"]
        message = super().generate(plain, *args, tools_to_call_from=tools or None, **settings)
        raw = message.raw.choices[0].message
        if raw.tool_calls:
            self.said.append(raw.model_dump(exclude_none=True))
        return message

    def _prepare_completion_kwargs(self, *args: Any, **settings: Any) -> dict[str, Any]:
        made = super()._prepare_completion_kwargs(*args, **settings)
        said, messages = iter(self.said), list[Any]()
        for message in made["messages"]:
            is_call = message["role"] == "assistant" and (calling := next(said, None))
            if is_call:
                messages.append(calling)
            elif messages and (calls := messages[-1].get("tool_calls")):
                text = message["content"].removeprefix("Observation:\n").strip()
                result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": text}
                messages.append(result)
            else:
                messages.append(message)
        made.pop("tool_choice", None)
        return made | {"messages": messages}

    def parse_tool_calls(self, message: ChatMessage) -> ChatMessage:
        answer = {"answer": message.content or ""}
        function = ChatMessageToolCallFunction(name="final_answer", arguments=answer)
        message.tool_calls = [ChatMessageToolCall(id="answer", type="function", function=function)]
        return message


async def solve(address: Any, row: dict[str, Any]) -> str:
    """The agent's final answer.

    Args:
        address: of the session: `openai`, `mcp` and `key`.
        row: `prompt` are its messages.
    """
    return await asyncio.to_thread(_solve, address, row["prompt"][-1]["content"])


def _solve(address: Any, question: str) -> str:
    @tool
    def search(query: str) -> str:
        """find passages

        Args:
            query: what to look for
        """
        return call(address.mcp, "search", query=query)

    model = PlainModel(model_id="policy", api_base=address.openai, api_key=address.key)
    model.said = []
    agent = ToolCallingAgent(
        tools=[search],
        model=model,
        prompt_templates=PROMPTS,
        max_steps=MAX_STEPS,
        verbosity_level=LogLevel.OFF,
    )
    return str(agent.run(question))


if __name__ == "__main__":
    variables = os.environ
    session = SimpleNamespace(
        openai=variables["OPENAI_BASE_URL"],
        mcp=variables["MIXED_MCP_URL"],
        key=variables["OPENAI_API_KEY"],
    )
    print(" ".join(asyncio.run(solve(session, json.load(sys.stdin))).split()))
