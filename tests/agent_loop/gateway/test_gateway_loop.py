"""The gateway's agent loop: real HTTP, through our worker and verl's post-processing."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from operator import length_hint
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import pytest

pytest.importorskip("verl")

from agent_loop.gateway.server import Gateway
from agent_loop.gateway_agent_loop import GatewayAgentLoop
from agent_loop.rewards import judging
from tests.agent_loop.test_passed_on import TOKENIZER, Engine, rows_of
from tests.agent_loop.test_several_rows import audit, records_of
from tests.fakes.engine import record_in

AGENT = """
import aiohttp

async def ask(address, messages, **fields):
    async with aiohttp.ClientSession() as http:
        body = {"model": "any", "messages": messages, **fields}
        async with http.post(f"{address.openai}/chat/completions", json=body) as answer:
            return answer.status, await answer.json()

async def talk(address, messages, turns):
    for _ in range(turns):
        _, said = await ask(address, messages)
        messages = [*messages, said["choices"][0]["message"], {"role": "user", "content": "on"}]
    return messages

async def post(address, **verdict):
    async with aiohttp.ClientSession() as http:
        async with http.post(address.reward, json=verdict) as answer:
            return answer.status, await answer.json()

"""

CHAT = """
async def solve(address, row):
    messages = list(row["prompt"])
    _, first = await ask(address, messages)
    messages += [first["choices"][0]["message"], {"role": "user", "content": "sure?"}]
    _, second = await ask(address, messages)
    return second["choices"][0]["message"]["content"]
"""


class Tools:
    """What an event loop shares, and the tools of no source."""

    clock = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self.kept: dict[Any, Any] = {}

    def resource(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    async def close(self) -> None:
        gateway: Gateway | None = self.kept.get("gateway")
        if gateway is not None:
            await gateway.close()


@pytest.fixture
async def tools() -> AsyncIterator[Tools]:
    tools = Tools()
    yield tools
    await tools.close()


async def session_rows(
    code: str, tools: Tools, tmp_path: Path, monkeypatch: Any, *texts: str, **options: Any
) -> list[Any]:
    path = tmp_path / f"agent_{tmp_path.name}.py"
    path.write_text(AGENT + code)
    return await rows_of(
        GatewayAgentLoop,
        monkeypatch,
        *(texts or ("ab<|im_end|>", "ab<|im_end|>")),
        tools=tools,
        agent_settings={"function": f"{path}:solve", **options},
    )


async def test_a_function_s_requests_are_a_row_with_the_reward_of_its_answer(
    tools: Tools, tmp_path: Path, monkeypatch: Any
):
    (row,) = await session_rows(CHAT, tools, tmp_path, monkeypatch)
    record = record_in(row)
    assert (record.stop_reason, record.requests) == ("answered", 2)
    assert record.reward_parts["score"] == 1.0
    text = TOKENIZER.decode(row["responses"])
    assert text.count("ab<|im_end|>") == 2 and "sure?" in text
    assert audit(tmp_path, records_of([row])).ok


@pytest.mark.parametrize(
    ("code", "stop_reason", "fault_tool", "words"),
    [
        ("return None", "infra_error", "loop", "without a message of the policy (it asked for n"),
        ("return 0.25", "infra_error", "loop", "without a message of the policy (it asked for n"),
        ("await ask(address, []); return 'ab'", "infra_error", "loop", "messages"),
        ("await ask(address, row['prompt'])", "no_action", "", ""),
        ("await ask(address, row['prompt']); return 0.25", "answered", "", ""),
        ("raise KeyError('torn')", "infra_error", "loop", "KeyError: 'torn'"),
        ("await ask(address, row['prompt']); return [1]", "infra_error", "loop", "want"),
        ("await talk(address, row['prompt'], 4)", "max_turns", "", ""),
        (
            "import asyncio; await asyncio.Event().wait()",
            "deadline",
            "agent",
            "trajectory_s passed",
        ),
        (
            "await ask(address, row['prompt']); await ask(address, []); raise KeyError('after')",
            *("infra_error", "loop", "KeyError: 'after'"),
        ),
    ],
)
async def test_how_a_session_ends_is_typed_by_whose_doing_it_is(
    code: str,
    stop_reason: str,
    fault_tool: str,
    words: str,
    tools: Tools,
    tmp_path: Path,
    monkeypatch: Any,
):
    monkeypatch.setattr("tests.agent_loop.test_passed_on.config_of", soon(monkeypatch))
    code = f"async def solve(address, row):\n    {code}\n"
    rows = await session_rows(code, tools, tmp_path, monkeypatch, *["ab<|im_end|>"] * 9)
    record = record_in(rows[-1])
    assert (record.stop_reason, record.fault_tool) == (stop_reason, fault_tool)
    assert words in (record.fault or "")
    is_lost = stop_reason in ("infra_error", "deadline")
    assert any(any(row["response_mask"]) for row in rows) != is_lost
    if stop_reason == "answered":
        assert record.reward_parts["score"] == 0.25


REFUSED = """
import asyncio

