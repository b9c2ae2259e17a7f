"""Writes a message with tool calls as the chat template of each format does."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Call = tuple[str, dict[str, Any]]
"""Name of the tool and its arguments."""

_DSML = "\uff5cDSML\uff5c"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _raw(value: Any) -> str:
    """A text as it is, other values as JSON."""
    return value if isinstance(value, str) else _json(value)


def _hermes(calls: Sequence[Call]) -> str:
    return "".join(
        f"\n<tool_call>\n{_json({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in calls
    )


def _function(name: str, arguments: dict[str, Any], around: str) -> str:
    parameters = "".join(
        f"<parameter={key}>{around}{_raw(value)}{around}</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<function={name}>\n{parameters}</function>\n"


def _qwen3_coder(calls: Sequence[Call]) -> str:
    return "".join(f"\n<tool_call>\n{_function(*call, chr(10))}</tool_call>" for call in calls)


def _seed(calls: Sequence[Call]) -> str:
    return "".join(f"\n<seed:tool_call>\n{_function(*call, '')}</seed:tool_call>" for call in calls)


def _minimax(calls: Sequence[Call]) -> str:
    invokes = "".join(
        f'<invoke name="{name}">\n'
        + "".join(
            f'<parameter name="{key}">{_raw(value)}</parameter>\n'
            for key, value in arguments.items()
        )
        + "</invoke>\n"
        for name, arguments in calls
    )
    return f"\n<minimax:tool_call>\n{invokes}</minimax:tool_call>"


def _deepseek_v4(calls: Sequence[Call]) -> str:
    invokes = "\n".join(
        f'<{_DSML}invoke name="{name}">\n'
        + "\n".join(
            f'<{_DSML}parameter name="{key}" string="{_json(isinstance(value, str))}">{_raw(value)}'
            f"</{_DSML}parameter>"
            for key, value in arguments.items()
        )
        + f"\n</{_DSML}invoke>"
        for name, arguments in calls
    )
    return f"\n\n<{_DSML}tool_calls>\n{invokes}\n</{_DSML}tool_calls>"


def _glm(calls: Sequence[Call]) -> str:
    return "".join(
        f"\n<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_raw(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )


def _kimi(calls: Sequence[Call]) -> str:
    written = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>"
        f"{_json(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma_value, value)) + "]"
    return _json(value)


def _gemma4(calls: Sequence[Call]) -> str:
    return "".join(
        f"<|tool_call>call:{name}{gemma_value(arguments)}<tool_call|>" for name, arguments in calls
    )


def _gpt_oss(calls: Sequence[Call]) -> str:
    return "".join(
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{_json(arguments)}<|call|>"
        for name, arguments in calls
    )


def _llama3(calls: Sequence[Call]) -> str:
    return "; ".join(_json({"name": name, "parameters": arguments}) for name, arguments in calls)


def _mistral(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls)


def lfm_value(value: Any) -> str:
    if isinstance(value, str):
        for plain, written in (("\\", "\\\\"), ("'", "\\'"), ("\n", "\\n"), ("\r", "\\r")):
            value = value.replace(plain, written)
        return f"'{value}'"
    return _json(value) if isinstance(value, (dict, list)) else str(value)


def _lfm2(calls: Sequence[Call]) -> str:
    written = (
        f"{name}({', '.join(f'{key}={lfm_value(value)}' for key, value in arguments.items())})"
        for name, arguments in calls
    )
    return f"<|tool_call_start|>[{', '.join(written)}]<|tool_call_end|>"


@dataclass(frozen=True, kw_only=True)
class Writer:
    """How messages of one format are written."""

    calls: Callable[[Sequence[Call]], str]

    before: tuple[str, ...]
    """Markers before the name of a call, without which it cannot be read."""

    after: tuple[str, ...]
    """Markers after the name, without which the call cannot be read. The last one ends it."""

    innermost_end: str
    """The marker before which no words may stand."""

    thought: tuple[str, str] = ("<think>\n", "\n</think>\n\n")

    end: str = "<|im_end|>"

    forbidden: tuple[str, ...] = ()
    """Texts that no value of the format can hold."""

    may_lack_end: bool = False
    """Whether the last marker may be missing at the end of a message: the engine stops at it."""

    prompt_markers: tuple[str, ...] = ()
    """Markers that may be missing at the beginning: they are the prompt's end."""

    has_plain_keys: bool = False
    """Whether a key must be one word, at all depths."""

    takes_python: bool = False
    """Whether a value may be written as Python does."""

    content: tuple[str, str] = ("", "")
    """What stands before and after the words of a message."""

    def message(self, calls: Sequence[Call], content: str = "", reasoning: str = "") -> str:
        """One message as the model samples it, with the token that ends it."""
        text = ""
        if reasoning:
            text += self.thought[0] + reasoning + self.thought[1]
        if content:
            text += self.content[0] + content + self.content[1]
        return text + (self.calls(calls) if calls else "") + self.end


