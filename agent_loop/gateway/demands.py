"""What a request demands of the form of its reply: JSON of a schema, calls, strict arguments.

OpenAI's and Anthropic's servers force it by constrained decoding. A trained token must be sampled
from the policy's own distribution, so the policy is told in words, at the end of the newest
message. The agent gets the reply as the policy wrote it, and `Turn.misfit` says what is wrong.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from agent_loop.gateway.wire import ModelReply, ModelRequest, WireError
from agent_loop.toolbox.spec import ToolSpec, check_thread

MOST_SCHEMA, SMALL_SCHEMA = 64 << 10, 512
"""Bytes of a schema that is taken, and of one that is checked in the event loop: the library takes
a second for the former and 10 ms for the latter."""

_INSTEAD = "For your messages from here on, this replaces what was asked before:"
_FREE = "any form will do, with or without a tool call."


def demand_of(request: ModelRequest) -> str:
    """What a request demands, in words for the policy; empty if nothing."""
    words: list[str] = []
    if request.tool_choice == "required":
        words.append("Each of your messages must call a tool.")
    elif request.tool_choice not in ("auto", "none"):
        words.append(f"Each of your messages must call the tool {request.tool_choice}.")
    if request.strict:
        words.append(
            f"The arguments of {', '.join(request.strict)} must fit the tool's schema exactly."
        )
    if request.answer_schema is not None:
        when = "If you call no tool, your message" if can_call(request) else "Your message"
        words.append(
            f"{when} must be JSON that fits this schema, and nothing else:\n"
            f"{json.dumps(request.answer_schema, ensure_ascii=False)}"
        )
    return "\n".join(words)


def can_call(request: ModelRequest) -> bool:
    """Whether the reply may have tool calls."""
    return bool(request.tools) and request.tool_choice != "none"


def with_demand(
    messages: Sequence[Mapping[str, Any]], demand: str, told: str = ""
) -> Sequence[Mapping[str, Any]]:
    """`messages` with what the policy must be told at the end of the last one.

    Args:
        told: the demand that the policy was told last in this conversation.
    """
    if demand == told:
        return messages
    words = f"{_INSTEAD} {demand or _FREE}" if told else demand
    last = messages[-1]
    content = "\n\n".join(filter(None, [last["content"], words]))
    return [*messages[:-1], {**last, "content": content}]


async def misfit(request: ModelRequest, reply: ModelReply) -> str | None:
    """Why a reply is not what its request demands; empty if it is, None without a demand."""
    if not demand_of(request):
        return None
    called, choice = [call.name for call in reply.calls], request.tool_choice
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in request.tools}
    if unknown := set(called) - schemas.keys():
        return f"there is no tool {', '.join(sorted(unknown))}"
    if choice == "required" and not called:
        return "no tool was called"
    if choice not in ("auto", "none", "required") and set(called) != {choice}:
        return f"{choice} was to be called, not {', '.join(called) or 'no tool'}"
    for call in reply.calls:
        if call.name in request.strict:
            spec = await _checker(schemas[call.name])
            if mistake := await spec.mistake_in_loop(json.loads(call.arguments)):
                return f"{call.name}: {mistake}"
    if request.answer_schema is None or called:
        return ""
    try:
        answer = json.loads(reply.content, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        return f"the message is no JSON: {error}"[:200]
    if not isinstance(answer, dict):
        return "the message is no JSON object"
    spec = await _checker(request.answer_schema)
    return await spec.mistake_in_loop(answer) or ""


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


async def check_schemas(request: ModelRequest) -> None:
    """
    Raises:
        WireError: a schema that the reply must fit is none, is too large, or has a `$ref` to what
            is not in it.
    """
    for place, schema in request.schemas:
        try:
            await _checker(schema)
        except ValueError as error:
            rule = str(error).partition("parameters: ")[2]
            raise WireError(f"{place}: {rule}", param=place) from error


_checkers: dict[bytes, ToolSpec] = {}
"""An agent sends its schemas with each request."""


async def _checker(schema: Mapping[str, Any]) -> ToolSpec:
    """Checks objects against a schema of an agent. A large one is read in a thread."""
    encoded = msgspec.json.encode(schema)
    if (known := _checkers.get(encoded)) is not None:
        return known
    if len(encoded) > MOST_SCHEMA:
        raise ValueError(f"reply: parameters: more than {MOST_SCHEMA >> 10} KiB; shorten it")

    def make() -> ToolSpec:
        # `mistake` refuses arguments that a tool's schema does not name; JSON Schema takes them
        parameters = {"additionalProperties": True, **msgspec.json.decode(encoded)}
        return ToolSpec(name="reply", description="", parameters=parameters)

    in_loop = len(encoded) <= SMALL_SCHEMA
    loop = asyncio.get_running_loop()
    spec = make() if in_loop else await loop.run_in_executor(check_thread(), make)
    if len(_checkers) >= 64:
        _checkers.clear()
    _checkers[encoded] = spec
    return spec
