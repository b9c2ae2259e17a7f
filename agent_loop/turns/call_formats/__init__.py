"""Reads the tool calls that a model wrote in its own format, and names every mistake.

Pure functions of text: no verl, no tokenizer, no I/O. Whether a tool exists and whether its
arguments fit is not checked here.

verl's `ToolParser` names nine formats, and vLLM the others. verl's parsers are not used, because
each of them drops or changes some calls without a word;
`tests/agent_loop/turns/test_verls_call_parsers.py` has a case for each.
"""

from collections.abc import Mapping

from agent_loop.turns.call_formats.gemma4 import GEMMA4
from agent_loop.turns.call_formats.glm import GLM
from agent_loop.turns.call_formats.gpt_oss import GPT_OSS
from agent_loop.turns.call_formats.hermes import HERMES
from agent_loop.turns.call_formats.kimi import KIMI
from agent_loop.turns.call_formats.lfm2 import LFM2
from agent_loop.turns.call_formats.llama3 import LLAMA3
from agent_loop.turns.call_formats.message import CallFormat, CallMistake, Message, ParsedCall
from agent_loop.turns.call_formats.mistral import MISTRAL
from agent_loop.turns.call_formats.tagged import DEEPSEEK_V4, MINIMAX, QWEN3_CODER, SEED

_VERLS: tuple[CallFormat, ...] = (
    *(HERMES, QWEN3_CODER, GPT_OSS, GLM, KIMI, DEEPSEEK_V4, MINIMAX, SEED, GEMMA4),
)

FORMATS: Mapping[str, CallFormat] = {each.name: each for each in (*_VERLS, LLAMA3, MISTRAL, LFM2)}
"""Name of a format in `multi_turn.format` -> the format."""

VERLS_FORMATS = tuple(each.name for each in _VERLS)
"""Those that verl's own `tool_agent` reads too."""

__all__ = ["FORMATS", "VERLS_FORMATS", "CallFormat", "CallMistake", "Message", "ParsedCall"]
