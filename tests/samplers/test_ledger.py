"""The ledger survives kills at any byte, and holds each step once."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplers.audit import audit
from samplers.ledger import Ledger, LedgerEntry, PlanStart, StepEnd, has_steps, read_ledger
from samplers.mixture_plan import MixturePlan
from tests.samplers.made_runs import (
    RATIOS,
    SIZES,
    entries_of,
    entry_of,
    new_plan,
    prompts_of,
    run_of,
    write_step,
)


@pytest.fixture(autouse=True, scope="module")
def _no_waiting_for_the_disk():
    """These tests kill no machine, only files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("config.disk.os.fsync", lambda handle: None)
        yield


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def write_run(path: Path, steps: int, plan: MixturePlan | None = None) -> Ledger:
    plan = plan or new_plan()
    ledger = Ledger(path)
    ledger.begin(plan.description())
    for step in range(1, steps + 1):
        write_step(ledger, plan, step)
    return ledger


def test_what_is_appended_is_read_back(path: Path):
    ledger = write_run(path, 2)
    assert read_ledger(path) == run_of(new_plan(), 2)
    assert ledger.last_step == Ledger(path).last_step == 2


def test_every_kind_of_prompt_is_read_back(path: Path):
    plan = new_plan()
    ledger = Ledger(path)
    ledger.begin(plan.description())
    entries = entries_of(plan, 1, lost=range(4))
    entries.append(replace(entry_of(plan.take(1)[0], 1, "unfinished"), row_id=""))
    entries[0] = replace(entries[0], row_id='na"me\n:é', reward_mean=1)
    ledger.append_step(1, entries, plan.drawn)
    assert prompts_of(read_ledger(path)) == entries
    assert len({entry.outcome for entry in entries}) == 5


def test_a_step_without_prompts_is_a_step(path: Path):
    ledger = Ledger(path)
    ledger.append_step(1, [], {})
    assert read_ledger(path) == [StepEnd(step=1, prompts=0, drawn={})]
    assert ledger.last_step == 1


def test_a_step_in_the_file_is_not_written_again(path: Path):
    write_run(path, 1)
    with pytest.raises(ValueError, match="has step=1 already"):
        write_step(Ledger(path), new_plan(), 1)
    assert read_ledger(path) == run_of(new_plan(), 1)


def test_entries_of_another_step_are_refused(path: Path):
    with pytest.raises(ValueError, match=r"steps=\[2\] as step=1"):
        Ledger(path).append_step(1, entries_of(new_plan(), 2), {})
    assert not path.exists()


def test_nothing_is_written_before_there_is_something_to_write(path: Path):
    assert Ledger(path).rewind(3) == 0
    assert read_ledger(path) == []
    assert not path.exists()


def test_a_ledger_has_steps_once_a_whole_one_is_written(path: Path):
    assert not has_steps(path)
    plan = new_plan()
    Ledger(path).begin(plan.description())
    assert not has_steps(path)
    write_step(Ledger(path), plan, 1)
    assert has_steps(path)


# --- plans ----------------------------------------------------------------------------------------


def test_a_plan_is_noted_once_also_over_a_restart(path: Path):
    plan = new_plan()
    write_run(path, 2, plan)
    resumed = Ledger(path)
    resumed.begin(plan.description())
    write_step(resumed, plan, 3)
    assert read_ledger(path) == run_of(new_plan(), 3)


def test_a_plan_that_changed_is_noted_with_its_first_step(path: Path):
    ledger = write_run(path, 2)
    other = new_plan(seed=4)
    for _ in range(2):
        ledger.begin(other.description())
    assert read_ledger(path)[-2:] == [
        run_of(new_plan(), 2)[-1],
        PlanStart(from_step=3, plan=other.description()),
    ]


def test_a_plan_noted_after_the_checkpoint_is_dropped_with_its_steps(path: Path):
    first, second = new_plan(), new_plan(seed=4)
    ledger = write_run(path, 2, first)
    ledger.begin(second.description())
    write_step(ledger, second, 3)
    ledger.rewind(1)
    ledger.begin(first.description())  # still that of the file
    assert read_ledger(path) == run_of(new_plan(), 1)


def test_a_plan_noted_at_the_checkpoint_stays(path: Path):
    ledger = write_run(path, 2)
    other = new_plan(seed=4).description()
    ledger.begin(other)
    assert Ledger(path).rewind(2) == 0
    Ledger(path).begin(other)
    assert [line for line in read_ledger(path) if isinstance(line, PlanStart)] == [
        PlanStart(from_step=1, plan=new_plan().description()),
        PlanStart(from_step=3, plan=other),
    ]


