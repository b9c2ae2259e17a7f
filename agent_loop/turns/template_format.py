"""Which format of tool calls a chat template has: the one that reads what the template writes."""

from typing import Any

from agent_loop.turns.call_formats import FORMATS, ParsedCall
from agent_loop.turns.tool_messages import CannotContinue, Message, Render

_NAME = "probe_tool"
_ARGUMENTS: dict[str, Any] = {"text": 'a "b" c', "count": 3}
_SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "count": {"type": "integer"}},
}


def formats_of(render: Render) -> list[str]:
    """verl's names of the formats that read a call as the template writes it; one if it is clear.

    Raises:
        CannotContinue: the template refuses messages with calls.
    """
    user: Message = {"role": "user", "content": "u"}
    function = {"name": _NAME, "arguments": _ARGUMENTS}
    call = {"id": "functions.probe_tool:0", "type": "function", "function": function}
    said: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        before, whole = render([user], True), render([user, said], False)
    except Exception as error:  # a template is a program and may raise anything
        raise CannotContinue(" ".join(str(error).split())) from error
    if not whole.startswith(before):  # the beginning of a message may have a thought in it
        before = render([user], False)
    written = whole[len(before) :]
    return [name for name in FORMATS if _reads(name, written)]


def _reads(name: str, written: str) -> bool:
    calls = FORMATS[name].parse(written, {_NAME: _SCHEMA}).calls
    if len(calls) != 1 or not isinstance(calls[0], ParsedCall):
        return False
    return (calls[0].name, calls[0].arguments) == (_NAME, _ARGUMENTS)
