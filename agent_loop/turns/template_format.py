"""Which format of tool calls a chat template has: the one that reads what the template writes."""

from typing import Any

from agent_loop.turns.call_formats import FORMATS, ParsedCall
from agent_loop.turns.call_formats.llama3 import LLAMA3
from agent_loop.turns.call_formats.message import new_call_id
from agent_loop.turns.tool_messages import CannotContinue, Message, Render

_NAME = "probe_tool"
_ARGUMENTS: dict[str, Any] = {"text": 'a "b" c', "count": 3}
_SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "count": {"type": "integer"}},
}


def formats_of(render: Render) -> list[str]:
    """Names of the formats that read a call as the template writes it; one if it is clear.

    Raises:
        CannotContinue: the template refuses messages with calls.
    """
    try:
        written = _written(render, f"functions.{_NAME}:0")  # Kimi's template writes no other name
    except CannotContinue:
        written = _written(render, new_call_id(0))
    found = [name for name in FORMATS if _reads(name, written)]
    # Llama 3's JSON without markers is also what others, as Hermes, write between theirs.
    return [name for name in found if name != LLAMA3.name] or found


def _written(render: Render, call_id: str) -> str:
    user: Message = {"role": "user", "content": "u"}
    function = {"name": _NAME, "arguments": _ARGUMENTS}
    call = {"id": call_id, "type": "function", "function": function}
    said: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        before, whole = render([user], True), render([user, said], False)
    except Exception as error:  # a template is a program and may raise anything
        raise CannotContinue(" ".join(str(error).split())) from error
    if not whole.startswith(before):  # the beginning of a message may have a thought in it
        before = render([user], False)
    return whole[len(before) :]


def _reads(name: str, written: str) -> bool:
    calls = FORMATS[name].parse(written, {_NAME: _SCHEMA}).calls
    if len(calls) != 1 or not isinstance(calls[0], ParsedCall):
        return False
    return (calls[0].name, calls[0].arguments) == (_NAME, _ARGUMENTS)
