"""smolagents: a ToolCallingAgent and a CodeAgent with their own prompts, streamed.

As in the guided tour and the guide "Tools" of its documentation.
"""

import json
import os
import sys

from session_tools import use
from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool


@tool
def calculate(expression: str) -> str:
    """The value of an arithmetic expression.

    Args:
        expression: as in 2 * (3 + 4)
    """
    return use("calculate", expression=expression)


model = OpenAIServerModel(
    model_id="policy",
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)
question = json.load(sys.stdin)["prompt"][0]["content"]
coder = CodeAgent(tools=[calculate], model=model, max_steps=1, stream_outputs=True)
print("code:", coder.run(question))
agent = ToolCallingAgent(tools=[calculate], model=model, max_steps=2, stream_outputs=True)
answer = agent.run(question)
print("answer:", " ".join(str(answer).split()))