# --- rewind ---------------------------------------------------------------------------------------


@given(steps=st.integers(0, 5), checkpoint=st.integers(0, 6))
def test_rewind_drops_the_steps_after_the_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, steps: int, checkpoint: int
):
    path = tmp_path_factory.mktemp("run") / "ledger.jsonl"
    ledger = write_run(path, steps)
    assert ledger.rewind(checkpoint) == 4 * max(0, steps - checkpoint)
    assert read_ledger(path) == run_of(new_plan(), min(steps, checkpoint))
    assert ledger.last_step == min(steps, checkpoint)


def test_prompts_that_were_left_when_the_run_was_over_are_under_way_again(path: Path):
    plan = new_plan()
    ledger = write_run(path, 2, plan)
    under_way = plan.take(3)
    last = [*entries_of(plan, 3), *(entry_of(prompt, 3, "unfinished") for prompt in under_way)]
    ledger.append_step(3, last, plan.drawn)
    assert Counter(entry.outcome for entry in prompts_of(read_ledger(path)))["unfinished"] == 3

    resumed = Ledger(path)
    assert resumed.rewind(3) == 3
    lines = read_ledger(path)
    assert prompts_of(lines)[-4:] == last[:4]
    assert lines[-1] == StepEnd(step=3, prompts=4, drawn=plan.drawn)
    assert "unfinished" not in {entry.outcome for entry in prompts_of(lines)}

    given_up = [entry_of(prompt, 4, "stale") for prompt in under_way]
    resumed.append_step(4, [*given_up, *entries_of(plan, 4)], plan.drawn)
    assert not [line for line in read_ledger(path) if "unfinished" in str(line)]


def test_unfinished_prompts_of_a_step_after_the_checkpoint_are_dropped_with_it(path: Path):
    plan = new_plan()
    ledger = write_run(path, 1, plan)
    ledger.append_step(2, [entry_of(plan.take(1)[0], 2, "unfinished")], plan.drawn)
    assert ledger.rewind(1) == 1
    assert read_ledger(path) == run_of(new_plan(), 1)


# --- kills ----------------------------------------------------------------------------------------


@given(
    kills=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 10_000)), max_size=4
    ),
    lost=st.sets(st.integers(0, 3), max_size=2),
)
def test_a_run_killed_at_any_byte_and_resumed_leaves_a_ledger_without_fault(
    tmp_path_factory: pytest.TempPathFactory, kills: list[tuple[int, int, int]], lost: set[int]
):
    path = tmp_path_factory.mktemp("run") / "ledger.jsonl"
    checkpoint, state, durable_bytes = 0, new_plan().state_dict(), 0

    def start() -> tuple[Ledger, MixturePlan]:
        plan = new_plan()
        plan.load_state_dict(state)
        ledger = Ledger(path)
        ledger.rewind(checkpoint)
        ledger.begin(plan.description())
        return ledger, plan

    for saved_steps, lost_steps, cut in kills:
        ledger, plan = start()
        for step in range(checkpoint + 1, checkpoint + saved_steps + 1):
            write_step(ledger, plan, step, lost)
        if saved_steps:
            checkpoint += saved_steps
            state, durable_bytes = json.loads(json.dumps(plan.state_dict())), path.stat().st_size
        for step in range(checkpoint + 1, checkpoint + lost_steps + 1):
            write_step(ledger, plan, step, lost)
        written = path.read_bytes()
        path.write_bytes(written[: durable_bytes + cut % (len(written) - durable_bytes + 1)])

    ledger, plan = start()
    for step in range(checkpoint + 1, checkpoint + 4):
        write_step(ledger, plan, step, lost)
    assert read_ledger(path) == run_of(new_plan(), checkpoint + 3, lost)
    assert audit(read_ledger(path), new_plan()).ok


def test_a_kill_at_each_byte_of_a_step_and_of_a_changed_plan_leaves_whole_steps(path: Path):
    ledger = write_run(path, 1)
    sound_bytes = path.stat().st_size
    changed = new_plan(batch_size=2)
    ledger.begin(changed.description())
    begun_bytes = path.stat().st_size
    write_step(ledger, changed, 2)
    written, lines = path.read_bytes(), read_ledger(path)
    before = run_of(new_plan(), 1)
    for cut in range(sound_bytes, len(written)):
        path.write_bytes(written[:cut])
        assert read_ledger(path) == (before if cut < begun_bytes else lines[: len(before) + 1])
        assert Ledger(path).last_step == 1
        assert path.read_bytes() == written[: sound_bytes if cut < begun_bytes else begun_bytes]


