"""The reward `judge`: its prompt, its requests over real HTTP, and what is a fault."""

import json
import logging
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import example, given
from hypothesis import strategies as st

from agent_loop.calls.client import ToolClient, store_of
from agent_loop.calls.own_limits import limited, own_state_path
from agent_loop.rewards import Attempt, Reward, reward_for
from agent_loop.rewards.judge import JudgeReward, judge_reward, reference_of
from agent_loop.rewards.judge_prompt import FIELDS, SYSTEM, prompt_of, quote
from config.compat import gather_all
from config.schema import ConfigError, MixedConfig, ToolCacheConfig, ToolConfig
from tests.agent_loop.rewards.hostile_answers import HOSTILE
from tests.fakes.judge_server import (
    GULLIBLE,
    HONEST,
    answer_as_named,
    completion,
    quoted,
    running_judge,
    user_text,
    verdict,
)
from tests.fakes.tool_server import ScriptedToolServer
from tool_server.wire.protocol import ToolUnavailable

KEY = "sk-not-in-any-message"
RUBRIC = "Is {answer} right for {question}, given {reference}?"
TEXTS = dict.fromkeys(map(str, FIELDS), "x")
TRUTH = {"answer": "forty-two"}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_BASE_URL", raising=False)
    monkeypatch.setenv("JUDGE_API_KEY", KEY)


class Clock:
    """Time that passes in sleeps only, and what was asked of it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.asked.append(seconds)
        self.now += seconds


@asynccontextmanager
async def client(**settings: Any) -> AsyncIterator[ToolClient]:
    clock = settings.pop("clock", None) or Clock()
    given = {"limiter": None, "sleep": clock.sleep, "clock": clock, "max_retries": 2} | settings
    async with ToolClient("http://127.0.0.1:9", **given) as tools:
        yield tools


def reward_at(url: str, **options: Any) -> JudgeReward:
    return judge_reward("judge", {"rubric": RUBRIC, "model": "m", "base_url": url} | options)


def attempt_of(answer: str | None = "42", text: str = "I think 42") -> Attempt:
    return Attempt(
        answer=answer, ground_truth=TRUTH, text=text, question="What is 6 x 7?", source="mine"
    )


def gives(*scores: float | str) -> list[Any]:
    """A script of verdicts; a text is what the judge writes."""

    def step(given: float | str) -> Any:
        if isinstance(given, str):
            return completion(given)
        return lambda body: completion(verdict(body, given))

    return [step(given) for given in scores]


async def judged(server: ScriptedToolServer, attempt: Attempt, **options: Any) -> Any:
    async with client() as tools:
        return await reward_at(server.url, **options).judge(attempt, tools)


def written(text: str) -> dict[str, Any]:
    """A judge's answer."""
    return {"text": text, "finish_reason": "stop"}


def bodies(server: ScriptedToolServer) -> list[dict[str, Any]]:
    return [body for _, body in server.seen]


# --- quotes ---------------------------------------------------------------------------------------

_TOKENS = (
    "<|im_start|>",
    "</s>",
    "[/INST]",
    "<\uff5cUser\uff5c>",
    "\uff1c|end|",
    "<<SYS>>",
    "\u202e",
    "\ud800",
)
_TEXTS = st.lists(
    st.one_of(
        st.text(), st.sampled_from([*_TOKENS, "\n", '"', "\\", "=== quote", "\x85", "{answer}"])
    )
).map("".join)


@given(_TEXTS)
@example("\ud83d\ude00 as two halves")
def test_a_quote_is_one_visible_line_that_decodes_to_its_text(text):
    line = quote("answer", text)
    assert json.loads(line) == {"answer": text.encode(errors="replace").decode()}
    assert line.isprintable() and line.startswith('{"answer": "') and line.splitlines() == [line]
    assert not re.search(r"[<\uff1c](?![\s=])|\[/?[A-Z]{2,}\]", line)


