"""A record keeps its values from the loop to the trainer and to a file, also one of an older
release; a line that is none is named."""

import json
import pickle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.records.trajectory_record import (
    LATER,
    Call,
    Segment,
    StopReason,
    TokenValues,
    TrajectoryRecord,
    Turn,
    absent_fields,
    add_texts,
    from_columns,
    line_of,
    read_file,
    read_line,
    to_columns,
)
from agent_loop.turns.trajectory import Trajectory
from agent_loop.turns.turn_loop import Rollout

RUNS = {
    "1.0.0": Path("tests/release/run_of_1_0_0/trajectories"),
    "1.1.0": Path("tests/recorded/run_of_1_1_0/trajectories"),
}
ABSENT = {"1.0.0": {*LATER}, "1.1.0": {"update", "old_log_probs"}}

texts = st.text(st.characters(exclude_categories=()), max_size=6)  # half characters too
floats = st.floats(allow_nan=False, allow_infinity=False)
naturals = st.integers(0, 2**32 - 1)
turns = st.builds(
    Turn,
    generate_s=floats,
    tokens=naturals,
    min_global_steps=st.none() | naturals,
    request=st.none() | naturals,
)
calls = st.builds(
    Call,
    turn=naturals,
    action=texts,
    arguments=texts,
    server_wait_s=floats,
    error=st.none() | texts,
    reward=st.none() | floats,
    ends=st.booleans(),
    unread=st.none() | texts,
)
segments = st.builds(
    Segment, author=st.sampled_from(["model", "tool"]), start=naturals, length=naturals, text=texts
)
of_loop: dict[str, Any] = {
    "stop_reason": st.sampled_from(["answered", "infra_error"]),
    "turns": st.lists(turns, max_size=3),
    "calls": st.lists(calls, max_size=3),
    "fault": st.none() | texts,
    "weight_versions": st.none() | st.tuples(naturals, naturals),
    "temperature": st.none() | floats,
    "reward_parts": st.dictionaries(texts, floats, max_size=2),
    "state_masking": st.booleans(),
    "rows": st.none() | naturals,
    "answer": st.none() | texts,
    "engine_turns": st.lists(st.lists(naturals, max_size=3), max_size=2),
    "segments": st.lists(segments, min_size=1, max_size=3),
}
records = st.builds(TrajectoryRecord, **of_loop)
written = st.builds(
    TrajectoryRecord,
    **of_loop,
    step=st.integers(1, 2**32 - 1),
    key=st.just("aa.0.nq_0_0"),
    source=st.just("nq"),
    row_id=st.just("nq:1"),
    reward=st.floats(),
    advantage=st.none() | floats,
    response_ids=st.lists(naturals, max_size=3),
    log_probs=st.lists(st.floats(width=32), max_size=3),
)


def sent(columns: Any) -> Any:
    """As after TransferQueue: objects of their own."""
    return pickle.loads(pickle.dumps(columns))


@given(records)
def test_the_columns_of_a_record_are_the_record(record: TrajectoryRecord):
    facts, packed = sent(to_columns(record))
    read = from_columns(facts)
    assert not read.segments and not any(call.arguments for call in read.calls)
    assert read.is_judged == record.is_judged and read.why_masked == record.why_masked
    add_texts(read, packed)
    assert read == record


def test_numbers_of_numpy_become_numbers():
    """A reward of a user's own may return them."""
    parts: Any = {"score": np.float32(0.5), "passed": np.int64(3), "acc": np.bool_(True)}
    record = TrajectoryRecord(reward_parts=parts, cause=Word("a"), loop_lag_s=np.float64(0.5))
    facts, _ = sent(to_columns(record))
    read = from_columns(facts)
    assert read.reward_parts == {"score": 0.5, "passed": 3, "acc": True}
    assert [type(value) for value in read.reward_parts.values()] == [float, int, bool]
    assert (read.cause, type(read.cause), read.loop_lag_s) == ("a", str, 0.5)


class Word(str):
    """A text of a class of somebody's own."""


@given(written)
def test_a_line_is_the_record(record: TrajectoryRecord):
    line = line_of(record)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert line_of(read_line(line)) == line
    fields = json.loads(line)
    assert fields.keys() == set(TrajectoryRecord.__struct_fields__)
    assert fields["calls"] == [
        {name: shown(value) for name, value in msgspec.structs.asdict(call).items()}
        for call in record.calls
    ]
    assert (fields["rows"], fields["engine_turns"]) == (record.rows, record.engine_turns)


