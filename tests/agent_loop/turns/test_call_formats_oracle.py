"""The package `renderers`, which renders and parses most of the formats, agrees with ours.

Its parser of gpt-oss is used alone, because its renderer downloads a vocabulary. It has no format
of Seed.
"""

import warnings
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import pytest

from agent_loop.turns.call_formats import FORMATS, ParsedCall
from tests.fakes.call_messages import BROKEN, Written, broken, messages
from tests.fakes.call_writers import WRITERS, Call
from tests.fakes.real_tokenizers import byte_tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("renderers", reason="needs the package renderers, and Python 3.11")
    import renderers
    from renderers.base import ParsedResponse, ToolCallParseStatus
    from renderers.parsing import parse_gpt_oss

MESSAGES = 40
DSML = "\uff5cDSML\uff5c"

THINK = ("<think>", "</think>")
CALL = ("<tool_call>", "</tool_call>")
QWEN = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", *THINK, *CALL),
    *("<tool_response>", "</tool_response>", "<|vision_start|>", "<|vision_end|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
DEEPSEEK = [
    *("begin\u2581of\u2581sentence", "end\u2581of\u2581sentence", "User", "Assistant"),
    *("latest_reminder", "action", "query", "authority", "domain", "title", "read_url"),
]
GEMMA = ("turn", "channel", "tool", "tool_call", "tool_response", "image")


@dataclass(frozen=True)
class Oracle:
    """The renderer of a format, and the special tokens that it needs. The last ends a message."""

    tokens: tuple[str, ...]
    renderer: str = ""


ORACLES = {
    "hermes": Oracle(QWEN, "Qwen3Renderer"),
    "qwen3_coder": Oracle(QWEN, "Qwen36Renderer"),
    "glm": Oracle(
        (
            *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
            *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", *THINK, *CALL),
            "<|endoftext|>",
        ),
        "GLM45Renderer",
    ),
    "kimi": Oracle(
        (
            *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
            "<|im_end|>",
        ),
        "KimiK2Renderer",
    ),
    "deepseek_v4": Oracle(
        (*(f"<\uff5c{word}\uff5c>" for word in DEEPSEEK), *THINK, DSML), "DeepSeekV4Renderer"
    ),
    "minimax": Oracle(
        ("]~!b[", "]~b]", *THINK, "<minimax:tool_call>", "</minimax:tool_call>", "[e~["),
        "MiniMaxM2Renderer",
    ),
    "gemma4": Oracle(
        (
            *(f"<|{word}>" for word in GEMMA),
            *(f"<{word}|>" for word in GEMMA),
            *("<|think|>", "<|image|>", '<|"|>', "<bos>", "<eos>"),
        ),
        "Gemma4Renderer",
    ),
    "gpt-oss": Oracle(
        (
            *("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>"),
            "<|return|>",
        )
    ),
}
RENDERED = sorted(name for name, oracle in ORACLES.items() if oracle.renderer)


@lru_cache
def renderer(name: str) -> Any:
    oracle = ORACLES[name]
    return getattr(renderers, oracle.renderer)(byte_tokenizer(oracle.tokens))


def oracle_parse(name: str, text: str, schemas: dict[str, dict[str, Any]]) -> ParsedResponse:
    tokenizer = byte_tokenizer(ORACLES[name].tokens)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if name == "gpt-oss":
        words = ("return", "call", "start", "end", "channel", "message", "constrain")
        tokens = {f"{word}_id": tokenizer.convert_tokens_to_ids(f"<|{word}|>") for word in words}
        return parse_gpt_oss(tokenizer, ids, **tokens)
    if name == "glm" and "</think>" not in text:
        ids = tokenizer.encode(f"<think></think>{text}")  # as its template writes
    prompt = renderer(name).render_ids([{"role": "user", "content": "x"}])
    tools: Any = [{"name": tool, "parameters": schema} for tool, schema in schemas.items()]
    return renderer(name).parse_response(ids, tools=tools, prompt_ids=prompt)


def oracle_calls(response: ParsedResponse) -> list[Call]:
    """The calls that the oracle could read."""
    return [
        (call.name or "", call.arguments if isinstance(call.arguments, dict) else {})
        for call in response.tool_calls
        if call.status == ToolCallParseStatus.OK
    ]


def our_calls(name: str, text: str, schemas: dict[str, dict[str, Any]]) -> list[Call]:
    calls = FORMATS[name].parse(text, schemas).calls
    return [(call.name, call.arguments) for call in calls if isinstance(call, ParsedCall)]


def render(name: str, written: Written) -> str:
    """What the oracle says a model samples for a message."""
    calls = [
        {
            "id": f"functions.{tool}:{index}",
            "type": "function",
            "function": {"name": tool, "arguments": arguments},
        }
        for index, (tool, arguments) in enumerate(written.calls)
    ]
    answer = {
        "role": "assistant",
        "content": written.content,
        "reasoning_content": written.reasoning,
        "tool_calls": calls,
    }
    rendered = renderer(name).render([{"role": "user", "content": "x"}, answer])
    ids = [
        token
        for token, is_sampled in zip(rendered.token_ids, rendered.sampled_mask, strict=True)
        if is_sampled
    ]
    return byte_tokenizer(ORACLES[name].tokens).decode(ids)


@pytest.mark.parametrize("name", RENDERED)
def test_what_the_oracle_renders_is_read(name):
    # Kimi K2 has no thoughts, and DeepSeek's renderer writes them if its prompt opens one only.
    has_thoughts = name not in ("kimi", "deepseek_v4")
    for written in islice(messages(name, seed=4, with_markers=False), MESSAGES):
        text = render(name, written)
        read = FORMATS[name].parse(text, written.schemas())
        assert our_calls(name, text, written.schemas()) == written.calls
        # Gemma's words follow the answers of the tools.
        assert read.content == written.content.strip() or name == "gemma4"
        assert read.reasoning == (written.reasoning if has_thoughts else "")


@pytest.mark.parametrize("name", sorted(ORACLES))
def test_what_the_oracle_reads_is_read(name):
    for written in islice(messages(name, seed=5, with_markers=False), MESSAGES):
        response = oracle_parse(name, written.text, written.schemas())
        assert oracle_calls(response) == written.calls
        assert our_calls(name, written.text, written.schemas()) == written.calls
        read = FORMATS[name].parse(written.text, written.schemas())
        assert read.content == (response.content or "").strip()
        assert read.reasoning == (response.reasoning_content or "").strip()


@pytest.mark.parametrize("name", sorted(set(ORACLES) - {"deepseek_v4", "minimax"}))
def test_the_calls_beside_a_broken_one_are_read_as_the_oracle_reads_them(name):
    for how, written in islice(broken(name, seed=6), MESSAGES):
        theirs = oracle_calls(oracle_parse(name, written.text, written.schemas()))
        ours = our_calls(name, written.text, written.schemas())
        assert all(call in ours for call in theirs if call[0] != BROKEN), (how, written.text)


def inside(name: str, old: str, new: str) -> str:
    """A message with one call, in which one piece is replaced."""
    text = WRITERS[name].message([("a", {"b": 1})])
    assert old in text
    return text.replace(old, new)


S = {"a": {"properties": {"b": {"type": "string"}}}}
I = {"a": {"properties": {"b": {"type": "integer"}}}}  # noqa: E741
B = {"a": {"properties": {"b": {"type": "boolean"}}}}
ONE: list[Call] = [("a", {"b": 1})]
SPACE: list[Call] = [("a", {"b": " c "})]
HOLDS: list[Call] = [("a", {"b": "</tool_call>"})]

# Where ours differs on purpose: reason -> (format, text, schemas, their calls, our calls).
DIFFERENCES: dict[str, tuple[str, str, dict[str, Any], list[Call], list[Call]]] = {
    "a marker inside a string is text": (
        *("hermes", inside("hermes", "1", '"</tool_call>"'), S, [], HOLDS),
    ),
    "a marker inside the arguments is text": (
        *("gpt-oss", inside("gpt-oss", "1", '"<|call|>"'), S, [], [("a", {"b": "<|call|>"})]),
    ),
    "a marker inside a value is text": (
        *("qwen3_coder", inside("qwen3_coder", "1", "</tool_call>"), S, [("a", {})], HOLDS),
    ),
    "NaN is no JSON": (
        *("kimi", inside("kimi", "1", "Infinity"), I, [("a", {"b": float("inf")})], []),
    ),
    "arguments are an object": (
        *("hermes", inside("hermes", '{"b": 1}', "[1]"), I, [("a", {})], []),
    ),
    "arguments under another key would be lost": (
        *("hermes", inside("hermes", "arguments", "parameters"), I, [("a", {})], []),
    ),
    "a text is kept exactly: qwen3_coder": (
        *("qwen3_coder", inside("qwen3_coder", "1", " c "), S, [("a", {"b": "c"})], SPACE),
    ),
    "a text is kept exactly: glm": (
        *("glm", inside("glm", "1", " c "), S, [("a", {"b": "c"})], SPACE),
    ),
    "a text is kept exactly: minimax": (
        *("minimax", inside("minimax", "1", " c "), S, [("a", {"b": "c"})], SPACE),
    ),
    "Python's words, which the template of Qwen3-Coder writes": (
        *("qwen3_coder", inside("qwen3_coder", "1", "True"), B, [], [("a", {"b": True})]),
    ),
    "no </function>": (*("qwen3_coder", inside("qwen3_coder", "</function>", ""), I, ONE, []),),
    "words between the parameters": (
        *("qwen3_coder", inside("qwen3_coder", "</function>", "so</function>"), I, ONE, []),
    ),
    "two functions in a block": (
        "qwen3_coder",
        inside("qwen3_coder", "</function>", "</function><function=c></function>"),
        I,
        ONE,
        [*ONE, ("c", {})],
    ),
    "words between key and value": (
        *("glm", inside("glm", "</arg_key>", "</arg_key>so"), I, ONE, []),
    ),
    "words between the parameters: minimax": (
        *("minimax", inside("minimax", "</invoke>", "so</invoke>"), I, ONE, []),
    ),
    "a block that is not closed, with a closed call": (
        *("minimax", inside("minimax", "</minimax:tool_call>", ""), I, [], ONE),
    ),
    "a call outside a block": (
        *("deepseek_v4", inside("deepseek_v4", f"<{DSML}tool_calls>", ""), I, ONE, []),
    ),
    "words between the calls": (
        "deepseek_v4",
        inside("deepseek_v4", f"</{DSML}tool_calls>", f"so</{DSML}tool_calls>"),
        *(I, ONE, []),
    ),
    "a parameter twice: the last counts, as in the other formats": (
        "deepseek_v4",
        inside(
            "deepseek_v4",
            f"</{DSML}parameter>",
            f'</{DSML}parameter>\n<{DSML}parameter name="b" string="false">2</{DSML}parameter>',
        ),
        *(I, [], [("a", {"b": 2})]),
    ),
    "a draft inside a closed thought: deepseek_v4": (
        *("deepseek_v4", f"<think>{WRITERS['deepseek_v4'].calls(ONE)}</think>4", I, ONE, []),
    ),
    "a draft inside a closed thought: glm": (
        *("glm", f"<think>{WRITERS['glm'].calls(ONE)}</think>4", I, ONE, []),
    ),
    "a word without quotes": (*("gemma4", inside("gemma4", "1", "c"), S, [("a", {"b": "c"})], []),),
    "the engine's stop token may be missing: gemma4": (
        *("gemma4", inside("gemma4", "<tool_call|>", ""), I, [], ONE),
    ),
    "the engine's stop token may be missing: gpt-oss": (
        *("gpt-oss", inside("gpt-oss", "<|call|>", ""), I, [], ONE),
    ),
    "a header without a channel": (*("gpt-oss", inside("gpt-oss", "<|channel|>", ""), I, ONE, []),),
    "a name with dots and no functions. before it": (
        *("kimi", inside("kimi", "functions.a", "x.a"), I, ONE, [("x.a", {"b": 1})]),
    ),
}


@pytest.mark.parametrize("reason", DIFFERENCES)
def test_where_ours_differs_from_the_oracle(reason):
    name, text, schemas, theirs, ours = DIFFERENCES[reason]
    assert oracle_calls(oracle_parse(name, text, schemas)) == theirs
    assert our_calls(name, text, schemas) == ours