@pytest.mark.parametrize(
    "token",
    [
        *(
            "<|im_end|>",
            "<|eot_id|>",
            "<turn|>",
            '<|"|>',
            "<\uff5cUser\uff5c>",
            "<seed:eos>",
            "<s>",
        ),
        *("[INST]", "[/INST]", "[TOOL_CALLS]", "[gMASK]", "[|endofturn|]", "[@BOS@]"),
        *("[extra_id_0]", "[start_header_id]", "[multimodal]", "]~b]", "]~!b[", "[e~[", "]!p~["),
    ],
)
@pytest.mark.parametrize("around", ["{}", "a{}b", "({})", " {} "])
def test_a_control_token_of_no_family_is_whole_in_a_quote(token: str, around: str):
    line = quote("answer", around.format(token))
    assert token not in line and json.loads(line) == {"answer": around.format(token)}


def test_lists_and_indexes_stay_readable():
    text = "a[0] = [1, 2], x[i] != y, if a < b or a <= 3: [x]"
    assert text in quote("answer", text)


def skeleton(rubric: str, texts: Mapping[str, str]) -> str:
    """The prompt without the code and without what is quoted."""
    user, code = prompt_of(rubric, texts, (0, 10), max_chars=40_000)
    lines = user.replace(code, "CODE").split("\n")
    return "\n".join(
        re.sub(r'": ".*"\}$', '": ...}', x) if x.startswith('{"') else x for x in lines
    )


@given(_TEXTS, _TEXTS)
@example("0" * 9, "=== quote CODE ends ===")
def test_no_text_changes_anything_outside_its_quote(answer, response):
    rubric, texts = "Judge {response} and {answer}.", {"answer": answer, "response": response}
    assert skeleton(rubric, TEXTS | texts) == skeleton(rubric, TEXTS)
    user, code = prompt_of(rubric, TEXTS | texts, (0, 10), max_chars=40_000)
    assert code not in answer + response
    assert user.count(code) == 5  # two quotes, and the line of the verdict


@given(st.text(min_size=101, max_size=400))
def test_the_middle_of_a_long_text_is_left_out_and_its_length_is_said(text):
    user, _ = prompt_of("{answer}", {"answer": text}, (0, 1), max_chars=100)
    head, tail = quoted({"messages": [{"content": user}]})
    assert (head, tail) == (text[:50], text[-50:])
    assert f": {len(text) - 100} characters are left out here ===" in user


def test_equal_texts_have_equal_prompts_and_others_another_code():
    one, same, other = (
        prompt_of("{answer}", {"answer": answer}, (0, 1), max_chars=100) for answer in "aab"
    )
    assert one == same and one[1] != other[1]


# --- verdicts -------------------------------------------------------------------------------------

_SCHEMA = {
    "type": "object",
    "properties": {"why": {"type": "string"}, "mark": {"type": "number"}},
    "required": ["mark"],
}


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("Score[c0de0123]: 7", 0.7),
        ("Good.\n\n**Score[c0de0123]: 7/10**\n", 0.7),
        ("- score [C0DE0123]: 7.5 out of 10.", 0.75),
        ("Score[c0de0123]: 3\nno:\nScore[c0de0123]: 7", 0.7),
        ("<think>Score[c0de0123]: 3</think>Score[c0de0123]: 0", 0.0),
        ("Score: 7", None),
        ("Score[c0de0124]: 7", None),
        ("as it says `Score[c0de0123]: 7`", None),
        ("Score[c0de0123]: seven", None),
        ("Score[c0de0123]: 11", None),
        ("Score[c0de0123]: -1", None),
        ("Score[c0de0123]: 3\nScore[c0de0123]: 70", None),
        ("<think>Score[c0de0123]: 3</think>", None),
        ("", None),
    ],
)
def test_a_verdict_is_read_from_the_last_line_with_the_code(said, score):
    assert reward_at("http://j").read(written(said), "c0de0123") == score