async def solve(address, row):
    {before}
    {requests}
    status, body = await ask(address, row["prompt"])
    assert status == 400 and "end the session with what there is" in body["error"]["message"]
    {after}
"""
MAX_TURNS = "row['prompt'] = await talk(address, row['prompt'], 3)"
MAX_REQUESTS = "for _ in range(5): await ask(address, row['prompt'])"
CUT = "so " * 600
REWARD = "await post(address, reward=0.25)"
CONTEXT = """await ask(address, row['prompt'])
    row['prompt'] = [{'role': 'user', 'content': 'word ' * 600}]"""


@pytest.mark.parametrize(
    ("requests", "before", "after", "stop_reason", "score"),
    [
        (MAX_TURNS, "", "return 'ab'", "answered", 1.0),
        (MAX_TURNS, "", "await post(address, answer='ab')", "answered", 1.0),
        (MAX_TURNS, REWARD, "", "answered", 0.25),
        (MAX_TURNS, REWARD, "raise KeyError", "answered", 0.25),
        (MAX_TURNS, "", "", "max_turns", 0.0),
        (MAX_REQUESTS, "", "", "max_turns", 0.0),
        (MAX_REQUESTS, "", "return 'ab'", "answered", 1.0),
        (MAX_TURNS, "", "raise KeyError('choices')", "max_turns", 0.0),
        (CONTEXT, "", "return 'ab'", "answered", 1.0),
        (CONTEXT, REWARD, "raise KeyError", "answered", 0.25),
        (CONTEXT, "", "raise KeyError('choices')", "response_budget", 0.0),
    ],
)
async def test_an_agent_that_is_told_to_end_is_judged_by_what_there_is(
    requests: str,
    before: str,
    after: str,
    stop_reason: str,
    score: float,
    tools: Tools,
    tmp_path: Path,
    monkeypatch: Any,
):
    code = REFUSED.format(requests=requests, before=before, after=after)
    texts = ["so<|im_end|>"] * (4 if requests == MAX_REQUESTS else 2)
    texts = ["so<|im_end|>"] if requests == CONTEXT else [*texts, CUT]
    if before == REWARD:
        monkeypatch.setattr("tests.agent_loop.test_passed_on.config_of", of_loop())
    rows = await session_rows(code, tools, tmp_path, monkeypatch, *texts, max_requests=5)
    record = record_in(rows[-1])
    assert (record.stop_reason, record.reward_parts["score"]) == (stop_reason, score)
    assert record.fault is None


POST = "await post(address, answer='ab')"


@pytest.mark.parametrize("requests", [MAX_TURNS, MAX_REQUESTS])
@pytest.mark.parametrize(("before", "stop_reason"), [(POST, "answered"), ("", "max_turns")])
async def test_an_agent_that_goes_on_after_it_was_told_to_end_is_stopped(
    before: str, stop_reason: str, requests: str, tools: Tools, tmp_path: Path, monkeypatch: Any
):
    monkeypatch.setattr("agent_loop.gateway.session.WIND_UP_S", 0.0)
    after = """try:
        while True: await ask(address, row["prompt"])
    except asyncio.CancelledError:
        return "too late"
"""
    code = REFUSED.format(requests=requests, before=before, after=after)
    texts = ["so<|im_end|>"] * (3 if requests == MAX_TURNS else 5)
    rows = await session_rows(code, tools, tmp_path, monkeypatch, *texts, max_requests=5)
    record = record_in(rows[-1])
    assert (record.stop_reason, record.fault) == (stop_reason, None)
    assert record.answer == ("ab" if before else None)
    assert any(any(row["response_mask"]) for row in rows)


AT_ONCE = """row["prompt"] = await talk(address, row["prompt"], 2)
    both = [asyncio.ensure_future(ask(address, row["prompt"])) for _ in range(2)]
    (refused,), _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    assert refused.result()[0] == 400"""
DEADLINE_PASSES = """loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + 61
    await asyncio.Event().wait()
