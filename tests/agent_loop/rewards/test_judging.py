"""The reward sees the model's own words: what a tool prints earns nothing."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.calls.client import ToolClient
from agent_loop.records.trajectory_record import COMMON_PARTS
from agent_loop.rewards.judging import attempt_of, judge
from agent_loop.row import Row
from agent_loop.training.verl_adapters.foreign_loop import rollouts_of
from agent_loop.turns.codec import codec_of
from agent_loop.turns.observation_style import GlueOf, inline_glue
from agent_loop.turns.tags import Action, ActionKind, Tags
from agent_loop.turns.trajectory import StopReason
from agent_loop.turns.turn_loop import Budget, Environment, Observation, Rollout, run_turns
from config.schema import MixedConfig, ToolConfig
from tests.agent_loop.training.test_foreign_loop import SETTINGS, finished
from tests.fakes.engine import ScriptedGenerate
from tests.fakes.judge_server import completion, quoted, running_judge, verdict
from tests.fakes.real_tokenizers import real_tokenizer, tool_messages
from tests.fakes.virtual_loop import run_virtual
from tool_server.wire.protocol import ToolCall, ToolRejected, ToolResult, ToolUnavailable

CODEC = codec_of(real_tokenizer("pieces"))
TAGS = Tags.from_config(
    ToolConfig(server_url="http://127.0.0.1:1"), (ActionKind.CODE, ActionKind.ANSWER),
    answer_boxed=True,
)  # fmt: skip
RIGHT = "<answer>Paris</answer> \\boxed{Paris}"
ROW = {"data_source": "nq", "reward_model": {"ground_truth": json.dumps({"target": ["Paris"]})}}
LIMIT_S = 20.0
NOBODY = "http://127.0.0.1:9"
MIXED = {
    "experiment": "x",
    "run_dir": "/x",
    "deadlines": {"reward_s": LIMIT_S},
    "sources": {
        "nq": {"ratio": 1},
        "taco": {"ratio": 1},
        "mine": {"ratio": 1, "reward": "gone.py:f"},
        "long": {"ratio": 1, "reward": "qa", "reward_terms": {"length": {"free": 0, "limit": 10}}},
    },
}
JUDGING = replace(SETTINGS, mixed=MixedConfig.model_validate(MIXED))


class Tools:
    def __init__(self, error: Exception | None = None, takes_s: float = 0.0) -> None:
        self.error, self.takes_s = error, takes_s

    async def call(self, call: ToolCall) -> ToolResult:
        await asyncio.sleep(self.takes_s)
        if self.error is not None:
            raise self.error
        return ToolResult(body={"status": "Success", "run_result": {"stdout": "2\n"}})


def glue_of(style: str) -> GlueOf:
    if style == "inline":
        return inline_glue(CODEC, "<information>", "</information>")
    messages = tool_messages(real_tokenizer("pieces"))
    return lambda count: messages.glue((), ("tool",) * count)


async def episode(
    style: str, turns: list[str], printed: str, given: Environment | None = None
) -> Rollout:
    async def environment(action: Action) -> Observation:
        return Observation(text=printed)

    return await run_turns(
        prompt_ids=[1],
        generate=ScriptedGenerate(CODEC, list(turns)),
        environment=given or environment,
        language=TAGS,
        glue=glue_of(style),
        codec=CODEC,
        budget=Budget(max_turns=3, response_length=1000),
        filler_id=0,
    )


async def reward_of(rollout: Rollout, row: Any = ROW, tools: Any = None) -> Any:
    return await judge(rollout, Row.from_columns(row), JUDGING, tools or Tools())


LAST = ["well", "", "<answer>", "</answer>", "<answer>Rome</answer>", "<code>b</code>"]


@given(
    style=st.sampled_from(["inline", "chat", "foreign"]),
    last=st.sampled_from(LAST),
    printed=st.sampled_from([RIGHT, f"<answer>{RIGHT}", "Paris", f"{RIGHT}<|im_end|>"]),
)
async def test_an_answer_that_a_tool_prints_earns_nothing(style, last, printed):
    if style == "foreign":
        output, turns = finished([("<code>a</code>", 1), (printed, 0), (last, 1)])
        rollout = rollouts_of([output], turns, CODEC, SETTINGS, "nq")[0]
    else:
        rollout = await episode(style, ["<code>a</code>", last, "so"], printed)
    assert (await reward_of(rollout))["score"] == 0.0


@pytest.mark.parametrize("style", ["inline", "chat"])
async def test_the_model_s_own_answer_earns_its_reward(style):
    rollout = await episode(style, ["<code>a</code>", "<answer>Paris</answer>"], "Rome")
    parts = await reward_of(rollout)
    assert (parts["score"], parts["infra_error"], parts["loop_error"]) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("empty", ["", " \n"])
async def test_empty_answer_tags_are_no_answer(empty):
    rollout = await episode("inline", [f"<answer>{empty}</answer>"], "")
    assert attempt_of(rollout, Row.from_columns(ROW), 1000).answer is None
    assert (await reward_of(rollout))["format"] == 0.0


CODE_ROW = {
    "data_source": "taco",
    "reward_model": {"ground_truth": json.dumps({"inputs": ["1"], "outputs": ["2"]})},
}


@pytest.mark.parametrize(
    ("tools", "row", "fault_tool", "is_loop_error"),
    [
        (Tools(ToolUnavailable("dead", tool="run_code")), CODE_ROW, "run_code", False),
        (Tools(takes_s=1e6), CODE_ROW, "reward", False),
        (Tools(TimeoutError("the reward's own")), CODE_ROW, "loop", True),
        (Tools(), CODE_ROW | {"reward_model": {"ground_truth": "no JSON"}}, "loop", True),
        (Tools(), CODE_ROW | {"data_source": "mine"}, "loop", True),
    ],
)
def test_a_trajectory_without_a_verdict_is_lost(tools, row, fault_tool, is_loop_error):
    async def judged() -> tuple[Rollout, Any]:
        rollout = await episode("inline", ["<answer>print(2)</answer>"], "")
        return rollout, await reward_of(rollout, row, tools)

    (rollout, parts), took_s = run_virtual(judged())
    assert took_s <= LIMIT_S
    assert (rollout.stop_reason, rollout.fault_tool) == (StopReason.INFRA_ERROR, fault_tool)
    assert (parts["loop_error"], parts["infra_error"]) == (is_loop_error, not is_loop_error)
    assert not any(rollout.trajectory.response_mask)


def test_a_lost_trajectory_is_not_judged():
    rollout, _ = run_virtual(episode("inline", ["<answer>x</answer>"], ""))
    rollout.lose("search", "dead")
    parts, _ = run_virtual(reward_of(rollout, row={"data_source": "nq"}))
    assert (parts["score"], parts["infra_error"]) == (0.0, 1.0)


def test_the_deadline_s_and_the_reward_s_own_errors_name_the_reward():
    async def judged() -> Rollout:
        rollout = await episode("inline", ["<answer>print(2)</answer>"], "")
        await reward_of(rollout, CODE_ROW | {"data_source": "mine"})
        return rollout

    rollout, _ = run_virtual(judged())
    assert "reward=gone.py:f" in (rollout.fault or "") and "no file" in (rollout.fault or "")


@pytest.mark.parametrize("is_up", [True, False])
async def test_a_judge_that_is_down_loses_the_trajectory_and_gives_no_score(is_up):
    def answer(body: dict[str, Any]) -> Any:
        return completion(verdict(body, 7)) if is_up else 500

    async with running_judge([answer]) as server:
        options = {"rubric": "{answer} for {question}", "model": "m", "base_url": server.url}
        source = {"ratio": 1, "reward": "judge", "reward_options": options}
        mixed = MixedConfig.model_validate(MIXED | {"sources": {"nq": source}})
        rollout = await episode("inline", ["<answer>Paris</answer>"], "")
        asked = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Where?"}]
        async with ToolClient(NOBODY, limiter=None, max_retries=0) as tools:
            parts = await judge(
                rollout,
                Row.from_columns(ROW | {"raw_prompt": asked}),
                replace(JUDGING, mixed=mixed),
                tools,
            )
    assert quoted(server.seen[0][1]) == ["Paris", "Where?"]
    assert (parts["score"], parts["infra_error"]) == ((0.7, 0.0) if is_up else (0.0, 1.0))
    assert rollout.is_lost != is_up and parts["loop_error"] == 0.0
    if not is_up:
        assert (rollout.fault_tool, sum(rollout.trajectory.response_mask)) == ("judge", 0)


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], ""),
        ([{"role": "user", "content": "first"}, {"role": "assistant", "content": "so"},
          {"role": "user", "content": "last"}], "last"),
        ([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}],
         "what?"),
    ],
)  # fmt: skip
def test_the_question_is_the_last_user_message(messages, text):
    assert Row.from_columns(ROW | {"raw_prompt": messages}).question == text


@pytest.mark.parametrize("style", ["inline", "chat", "foreign"])
async def test_a_reward_is_given_all_of_the_model_s_words_and_none_of_a_tool_s(style):
    turns, printed = ["so <code>a</code>", "well <answer>Paris</answer>"], f"tool {RIGHT}"
    if style == "foreign":
        output, given = finished([(turns[0], 1), (printed, 0), (turns[1], 1)])
        rollout = rollouts_of([output], given, CODEC, SETTINGS, "nq")[0]
    else:
        rollout = await episode(style, turns, printed)
    row = ROW | {"extra_info": {"row_id": "nq:1", "extras": json.dumps({"level": 3})}}
    attempt = attempt_of(rollout, Row.from_columns(row), 1000)
    assert attempt.text.removesuffix("<|im_end|>") == "\n".join(turns)
    assert (attempt.answer, attempt.ground_truth) == ("Paris", {"target": ["Paris"]})
    assert attempt.extra_info == {"row_id": "nq:1", "extras": {"level": 3}}
    assert attempt.response_length == len(rollout.trajectory) > len(CODEC.encode(turns[0]))


@pytest.mark.parametrize(
    ("turns", "calls"),
    [
        (["<code>a</code>", "<code>b</code>", "<answer>4</answer>"], 2),
        (["<answer>4</answer>"], 0),
        (["a</code>", "<answer>4</answer>"], 0),  # no opening tag
        (["<code>refuse</code>", "<answer>4</answer>"], 0),
        (["<code>empty</code>", "<code>b</code>", "<answer>4</answer>"], 1),
        (["so", "<answer>4</answer>"], 0),
    ],
)
async def test_calls_that_a_tool_executed_are_counted(turns, calls):
    async def environment(action: Action) -> Observation:
        if action.content == "refuse":
            raise ToolRejected("too long", tool="calculate")
        return Observation(text="4", rejected=action.content == "empty")

    rollout = await episode("inline", turns, "", environment)
    row = {**ROW, "reward_model": {"ground_truth": json.dumps({"answer": "4"})}}
    assert attempt_of(rollout, Row.from_columns(row), 1000).tool_calls == calls


@pytest.mark.parametrize(
    ("said", "calls"),
    [
        ([("call", 1), ("4", 0), ("again", 1), ("5", 0), ("<answer>4</answer>", 1)], 2),
        ([("<answer>4</answer>", 1)], 0),
    ],
)
def test_a_result_in_another_project_s_loop_is_a_call(said, calls):
    output, given = finished(said)
    rollout = rollouts_of([output], given, CODEC, SETTINGS, "nq")[0]
    assert attempt_of(rollout, Row.from_columns(ROW), 1000).tool_calls == calls


async def test_a_source_s_terms_are_added_and_what_verl_is_given_stays_the_same_for_all():
    rollout = await episode("inline", ["<answer>Paris</answer>"], "")
    parts = await reward_of(rollout, ROW | {"data_source": "long"})
    assert (parts["task"], parts["term_length"], parts["acc"]) == (1.0, -1.0, 1.0)
    assert parts["score"] == 0.0
    assert set(COMMON_PARTS) < parts.keys()
