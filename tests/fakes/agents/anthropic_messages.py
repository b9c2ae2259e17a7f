"""Anthropic's client: Messages with a tool, whole and streamed, and a count of tokens.

As in the guides "Tool use" and "Streaming" of Anthropic's documentation.
"""

import json
import sys

from anthropic import Anthropic
from session_tools import use

MODEL = "policy"
TOOLS = [
    {
        "name": "calculate",
        "description": "the value of an arithmetic expression",
        "input_schema": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
        "cache_control": {"type": "ephemeral"},
    }
]
client = Anthropic()
messages = list(json.load(sys.stdin)["prompt"])
asked = {"model": MODEL, "max_tokens": 64, "tools": TOOLS}


def results(content):
    calls = [block for block in content if block.type == "tool_use"]
    return [
        {"type": "tool_result", "tool_use_id": call.id, "content": use(call.name, **call.input)}
        for call in calls
    ]


counted = client.messages.count_tokens(model=MODEL, messages=messages, tools=TOOLS)
for _ in range(3):
    message = client.messages.create(messages=messages, **asked)
    messages.append({"role": "assistant", "content": message.content})
    if not (said := results(message.content)):
        break
    messages.append({"role": "user", "content": said})
print("tokens of the prompt:", counted.input_tokens, "models:", client.models.retrieve(MODEL).id)

# streamed, and through the client's beta namespace (`/v1/messages?beta=true`)
if messages[-1]["role"] == "assistant":
    messages.append({"role": "user", "content": "Are you sure?"})
with client.beta.messages.stream(
    messages=messages, betas=["interleaved-thinking-2025-05-14"], **asked
) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
    final = stream.get_final_message()
print()
text = " ".join(block.text for block in final.content if block.type == "text")
print("answer:", " ".join(text.split()))
