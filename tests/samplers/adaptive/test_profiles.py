"""Profiles: the file beside the rows, the rows that are chosen, and a run's own copy."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.schema import SourceConfig
from samplers.adaptive.profiles import (
    RowProfile,
    choices_for,
    choose_rows,
    profile_path,
    read_profile,
    row_ids_of,
    write_profile,
)
from samplers.ledger import Ledger
from tests.verl_mixed.conftest import write_source

CURRICULUM = {"start": 0.8, "end": 0.2, "width": 0.1, "steps": 5}


def profile(row_id: str, passed: int, trials: int = 4, by: str = "a test") -> RowProfile:
    return RowProfile(row_id=row_id, trials=trials, passed=passed, low=0.0, high=1.0, by=by)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_source(tmp_path / "math.parquet", "math", 6)


def source(**settings: object) -> SourceConfig:
    return SourceConfig.model_validate({"ratio": 1, **settings})


def test_a_new_profile_replaces_that_of_its_row_only(rows: Path):
    assert read_profile(rows) == {}
    write_profile(rows, [profile("a", 1), profile("b", 2)])
    write_profile(rows, [profile("b", 3, by="later")])
    assert profile_path(rows) == rows.with_name("math.profile.jsonl")
    found = read_profile(rows)
    assert {name: (own.passed, own.by) for name, own in found.items()} == {
        "a": (1, "a test"),
        "b": (3, "later"),
    }


@pytest.mark.parametrize(
    "line",
    ["{}", "no json", '{"row_id": "a", "trials": 0, "passed": 0, "low": 0, "high": 1, "by": ""}'],
)
def test_a_damaged_profile_is_named_with_its_line(rows: Path, line: str):
    write_profile(rows, [profile("a", 1)])
    with profile_path(rows).open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(ValueError, match=r"math\.profile\.jsonl line 2: not the profile of a row"):
        read_profile(rows)


@given(
    passed=st.lists(st.none() | st.integers(0, 4), min_size=1, max_size=30),
    bounds=st.tuples(st.integers(0, 4), st.integers(0, 4)).map(sorted),
)
def test_rows_in_the_range_are_chosen(passed: list[int | None], bounds: list[int]):
    low, high = (bound / 4 for bound in bounds)
    ids = [str(number) for number in range(len(passed))]
    known = {i: profile(i, own) for i, own in zip(ids, passed, strict=True) if own is not None}
    wanted = [n for n, own in enumerate(passed) if own is not None and low <= own / 4 <= high]
    own = source(difficulty={"min": low, "max": high})
    if not wanted:
        with pytest.raises(ValueError, match=f"{len(known)} of its {len(ids)} rows have a profile"):
            choose_rows("math", own, ids, known)
        return
    chosen = choose_rows("math", own, ids, known)
    assert chosen.rows.tolist() == wanted
    assert np.array_equal(chosen.rates, [known[ids[n]].rate for n in wanted])
    assert chosen.digest == choose_rows("math", own, ids, known).digest


def test_the_digest_tells_other_rates_and_other_settings_apart():
    ids = ["a", "b"]
    known = {"a": profile("a", 1), "b": profile("b", 2)}
    settings = (
        ({"curriculum": CURRICULUM}, known),
        ({"curriculum": {**CURRICULUM, "steps": 6}}, known),
        ({"difficulty": {"min": 0, "max": 1}}, known),
        ({"difficulty": {"min": 0, "max": 1}}, known | {"a": profile("a", 3)}),
    )
    digests = [choose_rows("math", source(**own), ids, rated).digest for own, rated in settings]
    assert len(set(digests)) == len(settings)


def test_a_run_keeps_the_profiles_that_it_began_with(rows: Path, tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    own = {"math": source(difficulty={"min": 0.2, "max": 0.8}), "nq": source()}
    ids = row_ids_of([str(rows)])["math"]
    write_profile(rows, [profile(ids[0], 0), profile(ids[1], 2), profile("of another file", 2)])
    choices_for(own, [str(rows)], run, keeps=True)  # of a start that died before its first step
    write_profile(rows, [profile(ids[0], 0)])
    first = choices_for(own, [str(rows)], run, keeps=True)
    assert {name: choice.rows.tolist() for name, choice in first.items()} == {"math": [1]}
    ledger = Ledger(run / "ledger.jsonl")
    ledger.begin({})
    ledger.append_step(1, [], {})
    write_profile(rows, [profile(ids[0], 2)])
    assert choices_for(own, [str(rows)], run, keeps=True)["math"].digest == first["math"].digest
    again = choices_for(own, [str(rows)], run)
    assert again["math"].digest == first["math"].digest
    anew = choices_for(own, [str(rows)], run, afresh=True, keeps=True)
    assert anew["math"].rows.tolist() == [0, 1]
    assert "of another file" not in (run / "profile.jsonl").read_text()
