"""Request and reply types that all three protocols are translated to, and parts that they share.

Three modules translate these types: `chat_completions`, `anthropic_messages` and `responses`. Each
has the same functions: `parse`, `reply_body`, `reply_events` and `error_body`.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

_PIECE = 64
"""Characters of a text in one event of a stream."""

Finish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """What an agent program asks of the policy."""

    messages: list[dict[str, Any]]
    """In the form that chat templates take. Every message has `role` (system, user, assistant or
    tool) and `content`, a text. An assistant message may have `reasoning_content`, a text, and
    `tool_calls`, whose `arguments` are a dict if their JSON text is an object, else the text. A
    tool message has `tool_call_id`, and `name` if the call or the client names the tool."""

    tools: list[dict[str, Any]]
    """OpenAI's function schemas. Each has a `name`, a `description` and `parameters`."""

    tool_choice: str
    """`auto`, `none`, `required`, or the name of one of `tools`."""

    strict: tuple[str, ...]
    """Names of the tools whose calls must fit their schemas."""

    answer_schema: dict[str, Any] | None
    """JSON schema that a reply without calls must fit, of an object; None: it may be any text."""

    schemas: list[tuple[str, dict[str, Any]]]
    """Those that the reply must fit, `answer_schema` too, each after its place in the request."""

    parallel_tool_calls: bool
    """Whether one reply may hold several calls."""

    model: str

    max_tokens: int | None
    """Most tokens of the reply; None if the request does not say."""

    stop: tuple[str, ...]

    temperature: float | None

    logprobs: bool
    """Whether the reply lists its tokens with their log-probabilities."""

    stream: bool

    include_usage: bool
    """Whether a stream ends with token counts."""

    ignored: tuple[str, ...]
    """Names of the fields that were given and have no effect, sorted, without repeats. Nested
    names have dots and no indexes: `messages.cache_control`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyCall:
    """A tool call of the policy."""

    id: str
    """Sent as it is in all protocols. A client sends it back with the tool's result."""

    name: str

    arguments: str
    """JSON text of an object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A sampled token and the log-probability with which the policy sampled it."""

    text: str
    raw: bytes
    """The token's bytes. A token may hold a part of a character, and `text` cannot say which."""
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReply:
    """One message of the policy."""

    id: str
    """Without a protocol's prefix: `chatcmpl-`, `msg_` and `resp_` are put before it."""

    created: int
    """Seconds since 1970."""

    model: str
    content: str
    reasoning: str
    calls: tuple[ReplyCall, ...]
    finish: Finish

    stop_text: str | None
    """The requested stop text that ended the reply; None if the reply ended otherwise."""

    prompt_tokens: int
    completion_tokens: int

    answer_schema: dict[str, Any] | None = None
    """The request's, which some clients read from the reply."""

    logprobs: tuple[TokenLogprob, ...] | None
    """All sampled tokens, those of reasoning and of calls too; None if they were not asked for."""

    @property
    def has_text(self) -> bool:
        """Whether the reply is sent with a text, which may be empty.

        A reply without calls always has one, because agent programs read it without looking.
        """
        return bool(self.content) or not self.calls


class WireError(Exception):
    """A request that gets an error for an answer."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_value",
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        """HTTP status."""
        self.code = code
        """For programs: `invalid_value`, `unsupported_value`, `context_length_exceeded`, ..."""
        self.param = param
        """Place in the request: `messages[2].content[0]`; None if no single field is at fault."""


def data_frame(data: dict[str, Any]) -> str:
    """A server-sent event without a name.

    The JSON is ASCII: some clients split the stream at U+2028 and U+0085 too, not only at line
    feeds, and would cut a frame in two.
    """
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"


def event_frame(data: dict[str, Any]) -> str:
    """A server-sent event with the name that `data` has as its type."""
    return f"event: {data['type']}\n{data_frame(data)}"


def pieces(text: str) -> Iterator[str]:
    """`text` in pieces, for the deltas of a stream. An empty text has none."""
    return (text[at : at + _PIECE] for at in range(0, len(text), _PIECE))


def openai_error_body(error: WireError) -> dict[str, Any]:
    """The answer to a refused request, in the form of both of OpenAI's protocols."""
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    default = "server_error" if error.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": error.message,
            "type": kinds.get(error.status, default),
            "param": error.param,
            "code": error.code,
        }
    }
