"""Messages and tools in the form that chat templates take, and the fields that protocols share.

The protocols split a turn of the policy differently: OpenAI's chat has one message, Anthropic has
blocks, the Responses API has items. `AssistantTurn` collects the parts of all three.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agent_loop.gateway.demands import checker
from agent_loop.gateway.fields import Fields, check_json, unsupported, wrong
from agent_loop.gateway.wire import ModelRequest
from agent_loop.turns.call_formats.json_values import read_json

TEXT_ONLY = "the policy reads text only; send text parts"
NO_FUNCTION = "only function tools are served; execute the tool in the client"
MOST_STOPS = 64
"""The engine looks for every stop text after every token."""

_CONSTRAINTS = (
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("regex", "ebnf", "json_schema", "grammar"),
)
"""Fields by which servers of open models (vLLM, SGLang, llama.cpp) take a form of the reply."""

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


def function_tool(fields: Fields, parameters: str) -> tuple[dict[str, Any], bool]:
    """The schema of a tool for chat templates, and whether its calls must fit it.

    Args:
        parameters: the protocol's name of the field with the parameters' schema.
    """
    is_strict = bool(fields.flag("strict"))
    function = {
        "name": fields.needed_name(),
        "description": fields.text("description") or "",
        "parameters": fields.json_object(parameters) or {"type": "object", "properties": {}},
    }
    if is_strict:
        _check_schema(function["parameters"], fields.at(parameters))
    return {"type": "function", "function": function}, is_strict


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


def answer_schema(form: Fields | None) -> dict[str, Any] | None:
    """The schema that the reply must fit, of a wish for structured output; None: any text.

    OpenAI's protocols and Anthropic's have the same types; chat completions have the schema in a
    field of its own.
    """
    if form is None or (kind := form.needed_text("type")) == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        rule = "the policy can be asked for text, json_object or json_schema"
        raise unsupported(form.at("type"), kind, rule)
    form = form.object("json_schema") or form
    form.skip("name", "strict")  # the answer is checked in any case
    description = form.text("description")
    form.require("schema")
    schema, place = form.json_object("schema") or {}, form.at("schema")
    if schema.get("type", "object") != "object":
        raise wrong(f"{place}.type", schema["type"], "must be object; put the value into one")
    _check_schema(schema, place)
    return {"description": description, **schema} if description else schema


def _check_schema(schema: dict[str, Any], place: str) -> None:
    try:
        checker(schema)
    except ValueError as error:
        raise wrong(place, schema, str(error).partition("parameters: ")[2]) from error


def check_top_logprobs(fields: Fields) -> None:
    if top := fields.integer("top_logprobs", least=0):
        raise unsupported("top_logprobs", top, "only sampled tokens have log-probabilities; send 0")


def model_request(
    fields: Fields,
    *,
    messages: list[dict[str, Any]],
    tools: list[tuple[dict[str, Any], bool]],
    choice: tuple[str, bool],
    answer_schema: dict[str, Any] | None,
    parallel_tool_calls: bool,
    max_tokens: int | None,
    stop: str,
    logprobs: bool = False,
    include_usage: bool = True,
) -> ModelRequest:
    """The request, with the fields that all protocols have. No field may be read after this.

    Args:
        tools: each with whether its calls must fit its schema.
        choice: the tool choice, and whether it is the name of a tool.
        stop: the protocol's name of the field with the stop texts.
    """
    for name in _CONSTRAINTS:
        fields.refuse(name, "the policy can be asked for JSON, in this protocol's own field")
    schemas = [schema for schema, _ in tools]
    return ModelRequest(
        messages=_with_tool_names(messages),
        tools=schemas,
        tool_choice=_checked_choice(*choice, _names(schemas)),
        strict=tuple(schema["function"]["name"] for schema, is_strict in tools if is_strict),
        answer_schema=answer_schema,
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


def _checked_choice(choice: str, is_name: bool, names: set[str]) -> str:
    if is_name and choice not in names:
        raise wrong("tool_choice", choice, "no tool has this name; name one of `tools`")
    if choice == "required" and not names:
        raise wrong("tool_choice", choice, "there is no tool to call; send `tools`")
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
