"""Results of tools that are not behind the tool servers: their bodies, bounds and texts."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic_core import to_jsonable_python

from agent_loop.turns.turn_loop import Observation
from tool_server.wire.protocol import ToolResult, ToolUnavailable
from tool_server.wire.responses import MAX_OTHER_ANSWER_BYTES, replace_surrogates

NO_OUTPUT = "no output"


def text_body(text: str, tool: str, *, is_error: bool = False) -> dict[str, Any]:
    """The body of a result: the text that the model reads, and whether it is its mistake.

    Raises:
        ToolUnavailable: the text is too large.
    """
    if len(text) > MAX_OTHER_ANSWER_BYTES // 4 and len(text.encode(errors="replace")) > (
        MAX_OTHER_ANSWER_BYTES
    ):
        raise ToolUnavailable(
            f"tool={tool!r} returned more than {MAX_OTHER_ANSWER_BYTES >> 20} MiB of text, which "
            "is the most that is read; limit its output, or leave the tool out with `only`",
            tool=tool,
        )
    return {"text": replace_surrogates(text) or NO_OUTPUT, "is_error": is_error}


def text_of(value: Any, tool: str) -> str:
    """The text of what a Python function returned: a text as it is, None as no output, and
    anything else as JSON. NaN and infinity, which JSON lacks, become texts.

    Raises:
        ToolUnavailable: the value is no JSON.
    """
    if value is None or isinstance(value, str):
        return value or ""
    try:
        plain = json.loads(json.dumps(value, default=_plain), parse_constant=str)
        return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)
    except Exception as error:  # a class of the user's may raise anything
        raise ToolUnavailable(
            f"tool={tool!r} returned a value of type {type(value).__name__} that is no JSON "
            f"({str(error).split(';')[0]:.200}); return a text, or numbers, texts, lists and dicts",
            tool=tool,
        ) from error


def _plain(value: Any) -> Any:
    """In JSON's types: a value that `json` does not know."""
    if isinstance(value, Iterator):  # to read it would run the function's code in the event loop
        raise TypeError(f"{type(value).__name__} is no list")
    return to_jsonable_python(value, fallback=_array)


def _array(value: Any) -> Any:
    """The numbers of an array or a tensor."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"{type(value).__name__} is no type of JSON")
    return value.tolist()


def observation_of(result: ToolResult) -> Observation:
    """The observation of a result with a `text_body`."""
    body: Mapping[str, Any] = result.body
    if body["is_error"]:
        return Observation(text=f"error: {body['text']}", result=result, rejected=True)
    return Observation(text=body["text"], result=result)
