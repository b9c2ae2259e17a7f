"""The client of an OpenAI-compatible server, against servers that take and say different things."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

pytest.importorskip("verl")

from omegaconf import OmegaConf

from agent_loop.evaluation.engine_openai import ATTEMPTS, REQUEST_S, OpenAIClient
from agent_loop.watchdog import current_activity, waits_for
from tests.fakes.real_tokenizers import real_tokenizer
from tests.listening import listening
from tests.ports import free_ports
from tool_server.wire.protocol import Again, ToolUnavailable

TOKENIZER = real_tokenizer("pieces")
CONFIG = OmegaConf.create({"actor_rollout_ref": {"rollout": {"response_length": 50}}})
PROMPT = TOKENIZER.encode("ab", add_special_tokens=False)
Answer = Callable[[dict[str, Any]], Any]


class CompletionsServer:
    """Answers `POST /v1/completions` by a function of the body, and keeps the bodies."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.bodies, self.keys = answer, list[dict[str, Any]](), list[str]()

    async def post(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization", ""))
        said = self.answer(body)
        if isinstance(said, web.Response):
            return said
        return web.json_response({"choices": [said]})


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[tuple[CompletionsServer, OpenAIClient]]:
    server = CompletionsServer(answer)
    app = web.Application()
    app.router.add_post("/v1/completions", server.post)
    async with listening(web.AppRunner(app, shutdown_timeout=0.1)) as url:
        client = OpenAIClient(CONFIG, f"{url}/v1", "demo")
        client.tokenizer = TOKENIZER
        try:
            yield server, client
        finally:
            if client._calls is not None:
                await client._calls.__aexit__()


async def tokens(client: OpenAIClient, **sampling: Any) -> list[int]:
    output = await client.generate("id", prompt_ids=PROMPT, sampling_params=sampling)
    assert output.log_probs == [0.0] * len(output.token_ids)
    return output.token_ids


def encoded(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


async def test_tokens_of_the_server_are_taken_as_they_are():
    async with serving(lambda body: {"text": "x", "token_ids": [4, 5]}) as (server, client):
        assert await tokens(client, temperature=0.3, max_tokens=7, stop="</a>") == [4, 5]
    (body,) = server.bodies
    assert body["prompt"] == PROMPT and body["max_tokens"] == 7
    assert body["temperature"] == 0.3 and body["stop"] == ["</a>"]
    assert body["return_token_ids"] and body["include_stop_str_in_output"]


async def test_a_schema_that_guides_the_answer_is_vllm_s_field_of_the_body():
    guide = {"json": {"type": "object"}}
    async with serving(lambda body: {"text": "x", "token_ids": [4]}) as (server, client):
        await tokens(client, structured_outputs=guide)
        await tokens(client)
    assert [body.get("structured_outputs") for body in server.bodies] == [guide, None]


async def test_a_server_that_takes_neither_ids_nor_more_fields_gets_text():
    def plain(body: dict[str, Any]) -> Any:
        if not isinstance(body["prompt"], str) or "return_token_ids" in body:
            return web.Response(status=422, text="extra fields are not permitted")
        return {"text": "ab", "finish_reason": "length"}

    async with serving(plain) as (server, client):
        assert await tokens(client) == encoded("ab")
        assert await tokens(client) == encoded("ab")
    assert len(server.bodies) == 4 + 1  # the form that was taken is remembered
    assert server.bodies[-1]["prompt"] == TOKENIZER.decode(PROMPT)
    assert server.bodies[-1]["max_tokens"] == 50


async def test_the_end_of_a_message_is_a_token_of_the_answer():
    async with serving(lambda body: {"text": "ab", "finish_reason": "stop"}) as (_, client):
        assert await tokens(client) == [*encoded("ab"), TOKENIZER.eos_token_id]
    async with serving(lambda body: {"text": "", "finish_reason": "stop"}) as (_, client):
        assert await tokens(client) == [TOKENIZER.eos_token_id]


@pytest.mark.parametrize(
    "said",
    [
        {"text": "ab</a>"},
        {"text": "ab", "stop_reason": "</a>"},
        {"text": "ab", "matched_stop": "</a>"},
    ],
)
async def test_a_stop_string_is_in_the_answer(said: dict[str, Any]):
    async with serving(lambda body: said | {"finish_reason": "stop"}) as (server, client):
        assert await tokens(client, stop=["</a>", "</b>"]) == encoded("ab</a>")
    assert len(server.bodies) == 1


async def test_a_server_that_does_not_say_where_it_stopped_gets_no_stop_strings():
    def answer(body: dict[str, Any]) -> Any:
        text = "ab" if "stop" in body else "ab</a>c"
        return {"text": text, "finish_reason": "stop"}

    async with serving(answer) as (server, client):
        whole = [*encoded("ab</a>c"), TOKENIZER.eos_token_id]  # the loop cuts it at its tag
        assert await tokens(client, stop=["</a>"]) == whole
        assert await tokens(client, stop=["</a>"]) == whole
    assert ["stop" in body for body in server.bodies] == [True, False, False]


async def test_a_server_that_says_it_stopped_at_the_end_of_the_message_is_believed():
    said = {"text": "ab", "finish_reason": "stop", "stop_reason": None}
    async with serving(lambda body: said) as (server, client):
        assert await tokens(client, stop=["</a>"]) == [*encoded("ab"), TOKENIZER.eos_token_id]
    assert len(server.bodies) == 1


async def test_seeds_fit_into_31_bits_and_the_key_is_sent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    async with serving(lambda body: {"text": "a", "token_ids": [1]}) as (server, client):
        await tokens(client, seed=(1 << 62) + 5)
    assert server.bodies[0]["seed"] == 5
    assert server.keys == ["Bearer secret"]


async def test_images_are_refused():
    client = OpenAIClient(CONFIG, "http://127.0.0.1:1/v1", "demo")
    with pytest.raises(ValueError, match="text only"):
        await client.generate("id", prompt_ids=[1], sampling_params={}, image_data=[object()])


# --- retries --------------------------------------------------------------------------------------


class Clock:
    """Time that passes in sleeps only."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@asynccontextmanager
async def asked(*answers: Any) -> AsyncIterator[tuple[OpenAIClient, Clock]]:
    """A server that gives these answers, the last one for ever."""
    left, clock = list(answers), Clock()

    def answer(body: dict[str, Any]) -> Any:
        said = left.pop(0) if len(left) > 1 else left[0]
        return said() if callable(said) else said

    async with serving(answer) as (_, client):
        await client.connect(sleep=clock.sleep, clock=clock)
        yield client, clock


def status(code: int, text: str = "", **headers: str) -> Callable[[], web.Response]:
    return lambda: web.Response(status=code, text=text, headers=headers)


async def test_an_overloaded_server_is_asked_again_after_the_pause_it_asks_for():
    busy = status(429, **{"Retry-After": "7"})
    async with asked(busy, {"text": "a", "token_ids": [4]}) as (client, clock):
        assert await tokens(client) == [4]
    assert clock.now == 7.0


async def test_an_answer_that_is_no_completion_is_asked_for_again_and_a_failing_server_is_named():
    wrong = lambda: web.Response(text="<html>")  # noqa: E731
    async with asked(wrong, status(500, "engine died"), {"token_ids": [4]}) as (client, _):
        assert await tokens(client) == [4]
    async with asked(status(500, "engine died")) as (client, clock):
        with pytest.raises(ToolUnavailable, match=rf"{ATTEMPTS} attempts.*HTTP 500 engine died"):
            await tokens(client)
    assert clock.now < REQUEST_S


async def test_a_server_that_is_away_is_waited_for_until_the_deadline(
    caplog: pytest.LogCaptureFixture,
):
    away = status(502, "no backend")
    async with asked(away) as (client, clock):
        for _ in range(2):
            with pytest.raises(ToolUnavailable, match="HTTP 502 no backend"):
                await tokens(client)
    [warned] = caplog.messages
    assert "/v1/completions does not answer (HTTP 502 no backend)" in warned
    assert "is --base-url its address?" in warned
    assert clock.now == pytest.approx(2 * REQUEST_S, rel=0.01)
    async with asked(*[away] * (2 * ATTEMPTS), {"token_ids": [4]}) as (client, _):
        assert await tokens(client) == [4]


async def test_a_secret_in_the_address_is_in_no_message(caplog: pytest.LogCaptureFixture):
    [port] = free_ports(1)
    client, clock = OpenAIClient(CONFIG, f"http://me:sesame@127.0.0.1:{port}/v1", "demo"), Clock()
    client.tokenizer = TOKENIZER
    calls = await client.connect(sleep=clock.sleep, clock=clock)
    with pytest.raises(ToolUnavailable, match=rf"from http://127.0.0.1:{port}/v1/compl") as caught:
        await tokens(client)
    await calls.__aexit__()
    assert len(caplog.messages) == 1 and "sesame" not in f"{caught.value}{caplog.text}"


@pytest.mark.parametrize(
    ("code", "words"), [(401, r"HTTP 401; .*OPENAI_API_KEY"), (422, r"HTTP 422 bad \*\*\*")]
)
async def test_a_refusal_is_not_repeated_and_does_not_show_the_key(
    code: int, words: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    async with asked(status(code, "bad sesame")) as (client, clock):
        with pytest.raises(ToolUnavailable, match=words) as caught:
            await tokens(client)
    assert caught.value.again is Again.NEVER and "sesame" not in str(caught.value)
    assert clock.now == 0.0


async def test_a_wait_for_the_server_is_a_wait_for_the_engine():
    async with asked(status(503), {"token_ids": [4]}) as (client, clock):
        with current_activity(clock) as activity:
            waits_for("engine")
            await tokens(client)
    assert activity.waits_for == "engine" and {*activity.waited_s} <= {"start", "engine"}


async def test_a_request_that_waits_for_its_next_attempt_leaves_its_place_to_another():
    answers = iter([web.Response(status=503), {"token_ids": [4]}, {"token_ids": [5]}])
    others: list[list[int]] = []

    async def pause(_: float) -> None:
        others.append(await tokens(client))

    async with serving(lambda _: next(answers)) as (_, client):
        client.most = 1
        await client.connect(sleep=pause)
        assert await asyncio.wait_for(tokens(client), 20.0) == [5]
    assert others == [[4]]