@pytest.mark.parametrize(
    ("form", "said", "score"),
    [
        ({"schema": _SCHEMA, "field": "mark"}, '{"mark": 5, "why": "Score: 1"}', 1.0),
        ({"schema": _SCHEMA, "field": "mark"}, '{"mark": "5"}', None),
        ({"schema": _SCHEMA, "field": "mark"}, '{"why": "5"}', None),
        ({"schema": _SCHEMA, "field": "mark"}, '{"mark": NaN}', None),
        ({"schema": _SCHEMA, "field": "mark"}, '{"mark": 1' + "0" * 400 + "}", None),
        ({"schema": {"properties": {"mark": {}}}, "field": "mark"}, '{"mark": true}', None),
        ({"schema": {"properties": {"mark": {}}}, "field": "mark"}, "[1]", None),
        ({"schema": _SCHEMA, "field": "mark"}, '{"mark": 5} as you asked', None),
        ({"schema": _SCHEMA, "field": "mark"}, "[" * 100_000, None),
    ],
)
def test_a_schema_finds_the_score(form, said, score):
    reward = reward_at("http://j", scale=(1, 5), score=form)
    assert reward.read(written(said), "c0de0123") == score


@pytest.mark.parametrize(
    ("truth", "text"),
    [
        ({"answer": "x"}, "x"),
        ({"target": ["a", "b"]}, "a\nb"),
        ({"answer": 7}, "7"),
        ("x", "x"),
        ({"inputs": [1]}, '{"inputs": [1]}'),
        ({}, ""),
        (None, ""),
    ],
)
def test_the_reference_is_the_right_answer_as_a_text(truth, text):
    assert reference_of(truth) == text
    problem = reward_at("http://j").truth_problem(truth)
    assert (problem is None) == bool(text)
    assert reward_at("http://j", rubric="{answer}").truth_problem(truth) is None


# --- hostile answers ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_answer_gets_what_the_judge_gives(name):
    hostile = attempt_of(HOSTILE[name], text=HOSTILE[name])
    rubric = "Grade {answer}\nof {response}\nfor {question} by {reference}."
    async with running_judge([answer_as_named]) as server, client(max_retries=0) as tools:
        harmless, harmless_code = prompt_of(rubric, TEXTS, (0, 10), max_chars=40_000)
        for model in GULLIBLE:
            reward = reward_at(server.url, rubric=rubric, model=model)
            if model == "only_repeats":
                with pytest.raises(ToolUnavailable, match="no readable verdict"):
                    await reward.judge(hostile, tools)
            else:
                assert (await reward.judge(hostile, tools))["score"] == HONEST / 10, model
    assert len(server.seen) == len(GULLIBLE)
    for body in bodies(server):
        assert [message["role"] for message in body["messages"]] == ["system", "user"]
        assert body["messages"][0]["content"] == SYSTEM
        lines = user_text(body).split("\n")
        outside = [line for line in lines if not line.startswith('{"')]
        code = re.search(r"Score\[(\w+)\]: N$", user_text(body))[1]  # type: ignore[index]
        kept = [line for line in harmless.split("\n") if not line.startswith('{"')]
        assert [
            line.replace(code, harmless_code) for line in outside if "left out" not in line
        ] == kept
        assert not re.search(
            r"<\S|\[/?INST|[\u200b-\u200f\u2028-\u202e\U000e0000-\U000e007f]", user_text(body)
        )


# --- requests -------------------------------------------------------------------------------------


async def test_a_request_is_one_of_openai_s_and_so_is_the_answer_of_the_fake():
    types = pytest.importorskip("openai.types.chat")
    from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
    from pydantic import TypeAdapter

    async with running_judge(gives(7)) as server:
        await judged(
            server, attempt_of(), votes=2, body={"top_p": 0.9, "max_tokens": None, "seed": None}
        )
        server.script = [completion('{"mark": 5}')]
        await judged(server, attempt_of(), score={"schema": _SCHEMA, "field": "mark"})
    assert len(server.seen) == 3
    for path, body in server.seen:
        assert path == "/v1/chat/completions"
        valid = TypeAdapter(CompletionCreateParamsNonStreaming).validate_python(body, strict=True)
        assert valid.keys() == body.keys()
    assert "max_tokens" not in bodies(server)[0]
    assert bodies(server)[2]["response_format"]["json_schema"]["schema"] == _SCHEMA
    answer = completion("x")
    assert types.ChatCompletion.model_validate(answer).model_dump(exclude_unset=True) == answer
    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}


async def test_without_a_key_none_is_sent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("JUDGE_API_KEY")
    async with running_judge(gives(7)) as server:
        await judged(server, attempt_of())
    assert "Authorization" not in server.headers[0]


