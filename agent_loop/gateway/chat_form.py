"""Messages and tools in the form that chat templates take, and the fields that protocols share.

The protocols split a turn of the policy differently: OpenAI's chat has one message, Anthropic has
blocks, the Responses API has items. `AssistantTurn` collects the parts of all three.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agent_loop.gateway.fields import Fields, check_json, unsupported, wrong
from agent_loop.gateway.wire import ModelRequest
from agent_loop.turns.call_formats.json_values import read_json

TEXT_ONLY = "the policy reads text only; send text parts"
NO_FUNCTION = "only function tools are served; execute the tool in the client"
MOST_STOPS = 64
"""The engine looks for every stop text after every token."""

_SAMPLING = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 2.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantTurn:
    """The parts of an assistant message, in the order in which they were written."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def add_call(self, call_id: str, name: str, arguments: str | dict[str, Any] | None) -> None:
        """
        Args:
            arguments: JSON text, or the object itself; none, blank and `null` are an empty object,
                as clients write a call without arguments. Other text that is no JSON object stays
                text: the policy's mistake is shown to the policy as it was made.
        """
        if isinstance(arguments, str):
            arguments = _object_of(arguments)
        function = {"name": name, "arguments": {} if arguments is None else arguments}
        self.calls.append({"id": call_id, "type": "function", "function": function})

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "\n".join(self.texts)}
        if thoughts := "\n".join(self.thoughts):
            message["reasoning_content"] = thoughts
        if self.calls:
            message["tool_calls"] = self.calls
        return message


def tool_message(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def content_texts(fields: Fields, name: str, kinds: Mapping[str, str]) -> list[str]:
    """The texts of a content, which is a text or a list of parts.

    Args:
        kinds: type of a part -> name of the field that holds its text. Other types are refused.
    """
    if fields.is_text(name):
        return [fields.needed_text(name)]
    texts: list[str] = []
    for part in fields.objects(name):
        kind = part.needed_text("type")
        if kind not in kinds:
            raise unsupported(part.place, kind, TEXT_ONLY)
        part.skip("annotations", "logprobs", "citations")
        texts.append(part.needed_text(kinds[kind]))
    return texts


def function_tool(fields: Fields, parameters: str) -> dict[str, Any]:
    """The schema of a tool for chat templates.

    Args:
        parameters: the protocol's name of the field with the parameters' schema.
    """
    function = {
        "name": fields.needed_name(),
        "description": fields.text("description") or "",
        "parameters": fields.json_object(parameters) or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def openai_tool_choice(fields: Fields) -> tuple[str, bool]:
    """`tool_choice` of both of OpenAI's protocols, and whether it is the name of a tool."""
    if fields.is_text("tool_choice"):
        choice = fields.needed_text("tool_choice")
        if choice not in ("auto", "none", "required"):
            raise wrong("tool_choice", choice, "must be auto, none, required or an object")
        return choice, False
    if (named := fields.object("tool_choice")) is None:
        return "auto", False
    if (kind := named.needed_text("type")) != "function":
        raise unsupported("tool_choice.type", kind, "must be 'function'")
    return (named.object("function") or named).needed_name(), True


def ignore_output_form(fields: Fields, name: str) -> None:
    """Note a wish for output of another form than text. The policy's output is not constrained."""
    if (form := fields.take(name)) is None:
        return
    if not isinstance(form, dict):
        raise wrong(fields.at(name), form, "must be a JSON object")
    if form.get("type") != "text":
        fields.ignore(name)


def check_top_logprobs(fields: Fields) -> None:
    if top := fields.integer("top_logprobs", least=0):
        raise unsupported("top_logprobs", top, "only sampled tokens have log-probabilities; send 0")


def model_request(
    fields: Fields,
    *,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    choice: tuple[str, bool],
    parallel_tool_calls: bool,
    max_tokens: int | None,
    stop: str,
    logprobs: bool = False,
    include_usage: bool = True,
) -> ModelRequest:
    """The request, with the fields that all protocols have. No field may be read after this.

    Args:
        choice: the tool choice, and whether it is the name of a tool.
        stop: the protocol's name of the field with the stop texts.
    """
    return ModelRequest(
        messages=_with_tool_names(messages),
        tools=tools,
        tool_choice=_checked_choice(fields, *choice, _names(tools)),
        parallel_tool_calls=parallel_tool_calls,
        model=fields.needed_text("model"),
        max_tokens=max_tokens,
        stop=_stop_texts(fields, stop),
        sampling=_sampling(fields),
        logprobs=logprobs,
        stream=bool(fields.flag("stream")),
        include_usage=include_usage,
        ignored=fields.ignored(),
    )


def _with_tool_names(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`messages`, in which each tool message has the name of the tool of the call before it."""
    names, named = dict[str, str](), list[dict[str, Any]]()
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        name = names.get(message["tool_call_id"]) if message["role"] == "tool" else None
        named.append(message if name is None else {**message, "name": name})
    return named


def _names(tools: list[dict[str, Any]]) -> set[str]:
    names: set[str] = set()
    for tool in tools:
        if (name := tool["function"]["name"]) in names:
            raise wrong("tools", name, "two tools have this name; rename one")
        names.add(name)
    return names


def _checked_choice(fields: Fields, choice: str, is_name: bool, names: set[str]) -> str:
    if is_name and choice not in names:
        raise wrong("tool_choice", choice, "no tool has this name; name one of `tools`")
    if is_name or choice == "required":
        fields.ignore("tool_choice")  # the policy's output is not constrained to calls
    return choice


def _sampling(fields: Fields) -> dict[str, float]:
    """The sampling parameters that were given. Their names are the same in all protocols."""
    given = {name: fields.number(name, *bounds) for name, bounds in _SAMPLING.items()}
    given["top_k"] = fields.integer("top_k", least=-1)
    given["seed"] = fields.integer("seed")
    return {name: value for name, value in given.items() if value is not None}


def _stop_texts(fields: Fields, name: str) -> tuple[str, ...]:
    stops = fields.texts(name)
    if len(stops) > MOST_STOPS or "" in stops:
        raise wrong(name, stops, f"must be at most {MOST_STOPS} texts, none of them empty")
    return tuple(stops)


def _object_of(text: str) -> str | dict[str, Any] | None:
    """The object or null of a JSON text, else the text; None for a blank text."""
    if not text.strip():
        return None
    try:
        value, end = read_json(text, 0)
        check_json(value)
    except ValueError:
        return text
    return value if isinstance(value, dict | None) and not text[end:].strip() else text
