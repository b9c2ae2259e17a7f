"""Why verl's parsers of tool calls are not used: a call that each of them changes or drops."""

import json
from typing import Any

import pytest

from agent_loop.turns.call_formats import FORMATS, VERLS_FORMATS, CallMistake
from tests.fakes.call_writers import WRITERS, Call
from tests.fakes.real_tokenizers import byte_tokenizer

pytestmark = pytest.mark.slow  # imports verl

DSML = "\uff5cDSML\uff5c"
TEXT = {"type": "string"}


def said(name: str, value: object, old: str = "", new: str = "") -> str:
    """A message with the call `a` whose parameter `b` is `value`, with one piece replaced."""
    return WRITERS[name].message([("a", {"b": value})]).replace(old, new)


# Format -> (text, schema of `b`, what verl reads, what we read; None is a mistake that is named).
VERLS_MISTAKES: dict[str, tuple[str, dict[str, str], list[Call], Any]] = {
    "hermes": (
        *(said("hermes", "</tool_call>"), TEXT, []),
        "</tool_call>",  # a marker inside the JSON
    ),
    "qwen3_coder": (
        *(said("qwen3_coder", "null"), TEXT, [("a", {"b": None})]),
        "null",  # a text that looks like another type
    ),
    "gpt-oss": (
        *(said("gpt-oss", "c", "commentary to=functions.a ", "commentary to=functions.a"), TEXT),
        *([], "c"),  # a header that is written without a space
    ),
    "glm": (*(said("glm", "5"), TEXT, [("a", {"b": 5})]), "5"),
    "kimi": (
        *(said("kimi", "c", '"c"', '"c'), TEXT, [("a", {})]),
        None,  # broken JSON is a call without arguments
    ),
    "deepseek_v4": (
        said("deepseek_v4", [1], "[1]", "[1"),
        *({"type": "array"}, [("a", {"b": "[1"})]),
        None,  # broken JSON is a text
    ),
    "minimax": (*(said("minimax", " c "), TEXT, [("a", {"b": "c"})]), " c "),
    "seed": (*(said("seed", "true"), TEXT, [("a", {"b": True})]), "true"),
    "gemma4": (
        *(said("gemma4", [1, 2]), {"type": "array"}, [("a", {"b": "[1"})]),
        [1, 2],  # a list
    ),
}


@pytest.mark.parametrize("name", VERLS_FORMATS)
async def test_verls_parser_is_wrong_where_ours_is_right(name):
    from verl.experimental.agent_loop.tool_parser import ToolParser
    from verl.tools.schemas import OpenAIFunctionToolSchema

    text, schema, theirs, ours = VERLS_MISTAKES[name]
    schemas = {"a": {"type": "object", "properties": {"b": schema}, "required": []}}
    function = {"name": "a", "description": "", "parameters": schemas["a"]}
    tool = OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})

    tokenizer = byte_tokenizer(("<|pad|>",))
    parser = ToolParser.get_tool_parser(name, tokenizer)
    _, calls = await parser.extract_tool_calls(tokenizer.encode(text), [tool])
    assert [(call.name, json.loads(call.arguments)) for call in calls] == theirs

    (call,) = FORMATS[name].parse(text, schemas).calls
    if ours is None:
        assert isinstance(call, CallMistake) and call.name == "a" and "JSON" in call.problem
    else:
        assert not isinstance(call, CallMistake) and call.arguments == {"b": ours}


@pytest.mark.parametrize("name", VERLS_FORMATS)
def test_the_engine_stops_at_verls_stop_tokens(name):
    from verl.experimental.agent_loop.tool_parser import ToolParser

    stops = FORMATS[name].stop_texts
    tokenizer = byte_tokenizer((*stops, "<|pad|>"))
    theirs = ToolParser.get_tool_parser(name, tokenizer).stop_token_ids
    # verl leaves gpt-oss to the end tokens of its generation config, which name <|call|>.
    ours = [] if name == "gpt-oss" else tokenizer.convert_tokens_to_ids(list(stops))
    assert [each for each in theirs if each is not None] == ours
