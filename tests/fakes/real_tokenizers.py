"""Real tokenizers, made in memory: byte-level BPE under which a tag is cut in three ways."""

from copy import copy
from functools import lru_cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agent_loop.turns.codec import codec_of
from agent_loop.turns.tool_messages import ToolMessages

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""The last ends a message; the second is special, but none that the tokenizer has a name for."""

KINDS = ("pieces", "whole", "straddling")
"""A tag is several tokens; it is one; its last character shares a token with what follows it."""

_WHOLE = ("<code>", "</code>", "<answer>", "</answer>", "<information>", "</information>")

_MERGES = {
    "pieces": [("c", "o"), ("d", "e"), ("co", "de"), ("<", "/"), ("a", "n")],
    "whole": [("c", "o"), ("d", "e"), ("co", "de"), ("<", "/"), ("a", "n")],
    # \u00f0 is how byte-level BPE writes the first byte of an emoji, \u010a the end of a line
    "straddling": [
        *[(">", "\u00f0"), (">", "\u010a"), (">", "<"), ("e", ">"), ("e>", "x"), ("r", ">")],
        *[("<", "/"), ("</", "c"), ("}", "\u010a"), ("\u010a", "O"), (":", "\u0120"), ("}", "}")],
    ],
}

_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""As Qwen's."""


@lru_cache
def real_tokenizer(kind: str) -> Any:
    """A Hugging Face tokenizer of one of `KINDS`, with a chat template like Qwen's."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces += [first + second for first, second in _MERGES[kind]]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=_MERGES[kind]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=kind != "straddling"
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(CONTROL))
    if kind == "whole":
        tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in _WHOLE])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=CONTROL[2],
        pad_token=CONTROL[0],
        chat_template=_TEMPLATE,
    )


def tool_messages(tokenizer: Any) -> ToolMessages:
    """The glue of a tokenizer's chat template."""
    codec = codec_of(tokenizer)
    return ToolMessages(
        lambda messages, prompt: tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt
        ),
        codec.encode,
        codec.end_ids,
    )


def control_ids(tokenizer: Any) -> set[int]:
    """What a tool must never write."""
    return set(tokenizer.added_tokens_decoder)


@lru_cache
def byte_tokenizer(control: tuple[str, ...]) -> Any:
    """A token for each byte, and the special tokens `control`, of which the last ends a message."""
    vocabulary = {piece: n for n, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(control))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=control[-1], pad_token=control[-1]
    )


_CALLS = {
    "hermes": """{{ '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\n</tool_call>' }}""",
    "qwen3_coder": """{{ '\n<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for name, value in call.function.arguments.items() %}
{{- '<parameter=' + name + '>\n' }}{{ value }}{{ '\n</parameter>\n' }}
{%- endfor %}{{ '</function>\n</tool_call>' }}""",
    "llama3_json": """{%- if message.tool_calls | length > 1 %}
{{- raise_exception('only single tool-calls at once') }}{% endif %}
{{- '{"name": "' + call.function.name + '", "parameters": ' }}
{{- call.function.arguments | tojson }}{{ '}' }}""",
    "mistral": """{%- if call.id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' }}
{{- call.function.arguments | tojson }}""",
    "mistral list": """{{ '[TOOL_CALLS] [' if loop.first else ', ' }}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{{ ']' if loop.last }}""",
    "lfm2": """{{ '<|tool_call_start|>[' if loop.first else ', ' }}{{ call.function.name + '(' }}
{%- for name, value in call.function.arguments.items() %}{{ ', ' if not loop.first }}
{{- name + '=' }}{{ "'" + value + "'" if value is string else value }}
{%- endfor %}{{ ')' }}{{ ']<|tool_call_end|>' if loop.last }}""",
    "unknown": "{{ '[call ' + call.function.name + ' ' + call.function.arguments.text + ']' }}",
}
"""Format -> how a chat template writes a call."""

_TOOLS = """\
{%- if tools %}{{ '<|im_start|>system\n' }}
{%- for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"""

_SAID = "message.content"
_LAST_SAID = """(message.content if message.role != 'assistant' or message ==
messages | selectattr('role', 'equalto', 'assistant') | list | last else '')"""


def calling_tokenizer(call_format: str, *, shows_tools: bool = True, continues: bool = True) -> Any:
    """A tokenizer of bytes, with a chat template that writes calls in a format, or in none.

    Args:
        call_format: one of `_CALLS`.
        shows_tools: whether the template puts the schemas of tools into the prompt.
        continues: whether earlier messages stay as they are when a later one follows.
    """
    tokenizer = copy(byte_tokenizer(CONTROL))
    calls = "{% for call in message.tool_calls or [] %}" + _CALLS[call_format] + "{% endfor %}"
    said = _SAID if continues else _LAST_SAID
    tokenizer.chat_template = (_TOOLS if shows_tools else "") + _TEMPLATE.replace(
        "message.content + '<|im_end|>\n'", f"{said} }}}}{calls}{{{{- '<|im_end|>\n'"
    )
    return tokenizer
