"""The ledger survives kills, and the audit finds every way in which it can differ from the plan."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samplers.ledger import AuditReport, Ledger, LedgerEntry, audit, read_ledger
from samplers.mixture_plan import MixturePlan

PLAN = MixturePlan({"taco": 7, "nq": 5, "math": 3}, {"taco": 5, "nq": 3, "math": 2}, 4, seed=3)


def entry_at(position: int, step: int, outcome: str = "solved 2/4") -> LedgerEntry:
    source, row = PLAN.prompt(position)
    return LedgerEntry(
        step=step,
        position=position,
        source=source,
        row=row,
        row_id=f"{source}:{row}",
        outcome=outcome,
    )


def entries_of(step: int) -> list[LedgerEntry]:
    return [entry_at(position, step) for position in range(4 * step - 4, 4 * step)]


def run_of(steps: int) -> list[LedgerEntry]:
    return [entry for step in range(1, steps + 1) for entry in entries_of(step)]


def problems_of(entries: list[LedgerEntry]) -> str:
    report = audit(entries, PLAN)
    assert not report.ok
    return "\n".join(report.problems)


def test_what_is_appended_is_read_back(tmp_path: Path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append_step(1, entries_of(1))
    ledger.append_step(2, entries_of(2))
    assert read_ledger(tmp_path / "ledger.jsonl") == run_of(2)
    assert ledger.last_step == 2


def test_a_step_in_the_file_is_not_written_again(tmp_path: Path):
    Ledger(tmp_path / "ledger.jsonl").append_step(1, entries_of(1))
    with pytest.raises(ValueError, match="has step=1 already"):
        Ledger(tmp_path / "ledger.jsonl").append_step(1, entries_of(1))


def test_entries_of_another_step_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"steps=\[2\] as step=1"):
        Ledger(tmp_path / "ledger.jsonl").append_step(1, entries_of(2))
    assert not (tmp_path / "ledger.jsonl").exists()


def test_rewind_drops_the_steps_after_the_checkpoint(tmp_path: Path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for step in (1, 2, 3):
        ledger.append_step(step, entries_of(step))
    assert ledger.rewind(1) == 8
    assert read_ledger(ledger.path) == run_of(1)
    ledger.append_step(2, entries_of(2))
    assert audit(read_ledger(ledger.path), PLAN).ok


def test_rewind_without_a_file_is_nothing(tmp_path: Path):
    assert Ledger(tmp_path / "ledger.jsonl").rewind(3) == 0
    assert not (tmp_path / "ledger.jsonl").exists()


@settings(max_examples=40)
@given(cut=st.integers(0, 10_000), checkpoint=st.integers(0, 3))
def test_a_run_killed_at_any_byte_and_resumed_leaves_a_ledger_without_fault(
    tmp_path_factory: pytest.TempPathFactory, cut: int, checkpoint: int
):
    path = tmp_path_factory.mktemp("run") / "ledger.jsonl"
    ledger = Ledger(path)
    for step in range(1, checkpoint + 1):
        ledger.append_step(step, entries_of(step))
    durable_bytes = path.stat().st_size if checkpoint else 0
    ledger.append_step(checkpoint + 1, entries_of(checkpoint + 1))
    whole = path.read_bytes()
    path.write_bytes(whole[: max(durable_bytes, cut % (len(whole) + 1))])

    resumed = Ledger(path)
    resumed.rewind(checkpoint)
    for step in range(checkpoint + 1, 6):
        resumed.append_step(step, entries_of(step))

    assert read_ledger(path) == run_of(5)
    assert audit(read_ledger(path), PLAN).ok


@pytest.mark.parametrize("tail", [b'{"step": 2, "posi', b"\0\0\0\n", b'{"step": 2}\n'])
def test_a_torn_last_line_is_left_out_and_removed(tmp_path: Path, tail: bytes):
    path = tmp_path / "ledger.jsonl"
    Ledger(path).append_step(1, entries_of(1))
    sound = path.read_bytes()
    path.write_bytes(sound + tail)
    assert read_ledger(path) == entries_of(1)
    Ledger(path)
    assert path.read_bytes() == sound


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    Ledger(path).append_step(1, entries_of(1))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"not json\n" + lines[1])
    with pytest.raises(ValueError, match="line 2: not a ledger entry"):
        read_ledger(path)


def test_a_failed_write_leaves_no_half_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append_step(1, entries_of(1))

    def no_space(handle: int) -> None:
        raise OSError(28, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("samplers.ledger.os.fsync", no_space)
        with pytest.raises(OSError, match="no space"):
            ledger.append_step(2, entries_of(2))
    assert read_ledger(ledger.path) == run_of(1)
    ledger.append_step(2, entries_of(2))
    assert read_ledger(ledger.path) == run_of(2)


def test_a_ledger_that_follows_the_plan_has_no_problems():
    assert audit(run_of(5), PLAN) == AuditReport(
        steps=5, trained={"math": 4, "nq": 6, "taco": 10}, problems=()
    )


def test_an_empty_ledger_has_no_problems():
    assert audit([], PLAN).ok


def test_a_missing_step_is_found():
    problems = problems_of(entries_of(1) + entries_of(3))
    assert "step 3 follows step 1" in problems
    assert "were skipped between" in problems


def test_a_late_start_is_found():
    assert "the first step is 2, not 1" in problems_of(entries_of(2))


def test_steps_out_of_order_are_found():
    assert "out of order" in problems_of(entries_of(2) + entries_of(1))


@given(st.integers(0, 19), st.data())
def test_any_single_wrong_entry_is_found(index: int, data: st.DataObject):
    entries = run_of(5)
    wrong = data.draw(
        st.sampled_from(
            [
                replace(entries[index], row=entries[index].row + 1),
                replace(entries[index], position=entries[(index + 1) % 20].position),
                replace(entries[index], position=entries[index].position + 400),
                replace(entries[index], position=-1),
                replace(entries[index], source="elsewhere"),
                replace(entries[index], outcome="filtered"),
                replace(entries[index], step=entries[index].step + 1),
            ]
        )
    )
    assert not audit([*entries[:index], wrong, *entries[index + 1 :]], PLAN).ok


def test_a_batch_off_its_quota_names_step_source_and_counts():
    problems = problems_of(run_of(2)[:-1])
    source = PLAN.prompt(7)[0]
    due = PLAN.counts(1)[source]
    assert f"step 2 trained {due - 1} prompts of source='{source}', the plan has {due}" in problems


def test_a_prompt_trained_twice_is_found():
    twice = replace(run_of(1)[0], step=2)
    assert "position=0 is in step 1 and in step 2" in problems_of([*run_of(2), twice])
    assert "position=0 is 2 times in step 1" in problems_of([*run_of(1), run_of(1)[0]])


def test_a_row_other_than_the_plans_is_found():
    entries = run_of(1)
    entries[2] = replace(entries[2], row=entries[2].row + 1)
    assert f"row={entries[2].row} at position=2, the plan has" in problems_of(entries)


def test_a_failed_prompt_replaced_by_the_next_of_its_source_is_no_problem():
    failed = entry_at(1, step=1, outcome="failed")
    own = [p for p in range(4, 40) if PLAN.prompt(p)[0] == failed.source]
    others = [p for p in range(4, 8) if PLAN.prompt(p)[0] != failed.source]
    replaced = [entry_at(position, step=1) for position in (0, 2, 3, own[0])]
    # Step 2 takes what step 1 left of the other sources, and this source's draws one further on.
    second = [entry_at(position, step=2) for position in (*others, *own[1 : 5 - len(others)])]
    report = audit([*replaced, failed, *second], PLAN)
    assert report.problems == ()


def test_a_skipped_prompt_is_found_even_when_the_counts_are_right():
    entries = run_of(1)
    source = entries[0].source
    further = next(p for p in range(4, 40) if PLAN.prompt(p)[0] == source)
    entries[0] = entry_at(further, step=1)
    problems = problems_of(entries)
    assert f"of source='{source}' were skipped between" in problems
    assert "trained" not in problems


def test_a_long_list_of_one_kind_is_cut_with_its_number():
    entries = [replace(entry, row=-1) for entry in run_of(5)]
    assert len(audit(entries, PLAN).problems) == 6
    assert "15 more like" in audit(entries, PLAN).problems[-1]
