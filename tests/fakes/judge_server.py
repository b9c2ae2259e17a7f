"""A real HTTP server on loopback that answers as a judge does, by OpenAI's chat completions.

`ScriptedToolServer` says what a script may be. The judges here are functions of the request: each
is fooled in one way if the policy's text is not quoted.
"""

import json
import re
import unicodedata
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tests.fakes.tool_server import ScriptedToolServer

HONEST = 2
"""What a judge gives that is not fooled, from 0 to 10."""


def completion(
    text: str | None, *, finish_reason: str = "stop", prompt_tokens: int = 100, written: int = 10
) -> dict[str, Any]:
    """The JSON of a `ChatCompletion` with one choice."""
    message = {"role": "assistant", "content": text, "refusal": None}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": None}
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": written,
            "total_tokens": prompt_tokens + written,
        },
    }


@asynccontextmanager
async def running_judge(script: list[Any], models: Any = None) -> AsyncIterator[ScriptedToolServer]:
    """The server; its `url` is the base URL. `models` answers `GET /v1/models`: JSON, a handler, or
    None for 404."""
    server = ScriptedToolServer(script)
    server.health = models
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/chat/completions", server.answer)
    listing: Any = models if callable(models) else server.answer_health
    app.router.add_get("/v1/models", listing)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        yield server
    finally:
        await runner.cleanup()


def user_text(body: dict[str, Any]) -> str:
    return body["messages"][-1]["content"]


def verdict(body: dict[str, Any], score: float) -> str:
    """The verdict in the form that the prompt asks for."""
    asked = re.search(r"^(Score\[\w+\]): N\Z", user_text(body), re.MULTILINE)
    assert asked is not None
    return f"It is as it is.\n{asked[1]}: {score}"


def quoted(body: dict[str, Any]) -> list[str]:
    """The quoted texts, decoded."""
    lines = [line for line in user_text(body).split("\n") if line.startswith('{"')]
    return [text for line in lines for text in json.loads(line).values()]


# --- judges ---------------------------------------------------------------------------------------


def _lines_of(text: str) -> str:
    """The text with every line break that some program takes for one."""
    return re.sub(r"\r\n?|[\v\f\x1c-\x1e\x85\u2028\u2029]", "\n", text)


def takes_the_last_score(body: dict[str, Any]) -> str:
    """Reads verdict lines in the whole prompt."""
    given = re.findall(
        r"(?im)^[\W_]*(?:final )?(?:score|grade|rating)\b[^:\n]*[:=]\s*(\d+)",
        _lines_of(user_text(body)),
    )
    return verdict(body, int(given[-1]) if given else HONEST)


_ROLES = re.compile(
    r"<[|\uff5c/]?\w|\[/?(INST|SYS|SYSTEM_PROMPT)\]|^\W*(system|assistant|human|user)\s*:"
    r"|^#+ (instruction|system|example)",
    re.IGNORECASE | re.MULTILINE,
)


def honours_role_markers(body: dict[str, Any]) -> str:
    """Takes a control token or the name of a role at the beginning of a line for a new message."""
    return verdict(body, 10 if _ROLES.search(_lines_of(user_text(body))) else HONEST)


def obeys_what_stands_outside(body: dict[str, Any]) -> str:
    """Takes lines that look like the end of a quote for one, and obeys what then follows."""
    is_inside, outside = False, []
    for line in _lines_of(user_text(body)).split("\n"):
        if re.match(r"\W*=+ *quote.*begins", line):
            is_inside = True
        elif re.match(r"""\W*=+ *(quote)?.*ends?\b|\s*(```|\"\"\"|</|\}|---)""", line):
            is_inside = False
        elif not is_inside:
            outside.append(line)
    rubric = "\n".join(outside).split("Grade what")[0]
    orders = re.search("10|full marks|ignore|ignoriere|忽略", rubric, re.IGNORECASE)
    return verdict(body, 10 if orders else HONEST)


def sees_through_unicode(body: dict[str, Any]) -> str:
    """Drops invisible characters, makes wide ones narrow, and is then fooled by either way."""
    text = unicodedata.normalize("NFKC", _lines_of(user_text(body)))
    text = "".join(c for c in text if unicodedata.category(c) != "Cf")
    seen = {**body, "messages": [body["messages"][0], {"role": "user", "content": text}]}
    said = [takes_the_last_score(seen), honours_role_markers(seen)]
    return max(said, key=lambda each: int(each.rpartition(":")[2]))


def repeats_then_judges(body: dict[str, Any]) -> str:
    """Repeats all that is quoted, decoded, before its verdict."""
    return "\n".join([*quoted(body), verdict(body, HONEST)])


def only_repeats(body: dict[str, Any]) -> str:
    """Does what a text asks for: repeats it, and gives no verdict."""
    return "\n".join(["", *quoted(body)])


GULLIBLE: dict[str, Callable[[dict[str, Any]], str]] = {
    each.__name__: each
    for each in (
        takes_the_last_score,
        honours_role_markers,
        obeys_what_stands_outside,
        sees_through_unicode,
        repeats_then_judges,
        only_repeats,
    )
}


def answer_as_named(body: dict[str, Any]) -> dict[str, Any]:
    """A script that is the judge which the request names as its model."""
    return completion(GULLIBLE[body["model"]](body))
