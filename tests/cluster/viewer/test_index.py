"""The viewer's index says what the files hold, however they come."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.run_folder import read_lines
from agent_loop.trajectory import StopReason
from agent_loop.turn_loop import Call
from cluster.viewer.index import Filter, Index, parse_steps
from tests.cluster.viewer.episodes import SPOKEN, as_bytes, line, write_run

STEPS = st.integers(1, 3)
LINES = st.builds(
    line,
    st.lists(
        st.tuples(
            st.sampled_from(("model", "tool")),
            st.text(st.sampled_from("ab é\u2028\n😀<"), min_size=1, max_size=6),
        ),
        min_size=1,
        max_size=3,
    ),
    step=STEPS,
    draw=st.integers(0, 2),
    member=st.integers(0, 2),
    source=st.sampled_from(("math", "nq")),
    reward=st.sampled_from((0.0, 0.5, 1.0)),
    stop_reason=st.sampled_from(StopReason),
)


def open_index(run_dir: Path) -> Any:
    """A refreshed index that closes itself."""
    index = Index(run_dir)
    index.refresh()
    return closing(index)


def seen(index: Index) -> list[tuple[str, str]]:
    return [(row.id, row.values["key"]) for row in index.rows(Filter(), limit=1000)]


@given(
    lines=st.lists(LINES, min_size=1, max_size=6),
    cuts=st.lists(st.floats(0, 1), max_size=4),
)
def test_index_of_files_cut_anywhere_is_that_of_reading_them_whole(
    lines: list[dict[str, Any]], cuts: list[float]
):
    files = {step: as_bytes([e for e in lines if e["step"] == step]) for step in (1, 2, 3)}
    with TemporaryDirectory() as name:
        folder = Path(name) / "trajectories"
        folder.mkdir()
        with closing(Index(Path(name))) as index:
            for part in [*sorted(cuts), 1.0]:
                for step, whole in files.items():
                    (folder / f"{step}.jsonl").write_bytes(whole[: int(part * len(whole))])
                index.refresh()
                expected = [
                    (f"{step}.{number}", each["key"])
                    for step in files
                    for number, each in enumerate(read_lines(folder / f"{step}.jsonl"), 1)
                ]
                assert seen(index) == expected
                for identity, key in expected:
                    assert index.record(identity).key == key
                assert index.unreadable() == (0, [])


@given(
    lines=st.lists(LINES, max_size=8),
    source=st.sampled_from(("", "math", "nq")),
    steps=st.none() | st.tuples(STEPS, STEPS),
    outcome=st.sampled_from(("", "solved", "unsolved", "lost", "answered")),
    low=st.none() | st.sampled_from((0.0, 0.5, 1.0)),
    high=st.none() | st.sampled_from((0.0, 0.5, 1.0)),
)
def test_filter_takes_what_fits_all_of_it(
    lines: list[dict[str, Any]],
    source: str,
    steps: tuple[int, int] | None,
    outcome: str,
    low: float | None,
    high: float | None,
):
    def fits(each: dict[str, Any]) -> bool:
        lost = each["stop_reason"] == "infra_error"
        is_one = {
            "": True,
            "solved": each["acc"] >= 1 and not lost,
            "unsolved": each["acc"] < 1 and not lost,
            "lost": lost,
            "answered": each["stop_reason"] == "answered",
        }
        return (
            source in ("", each["source"])
            and (steps is None or steps[0] <= each["step"] <= steps[1])
            and is_one[outcome]
            and (low is None or each["reward"] >= low)
            and (high is None or each["reward"] <= high)
        )

    chosen = Filter(source=source, steps=steps, outcome=outcome, reward_min=low, reward_max=high)
    with (
        TemporaryDirectory() as name,
        open_index(write_run(Path(name), lines, tokenizer=False)) as index,
    ):
        rows = index.rows(chosen)
        assert sorted(row.values["key"] for row in rows) == sorted(
            each["key"] for each in lines if fits(each)
        )
        assert index.count(chosen) == len(rows)
        assert not outcome or all(outcome in row.values["outcomes"] for row in rows)


def test_pages_of_the_list_are_the_list(tmp_path: Path):
    lines = [line(step=step, member=member) for step in (2, 10) for member in range(5)]
    with open_index(write_run(tmp_path / "run", lines)) as index:
        whole = index.rows(Filter())
        paged = [row for at in range(0, 10, 3) for row in index.rows(Filter(), offset=at, limit=3)]
    assert paged == whole
    assert [row.values["step"] for row in whole] == [2] * 5 + [10] * 5


SEARCHES = {
    "capital france": {1},
    "FRANCE": {1},
    "fran": {1},
    "1+1": {2},
    "<code>1+1</code>": {2},
    "code": {2},
    '"': {3},
    "%": {3},
    "NOT france": set(),
    "paris OR code": set(),
    'par"is*': set(),
    "text:france": set(),
    "^": set(),
    "france nothing": set(),
}


@pytest.mark.parametrize("with_words", [True, False], ids=["fts5", "like"])
def test_every_word_of_a_search_is_text_and_no_operator(tmp_path: Path, with_words: bool):
    run_dir = write_run(
        tmp_path / "run",
        [
            line([("model", "the capital of France is Paris")], member=1),
            line(SPOKEN, member=2),
            line([("model", 'said "yes" at 100 %')], member=3),
        ],
    )
    with open_index(run_dir) as index:
        path = index.path
    if not with_words:  # as made by an sqlite without it
        with closing(sqlite3.connect(path)) as database, database:
            for statement in ("DROP TABLE texts", "CREATE TABLE texts (text TEXT)"):
                database.execute(statement)
            database.execute("UPDATE files SET size = 0")
    with open_index(run_dir) as index:
        found = {
            text: {int(row.id.split(".")[1]) for row in index.rows(Filter(text=text))}
            for text in SEARCHES
        }
    assert found == SEARCHES


def test_files_that_did_not_change_are_not_read_again(tmp_path: Path):
    run_dir = write_run(tmp_path / "run", [line(step=1), line(step=2)])
    with open_index(run_dir):
        pass
    with closing(Index(run_dir)) as index:
        assert index.refresh() == 0
        write_run(run_dir, [line(step=2), line(step=2, member=1)])
        assert index.refresh() == 1
        assert [row.id for row in index.rows(Filter())] == ["1.1", "2.1", "2.2"]
        (run_dir / "trajectories" / "1.jsonl").unlink()
        index.refresh()
        assert [row.id for row in index.rows(Filter())] == ["2.1", "2.2"]
        assert index.count(Filter(text="code")) == 2


def test_lines_that_are_no_trajectory_are_counted_and_named(tmp_path: Path):
    run_dir = write_run(tmp_path / "run", [])
    (run_dir / "trajectories").mkdir()
    bad = [b"{", b"[]", b'{"step": 1}', b"\xff", b"[" * 100_000, b'{"step": "one"}']
    whole = as_bytes([line()])
    (run_dir / "trajectories" / "1.jsonl").write_bytes(b"\n".join([*bad, b"", whole]))
    with open_index(run_dir) as index:
        number, why = index.unreadable()
        assert [row.id for row in index.rows(Filter())] == ["1.8"]
    assert number == len(bad)
    assert [each.split(":")[0] for each in why] == [f"1.jsonl line {n}" for n in range(1, 7)]


def test_nan_and_half_characters_are_kept(tmp_path: Path):
    run_dir = write_run(tmp_path / "run", [])
    (run_dir / "trajectories").mkdir()
    odd = line([("model", "x")], reward=float("nan"), answer="\ud83d")
    odd["segments"][0][3] = "half \ud83d"
    (run_dir / "trajectories" / "1.jsonl").write_text(json.dumps(odd) + "\n")
    with open_index(run_dir) as index:
        [row] = index.rows(Filter(text="half"))
        assert row.values["reward"] == "nan"
        assert index.record("1.1").answer == "\ud83d"


def test_unknown_names_are_refused(tmp_path: Path):
    with open_index(write_run(tmp_path / "run", [line()])) as index:
        for identity in ("1.2", "2.1", "1", "", "../1.1", "1.-1", "x.y"):
            with pytest.raises(KeyError):
                index.record(identity)


@pytest.mark.parametrize("harm", ["damaged", "of another version", "cut"])
def test_database_that_is_no_use_is_made_anew(tmp_path: Path, harm: str):
    run_dir = write_run(tmp_path / "run", [line(), line(member=1)])
    with open_index(run_dir) as index:
        path, expected = index.path, seen(index)
    if harm == "damaged":
        path.write_bytes(b"no database at all " * 1000)
    elif harm == "cut":
        path.write_bytes(path.read_bytes()[:5000])
    else:
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("PRAGMA user_version = 99")
            database.execute("ALTER TABLE trajectories DROP COLUMN errors")
    with open_index(run_dir) as index:
        assert seen(index) == expected


def test_index_lies_in_the_cache_where_the_run_takes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run_dir = write_run(tmp_path / "run", [line()])
    (run_dir / "viewer.sqlite").mkdir()  # root may write everywhere, but not here
    with open_index(run_dir) as index:
        assert index.path.is_relative_to(tmp_path / "cache")
        assert len(seen(index)) == 1


def test_calls_that_failed_are_counted(tmp_path: Path):
    calls = [
        Call(turn=1, action="code", arguments="1", status=status)
        for status in ("ok", "rejected", "unavailable")
    ]
    with open_index(write_run(tmp_path / "run", [line(calls=calls), line(member=1)])) as index:
        [row] = index.rows(Filter(outcome="tool error"))
    assert (row.values["calls"], row.values["errors"]) == (3, 2)


def test_steps_are_one_or_a_range():
    assert [parse_steps(text) for text in ("", "3", "3-7", " 3 - 7 ")] == [
        *(None, (3, 3), (3, 7), (3, 7))
    ]
    for text in ("x", "-3", "3-", "3-x", "1.5"):
        with pytest.raises(ValueError, match="want one step, 3, or a range, 3-7"):
            parse_steps(text)
