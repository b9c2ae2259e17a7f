"""Chat templates of the formats of tool calls, as functions: messages -> text.

Their headers, ends and the place of a tool's result are those of the models' own templates.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from tests.fakes.call_writers import WRITERS

Message = Mapping[str, Any]
_AI, _USER = "<\uff5cAssistant\uff5c>", "<\uff5cUser\uff5c>"


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """The template of one format."""

    format_name: str
    user: str
    """`{}` is the text."""

    header: str
    """Before an assistant's message; the prompt of a generation."""

    end: str
    """Of an assistant's message."""

    results: Callable[[Sequence[Message]], str]
    """The results of one message's calls."""

    control: tuple[str, ...]
    """Special tokens; at the last one the engine stops."""

    call_end: str | None = None
    """Of an assistant's message with calls; None: `end`."""

    continues: bool = False
    """Whether results are in the assistant's own message, which goes on after them."""

    takes_one_call: bool = False
    """Whether an assistant's message with several calls is refused."""

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        text, role = "", ""
        for role, group in groupby(messages, key=lambda message: message["role"]):
            several = list(group)
            if role == "tool":
                text += self.results(several)
                continue
            for message in several:
                goes_on = self.continues and text.endswith("<tool_response|>")
                header = "" if goes_on else self.header
                text += (
                    self._assistant(message, header)
                    if role == "assistant"
                    else (self.user.format(message["content"]))
                )
        if add_generation_prompt and not (self.continues and role == "tool"):
            text += self.header
        return text

    def _assistant(self, message: Message, header: str) -> str:
        asked = [
            (call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls", ())
        ]
        if self.takes_one_call and len(asked) > 1:
            raise ValueError("This model only supports single tool-calls at once!")
        writer = WRITERS[self.format_name]
        body = (
            writer.content[0] + message["content"] + writer.content[1]
            if asked
            else (message["content"])
        )
        text = f"{body if message['content'] else ''}{writer.calls(asked) if asked else ''}"
        text = text.removeprefix(header) if self.format_name == "gpt-oss" else text
        end = self.end if self.call_end is None or not asked else self.call_end
        return f"{header}{text}{end}"


def _each(form: str) -> Callable[[Sequence[Message]], str]:
    """Each result in this form, in which `{}` is the text."""
    return lambda results: "".join(
        form.replace("{id}", str(r["tool_call_id"])).replace("{}", r["content"]) for r in results
    )


def _of_qwen(results: Sequence[Message]) -> str:
    inner = _each("\n<tool_response>\n{}\n</tool_response>")(results)
    return f"<|im_start|>user{inner}<|im_end|>\n"


def _of_glm(results: Sequence[Message]) -> str:
    return "<|observation|>" + _each("\n<tool_response>\n{}\n</tool_response>")(results)


def _of_gpt_oss(results: Sequence[Message]) -> str:
    return "".join(
        f"<|start|>functions.{r['name']} to=assistant<|channel|>commentary<|message|>"
        f"{json.dumps(r['content'], ensure_ascii=False)}<|end|>"
        for r in results
    )


def _of_gemma(results: Sequence[Message]) -> str:
    return "".join(
        f'<|tool_response>response:{r["name"]}{{value:<|"|>{r["content"]}<|"|>}}<tool_response|>'
        for r in results
    )


@dataclass(frozen=True, kw_only=True)
class ThinkingTemplate(ChatTemplate):
    """As Qwen3's. It drops thoughts at the next message of a user, and writes an empty thought into
    the last message only."""

    keeps_thoughts: bool = True
    """Whether a thought stays when a tool's result follows."""

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        last_user = max(at for at, each in enumerate(messages) if each["role"] == "user")
        shown = list[Message]()
        for at, each in enumerate(messages):
            is_last, thought = at == len(messages) - 1, each.get("reasoning_content", "")
            is_shown = is_last or (thought and self.keeps_thoughts)
            if each["role"] == "assistant" and at > last_user and is_shown:
                each = {**each, "content": f"<think>\n{thought}\n</think>\n\n{each['content']}"}
            shown.append(each)
        return super().render(shown, add_generation_prompt)


def _of_llama(results: Sequence[Message]) -> str:
    header = "<|start_header_id|>ipython<|end_header_id|>\n\n"
    return "".join(
        f"{header}{json.dumps(r['content'], ensure_ascii=False)}<|eot_id|>" for r in results
    )


def _of_mistral(results: Sequence[Message]) -> str:
    if any(len(r["tool_call_id"]) != 9 for r in results):
        raise ValueError("Tool call IDs should be alphanumeric strings with length 9!")
    return _each("[TOOL_RESULTS]{id}[TOOL_CONTENT]{}[/TOOL_RESULTS]")(results)


_CHATML: dict[str, Any] = {
    "user": "<|im_start|>user\n{}<|im_end|>\n",
    "header": "<|im_start|>assistant\n",
    "end": "<|im_end|>\n",
    "results": _of_qwen,
    "control": ("<|im_start|>", "<|im_end|>"),
}

QWEN3 = ThinkingTemplate(format_name="hermes", **_CHATML)

TEMPLATES = {
    template.format_name: template
    for template in (
        ChatTemplate(format_name="hermes", **_CHATML),
        ChatTemplate(format_name="qwen3_coder", **_CHATML),
        ChatTemplate(
            format_name="gpt-oss",
            user="<|start|>user<|message|>{}<|end|>",
            header="<|start|>assistant",
            end="<|return|>",
            call_end="",  # the writer of calls ends them
            results=_of_gpt_oss,
            control=(
                "<|start|>",
                "<|channel|>",
                "<|message|>",
                "<|end|>",
                "<|call|>",
                "<|return|>",
            ),
        ),
        ChatTemplate(
            format_name="glm",
            user="<|user|>\n{}",
            header="<|assistant|>\n",
            end="",
            results=_of_glm,
            control=("<|assistant|>", "<|observation|>", "<|user|>"),
        ),
        ChatTemplate(
            format_name="kimi",
            user="<|im_user|>user<|im_middle|>{}<|im_end|>",
            header="<|im_assistant|>assistant<|im_middle|>",
            end="<|im_end|>",
            results=_each("<|im_system|>tool<|im_middle|>## Return of {id}\n{}<|im_end|>"),
            control=("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_end|>"),
        ),
        ChatTemplate(
            format_name="deepseek_v4",
            user=f"{_USER}{{}}",
            header=f"{_AI}</think>",
            end="<\uff5cend\u2581of\u2581sentence\uff5c>",
            results=lambda results: _USER + _each("<tool_result>{}</tool_result>")(results),
            control=(_USER, _AI, "<\uff5cend\u2581of\u2581sentence\uff5c>"),
        ),
        ChatTemplate(
            format_name="minimax",
            user="]~b]user\n{}[e~[\n",
            header="]~b]ai\n",
            end="[e~[\n",
            results=_each("]~b]tool\n<response>{}</response>[e~[\n"),
            control=("]~b]", "[e~["),
        ),
        ChatTemplate(
            format_name="seed",
            user="<seed:bos>user\n{}<seed:eos>",
            header="<seed:bos>assistant\n",
            end="<seed:eos>",
            results=_each("<seed:bos>tool\n{}<seed:eos>"),
            control=("<seed:bos>", "<seed:eos>"),
        ),
        ChatTemplate(
            format_name="gemma4",
            user="<|turn>user\n{}<turn|>\n",
            header="<|turn>model\n",
            end="<turn|>\n",
            call_end="",
            results=_of_gemma,
            control=('<|"|>', "<|tool_call>", "<tool_call|>", "<|turn>", "<turn|>"),
            continues=True,
        ),
        ChatTemplate(
            format_name="llama3_json",
            user="<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>",
            header="<|start_header_id|>assistant<|end_header_id|>\n\n",
            end="<|eot_id|>",
            results=_of_llama,
            control=("<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>", "<|eot_id|>"),
            takes_one_call=True,
        ),
        ChatTemplate(
            format_name="mistral",
            user="[INST]{}[/INST]",
            header="",
            end="</s>",
            results=_of_mistral,
            control=("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "</s>"),
        ),
        ChatTemplate(
            format_name="lfm2",
            user=_CHATML["user"],
            header=_CHATML["header"],
            end=_CHATML["end"],
            results=_each("<|im_start|>tool\n{}<|im_end|>\n"),
            control=("<|im_start|>", "<|tool_call_start|>", "<|tool_call_end|>", "<|im_end|>"),
        ),
    )
}
"""Name of a format in `multi_turn.format` -> its template."""