def shown(value: Any) -> Any:
    """A text as UTF-8 can hold it."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


@pytest.mark.parametrize("release", RUNS)
def test_the_records_of_an_older_release_are_read_as_before(release: str):
    for path in sorted(RUNS[release].glob("*.jsonl")):
        records, problems = read_file(path)
        assert problems == [] and records
        assert absent_fields(records) == ABSENT[release]
        for raw, record in zip(path.read_text().splitlines(), records, strict=True):
            was, now = json.loads(raw), json.loads(line_of(record))
            for name in was.keys() - {"turns", "calls"}:
                assert now[name] == was[name], name
            for name in ("turns", "calls"):
                for old, new in zip(was[name], now[name], strict=True):
                    assert old.items() <= new.items()
            assert record.update is None and record.old_log_probs is None
            assert not any(call.server_wait_s for call in record.calls)


def test_facts_in_a_checkpoint_of_an_older_release_are_read():
    of_1_1_0 = {
        "stop_reason": "answered",
        "turns": [{"generate_s": 0.5, "tools_s": 0.0, "tokens": 3, "min_global_steps": 2}],
        "calls": [{"turn": 1, "action": "code", "status": "ok", "latency_s": 0.1}],
        "fault": None,
        "weight_versions": (2, 2),
        "reward_parts": {"score": 1.0, "acc": 1.0},
        "trained_tokens": 3,
    }
    packed = pickle.dumps(
        {
            "answer": "4",
            "calls": [{"arguments": "2+2", "error": None, "unread": None}],
            "engine_turns": [[5, 6, 7]],
            "segments": [["model", 0, 3, "2+2"]],
        }
    )
    record = from_columns(of_1_1_0)
    add_texts(record, packed)
    assert (record.calls[0].arguments, record.calls[0].latency_s) == ("2+2", 0.1)
    assert record.segments == [Segment("model", 0, 3, "2+2")] and record.answer == "4"
    # release 1.0.0 had the texts beside the facts, and did not count the trained tokens
    of_1_0_0 = of_1_1_0 | {"segments": [["tool", 0, 1, "x"]], "engine_turns": [], "answer": None}
    del of_1_0_0["trained_tokens"]
    older = from_columns(of_1_0_0)
    assert older.segments[0].text == "x" and older.trained_tokens is None


@pytest.mark.parametrize(
    ("damaged", "why"),
    [
        (b'{"step": 1, "key": "a"', "Expecting ',' delimiter"),
        (b'{"step": 1}', "it has no step or no key"),
        ({"turns": [{"tokens": "three"}]}, "Expected `int`, got `str` - at `$.turns[0].tokens`"),
        ({"segments": [["model", 0, -1, ""]]}, "Expected `int` >= 0"),
        ({"reward": None}, "Expected `float`, got `null` - at `$.reward`"),
        ({"key": None}, "Expected `str`, got `null` - at `$.key`"),
        (["key"], "it has no step or no key"),
        ({"step": None}, "it has no step or no key"),
        (b'{"newer": ' + b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_line_that_is_no_record_is_named_and_the_rest_is_read(
    damaged: Any, why: str, tmp_path: Path
):
    whole = (RUNS["1.1.0"] / "1.jsonl").read_bytes().splitlines(keepends=True)[0]
    fields = json.loads(whole)
    if isinstance(damaged, dict):
        damaged = json.dumps(fields | damaged).encode()
    elif isinstance(damaged, list):
        damaged = json.dumps({k: v for k, v in fields.items() if k not in damaged}).encode()
    (tmp_path / "7.jsonl").write_bytes(whole + damaged + b"\n" + whole + whole[:40])
    records, (of_field, torn) = read_file(tmp_path / "7.jsonl")
    assert len(records) == 2
    assert of_field.startswith(f"7.jsonl line 2 is left out: {why}")
    assert torn == "7.jsonl line 4 is left out: it is torn: it has no newline"


def test_a_row_without_a_token_to_train_says_nothing_of_what_is_absent():
    masked = TrajectoryRecord(response_mask=[0], rows=1)
    assert absent_fields([masked], ["rows", "update"]) == {"rows", "update"}
    trained = TrajectoryRecord(response_mask=[0, 1], rows=1)
    assert absent_fields([masked, trained], ["rows", "update"]) == {"update"}


def test_a_call_that_goes_on_does_not_change_the_record():
    rollout = Rollout(trajectory=Trajectory([1]), stop_reason=StopReason.ANSWERED, answer="4")
    rollout.calls.append(Call(turn=1, action="code"))
    record = rollout.record()
    rollout.calls[0].status = "ok"
    rollout.calls.append(Call(turn=2, action="code"))
    rollout.turns.append(Turn())
    assert [call.status for call in record.calls] == ["cancelled"] and record.turns == []


def test_the_values_of_tokens_are_a_sum_and_a_hash_and_whole_on_demand():
    numbers = np.array([-0.5, -0.25, 1e-8], np.float32)
    values = TokenValues.of(numbers, whole=False)
    assert values is not None and values.values is None
    assert values.sum == float(numbers.astype(np.float64).sum())
    other = TokenValues.of(numbers + np.float32(2e-8), whole=True)
    assert other is not None and other.hash != values.hash
    assert np.array_equal(np.array(other.values, np.float32), numbers + np.float32(2e-8))
    assert TokenValues.of(numbers[:0], whole=True) is None
