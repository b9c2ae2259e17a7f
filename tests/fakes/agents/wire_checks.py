"""Checks that the clients of OpenAI and Anthropic read each part of the gateway's replies.

Usage: wire_checks.py BASE_URL
Exit:  0 every check passed, 1 a check failed

The server must answer as `tests/fakes/scripted_gateway.py` describes. Prints a line a check.
"""

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import anthropic
import openai

TEXT = "Grüße \U0001f600 \u2028 line\nnext " * 20
THOUGHT = "first this, then that; " * 10
CALLS: list[Any] = [["search", {"query": "π " * 100, "most": 3}], ["clock", {}]]
SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}}}
TURN = {"content": TEXT, "reasoning": THOUGHT, "calls": CALLS}
CHAT_TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": SCHEMA}}
    for name in ("search", "clock")
]
FLAT_TOOLS: Any = [{"type": "function", **each["function"]} for each in CHAT_TOOLS]
BLOCK_TOOLS: Any = [
    {"name": name, "description": "d", "input_schema": SCHEMA} for name in ("search", "clock")
]
EXPECTED = [(f"call_{n}", name, arguments) for n, (name, arguments) in enumerate(CALLS)]
HISTORY = [("user", None), ("assistant", TEXT), ("tool", "r0"), ("tool", "r1"), ("user", None)]


def user(**script: Any) -> dict[str, Any]:
    return {"role": "user", "content": json.dumps(script)}


def check_history(echoed: str) -> None:
    """The server read the policy's turn from the client's history as the policy had written it."""
    request = json.loads(echoed)
    messages = request["messages"]
    for message, (role, content) in zip(messages, HISTORY, strict=True):
        assert message["role"] == role and content in (None, message["content"]), message
    turn = messages[1]
    read = [
        (c["id"], c["function"]["name"], c["function"]["arguments"]) for c in turn["tool_calls"]
    ]
    assert read == EXPECTED, read
    assert turn["reasoning_content"] == THOUGHT
    assert [each["name"] for each in messages[2:4]] == ["search", "clock"]
    assert request["ignored"] == [], request["ignored"]


