"""The forms in which the demo's teacher asks for tools and answers: tags, ReAct, native calls.

A form gives the teacher's texts, and reads the model's for the probe, as the agent loop of this
form does. The default demo has tags for all sources.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from agent_loop.tool_actions import calculate, run_code, search
from agent_loop.toolbox.own import SPECS
from agent_loop.turns.call_formats import FORMATS
from agent_loop.turns.codec import HFCodec
from agent_loop.turns.native import NativeDialogue
from agent_loop.turns.observation_style import GlueOf, inline_glue
from agent_loop.turns.react import OBSERVATION, ReAct, instructions
from agent_loop.turns.tags import Action, ActionKind, Language, Tags
from agent_loop.turns.tool_messages import ToolMessages
from agent_loop.turns.turn_loop import Observation
from config.schema import ToolConfig
from tool_server.wire.protocol import ToolBackend

TOPK = 2
"""Passages of a search, as in config/agent_loops.yaml."""

TOOLS = {"taco": "run_code", "nq": "search", "math": "calculate"}
"""Source -> its tool."""

ARGUMENTS = {"run_code": "code", "search": "query", "calculate": "expression"}
"""Tool -> its argument."""

REACT_PROMPT = "{tools}"
"""`system_prompt` of the ReAct agent of the demo, which has learnt the form from examples."""

CALL_TOKENS = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *('{"name": "', '", "arguments": {"', '": "', '"}}', '"}'),
    *("Action: ", '\nAction Input: {"', "\nObservation: ", "Final Answer: "),
)
"""Tokens of the native form, as in Qwen's tokenizers, and the punctuation of calls: tokenizers of
large models have such pieces too, and the demo model is spared a dozen tokens in each call."""

CHAT_TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}"
    "{%- for tool in tools %}{{- tool.function.name + '(' }}"
    "{{- tool.function.parameters.properties | join(', ') + ')\\n' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}"
    "{%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- else %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    '{{- \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Of a demo whose forms are not all tags. Tools are shown by their names and arguments."""