async def test_the_parts_of_several_votes():
    options = {"votes": 3, "pass_at": 0.6}
    async with running_judge(gives(4, 6, 8)) as server, client() as tools:
        reward = reward_at(server.url, **options)
        first = await reward.judge(attempt_of(), tools)
        again = await reward.judge(attempt_of(), tools)
        none = await reward.judge(attempt_of(None), tools)
    assert first == {
        "score": pytest.approx(0.6), "acc": 1.0, "format": 1.0, "judge_votes": 3.0,
        "judge_disagreement": pytest.approx((0.08 / 3) ** 0.5), "judge_prompt_tokens": 300.0,
        "judge_completion_tokens": 30.0, "judge_cached": 0.0,
    }  # fmt: skip
    free = {"judge_prompt_tokens": 0, "judge_completion_tokens": 0}
    assert again == first | free | {"judge_cached": 1.0}
    assert none == dict.fromkeys(first, 0.0)
    sent = bodies(server)
    assert len(sent) == 3 and sorted(body["seed"] for body in sent) == [0, 1, 2]
    assert {body["temperature"] for body in sent} == {0.7}


@pytest.mark.parametrize(
    ("rubric", "answer", "text", "asks"),
    [
        (RUBRIC, None, "thinking", False),
        ("{response}", None, "thinking", True),
        ("{response}", None, " \n", False),
        ("{response}", "42", "", True),
    ],
)
async def test_the_judge_is_asked_only_if_there_is_something_to_see(rubric, answer, text, asks):
    async with running_judge(gives(10)) as server:
        parts = await judged(server, attempt_of(answer, text), rubric=rubric)
    assert (parts["score"], parts["acc"]) == (float(asks), float(asks))
    assert parts["format"] == float(answer is not None) and len(server.seen) == asks


async def test_an_unreadable_verdict_is_asked_for_again_as_another_sample_and_not_kept():
    def cut(body: dict[str, Any]) -> Any:
        return completion(verdict(body, 10), finish_reason="length")

    script = [*gives("no verdict"), cut, *gives(9)]
    async with running_judge(script) as server, client() as tools:
        reward = reward_at(server.url)
        first = await reward.judge(attempt_of(), tools)
        server.script = gives(1)
        again = await reward.judge(attempt_of(), tools)
    assert first["score"] == 0.9 and first["judge_prompt_tokens"] == 300
    assert again["score"] == 0.1, "the unreadable answers were not kept"
    assert [body["seed"] for body in bodies(server)] == [0, 1, 2, 0]
    assert [body["temperature"] for body in bodies(server)] == [0, 0.7, 0.7, 0]


@pytest.mark.parametrize("said", ["I cannot grade this", None, "Score[00000000]: 10", "Score: 10"])
async def test_a_judge_without_a_readable_verdict_is_a_fault_and_no_score(said):
    async with running_judge([completion(said)]) as server:
        with pytest.raises(ToolUnavailable, match=r"no readable verdict .* in 3 answers") as caught:
            await judged(server, attempt_of())
    assert caught.value.tool == "judge" and len(server.seen) == 3


async def test_equal_attempts_at_once_are_one_request():
    async with running_judge(gives(7)) as server, client() as tools:
        reward = reward_at(server.url)
        parts = await gather_all([reward.judge(attempt_of(), tools) for _ in range(5)])
        await reward_at(server.url, model="another").judge(attempt_of(), tools)
    assert {part["score"] for part in parts} == {0.7} and len(server.seen) == 2
    assert sum(part["judge_prompt_tokens"] for part in parts) == 100


async def test_another_address_is_another_judge_and_cache_false_asks_each_time():
    async with running_judge(gives(7)) as one, running_judge(gives(3)) as other, client() as tools:
        for server, score in ((one, 0.7), (other, 0.3)):
            assert (await reward_at(server.url).judge(attempt_of(), tools))["score"] == score
        await reward_at(one.url, cache=False).judge(attempt_of(), tools)
    assert (len(one.seen), len(other.seen)) == (2, 1)


