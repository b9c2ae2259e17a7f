"""What the gateway says of messages that the chat template refuses."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from verl.utils.tokenizer.chat_template import apply_chat_template

from agent_loop.gateway.template import ChatTemplate
from agent_loop.gateway.wire import WireError

MAPPING = "Can only get item pairs from a mapping."
ROLES = "After the optional system message, roles must alternate"
USER = {"role": "user", "content": "q"}


class StrictTokenizer:
    """Refuses as templates do: arguments that are no object, and two users in a row. It adds
    contents to texts, so verl's second try, whose message has parts, fails in other words."""

    def apply_chat_template(self, messages: list[Any], **_: Any) -> list[int]:
        roles = [message["role"] for message in messages]
        for before, message in zip([None, *roles], messages, strict=False):
            _ = "user\n" + message["content"]
            calls = message.get("tool_calls") or ()
            if any(not isinstance(call["function"]["arguments"], dict) for call in calls):
                raise TypeError(MAPPING)
            if before == message["role"]:
                raise ValueError(ROLES)
        return [1]


def refusal(messages: list[Any]) -> str:
    template = ChatTemplate(
        lambda messages, tools: apply_chat_template(StrictTokenizer(), messages),  # type: ignore[arg-type]
        lambda tools: lambda messages, go: json.dumps(messages),
        SimpleNamespace(encode=lambda text: [], end_ids=frozenset()),  # type: ignore[arg-type]
        (),
        1000,
    )
    with pytest.raises(WireError) as caught:
        template.prompt_ids(messages, [])
    return caught.value.message


def test_a_refusal_has_the_template_s_own_reason():
    called = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "3"}}
    said = {"role": "assistant", "content": "", "tool_calls": [called]}
    words = refusal([USER, said, {"role": "tool", "tool_call_id": "c", "content": "r"}])
    assert words.endswith(MAPPING)
    assert refusal([USER, USER]).endswith(ROLES)
