"""GLM: `<tool_call>NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> ... </tool_call>`.

A value has no quotes: the tool's schema says whether it is text or JSON. A text is kept exactly,
with the white space at its ends. A value ends at its first closing marker.
"""

import re

from agent_loop.turns.call_formats.scanning import MarkedFormat, single_calls
from agent_loop.turns.call_formats.tagged import Tag, TagReader

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_KEY = ("<arg_key>", "</arg_key>")
_VALUE = ("<arg_value>", "</arg_value>")

_NAME = r"(?P<name>[^\s<>{}\"]+)"
_WORDS = r"(?P<name>(?:(?!</?arg_(?:key|value)>)[\s\S])*)"

_READER = TagReader(
    call=Tag(begin=_OPEN, header=re.compile(rf"{_OPEN}\s*{_NAME}\s*(?=<|$)"), end=_CLOSE),
    parameter=Tag(
        begin=_KEY[0],
        header=re.compile(rf"{_KEY[0]}{_WORDS}{_KEY[1]}[ \t\r\n]*{_VALUE[0]}"),
        end=_VALUE[1],
    ),
    others=(_KEY[1], _VALUE[0]),
)

GLM = MarkedFormat(
    name="glm",
    openings=(_OPEN,),
    strays=(_CLOSE, *_KEY, *_VALUE),
    read=single_calls(_READER.read_call, _OPEN, _CLOSE),
    end_texts=("<|observation|>", "<|user|>", "<|assistant|>", "<|endoftext|>"),
    stop_texts=("<|observation|>",),
    cut_late_thoughts=True,
)