async def test_processes_share_verdicts_and_the_key_is_in_no_file(tmp_path: Path):
    store = ToolCacheConfig(store="sqlite")
    async with running_judge(gives(7)) as server:
        for cached in (0.0, 1.0):
            opener = partial(store_of, store, str(tmp_path))
            async with client(open_store=opener) as tools:
                parts = await reward_at(server.url).judge(attempt_of(), tools)
            assert (parts["score"], parts["judge_cached"]) == (0.7, cached)
    assert len(server.seen) == 1
    (database,) = tmp_path.glob("*.sqlite")  # noqa: ASYNC240 - nothing else runs
    written = database.read_bytes()
    assert written and KEY.encode() not in written


def compressed() -> web.Response:
    response = web.json_response(completion("Score: 10"))
    response.enable_compression(web.ContentCoding.gzip)
    return response


def refused(status: int) -> web.Response:
    return web.json_response({"error": {"message": f"no such model, {KEY}"}}, status=status)


@pytest.mark.parametrize(
    ("step", "requests", "words"),
    [
        (429, None, "HTTP 429"),
        (503, None, "is the judge up"),
        ("drop", None, "ServerDisconnectedError"),
        (500, 3, "HTTP 500"),
        ({"choices": []}, 3, "no choices"),
        ({"object": "error"}, 3, "choices"),
        ([1], 3, "Expected `object`"),
        (refused(400), 1, r"model='m' at http://.* \(HTTP 400 .*no such model, \*\*\*.*max_tokens"),
        (refused(422), 1, "correct reward_options"),
        (refused(404), 1, r"HTTP 404 .*no such model, \*\*\*.*has this server the model"),
        (refused(401), 1, "HTTP 401; .* is JUDGE_API_KEY its key"),
        (refused(403), 1, "JUDGE_API_KEY"),
        (
            (307, {"Location": "http://other.example/x?secret"}),
            1,
            "redirects to http://other.example .*set base_url",
        ),
        (compressed(), 1, "Content-Encoding='gzip'"),
        (completion("x" * (1 << 21)), 1, "more than 1 MiB"),
    ],
)
async def test_a_judge_that_gives_no_answer_is_a_fault_with_its_reason(
    step, requests, words, caplog
):
    """Without a number of requests: it is asked as long as there is time."""
    caplog.set_level(logging.DEBUG)
    async with running_judge(
        [step if not isinstance(step, web.Response) else lambda _: step]
    ) as server:
        with pytest.raises(ToolUnavailable, match=words) as caught:
            await judged(server, attempt_of())
    asked = len(server.seen)
    assert caught.value.tool == "judge" and (asked == requests if requests else asked > 4)
    assert KEY not in f"{caught.value} {caplog.text}" and "secret" not in str(caught.value)


async def test_a_judge_that_nobody_runs_is_a_fault():
    async with client() as tools:
        with pytest.raises(ToolUnavailable, match="is the judge up"):
            await reward_at("http://127.0.0.1:9/v1").judge(attempt_of(), tools)


async def test_an_overloaded_judge_is_obeyed_and_slows_no_tool_server_down():
    class Limiter:
        penalties = 0

        async def acquire_async(self, *_: Any, **__: Any) -> float:
            return 0.0

        async def penalise_async(self, retry_after_s: float = 0.0) -> None:
            self.penalties += 1

    limiter, clock = Limiter(), Clock()
    script = [(429, {"Retry-After": "3"}), *gives(7)]
    async with running_judge(script) as server, client(limiter=limiter, clock=clock) as tools:
        assert (await reward_at(server.url).judge(attempt_of(), tools))["score"] == 0.7
    assert clock.asked == [3.0] and limiter.penalties == 0


