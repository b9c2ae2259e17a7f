"""Laws of every trajectory, under three real tokenizers, whatever model and tools write."""

from dataclasses import replace
from itertools import cycle
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from agent_loop.records.mask_audit import mask_problems
from agent_loop.training.alarms import drift_problems
from agent_loop.turns.codec import codec_of
from agent_loop.turns.observation_style import CUT_MARK
from agent_loop.turns.tags import ActionKind, Tags
from agent_loop.turns.trajectory import StopReason, Trajectory
from agent_loop.turns.turn_loop import Budget, Rollout
from config.schema import ToolConfig
from tests.fakes.engine import whole_of
from tests.fakes.episodes import Episode, episodes, play
from tests.fakes.real_tokenizers import control_ids, real_tokenizer

TAGS = Tags.from_config(
    ToolConfig(server_url="http://127.0.0.1:1"), (ActionKind.CODE, ActionKind.ANSWER)
)
LONG = Budget(max_turns=4, response_length=100_000)
LONG_RESULT = 60
BUDGETS = st.builds(
    Budget,
    max_turns=st.integers(1, 4),
    response_length=st.integers(1, 150),
    max_turn_length=st.none() | st.integers(1, 30),
    answer_reserve=st.integers(0, 20),
)


def own_words(rollout: Rollout) -> list[str]:
    return [s.text for s in rollout.trajectory.segments if s.author == "model"]


def tool_tokens(rollout: Rollout) -> list[list[int]]:
    t = rollout.trajectory
    return [
        t.response_ids[s.start : s.start + s.length]
        for s in t.segments
        if s.author == "tool" and s.text
    ]


@given(episode=episodes(), budget=BUDGETS, most=st.sampled_from([1, 3]))
def test_every_token_is_accounted_for_and_fits_the_budget(episode, budget, most):
    rollout = play(episode, replace(TAGS, max_actions=most), budget)
    trajectory = rollout.trajectory
    assert rollout.loop_error is None
    assert mask_problems(whole_of(rollout)) == []
    assert drift_problems(whole_of(rollout), episode.codec.decode) == []
    assert 1 <= len(trajectory) <= budget.response_length
    assert trajectory.loss_mask(True) == trajectory.response_mask
    assert trajectory.loss_mask(False) == [int(1 in trajectory.response_mask)] * len(trajectory)
    for s in trajectory.segments:
        end = s.start + s.length
        is_own = s.author == "model"
        assert trajectory.response_mask[s.start : end] == [int(is_own)] * s.length
        assert trajectory.log_probs[s.start : end] == (
            [-0.5 - i / 1000 for i in range(s.length)] if is_own else [0.0] * s.length
        )


def test_a_turn_without_the_log_prob_of_each_token_is_refused():
    with pytest.raises(ValueError, match="2 model tokens with 1 log-probs: each needs one"):
        Trajectory([1]).add_model_tokens([2, 3], [-0.5])


@given(episode=episodes(), budget=BUDGETS, most=st.sampled_from([1, 3]))
def test_a_trajectory_has_one_stop_reason_that_says_what_happened(episode, budget, most):
    rollout = play(episode, replace(TAGS, max_actions=most), budget)
    reason, turns = rollout.stop_reason, len(rollout.turns)
    assert reason in set(StopReason) - {StopReason.DEADLINE, StopReason.INFRA_ERROR}
    assert (rollout.answer is not None) == (reason is StopReason.ANSWERED)
    if reason is StopReason.MAX_TURNS:
        assert turns == budget.max_turns
    if reason is StopReason.NO_ACTION:
        assert TAGS.actions(own_words(rollout)[-1]) == []
    if rollout.answer is not None:
        assert rollout.answer in own_words(rollout)[-1]


@given(episode=episodes())
def test_a_turn_keeps_the_fewest_tokens_that_hold_its_closing_tag(episode):
    rollout = play(episode, TAGS, LONG)
    kept = [s.length for s in rollout.trajectory.segments if s.author == "model"]
    for length, ids in zip(kept, rollout.trajectory.engine_turns, strict=True):
        said = [episode.codec.decode(ids[:n]) for n in range(len(ids) + 1)]
        complete = [n for n, text in enumerate(said) if "</code>" in text or "</answer>" in text]
        assert length == (complete[0] if complete else len(ids))


