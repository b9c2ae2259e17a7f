"""The counts of a trajectory add up, or the page shows a problem."""

import json
from typing import Any

import pytest

from agent_loop.records.trajectory_record import Call, StopReason, read_line
from tests.fakes.real_tokenizers import real_tokenizer
from tests.verl_mixed.views.viewer.episodes import line
from verl_mixed.views.viewer.views import trajectory_view


def decode(ids: Any) -> str:
    return real_tokenizer("pieces").backend_tokenizer.decode(list(ids), skip_special_tokens=False)


def view(record: dict[str, Any]) -> dict[str, Any]:
    shown = trajectory_view("1.1", read_line(json.dumps(record).encode()), decode)
    json.dumps(shown, allow_nan=False)
    return shown


def test_counts_of_a_sound_trajectory_add_up():
    shown = view(line())
    counts = shown["counts"]
    assert counts["model"] + counts["tool"] == counts["response"] == len(shown["tokens"])
    assert counts["mask_ones"] == counts["to_train"] == counts["model"] > 0
    assert shown["problems"] == []
    assert "".join(shown["tokens"]) == "".join(s["text"] for s in shown["segments"])
    assert shown["prompt"] == "What is it?"


@pytest.mark.parametrize(
    ("reason", "setting", "masked"),
    [
        (StopReason.INFRA_ERROR, "train", "lost"),
        (StopReason.DEADLINE, "train", "lost"),
        (StopReason.MAX_TURNS, "mask", "truncated"),
        (StopReason.MAX_TURNS, "train", None),
    ],
)
def test_a_masked_trajectory_trains_nothing(reason: StopReason, setting: str, masked: str | None):
    record = line(stop_reason=reason, on_truncated=setting)
    if masked == "truncated":
        record["response_mask"] = [0] * len(record["response_ids"])
        record["log_probs"] = [0.0] * len(record["response_ids"])
    shown = view(record)
    assert shown["masked"] == masked
    assert (shown["counts"]["to_train"] == shown["counts"]["mask_ones"] == 0) == bool(masked)
    assert shown["problems"] == []


def test_a_late_trajectory_of_release_1_0_0_was_trained():
    record: dict[str, Any] = line()
    record["stop_reason"] = "deadline"
    del record["weight_versions"], record["turns"][0]["min_global_steps"]
    shown = view(record)
    assert (shown["masked"], shown["problems"], shown["weight_versions"]) == (None, [], None)


def test_without_state_masking_all_tokens_are_trained():
    record = line(state_masking=False)
    record["response_mask"] = [1] * len(record["response_ids"])
    record["log_probs"] = [-1.0] * len(record["response_ids"])
    shown = view(record)
    assert shown["counts"]["to_train"] == shown["counts"]["response"]
    assert shown["problems"] == []


def flip_model_bit(record: dict[str, Any]) -> None:
    record["response_mask"][0] = 0


def train_tool_token(record: dict[str, Any]) -> None:
    record["response_mask"][record["segments"][1][1]] = 1


def drop_last_token(record: dict[str, Any]) -> None:
    for name in ("response_ids", "response_mask", "log_probs"):
        record[name].pop()


def drop_last_segment(record: dict[str, Any]) -> None:
    record["segments"].pop()


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (flip_model_bit, "the mask has"),
        (train_tool_token, "the mask has"),
        (drop_last_token, "are not the"),
        (drop_last_segment, "are not the"),
    ],
)
def test_sums_that_do_not_add_up_are_problems(harm: Any, says: str):
    record = line()
    harm(record)
    assert says in view(record)["problems"][0]


def test_calls_stand_on_the_turn_that_asked_for_them():
    calls = [Call(turn=turn, action="code", arguments=str(turn)) for turn in (1, 1, 2)]
    segments = view(line(calls=calls))["segments"]
    asked = [[call["arguments"] for call in s.get("calls", [])] for s in segments]
    assert asked == [["1", "1"], [], ["2"]]


def test_a_call_that_waited_for_a_server_says_so():
    calls = [Call(turn=1, action="code", server_wait_s=seconds) for seconds in (0.0, 2.5)]
    first, second = view(line(calls=calls))["segments"][0]["calls"]
    assert "server_wait_s" not in first and second["server_wait_s"] == 2.5


def test_calls_of_a_turn_without_tokens_are_shown_too():
    shown = view(line(calls=[Call(turn=9, action="code", arguments="9")]))
    assert shown["segments"][-1]["calls"][0]["arguments"] == "9"
    assert shown["segments"][-1]["length"] == 0


def test_advantage_is_the_trainers_or_none():
    assert view(line())["advantage"] is None
    assert view(line(advantage=-0.5))["advantage"] == -0.5


def test_numbers_that_json_has_not_are_named():
    record = line(reward=float("nan"), advantage=float("-inf"))
    record["log_probs"][0] = float("inf")
    shown = view(record)
    assert (shown["reward"], shown["advantage"], shown["log_probs"][0]) == ("nan", "-inf", "inf")
