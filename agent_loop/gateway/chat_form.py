"""Messages and tools in the form that chat templates take, and what the protocols share.

The protocols split a turn of the policy differently: OpenAI's chat has one message, Anthropic has
blocks, the Responses API has items.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from agent_loop.gateway.forms import Form, check_depth, wrong
from agent_loop.gateway.wire import ModelRequest, WireError

MAX_STOPS = 64
"""The engine looks for every stop text after every token."""

Name = Annotated[str, Meta(min_length=1)]
MaxTokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
StopText = Annotated[str, Meta(min_length=1)]
Stops = StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None
MAX_MESSAGES = 4096
"""Messages or tools of one request; each takes about 20 microseconds of the event loop."""

T = TypeVar("T")
Messages = Annotated[list[T], Meta(min_length=1, max_length=MAX_MESSAGES)]
Tools = Annotated[list[T], Meta(max_length=MAX_MESSAGES)]

_CONSTRAINTS = (
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("regex", "ebnf", "json_schema", "grammar"),
)
"""Fields by which servers of open models (vLLM, SGLang, llama.cpp) take a form of the reply."""


class Asked(Form, kw_only=True):
    """The fields that all protocols have."""

    model: str
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    max_tokens: MaxTokens | None = None
    stop: Stops = None

    neutral: ClassVar = {
        **{"top_p": 1, "min_p": 0, "top_k": -1},
        **{"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1},
    }
    refused = dict.fromkeys(_CONSTRAINTS, "ask for JSON, in this protocol's own field")


class OpenAIAsked(Asked, kw_only=True):
    """Those of both of OpenAI's protocols."""

    tool_choice: "Literal['auto', 'none', 'required'] | OpenAIChoice | None" = None
    parallel_tool_calls: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=0)] | None = None


class Text(Form, tag_field="type", tag="text"):
    """A block of text of Anthropic's protocol."""

    text: str

    skipped = ("citations",)


class Part(Form, kw_only=True):
    """A part of a content of OpenAI's protocols."""

    type: Literal["text", "refusal", "input_text", "output_text", "summary_text", "reasoning_text"]
    text: str | None = None
    refusal: str = ""

    skipped = ("annotations", "logprobs")

    def __post_init__(self) -> None:
        if self.text is None and self.type != "refusal":
            raise ValueError("Object missing required field `text`")  # as msgspec says it


Content = str | list[Part]


class Function(Form, kw_only=True):
    """A tool."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Schema(Form, kw_only=True):
    """The schema of an answer."""

    schema: dict[str, Any] | None = None
    description: str | None = None

    skipped = ("name", "strict")  # the answer is checked in any case


class AnswerForm(Schema, kw_only=True):
    """A wish for structured output. Chat completions have the schema in a field of its own."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None


class Output(Form):
    format: AnswerForm | None = None


class _Named(Form):
    name: Name


class OpenAIChoice(Form, kw_only=True):
    """A tool that must be called: chat completions have its name in a field of its own."""

    type: Literal["function"]
    name: Name | None = None
    function: _Named | None = None


def texts_of(content: str | Sequence[Part | Text] | None) -> list[str]:
    """The texts of a content, which is a text or a list of parts."""
    if isinstance(content, str):
        return [content]
    return [each.text or getattr(each, "refusal", "") for each in content or ()]