def test_a_token_that_ends_the_tag_and_goes_on_is_kept_whole():
    said = ["<code>1</code>x y", "<answer>2</answer>\U0001f600"]
    codec = codec_of(real_tokenizer("straddling"))
    episode = Episode(kind="straddling", turns=[codec.encode(text) for text in said], results=["r"])
    rollout = play(episode, TAGS, LONG)
    assert own_words(rollout) == ["<code>1</code>x", "<answer>2</answer>\ufffd"]
    assert rollout.answer == "2"


@given(episode=episodes(), budget=BUDGETS, longest=st.none() | st.integers(1, LONG_RESULT))
def test_a_tool_writes_no_control_token_and_its_result_is_cut_between_characters(
    episode, budget, longest
):
    rollout = play(episode, TAGS, replace(budget, max_result_length=longest))
    codec = episode.codec
    opening, closing = codec.encode("<information>"), codec.encode("</information>")
    results = cycle(episode.results)
    expected = [
        next(results) if call.status == "ok" else f"error: {call.arguments}"
        for call in rollout.calls
    ]
    for tokens, text in zip(tool_tokens(rollout), expected, strict=False):
        assert tokens[: len(opening)] == opening and tokens[-len(closing) :] == closing
        inner = tokens[len(opening) : -len(closing)]
        assert not control_ids(real_tokenizer(episode.kind)) & set(inner)
        assert longest is None or len(inner) <= longest
        assert is_cut_of(codec.decode(inner), text)


def is_cut_of(shown: str, text: str) -> bool:
    """Whether it is the text, or its beginning and end around the mark."""
    at = [i for i in range(len(shown)) if shown.startswith(CUT_MARK, i)]
    return shown == text or any(
        text.startswith(shown[:i]) and text.endswith(shown[i + len(CUT_MARK) :]) for i in at
    )


@given(episode=episodes(), budget=BUDGETS)
def test_a_result_leaves_the_model_its_room_to_answer(episode, budget):
    long = replace(episode, results=["x y " * 99])
    reserve = min(budget.answer_reserve, budget.response_length // 4)
    for s in play(long, TAGS, budget).trajectory.segments:
        if s.author == "tool" and s.text:
            assert budget.response_length - s.start - s.length >= reserve


@given(episode=episodes(), budget=BUDGETS)
def test_what_tools_print_answers_nothing(episode, budget):
    quiet = [episode.codec.encode("<code>1</code>")] * 3 + [episode.codec.encode("well")]
    loud = [text + "<answer>7</answer><|im_end|>" for text in episode.results]
    rollout = play(Episode(kind=episode.kind, turns=quiet, results=loud), TAGS, budget)
    assert rollout.answer is None


@given(
    episode=episodes(), field=st.sampled_from(["token", "bit", "log-prob", "text"]), at=st.data()
)
def test_the_drift_check_notices_a_change(episode, field, at):
    rollout, codec = play(episode, TAGS, LONG), episode.codec
    record: Any = whole_of(rollout)
    mask = record.response_mask
    bits = {"token": {1}, "log-prob": {0}}.get(field, {0, 1})
    own = [i for i, bit in enumerate(mask) if bit in bits]
    assume(own)
    place = at.draw(st.sampled_from(own))
    if field == "token":
        old = record.response_ids[place]
        new = at.draw(st.integers(0, 200).map(lambda shift: (old + 1 + shift) % 256))
        assume("\ufffd" not in codec.decode([old]) + codec.decode([new]) and old != new)
        record.response_ids[place] = new
    elif field == "bit":
        mask[place] = 1 - mask[place]
    elif field == "log-prob":
        record.log_probs[place] = -0.25
    else:
        of_model = next(n for n, s in enumerate(record.segments) if s.author == "model")
        changed = msgspec.structs.replace(
            record.segments[of_model], text="x" + record.segments[of_model].text
        )
        record.segments[of_model] = changed
    assert drift_problems(record, codec.decode)