class Form(Protocol):
    """How a model asks for the tool of one source."""

    def messages(self, question: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Messages of the prompt, and the schemas of tools that the template shows."""
        ...

    def call(self, argument: str) -> str: ...

    def result(self, text: str) -> str:
        """What stands between a call and the model's next words."""
        ...

    def answer(self, text: str) -> str: ...

    def dialogue(self, codec: HFCodec, tokenizer: Any) -> tuple[Language, GlueOf]: ...

    async def act(
        self, action: Action, extras: Mapping[str, Any], tools: ToolBackend
    ) -> Observation: ...


@dataclass(frozen=True)
class TagForm:
    source: str
    config: ToolConfig

    @property
    def _kind(self) -> str:
        return ActionKind.SEARCH if self.source == "nq" else ActionKind.CODE

    def messages(self, question: str) -> tuple[list[dict[str, Any]], None]:
        return [{"role": "user", "content": question}], None

    def _said(self, kind: str, text: str) -> str:
        start = getattr(self.config, f"{kind}_start_tag")
        return f"{start}{text}{getattr(self.config, f'{kind}_end_tag')}"

    def call(self, argument: str) -> str:
        return self._said(self._kind, argument)

    def result(self, text: str) -> str:
        return f"{self.config.start_state_marker}{text}{self.config.end_state_marker}"

    def answer(self, text: str) -> str:
        return self._said(ActionKind.ANSWER, text)

    def dialogue(self, codec: HFCodec, tokenizer: Any) -> tuple[Language, GlueOf]:
        markers = self.config.start_state_marker, self.config.end_state_marker
        language = Tags.from_config(self.config, (self._kind, ActionKind.ANSWER))
        return language, inline_glue(codec, *markers)

    async def act(
        self, action: Action, extras: Mapping[str, Any], tools: ToolBackend
    ) -> Observation:
        return await _act(TOOLS[self.source], action.content, extras, tools)


@dataclass(frozen=True)
class ReactForm:
    source: str
    config: ToolConfig

    def messages(self, question: str) -> tuple[list[dict[str, Any]], None]:
        system = instructions(REACT_PROMPT, [SPECS[TOOLS[self.source]].line])
        asked = {"role": "user", "content": question}
        return [{"role": "system", "content": system}, asked], None

    def call(self, argument: str) -> str:
        tool = TOOLS[self.source]
        given = json.dumps({ARGUMENTS[tool]: argument}, ensure_ascii=False)
        return f"Action: {tool}\nAction Input: {given}"

    def result(self, text: str) -> str:
        return f"\n{OBSERVATION} {text}\n"

    def answer(self, text: str) -> str:
        return f"Final Answer: {text}<|im_end|>"

    def dialogue(self, codec: HFCodec, tokenizer: Any) -> tuple[Language, GlueOf]:
        return ReAct(), inline_glue(codec, f"\n{OBSERVATION} ", "\n")

    async def act(
        self, action: Action, extras: Mapping[str, Any], tools: ToolBackend
    ) -> Observation:
        return await _named(self.source, action, extras, tools)


@dataclass(frozen=True)
class NativeForm:
    source: str
    config: ToolConfig

    def messages(self, question: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        return [{"role": "user", "content": question}], [SPECS[TOOLS[self.source]].schema]

    def call(self, argument: str) -> str:
        tool = TOOLS[self.source]
        given = json.dumps({ARGUMENTS[tool]: argument}, ensure_ascii=False)
        return f'<tool_call>\n{{"name": "{tool}", "arguments": {given}}}\n</tool_call><|im_end|>'

    def result(self, text: str) -> str:
        shown = f"\n<tool_response>\n{text}\n</tool_response>"
        return f"\n<|im_start|>user{shown}<|im_end|>\n<|im_start|>assistant\n"

    def answer(self, text: str) -> str:
        return f"{text}<|im_end|>"

    def dialogue(self, codec: HFCodec, tokenizer: Any) -> tuple[Language, GlueOf]:
        spec = SPECS[TOOLS[self.source]]

        def render(messages: Any, add_generation_prompt: bool) -> str:
            return tokenizer.apply_chat_template(
                messages,
                tools=[spec.schema],
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )

        dialogue = NativeDialogue(
            FORMATS["hermes"],
            {spec.name: spec.parameters},
            ToolMessages(render, codec.encode, codec.end_ids),
            codec,
            Tags.from_config(self.config, [ActionKind.ANSWER]),
            max_calls=1,
        )
        return dialogue, dialogue.glue

    async def act(
        self, action: Action, extras: Mapping[str, Any], tools: ToolBackend
    ) -> Observation:
        return await _named(self.source, action, extras, tools)


async def _named(
    source: str, action: Action, extras: Mapping[str, Any], tools: ToolBackend
) -> Observation:
    """Run a call by name, as the agent loops that take calls by name do."""
    tool = TOOLS[source]
    if action.kind != tool:
        return Observation(text=f"error: no tool {action.kind!r}; there are {tool}", rejected=True)
    if (problem := SPECS[tool].mistake(action.arguments)) is not None:
        return Observation(text=f"error: {problem}", rejected=True)
    stdin = {"example_input": action.arguments.get("stdin", "")}
    return await _act(tool, action.arguments[ARGUMENTS[tool]], stdin, tools)


async def _act(
    tool: str, argument: str, extras: Mapping[str, Any], tools: ToolBackend
) -> Observation:
    if tool == "search":
        return await search(tools, argument, TOPK)
    if tool == "calculate":
        return await calculate(tools, argument)
    return await run_code(tools, argument, extras["example_input"])


FORMS: dict[str, type[TagForm | ReactForm | NativeForm]] = {
    "tags": TagForm,
    "react": ReactForm,
    "native": NativeForm,
}


def forms_of(names: Mapping[str, str], config: ToolConfig) -> dict[str, Form]:
    """Source -> its form."""
    return {source: FORMS[name](source, config) for source, name in names.items()}