def assistant_message(
    texts: Iterable[str], thoughts: Iterable[str] = (), calls: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thought := "\n".join(thoughts):
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message


def call_of(call_id: str, name: str, arguments: str | dict[str, Any] | None) -> dict[str, Any]:
    """
    Args:
        arguments: JSON text, or the object itself; none, blank and `null` are an empty object,
            as clients write a call without arguments. Other text that is no JSON object stays
            text: the policy's mistake is shown to the policy as it was made.
    """
    if isinstance(arguments, str):
        arguments = _object_of(arguments)
    function = {"name": name, "arguments": {} if arguments is None else arguments}
    return {"id": call_id, "type": "function", "function": function}


def _object_of(text: str) -> str | dict[str, Any] | None:
    """The object or null of a JSON text, else the text; None for a blank text."""
    if not text.strip():
        return None
    try:
        value = msgspec.json.decode(text)
        check_depth(value, "")
    except (ValueError, RecursionError, WireError):
        return text
    return value if isinstance(value, dict | None) else text


def tool_message(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def model_request(
    asked: Asked,
    ignored: set[str],
    *,
    messages: list[dict[str, Any]],
    tools: Iterable[Function],
    parameters_at: str,
    choice: str | OpenAIChoice | None,
    answer: AnswerForm | None,
    answer_at: str,
    parallel_tool_calls: bool | None,
    logprobs: bool = False,
    include_usage: bool = True,
) -> ModelRequest:
    """
    Args:
        parameters_at: place of a tool's parameters within the tool.
        choice: auto, none or required, or a tool.
        answer_at: place of `answer`.
    """
    functions, schemas = list[dict[str, Any]](), list[tuple[str, dict[str, Any]]]()
    strict, answer_schema = list[str](), None
    for number, tool in enumerate(tools):
        place = f"tools[{number}].{parameters_at}"
        check_depth(tool.parameters, place)
        parameters = tool.parameters or {"type": "object", "properties": {}}
        function = {"name": tool.name, "description": tool.description or ""}
        functions.append(function | {"parameters": parameters})
        if tool.strict:
            schemas.append((place, parameters))
            strict.append(tool.name)
    if answer is not None and answer.type != "text":
        place, answer_schema = _answer_schema(answer, answer_at)
        schemas.append((place, answer_schema))
    names = [function["name"] for function in functions]
    if len(set(names)) < len(names):
        raise wrong("tools", "two tools have the same name; rename one")
    if isinstance(choice, OpenAIChoice):
        named = choice.name if choice.function is None else choice.function.name
        if named not in names:
            raise wrong("tool_choice", f"{named!r:.80}: no tool has this name; name one of `tools`")
        choice = named
    if choice == "required" and not names:
        raise wrong("tool_choice", "there is no tool to call; send `tools`")
    return ModelRequest(
        messages=_with_tool_names(messages),
        tools=[{"type": "function", "function": function} for function in functions],
        tool_choice=choice or "auto",
        strict=tuple(strict),
        answer_schema=answer_schema,
        schemas=schemas,
        parallel_tool_calls=parallel_tool_calls is not False,
        model=asked.model,
        max_tokens=asked.max_tokens,
        stop=(asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ()),
        temperature=asked.temperature,
        logprobs=logprobs,
        stream=bool(asked.stream),
        include_usage=include_usage,
        ignored=tuple(sorted(ignored)),
    )


def _answer_schema(form: AnswerForm, place: str) -> tuple[str, dict[str, Any]]:
    """Place and content of the schema that the reply must fit."""
    if form.type == "json_object":
        return place, {"type": "object"}
    own, place = (form, place) if form.json_schema is None else (
        form.json_schema, f"{place}.json_schema")  # fmt: skip
    place = f"{place}.schema"
    if own.schema is None:
        raise wrong(place, "is required")
    check_depth(own.schema, place)
    if own.schema.get("type", "object") != "object":
        raise wrong(f"{place}.type", "must be object; put the value into one")
    described = {"description": own.description} if own.description else {}
    return place, {**described, **own.schema}


def _with_tool_names(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`messages`, in which each tool message has the name of the tool of the call before it."""
    names, named = dict[str, str](), list[dict[str, Any]]()
    for message in messages:
        for each in message.get("tool_calls", ()):
            names[each["id"]] = each["function"]["name"]
        name = names.get(message["tool_call_id"]) if message["role"] == "tool" else None
        named.append(message if name is None else {**message, "name": name})
    return named
