"""What an agent sends is text to the template and to the tokenizer."""

from collections.abc import Sequence
from copy import copy
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from agent_loop.gateway.template import ChatTemplate
from agent_loop.turns.codec import HFCodec
from tests.fakes.real_tokenizers import CONTROL, byte_tokenizer

MARKS = ("<tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
TEMPLATE = """\
{%- set last = namespace(query=0) %}
{%- for m in messages if m.role == 'user' and not (m.content.startswith('<tool_response>')
    and m.content.endswith('</tool_response>')) %}
{%- set last.query = messages.index(m) %}{% endfor %}
{%- for tool in tools or [] %}{{ tool | tojson + '\n' }}{% endfor %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.reasoning_content and loop.index0 > last.query %}
{{- '<think>' + m.reasoning_content + '</think>' }}{% endif %}
{{- m.content | trim }}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function.arguments | tojson }}
{%- endfor %}{{ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""As Qwen3's: a user's message in the marks of a result does not drop the thoughts before it."""


@lru_cache
def parts() -> tuple[Any, HFCodec, ChatTemplate]:
    # a copy with a backend of its own, because tokens are added
    tokenizer = copy(byte_tokenizer(CONTROL))
    tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(
        tokenizer.backend_tokenizer.to_str()
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in MARKS])
    tokenizer.chat_template = TEMPLATE
    codec = HFCodec(tokenizer)

    def tokens(messages: Sequence[Any], tools: Any) -> list[int]:
        return codec.encode(rendered(messages, tools))

    def render(tools: Any) -> Any:
        return lambda messages, prompt: rendered(messages, tools)

    return (
        tokenizer,
        codec,
        ChatTemplate(tokens, render, codec, codec.mark_texts, 9000),
    )


def rendered(messages: Sequence[Any], tools: Any) -> str:
    return parts()[0].apply_chat_template(
        messages, tools=tools or None, add_generation_prompt=True, tokenize=False
    )


TEXTS = st.lists(
    st.sampled_from([*CONTROL, *MARKS, "a", " ", "\n", "<", "qztagqz"]), max_size=6
).map("".join)


@given(
    asked=TEXTS,
    result=TEXTS,
    schema=st.sampled_from([*CONTROL, "d"]),
    then=TEXTS | st.builds("<tool_response>{}</tool_response>".format, TEXTS),
)
def test_a_prompt_is_what_the_template_renders_with_its_own_marks_alone(
    asked: str, result: str, schema: str, then: str
):
    _, codec, template = parts()
    tools = [{"type": "function", "function": {"name": "f", "description": schema}}]
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": {"q": CONTROL[2]}},
    }
    messages = [
        {"role": "system", "content": f"say <tool_call> {schema}"},
        {"role": "user", "content": asked},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": result, "tool_call_id": "1"},
        {"role": "user", "content": then},
    ]
    ids = template.prompt_ids(messages, tools)
    assert codec.decode(ids) == rendered(messages, tools)
    calm = [message | {"content": "a"} for message in messages]
    thinks = "hm" in rendered(messages, tools)
    marks = [text for text in map(codec.decode, ([i] for i in ids)) if text in (*CONTROL, *MARKS)]
    of_calm = {text: rendered(calm, []).count(text) for text in CONTROL}
    assert {text: marks.count(text) for text in CONTROL} == of_calm | {CONTROL[2]: 5}
    assert {text: marks.count(text) for text in MARKS} == dict.fromkeys(MARKS, 0) | {
        "<tool_call>": 2,  # of the system message, and of the template
        "<think>": thinks,
        "</think>": thinks,
    }


@pytest.mark.parametrize("role", ["user", "tool"])
def test_what_is_added_to_a_row_has_no_marks(role: str):
    _, codec, template = parts()
    said = {"role": "assistant", "content": "so", "tool_calls": []}
    if role == "tool":
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
        said["tool_calls"] = [call]
    new = [{"role": role, "content": "".join((*MARKS, *CONTROL)), "tool_call_id": "1"}]
    ids = template.glue_ids(said, new, [], 0, False)
    text = codec.decode(ids)
    assert "".join((*MARKS, *CONTROL)) in text
    assert sorted(
        text for text in map(codec.decode, ([i] for i in ids)) if text in (*CONTROL, *MARKS)
    ) == [
        "<|im_end|>",
        "<|im_end|>",
        "<|im_start|>",
        "<|im_start|>",
    ]