WRITERS = {
    "hermes": Writer(
        calls=_hermes,
        before=("<tool_call>",),
        after=("</tool_call>",),
        innermost_end="</tool_call>",
    ),
    "qwen3_coder": Writer(
        calls=_qwen3_coder,
        before=("<tool_call>", "<function="),
        after=("<parameter=", "</parameter>", "</function>", "</tool_call>"),
        innermost_end="</function>",
        forbidden=("</parameter>", "<parameter="),
    ),
    "gpt-oss": Writer(
        calls=_gpt_oss,
        before=("<|start|>assistant", "<|channel|>"),
        after=("<|message|>", "<|call|>"),
        innermost_end="<|call|>",
        thought=("<|start|>assistant<|channel|>analysis<|message|>", "<|end|>"),
        content=("<|start|>assistant<|channel|>commentary<|message|>", "<|end|>"),
        prompt_markers=("<|start|>assistant",),
        may_lack_end=True,
        end="",
    ),
    "glm": Writer(
        calls=_glm,
        before=("<tool_call>",),
        after=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"),
        innermost_end="</tool_call>",
        thought=("<think>", "</think>\n"),
        forbidden=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        end="<|observation|>",
    ),
    "kimi": Writer(
        calls=_kimi,
        before=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        after=("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        innermost_end="<|tool_call_end|>",
    ),
    "deepseek_v4": Writer(
        calls=_deepseek_v4,
        before=(f"<{_DSML}tool_calls>", f"<{_DSML}invoke"),
        after=(f"<{_DSML}parameter", f"</{_DSML}parameter>", f"</{_DSML}invoke>"),
        innermost_end=f"</{_DSML}invoke>",
        thought=("<think>", "</think>"),
        forbidden=(f'<{_DSML}parameter name="', f"</{_DSML}parameter>"),
        end="<\uff5cend\u2581of\u2581sentence\uff5c>",
    ),
    "minimax": Writer(
        calls=_minimax,
        before=("<minimax:tool_call>", "<invoke"),
        after=("<parameter", "</parameter>", "</invoke>"),
        innermost_end="</invoke>",
        forbidden=('<parameter name="', "</parameter>"),
        end="[e~[",
    ),
    "seed": Writer(
        calls=_seed,
        before=("<seed:tool_call>", "<function="),
        after=("<parameter=", "</parameter>", "</function>", "</seed:tool_call>"),
        innermost_end="</function>",
        thought=("<seed:think>", "</seed:think>"),
        forbidden=("</parameter>", "<parameter="),
        end="<seed:eos>",
    ),
    "gemma4": Writer(
        calls=_gemma4,
        before=("<|tool_call>",),
        after=("<tool_call|>",),
        innermost_end="<tool_call|>",
        thought=("<|channel>thought\n", "<channel|>"),
        forbidden=('<|"|>',),
        end="<|tool_response>",
        has_plain_keys=True,
        may_lack_end=True,
    ),
    "llama3_json": Writer(
        calls=_llama3,
        before=(),
        after=("}",),
        innermost_end="}",
        content=("", "\n"),
        end="<|eot_id|>",
    ),
    "mistral": Writer(
        calls=_mistral,
        before=("[TOOL_CALLS]",),
        after=("{", "}"),
        innermost_end="}",
        thought=("[THINK]", "[/THINK]"),
        end="</s>",
    ),
    "lfm2": Writer(
        calls=_lfm2,
        before=("<|tool_call_start|>",),
        after=("=", ")"),
        innermost_end=")",
        forbidden=("<|tool_call_end|>",),
        takes_python=True,
    ),
}
"""Name of a format in `multi_turn.format` -> its writer."""