def test_what_a_kill_left_of_a_rewrite_is_no_part_of_the_ledger(path: Path):
    ledger = write_run(path, 3)
    path.with_name("ledger.jsonl.tmp").write_bytes(b'{"step": 1, "so')
    assert Ledger(path).last_step == 3
    assert ledger.rewind(2) == 4
    assert read_ledger(path) == run_of(new_plan(), 2)


@pytest.mark.parametrize("tail", [b'{"step": 2, "posi', b"\0\0\0\n", b'{"step": 2}\n', b"\xff\n"])
def test_a_torn_last_line_is_left_out_and_removed(path: Path, tail: bytes):
    write_run(path, 1)
    sound = path.read_bytes()
    path.write_bytes(sound + tail)
    assert read_ledger(path) == run_of(new_plan(), 1)
    Ledger(path)
    assert path.read_bytes() == sound


def test_a_sound_file_is_not_written_again(path: Path):
    write_run(path, 2)
    before = path.stat()
    Ledger(path).rewind(2)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize(
    "broken",
    [
        b"not json",
        b"[]",
        b'{"step": 1}',
        b'{"step": true, "prompts": 1, "drawn": {}}',
        b'{"step": 1, "prompts": "1", "drawn": {}}',
        b'{"step": 4611686018427387904, "prompts": 1, "drawn": {}}',
        b'{"from_step": 1, "plan": null}',
        b"",
    ],
)
def test_a_broken_line_in_the_middle_is_an_error_with_its_number(path: Path, broken: bytes):
    write_run(path, 1)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], broken + b"\n", *lines[2:]]))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="line 3: not of a ledger"):
        read_ledger(path)
    with pytest.raises(ValueError, match="line 3: not of a ledger"):
        Ledger(path).rewind(0)
    assert path.read_bytes() == before


def test_an_outcome_that_is_none_is_an_error(path: Path):
    write_run(path, 1)
    path.write_bytes(path.read_bytes().replace(b'"trained"', b'"solved"', 1))
    with pytest.raises(ValueError, match=r"line 2: .*'solved' - at .*outcome"):
        read_ledger(path)


def test_a_failed_write_leaves_no_half_step(path: Path, monkeypatch: pytest.MonkeyPatch):
    plan = new_plan()
    ledger = write_run(path, 1, plan)

    def no_space(handle: int) -> None:
        raise OSError(28, "no space left on device")

    entries = entries_of(plan, 2)
    with monkeypatch.context() as patch:
        patch.setattr("config.disk.os.fsync", no_space)
        with pytest.raises(OSError, match="no space"):
            ledger.append_step(2, entries, plan.drawn)
    assert read_ledger(path) == run_of(new_plan(), 1)
    ledger.append_step(2, entries, plan.drawn)
    assert read_ledger(path) == run_of(new_plan(), 2)


def test_a_plan_whose_write_failed_is_noted_at_the_next_try(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    def no_space(handle: int) -> None:
        raise OSError(28, "no space left on device")

    ledger, plan = Ledger(path), MixturePlan(SIZES, RATIOS, 4, 0)
    with monkeypatch.context() as patch:
        patch.setattr("config.disk.os.fsync", no_space)
        with pytest.raises(OSError, match="no space"):
            ledger.begin(plan.description())
    ledger.begin(plan.description())
    assert read_ledger(path) == [PlanStart(from_step=1, plan=plan.description())]


def test_a_step_is_on_disk_before_append_returns(path: Path, monkeypatch: pytest.MonkeyPatch):
    synced: list[int] = []
    monkeypatch.setattr("config.disk.os.fsync", lambda handle: synced.append(handle))
    ledger = Ledger(path)
    ledger.append_step(1, [], {})
    assert len(synced) == 2  # the file, and the folder that it is new in
    ledger.append_step(2, [], {})
    assert len(synced) == 3


def test_a_line_of_the_file_is_json_with_the_fields_of_an_entry(path: Path):
    write_run(path, 1)
    start, first, *_, end = map(json.loads, path.read_text().splitlines())
    assert start.keys() == {"from_step", "plan"}
    assert LedgerEntry(**first) == prompts_of(run_of(new_plan(), 1))[0]
    assert end == {"step": 1, "prompts": 4, "drawn": new_plan().counts(0)}