"""


@pytest.mark.parametrize(
    ("requests", "before", "stop_reason"),
    [
        (MAX_TURNS, "", "deadline"),
        (MAX_TURNS, POST, "answered"),
        (AT_ONCE, "", "deadline"),
        (AT_ONCE, POST, "deadline"),
    ],
)
async def test_a_deadline_that_passes_is_a_fault_unless_the_agent_that_was_told_to_end_has_answered(
    requests: str,
    before: str,
    stop_reason: str,
    tools: Tools,
    tmp_path: Path,
    monkeypatch: Any,
):
    monkeypatch.setattr("agent_loop.gateway.session.WIND_UP_S", 1e6)
    monkeypatch.setattr("tests.agent_loop.test_passed_on.config_of", soon(monkeypatch, 60))
    generate = Engine.generate

    async def hangs_without_texts(self: Engine, *args: Any, **how: Any) -> Any:
        if not length_hint(self.texts):
            await asyncio.Event().wait()
        return await generate(self, *args, **how)

    monkeypatch.setattr(Engine, "generate", hangs_without_texts)
    code = REFUSED.format(requests=requests, before=before, after=DEADLINE_PASSES)
    texts = ["so<|im_end|>"] * (3 if requests == MAX_TURNS else 2)
    rows = await session_rows(code, tools, tmp_path, monkeypatch, *texts, max_requests=3)
    record = record_in(rows[-1])
    assert record.stop_reason == stop_reason
    assert any(any(row["response_mask"]) for row in rows) == (stop_reason == "answered")


async def test_what_an_agent_makes_of_a_message_that_was_cut_is_no_answer(
    tools: Tools, tmp_path: Path, monkeypatch: Any
):
    code = "async def solve(address, row):\n    return str(await ask(address, row['prompt']))\n"
    (row,) = await session_rows(code, tools, tmp_path, monkeypatch, CUT)
    assert (record_in(row).stop_reason, record_in(row).answer) == ("response_budget", None)


def of_loop(reward: str | None = "loop") -> Any:
    """`config_of` of a source with this reward."""
    from tests.agent_loop.test_passed_on import config_of

    return lambda **source: config_of(**source, reward=reward)


@pytest.mark.parametrize("reward", [None, "exact_match", "loop"])
async def test_a_reward_that_is_posted_counts_only_where_the_source_leaves_it_to_the_agent(
    reward: str | None, tools: Tools, tmp_path: Path, monkeypatch: Any
):
    monkeypatch.setattr("tests.agent_loop.test_passed_on.config_of", of_loop(reward))
    code = """
async def solve(address, row):
    await ask(address, row["prompt"])
    async with aiohttp.ClientSession() as http:  # what the model's code knows
        for guess in (f"{address.url}/reward", address.openai.replace("/v1", "/reward")):
            async with http.post(guess, json={"reward": 1.0}) as answer:
                assert answer.status == 404
    assert (await post(address, answer="wrong"))[0] == 200
    status, body = await post(address, reward=1.0)
    return f"{status} {body}"
"""
    (row,) = await session_rows(code, tools, tmp_path, monkeypatch)
    record = record_in(row)
    assert record.reward_parts["score"] == (reward == "loop") and record.answer == "wrong"


def soon(monkeypatch: Any, trajectory_s: float = 0.5) -> Any:
    """`config_of` with a deadline."""
    from tests.agent_loop.test_passed_on import config_of

    def config(**source: Any) -> Any:
        made = config_of(**source)
        made.mixed.deadlines = {"trajectory_s": trajectory_s}
        return made

    return config


PROGRAM = """
import json, os, sys, urllib.request

row = json.load(sys.stdin)
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
body = json.dumps({"model": "any", "messages": row["prompt"]}).encode()
with urllib.request.urlopen(urllib.request.Request(url, body)) as answer:
    said = json.load(answer)["choices"][0]["message"]["content"]
print("thinking...")
"""


@pytest.mark.sandbox
@pytest.mark.parametrize("where", ["sandbox", "host"])
@pytest.mark.parametrize(
    ("end", "options", "stop_reason", "score", "words"),
    [
        ("print(said)", {}, "answered", 1.0, ""),
        (
            "open(os.environ['MIXED_SESSION_DIR'] + '/a.txt', 'w').write(said)",
            *({"answer_file": "a.txt"}, "answered", 1.0, ""),
        ),
        (
            "urllib.request.urlopen(os.environ['MIXED_REWARD_URL'], b'{\"answer\": \"ab\"}')",
            *({}, "answered", 1.0, ""),
        ),
        ("sys.exit('no idea')", {}, "infra_error", 0.0, "ended with exit code 1"),
    ],
)
async def test_a_program_is_trained_by_its_last_line_its_file_or_its_own_reward(
    end: str,
    options: dict[str, Any],
    stop_reason: str,
    score: float,
    words: str,
    where: str,
    tools: Tools,
    tmp_path: Path,
    monkeypatch: Any,
):
    folder = tmp_path / "agent"
    folder.mkdir(mode=0o755)
    (folder / "agent.py").write_text(PROGRAM + end)
    settings = {"command": "python agent.py", "cwd": str(folder), "where": where, **options}
    (row,) = await rows_of(
        GatewayAgentLoop, monkeypatch, "ab<|im_end|>", tools=tools, agent_settings=settings
    )
    record = record_in(row)
    assert (record.stop_reason, record.reward_parts["score"]) == (stop_reason, score)
    assert words in (record.fault or "")
    if words:
        assert "no idea" in (record.fault or "") and record.fault_tool == "loop"


async def test_an_engine_that_fails_loses_the_session_even_if_the_agent_goes_on(
    tools: Tools, tmp_path: Path, monkeypatch: Any
):
    code = """
