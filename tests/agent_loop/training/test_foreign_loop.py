"""A loop that is not ours: whose tokens it trains, and what its answer is."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.loop_settings import LoopSettings
from agent_loop.records.mask_audit import mask_problems
from agent_loop.training.alarms import drift_problems
from agent_loop.training.verl_adapters.engine_client import EngineTurn
from agent_loop.training.verl_adapters.foreign_loop import late_rollout, rollouts_of
from agent_loop.turns.codec import codec_of
from agent_loop.turns.trajectory import StopReason
from agent_loop.turns.turn_loop import Budget, Rollout
from agent_loop.watchdog import Watchdog
from config.schema import MixedConfig, ToolConfig
from tests.fakes.engine import whole_of
from tests.fakes.real_tokenizers import KINDS, real_tokenizer

CODEC = codec_of(real_tokenizer("pieces"))
MIXED = {"experiment": "x", "run_dir": "/x", "sources": {"nq": {"ratio": 1}}}
SETTINGS = LoopSettings(
    mixed=MixedConfig.model_validate(MIXED),
    tools=ToolConfig(server_url="http://127.0.0.1:1"),
    budget=Budget(max_turns=3, response_length=60),
    max_actions=1,
    backend="cpu",
    sampling={},
    watchdog=Watchdog(60.0),
)
END = "<|im_end|>"


def finished(
    parts: Sequence[tuple[str, int]], length: int | None = None, codec: Any = CODEC
) -> tuple[Any, list[Any]]:
    """verl's output, cut to a length as verl's loops cut it, and the engine's answers."""
    ids, mask, turns = [], [], []
    for text, bit in parts:
        own = codec.encode(text)
        if bit:
            answer = SimpleNamespace(
                token_ids=own, log_probs=[-0.5] * len(own), extra_fields={"global_steps": 3}
            )
            turns.append(EngineTurn([1, *ids], answer))
        ids, mask = ids + own, mask + [bit] * len(own)
    output = SimpleNamespace(
        prompt_ids=[1],
        response_ids=ids[:length],
        response_mask=mask[:length],
        response_logprobs=[-0.5 * bit for bit in mask][:length],
    )
    return output, turns


def hosted(*parts: tuple[str, int], length: int | None = None) -> Rollout:
    output, turns = finished(parts, length)
    return rollouts_of([output], turns, CODEC, SETTINGS, "nq")[0]


PARTS = st.lists(
    st.tuples(st.sampled_from(["a", "\U0001f600", f"b{END}", "<answer>7</answer>", "c d"]),
              st.integers(0, 1)),
    min_size=1, max_size=8,
)  # fmt: skip


@given(parts=PARTS, length=st.integers(1, 60), kind=st.sampled_from(KINDS))
def test_every_token_of_an_honest_loop_is_accounted_for(parts, length, kind):
    codec = codec_of(real_tokenizer(kind))
    output, turns = finished(parts, length, codec)
    rollout = rollouts_of([output], turns, codec, SETTINGS, "nq")[0]
    t = rollout.trajectory
    assert (t.response_ids, t.response_mask) == (output.response_ids, output.response_mask)
    assert t.log_probs == output.response_logprobs
    assert mask_problems(whole_of(rollout)) == []
    assert drift_problems(whole_of(rollout), codec.decode) == []
    assert sum(turn.tokens for turn in rollout.turns) == sum(output.response_mask)


def test_turns_with_nothing_between_them_are_turns_of_their_own():
    rollout = hosted(("so", 1), ("[result]", 0), (f"well{END}", 1), ("4", 1))
    own = [s.text for s in rollout.trajectory.segments if s.author == "model"]
    assert own == ["so", f"well{END}", "4"]
    assert [turn.tokens for turn in rollout.turns] == [2, 5, 1]
    assert rollout.answer == "4"


