"""Turns: what ends a trajectory, what the mask says, and how much room a result may take."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.deadline import Deadline
from agent_loop.records.mask_audit import mask_problems
from agent_loop.records.trajectory_record import Call
from agent_loop.turns.observation_style import GlueOf, fit_between, inline_glue
from agent_loop.turns.react import ReAct
from agent_loop.turns.tags import Action, ActionKind, Tags
from agent_loop.turns.trajectory import StopReason
from agent_loop.turns.turn_loop import (
    Budget,
    Generated,
    Observation,
    Rollout,
    Stop,
    run_call,
    run_turns,
)
from config.schema import ToolConfig
from tests.fakes.engine import END, CharTokenizer, ScriptedGenerate, TableEnvironment, whole_of
from tool_server.wire.protocol import Fault, ToolRejected, ToolResult, ToolUnavailable

CONFIG = ToolConfig(server_url="http://127.0.0.1:1")
TAGS = Tags.from_config(CONFIG, (ActionKind.CODE, ActionKind.ANSWER))
FILLER = 0


def glue_of(codec: CharTokenizer) -> GlueOf:
    return inline_glue(codec, CONFIG.start_state_marker, CONFIG.end_state_marker)


async def play(
    turns: list[str],
    table: dict[str, str | None] | None = None,
    codec: CharTokenizer | None = None,
    deadline: Deadline | None = None,
    **limits: Any,
) -> tuple[Rollout, ScriptedGenerate, TableEnvironment]:
    codec = codec or CharTokenizer()
    generate = ScriptedGenerate(codec, turns)
    environment = TableEnvironment(table or {})
    rollout = await run_turns(
        prompt_ids=codec.encode("Q"),
        generate=generate,
        environment=environment,
        language=TAGS,
        glue=glue_of(codec),
        codec=codec,
        budget=Budget(**{"max_turns": 3, "response_length": 400, **limits}),
        deadline=deadline,
        filler_id=FILLER,
    )
    return rollout, generate, environment


def masked_text(rollout: Rollout, bit: int) -> str:
    t = rollout.trajectory
    pairs = zip(t.response_ids, t.response_mask, strict=True)
    return CharTokenizer().decode([token for token, mask in pairs if mask == bit])


async def test_a_tool_result_has_mask_zero_and_the_models_words_have_mask_one():
    rollout, _, environment = await play(["<code>1+1</code>", "<answer>2</answer>"], {"1+1": "2"})
    assert rollout.stop_reason is StopReason.ANSWERED
    assert rollout.answer == "2"
    assert masked_text(rollout, 1) == "<code>1+1</code><answer>2</answer>"
    assert masked_text(rollout, 0) == "<information>2</information>"
    assert [action.content for action in environment.seen] == ["1+1"]


async def test_the_engine_continues_exactly_the_tokens_that_are_trained():
    rollout, generate, _ = await play(["<code>a</code>", "<answer>b</answer>"], {"a": "c"})
    second_prompt, _ = generate.asked[1]
    tokens = rollout.trajectory.ids
    assert tokens[: len(second_prompt)] == second_prompt


async def test_tokens_after_the_closing_tag_are_dropped_before_the_result_is_appended():
    rollout, _, _ = await play(
        ["<code>a</code> and so on", "<answer>b</answer> trailing"], {"a": "c"}
    )
    assert "and so on" not in masked_text(rollout, 1)
    assert "trailing" not in masked_text(rollout, 1)
    assert mask_problems(whole_of(rollout)) == []


async def test_an_answer_printed_by_a_tool_is_no_answer():
    rollout, _, _ = await play(["<code>p</code>", "I am done"], {"p": "<answer>42</answer>"})
    assert rollout.answer is None
    assert rollout.stop_reason is StopReason.NO_ACTION


async def test_a_dead_tool_ends_the_trajectory_without_gradient():
    rollout, _, _ = await play(["<code>x</code>"], {"x": None})
    assert rollout.stop_reason is StopReason.INFRA_ERROR
    assert rollout.fault is not None and "ToolUnavailable" in rollout.fault
    assert set(rollout.trajectory.response_mask) == {0}
    assert set(rollout.trajectory.log_probs) == {0.0}


@pytest.mark.parametrize(
    "outcome",
    [
        ToolResult(body={}, server_wait_s=12.5),
        ToolRejected("no such name", tool="run_code"),
        ToolUnavailable("no answer", tool="run_code"),
    ],
)
async def test_a_call_has_the_seconds_that_it_waited_for_a_server_also_if_it_failed(
    outcome: ToolResult | Fault,
):
    async def act(action: Action) -> Observation:
        if isinstance(outcome, ToolResult):
            return Observation(text="2", result=outcome)
        outcome.server_wait_s = 12.5
        raise outcome

    call = Call(turn=1, action="code")
    with suppress(ToolUnavailable):
        await run_call(call, Action(kind=ActionKind.CODE, content="1+1"), act)
    assert call.server_wait_s == 12.5


async def test_the_last_turn_runs_no_tool_since_nobody_would_read_its_result():
    rollout, _, environment = await play(
        ["<code>a</code>", "<code>b</code>"], {"a": "1", "b": "2"}, max_turns=2
    )
    assert rollout.stop_reason is StopReason.MAX_TURNS
    assert [action.content for action in environment.seen] == ["a"]


async def test_turns_that_are_shared_and_used_up_are_the_last_turns():
    left = iter([True, False])
    rollout, _, _ = await play(["<code>a</code>"], {"a": "1"}, take_turn=lambda: next(left))
    assert (len(rollout.turns), rollout.stop_reason) == (1, StopReason.MAX_TURNS)


async def test_a_turn_says_how_long_it_took_and_which_weights_sampled_it():
    codec, now_s, versions = CharTokenizer(), [100.0], iter([(3, 4), (5, 6)])
    scripted = ScriptedGenerate(codec, ["<code>a</code>", "<answer>b</answer>"])
    table = TableEnvironment({"a": "c"})

    async def generate(prompt_ids: list[int], *, max_tokens: int, stop: Stop) -> Generated:
        now_s[0] += 2.0
        oldest, newest = next(versions)
        said = await scripted(prompt_ids, max_tokens=max_tokens, stop=stop)
        return replace(said, min_global_steps=oldest, max_global_steps=newest)

    async def environment(action: Action) -> Observation:
        now_s[0] += 0.5
        return await table(action)

    rollout = await run_turns(
        prompt_ids=[1],
        generate=generate,
        environment=environment,
        language=TAGS,
        glue=glue_of(codec),
        codec=codec,
        budget=Budget(max_turns=3, response_length=200),
        filler_id=FILLER,
        clock=lambda: now_s[0],
    )
    assert [turn.generate_s for turn in rollout.turns] == [2.0, 2.0]
    assert [turn.tools_s for turn in rollout.turns] == [0.5, 0.0]
    assert rollout.weight_versions == (3, 6)


@pytest.mark.parametrize("reserve", [30, 1024])
async def test_a_long_result_is_cut_in_the_middle_and_leaves_room_for_the_answer(reserve: int):
    rollout, generate, _ = await play(
        ["<code>a</code>", "<answer>b</answer>"],
        {"a": "x" * 500},
        response_length=120,
        answer_reserve=reserve,  # of more than a quarter, a result would find no room
    )
    assert rollout.stop_reason is StopReason.ANSWERED
    assert "x...x" in masked_text(rollout, 0)
    assert masked_text(rollout, 0).endswith("</information>")
    assert generate.asked[1][1] >= 30


async def test_closing_tags_of_one_token_stop_the_engine_itself():
    codec = CharTokenizer(wide=["</code>", "</answer>"])
    generate = ScriptedGenerate(codec, ["<code>a</code>never sampled", "<answer>b</answer>"])
    rollout = await run_turns(
        prompt_ids=[1],
        generate=generate,
        environment=TableEnvironment({"a": "c"}),
        language=TAGS,
        glue=glue_of(codec),
        codec=codec,
        budget=Budget(max_turns=3, response_length=200),
        filler_id=FILLER,
    )
    assert rollout.answer == "b"
    assert codec.decode(rollout.trajectory.engine_turns[0]) == "<code>a</code>"


@given(
    text=st.text(max_size=80),
    room=st.integers(0, 120),
    wide=st.lists(st.sampled_from(["ab", "<information>", "..."]), unique=True),
)
async def test_a_fitted_result_never_takes_more_than_its_room_and_keeps_its_markers(
    text, room, wide
):
    codec = CharTokenizer(wide)
    ids = await fit_between(glue_of(codec)(1), [text], codec, last_id=0, room=room, max_length=None)
    if ids is None:
        assert room < len(codec.encode("<information>...</information>"))
        return
    shown = codec.decode(ids)
    assert len(ids) <= room
    assert shown.startswith("<information>") and shown.endswith("</information>")


PIECES = st.sampled_from(
    ["<code>", "</code>", "<answer>", "</answer>", "<information>", "</information>", "a", " ", "1"]
)


@given(
    turns=st.lists(st.lists(PIECES, max_size=8).map("".join), min_size=4, max_size=4),
    wide=st.lists(st.sampled_from(["</code>", "</answer>", "e>a", "<c", "er>"]), unique=True),
    max_turns=st.integers(1, 4),
    response_length=st.integers(1, 90),
    result=st.text("xyz<>/answer ", max_size=40),
)
async def test_whatever_the_model_says_every_mask_bit_is_accounted_for(
    turns, wide, max_turns, response_length, result
):
    codec = CharTokenizer(wide)

    class Answering(TableEnvironment):
        async def __call__(self, action):
            self.table[action.content] = result
            return await super().__call__(action)

    rollout = await run_turns(
        prompt_ids=[7],
        generate=ScriptedGenerate(codec, turns),
        environment=Answering({}),
        language=TAGS,
        glue=glue_of(codec),
        codec=codec,
        budget=Budget(max_turns=max_turns, response_length=response_length, answer_reserve=4),
        filler_id=FILLER,
    )
    assert mask_problems(whole_of(rollout)) == []
    assert 1 <= len(rollout.trajectory) <= response_length
    if rollout.answer is not None:
        model_text = codec.decode(
            [
                token
                for token, bit in zip(
                    rollout.trajectory.response_ids, rollout.trajectory.response_mask, strict=True
                )
                if bit
            ]
        )
        assert rollout.answer in model_text


@pytest.mark.parametrize("field", ["response_mask", "log_probs", "response_ids"])
async def test_the_mask_audit_notices_a_changed_token_mask_or_log_prob(field):
    rollout, _, _ = await play(["<code>1+1</code>", "<answer>2</answer>"], {"1+1": "2"})
    record = whole_of(rollout)
    values: Any = getattr(record, field)
    at = record.response_mask.index(0) if field != "response_ids" else 3
    values[at] = 1 - values[at] if field != "response_ids" else 99
    assert mask_problems(record)


async def test_an_answer_without_an_end_of_its_own_is_none_where_the_turn_was_cut_short():
    async def played(**limits: float) -> Rollout:
        codec = CharTokenizer(wide=[END])
        return await run_turns(
            prompt_ids=[7],
            generate=ScriptedGenerate(codec, [f"Final Answer: 4217{END}"]),
            environment=TableEnvironment({}),
            language=ReAct(),
            glue=glue_of(codec),
            codec=codec,
            budget=Budget(max_turns=1, response_length=90, **limits),  # pyright: ignore
            filler_id=FILLER,
        )

    whole, cut = await played(), await played(max_turn_length=16)
    assert (whole.stop_reason, whole.answer) == (StopReason.ANSWERED, "4217")
    assert (cut.stop_reason, cut.answer) == (StopReason.RESPONSE_BUDGET, None)


async def test_an_action_that_is_cancelled_from_within_is_the_loop_s_error():
    async def environment(action):
        inner = asyncio.ensure_future(asyncio.Event().wait())
        inner.cancel()
        await inner

    codec = CharTokenizer()
    rollout = await run_turns(
        prompt_ids=[7],
        generate=ScriptedGenerate(codec, ["<code>a</code>"]),
        environment=environment,  # pyright: ignore[reportArgumentType]
        language=TAGS,
        glue=glue_of(codec),
        codec=codec,
        budget=Budget(max_turns=2, response_length=90),
        filler_id=FILLER,
    )
    assert rollout.loop_error is not None and rollout.calls[0].status == "failed"
    assert "was cancelled from within" in (rollout.fault or "")


async def test_a_trajectory_that_is_late_before_it_begins_asks_no_engine():
    deadline = Deadline.after(0.0, "trajectory_s")
    rollout, generate, _ = await play(["<answer>2</answer>"], deadline=deadline)
    assert rollout.stop_reason is StopReason.DEADLINE
    assert generate.asked == []