async def solve(address, row):
    status, body = await ask(address, row["prompt"])
    return str(status)
"""
    (row,) = await session_rows(code, tools, tmp_path, monkeypatch, "")
    record = record_in(row)
    assert (record.stop_reason, record.fault_tool) == ("infra_error", "engine")


STUBBORN = """
import asyncio

async def solve(address, row):
    ends = asyncio.get_running_loop().time() + 2
    while asyncio.get_running_loop().time() < ends:
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            pass
"""


async def test_an_agent_that_swallows_its_cancellation_is_named(
    tools: Tools, tmp_path: Path, monkeypatch: Any
):
    monkeypatch.setattr("tests.agent_loop.test_passed_on.config_of", soon(monkeypatch))
    monkeypatch.setattr("agent_loop.gateway_agent_loop.END_S", 0.1)
    (row,) = await session_rows(STUBBORN, tools, tmp_path, monkeypatch)
    assert "goes on 0.1 s after it was cancelled" in (record_in(row).fault or "")
    assert not tools.kept["gateway"]._served


async def test_a_reward_judges_the_words_of_all_rows(
    tools: Tools, tmp_path: Path, monkeypatch: Any
):
    code = """
async def solve(address, row):
    await ask(address, row["prompt"])
    await ask(address, [{"role": "user", "content": "other"}])
    return "ab"
"""
    seen: list[Any] = []
    attempt_of = judging.attempt_of

    def noted(*args: Any) -> Any:
        seen.append(attempt_of(*args))
        return seen[-1]

    monkeypatch.setattr(judging, "attempt_of", noted)
    rows = await session_rows(code, tools, tmp_path, monkeypatch, "one<|im_end|>", "two<|im_end|>")
    (attempt,) = seen
    assert len(rows) == 2 and attempt.text == "one<|im_end|>\ntwo<|im_end|>"
    assert attempt.tool_calls == 0
    assert attempt.response_length == sum(len(row["responses"]) for row in rows)


async def test_after_its_session_an_address_answers_nothing(
    tools: Tools, tmp_path: Path, monkeypatch: Any
):
    code = f"""
async def solve(address, row):
    with open({str(tmp_path / "url")!r}, "w") as file:
        file.write(address.openai)
    await ask(address, row["prompt"])
    return "ab"
"""
    await session_rows(code, tools, tmp_path, monkeypatch)
    url = (tmp_path / "url").read_text()
    async with aiohttp.ClientSession() as http:
        body = {"model": "m", "messages": [{"role": "user", "content": "u"}]}
        for path in ("/chat/completions", "/messages"):
            async with http.post(url + path, json=body) as answer:
                assert answer.status == 404
                assert "no such session" in json.dumps(await answer.json())
    assert not tools.kept["gateway"]._served


FORM = """
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}

async def solve(address, row):
    _, said = await ask(address, row["prompt"], response_format=FORM)
    return said["choices"][0]["message"]["content"]
"""


@pytest.mark.parametrize("structured", ["prompt", "guided"])
async def test_vllm_is_given_the_schema_as_its_own_parameter_only_where_it_guides(
    structured: str, tools: Tools, tmp_path: Path, monkeypatch: Any
):
    module = ModuleType("vllm.sampling_params")
    vars(module)["StructuredOutputsParams"] = StructuredOutputs
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", module)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    given = list[Any]()

    async def noted(self: Engine, *args: Any, sampling_params: Any, **how: Any) -> Any:
        given.append(sampling_params.get("structured_outputs"))
        return await generate(self, *args, **how)

    generate = Engine.generate
    monkeypatch.setattr(Engine, "generate", noted)
    (row,) = await session_rows(FORM, tools, tmp_path, monkeypatch, structured=structured)
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    assert given == [StructuredOutputs(json=schema) if structured == "guided" else None]
    assert "must be JSON that fits this schema" in TOKENIZER.decode(row["prompts"])
    assert "no JSON" in str(record_in(row).turns[0].misfit)


@dataclass
class StructuredOutputs:
    """vLLM's `StructuredOutputsParams` (vllm/sampling_params.py at 0.24.0), which is not installed
    without a GPU."""

    json: Any