def test_of_two_answers_that_begin_alike_a_row_has_the_longer_one_that_fits():
    turns = [
        EngineTurn(
            [7], SimpleNamespace(token_ids=ids, log_probs=[-0.5] * len(ids), extra_fields={})
        )
        for ids in ([1, 2], [1, 2, 3])
    ]
    outputs = [
        SimpleNamespace(prompt_ids=[7], response_ids=ids, response_mask=[1] * len(ids))
        for ids in ([1, 2, 3], [1, 2])
    ]
    rows = rollouts_of(outputs, turns, CODEC, SETTINGS, "nq")
    assert [row.turns[0].request for row in rows] == [2, 1]


@pytest.mark.parametrize("change", ["merged", "dropped", "invented", "swapped"])
def test_a_loop_that_tokenises_the_model_s_words_again_is_refused(change):
    output, turns = finished([("code", 1), ("[r]", 0), ("code", 1)])
    if change == "merged":  # the same text, as other tokens than were sampled
        turns[0].output.token_ids = [CODEC.encode(letter)[0] for letter in "code"]
    elif change == "dropped":
        turns[1].output.token_ids = [9, *turns[1].output.token_ids]
    elif change == "invented":
        turns.pop()
    else:
        output.response_ids[-1] += 1
    with pytest.raises(ValueError, match=r"source=nq are not the engine's, from token \d of \d"):
        rollouts_of([output], turns, CODEC, SETTINGS, "nq")[0]


@pytest.mark.parametrize(
    ("parts", "answer"),
    [
        ([("<answer> 7 </answer> I think", 1)], "7"),
        ([("so <answer>7</answer>", 1), ("[r]", 0), ("well", 1)], "7"),
        ([("it is \\boxed{7}", 1), ("[r]", 0), (f"done{END}", 1)], "7"),
        ([("<answer>7</answer> or \\boxed{8}", 1)], "7"),
        ([("thinking", 1), ("[r]", 0), (f" the last turn \n{END}", 1)], "the last turn"),
        ([(END, 1)], None),
        ([("only a tool", 0)], None),
    ],
)
def test_the_answer_is_tagged_or_boxed_or_the_last_turn(parts, answer):
    rollout = hosted(*parts)
    assert rollout.answer == answer
    is_message = answer == "the last turn" or parts[0][0] == END
    assert rollout.answer_is_message is is_message
    assert rollout.stop_reason == (StopReason.NO_ACTION if answer is None else StopReason.ANSWERED)


@pytest.mark.parametrize("parts", [("a " * 99, 1), ("[r]" * 99, 0)])
def test_a_response_that_fills_its_budget_is_truncated(parts):
    assert hosted(parts, length=60).stop_reason is StopReason.RESPONSE_BUDGET


def test_the_log_probs_are_the_engine_s_whatever_the_loop_says():
    for said in (None, [-9.0] * 4):
        output, turns = finished([("4", 1), ("[r]", 0)])
        output.response_logprobs = said
        rollout = rollouts_of([output], turns, CODEC, SETTINGS, "nq")[0]
        assert rollout.trajectory.log_probs == [-0.5, 0.0, 0.0, 0.0]


@given(parts=PARTS, kind=st.sampled_from(KINDS))
def test_what_a_loop_had_at_its_deadline_is_read_from_what_it_asked_the_engine(parts, kind):
    codec = codec_of(real_tokenizer(kind))
    output, turns = finished(parts, codec=codec)
    rollout = late_rollout(turns, codec, SETTINGS.deadline_of())
    t = rollout.trajectory
    last = max((i for i, bit in enumerate(output.response_mask, 1) if bit), default=0)
    if turns:  # what came before the first request is its prompt
        assert t.ids == [1, *output.response_ids[:last]]
    assert not any(t.response_mask) and rollout.is_lost
    assert rollout.stop_reason is StopReason.DEADLINE
    assert mask_problems(whole_of(rollout)) == []


def test_a_conversation_that_does_not_go_on_from_the_one_before_is_left_out():
    _, turns = finished([("a", 1), ("[r]", 0), ("b", 1)])
    turns.append(EngineTurn([7, 7], turns[0].output))
    assert late_rollout(turns, CODEC, SETTINGS.deadline_of()).trajectory.segments[-1].text == "b"