class OpenAIChecks:
    def __init__(self, base_url: str) -> None:
        client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0)
        self.chat: Any = client.chat.completions
        self.responses: Any = client.responses

    def ask(self, method: str = "create", **script: Any) -> Any:
        options = script.pop("options", {})
        return getattr(self.chat, method)(model="policy", messages=[user(**script)], **options)

    def respond(self, method: str = "create", **script: Any) -> Any:
        options = script.pop("options", {})
        return getattr(self.responses, method)(model="policy", input=[user(**script)], **options)

    def check_chat_text_and_usage(self) -> None:
        reply = self.ask(content=TEXT)
        assert reply.choices[0].message.content == TEXT
        assert reply.choices[0].finish_reason == "stop" and not reply.choices[0].message.tool_calls
        assert reply.usage.total_tokens == 1 + 7

    def check_chat_length(self) -> None:
        assert self.ask(content=TEXT, finish="length").choices[0].finish_reason == "length"

    def check_chat_turn(self) -> None:
        message = self.ask(**TURN, options={"tools": CHAT_TOOLS}).choices[0].message
        self.check_chat_message(message)
        assert self.ask(calls=CALLS).choices[0].message.content is None

    def check_chat_message(self, message: Any) -> None:
        assert message.content == TEXT and message.reasoning_content == THOUGHT
        calls = [
            (c.id, c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls
        ]
        assert calls == EXPECTED, calls

    def check_chat_raw_stream(self) -> None:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(self.ask(**TURN, options=options))
        assert chunks[-1].usage.completion_tokens == 7 and not chunks[-1].choices
        deltas = [each.choices[0].delta for each in chunks[:-1]]
        assert "".join(each.content or "" for each in deltas) == TEXT
        assert chunks[-2].choices[0].finish_reason == "tool_calls"
        assert deltas[0].role == "assistant"

    def check_chat_stream_helper(self) -> None:
        for content in (TEXT, ""):
            options = {"tools": CHAT_TOOLS, "stream_options": {"include_usage": True}}
            script = TURN | {"content": content, "options": options}
            with self.ask("stream", **script) as stream:
                kinds = {event.type for event in stream}
                final = stream.get_final_completion()
            assert "tool_calls.function.arguments.done" in kinds, kinds
            assert final.choices[0].finish_reason == "tool_calls" and final.usage.total_tokens == 8
            message = final.choices[0].message
            assert (message.content or "") == content
            message.content = TEXT
            self.check_chat_message(message)

    def check_chat_logprobs(self) -> None:
        script: dict[str, Any] = {"content": TEXT, "options": {"logprobs": True}}
        whole = self.ask(**script).choices[0].logprobs.content
        assert [each.token for each in whole] == TEXT.split()
        assert bytes(whole[0].bytes) == "Grüße".encode() and whole[0].logprob == -0.5
        with self.ask("stream", **script) as stream:
            streamed = stream.get_final_completion().choices[0].logprobs.content
        assert streamed == whole

    def check_chat_history(self) -> None:
        for method in ("create", "stream"):
            if method == "create":
                turn = self.ask(**TURN).choices[0].message
            else:
                with self.ask("stream", **TURN) as stream:
                    turn = stream.get_final_completion().choices[0].message
            results = [
                {"role": "tool", "tool_call_id": f"call_{n}", "content": f"r{n}"} for n in (0, 1)
            ]
            history = [user(), turn.model_dump(), *results, user(echo=1)]
            reply = self.chat.create(model="policy", messages=history, tools=CHAT_TOOLS)
            check_history(reply.choices[0].message.content)

    def check_errors(self) -> None:
        kinds = {
            400: openai.BadRequestError,
            404: openai.NotFoundError,
            429: openai.RateLimitError,
            500: openai.InternalServerError,
        }
        for status, kind in kinds.items():
            error = {"message": "m", "status": status, "code": "c", "param": "p"}
            for ask in (self.ask, self.respond):
                caught = raised(kind, lambda ask=ask, error=error: ask(error=error))
                assert (caught.code, caught.param, caught.body["message"]) == ("c", "p", "m")
        image = {"type": "image_url", "image_url": {"url": "data:"}}
        messages = [user(), {"role": "user", "content": [image]}]
        caught = raised(
            openai.BadRequestError, lambda: self.chat.create(model="p", messages=messages)
        )
        assert caught.param == "messages[1].content[0].type" and "image_url" in str(caught)

    def check_responses_turn(self) -> None:
        assert self.respond(content=TEXT).output_text == TEXT
        self.check_response(self.respond(**TURN, options={"tools": FLAT_TOOLS}))

    def check_response(self, reply: Any) -> None:
        assert reply.status == "completed" and reply.usage.total_tokens == 8
        assert reply.output_text == TEXT
        thought, _, *calls = reply.output
        assert thought.content[0].text == THOUGHT
        read = [(each.call_id, each.name, json.loads(each.arguments)) for each in calls]
        assert read == EXPECTED, read

    def check_responses_stream(self) -> None:
        events = list(self.respond(**TURN, options={"stream": True}))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        assert text == TEXT and events[-1].type == "response.completed"
        self.check_response(events[-1].response)
        cut = list(self.respond(content=TEXT, finish="length", options={"stream": True}))[-1]
        assert cut.type == "response.incomplete"
        assert cut.response.incomplete_details.reason == "max_output_tokens"

    def check_responses_stream_helper(self) -> None:
        with self.respond("stream", **TURN, options={"tools": FLAT_TOOLS}) as stream:
            snapshots = [e.snapshot for e in stream if e.type == "response.output_text.delta"]
            self.check_response(stream.get_final_response())
        assert snapshots[-1] == TEXT

    def check_responses_history(self) -> None:
        turn = self.respond(**TURN)
        results = [
            {"type": "function_call_output", "call_id": f"call_{n}", "output": f"r{n}"}
            for n in (0, 1)
        ]
        history = [user(), *turn.output, *results, user(echo=1)]
        check_history(self.responses.create(model="policy", input=history).output_text)


class AnthropicChecks:
    def __init__(self, base_url: str) -> None:
        client = anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0)
        self.messages: Any = client.messages

    def ask(self, method: str = "create", **script: Any) -> Any:
        options = {"max_tokens": 99, "model": "policy"} | script.pop("options", {})
        return getattr(self.messages, method)(messages=[user(**script)], **options)

    def check_message(self, message: Any) -> None:
        thought, text, *calls = message.content
        assert thought.thinking == THOUGHT and thought.signature == "" and text.text == TEXT
        assert [(each.id, each.name, each.input) for each in calls] == EXPECTED, calls
        assert message.stop_reason == "tool_use"
        assert (message.usage.input_tokens, message.usage.output_tokens) == (1, 7)

    def check_messages_turn(self) -> None:
        thinking = {"type": "enabled", "budget_tokens": 1024}
        options = {"tools": BLOCK_TOOLS, "thinking": thinking, "max_tokens": 2000}
        self.check_message(self.ask(**TURN, options=options))

    def check_messages_stop_reasons(self) -> None:
        assert self.ask(content=TEXT).stop_reason == "end_turn"
        assert self.ask(content=TEXT, finish="length").stop_reason == "max_tokens"
        reply = self.ask(content=TEXT, stop_text="END")
        assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "END")

    def check_messages_raw_stream(self) -> None:
        events = list(self.ask(**TURN, options={"stream": True}))
        assert (events[0].type, events[-1].type) == ("message_start", "message_stop")

    def check_messages_stream_helper(self) -> None:
        with self.ask("stream", **TURN, options={"tools": BLOCK_TOOLS}) as stream:
            text = "".join(stream.text_stream)
            self.check_message(stream.get_final_message())
        assert text == TEXT

    def check_messages_count_tokens(self) -> None:
        options = {"model": "policy", "system": "s", "tools": BLOCK_TOOLS}
        assert self.messages.count_tokens(messages=[user()], **options).input_tokens == 2

    def check_messages_history(self) -> None:
        turn = self.ask(**TURN)
        results = [
            {"type": "tool_result", "tool_use_id": f"call_{n}", "content": f"r{n}"} for n in (0, 1)
        ]
        script = {"type": "text", "text": json.dumps({"echo": 1})}
        for content in (turn.content, [each.model_dump() for each in turn.content]):
            turns = [
                {"role": "assistant", "content": content},
                {"role": "user", "content": [*results, script]},
            ]
            reply = self.messages.create(
                model="policy", max_tokens=99, messages=[user(), *turns], tools=BLOCK_TOOLS
            )
            check_history(reply.content[0].text)

    def check_messages_errors(self) -> None:
        kinds = {
            400: (anthropic.BadRequestError, "invalid_request_error"),
            404: (anthropic.NotFoundError, "not_found_error"),
            413: (anthropic.APIStatusError, "request_too_large"),
            429: (anthropic.RateLimitError, "rate_limit_error"),
            500: (anthropic.InternalServerError, "api_error"),
            529: (anthropic.APIStatusError, "overloaded_error"),
        }
        for status, (kind, name) in kinds.items():
            error = {"message": "m", "status": status}
            caught = raised(kind, lambda error=error: self.ask(error=error))
            assert caught.body["error"] == {"type": name, "message": "m"}, caught.body


def raised(kind: type[Exception], ask: Callable[[], Any]) -> Any:
    """The exception of this class that `ask` raises."""
    try:
        ask()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def run(base_url: str) -> int:
    failed = 0
    for checks in (OpenAIChecks(base_url), AnthropicChecks(base_url)):
        for name in [each for each in dir(checks) if each.startswith("check_")]:
            check = getattr(checks, name)
            if check.__code__.co_argcount > 1:  # a part of several checks
                continue
            try:
                check()
            except Exception:
                failed += 1
                print(f"FAILED {name}\n{traceback.format_exc(limit=-2)}")
            else:
                print(f"passed {name}")
    return 1 if failed else 0


def main() -> int:
    print(f"openai {openai.__version__}, anthropic {anthropic.__version__}")
    return run(sys.argv[1])


if __name__ == "__main__":
    sys.exit(main())
