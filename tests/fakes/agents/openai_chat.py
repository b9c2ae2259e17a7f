"""OpenAI's client: chat completions with a function tool, whole and streamed, and Responses.

As in the guides "Function calling", "Streaming" and "Responses" of OpenAI's documentation.
"""

import json
import sys

from openai import LengthFinishReasonError, OpenAI
from session_tools import use

MODEL = "policy"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "the value of an arithmetic expression",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
                "additionalProperties": False,
            },
        },
    }
]
client = OpenAI()
messages = list(json.load(sys.stdin)["prompt"])

# whole: to the end of the tool calls, at most three messages
for _ in range(3):
    completion = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    message = completion.choices[0].message
    messages.append(message)
    for call in message.tool_calls or []:
        arguments = json.loads(call.function.arguments)
        result = use(call.function.name, **arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    if not message.tool_calls:
        break

# streamed: the conversation goes on
messages.append({"role": "user", "content": "Are you sure?"})
try:
    with client.chat.completions.stream(
        model=MODEL, messages=messages, tools=TOOLS, stream_options={"include_usage": True}
    ) as stream:
        for event in stream:
            if event.type == "content.delta":
                print(event.delta, end="", flush=True)
        assert stream.get_final_completion().usage.total_tokens > 0
    print()
except LengthFinishReasonError:  # the client's own rule for calls that were cut
    print("cut at its longest length")
print("models:", [model.id for model in client.models.list()], client.models.retrieve(MODEL).id)

# the Responses API: a conversation of its own, streamed
inputs = [{"role": "user", "content": "What is 3 + 4?"}]
flat = [{"type": "function", "strict": True, **tool["function"]} for tool in TOOLS]
for _ in range(2):
    for event in client.responses.create(model=MODEL, input=inputs, tools=flat, stream=True):
        if event.type == "response.output_text.delta":
            print(event.delta, end="", flush=True)
        elif event.type in ("response.completed", "response.incomplete"):
            response = event.response
    print()
    inputs += response.output
    calls = [item for item in response.output if item.type == "function_call"]
    for call in calls:
        result = use(call.name, **json.loads(call.arguments))
        inputs.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    if not calls:
        break
print("answer:", " ".join(response.output_text.split()))