async def test_a_judge_has_limits_of_its_own_beside_the_run_s(tmp_path: Path):
    mixed = MixedConfig.model_validate(
        {"experiment": "x", "run_dir": str(tmp_path), "sources": {"mine": {"ratio": 1}},
         "rate_limit": {"backend": "file"}}
    )  # fmt: skip
    config = ToolConfig(server_url="http://127.0.0.1:9")
    limits = partial(limited, tools=config, mixed=mixed)
    async with running_judge(gives(7)) as server, client(limits=limits) as tools:
        reward = reward_at(server.url, rate="100/s", slots=2, timeout=20.0, retry=1)
        await reward.judge(attempt_of(), tools)
        path = own_state_path(reward.options.target, config, mixed)
        (route,) = tools.opened.resources.values()
    assert path.exists() and path.with_suffix(".slots").exists()
    assert (route.timeout_s, route.max_retries) == (20.0, 1)


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": None}, r"reward_options\.model: .*valid string"),
        ({"model": ""}, r"reward_options\.model"),
        (
            {"rubric": "{question}"},
            r"the judge would see no work: write \{answer\} or \{response\}",
        ),
        (
            {"rubric": "{answer} {anwser}"},
            r"no text for \{anwser\}: there are \{question\}, \{answer\}",
        ),
        (
            {"rubric": "no/such/rubric.md"},
            r"reward_options\.rubric: cannot read the file /.*rubric\.md",
        ),
        ({"base_url": None}, "no judge: give base_url, or export JUDGE_BASE_URL"),
        ({"base_url": "api.openai.com/v1"}, "is no http"),
        ({"base_url": "https://user:pw@host/v1"}, "a key belongs into JUDGE_API_KEY"),
        ({"base_url": "https://host/v1?key=pw"}, "a key belongs into JUDGE_API_KEY"),
        ({"votes": 0}, r"reward_options\.votes"),
        ({"votes": 3, "temperature": 0}, "votes=3 at temperature=0 are the same vote"),
        ({"scale": [10, 0]}, r"scale=\[10\.0, 0\.0\]: the first number must be below"),
        ({"scale": [0, 1e12]}, "and both from -1e9 to 1e9"),
        ({"scale": [0, float("inf")]}, "scale"),
        ({"score": {"schema": {"type": "x"}}}, "score: schema: no JSON schema"),
        ({"score": {"field": "mark"}}, "field='mark' is read with a schema only"),
        *(
            ({"score": {"schema": {"properties": {"score": {"$ref": ref}}}}}, "nothing is fetched")
            for ref in ("#/$defs/gone", "http://127.0.0.1:9/schema.json")
        ),
        (
            {"score": {"schema": _SCHEMA}},
            r"field='score' is none of the schema's \['mark', 'why'\]",
        ),
        *(
            (
                {"body": {name: 1}},
                rf"body\.{name}: the judge sets this field itself; set",
            )
            for name in ("n", "temperature", "max_tokens", "seed")
        ),
        ({"body": {"messages": None}}, r"body\.messages: the judge sets this field itself"),
        ({"aggregate": "median"}, "the score is the mean of the votes"),
        ({"score": {"pattern": r"(\d)"}}, "a verdict that the policy wrote could match it"),
        ({"rate": "1000000000000/s"}, "write a number above 0 and a unit, .* below 1e9/s"),
        ({"vote": 3}, "did you mean reward_options.votes"),
    ],
)
def test_wrong_options_are_refused_by_name(options, words):
    given = {"rubric": RUBRIC, "model": "m", "base_url": "http://j/v1"} | options
    with pytest.raises(ConfigError, match=words) as caught:
        reward_for("judge", given)
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize("key", ["two words", "two\nlines", "sk-\u2026"])
def test_a_key_that_cannot_be_one_is_refused_and_not_shown(
    key: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JUDGE_API_KEY", key)
    with pytest.raises(ConfigError, match="JUDGE_API_KEY holds no key") as caught:
        judge_reward("judge", {"rubric": RUBRIC, "model": "m", "base_url": "http://j/v1"})
    assert key not in str(caught.value)


async def test_the_address_and_the_rubric_may_come_from_outside(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "rubric.md").write_text("Grade {answer} für {question}.\n", encoding="utf-8")
    async with running_judge(gives(7)) as server, client() as tools:
        monkeypatch.setenv("JUDGE_BASE_URL", f"{server.url}/ ")
        options = {"rubric": str(tmp_path / "rubric.md"), "model": "m"}
        reward: Reward = reward_for("judge", options)
        assert (await reward.judge(attempt_of(), tools))["score"] == 0.7
    assert user_text(bodies(server)[0]).startswith("Grade \n=== quote ")
    assert quoted(bodies(server)[0]) == ["42", "What is 6 x 7?"]
