"""The viewer's index has what the files have, however the files change."""

import json
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.records.mask_audit import audit_masks
from agent_loop.turns.trajectory import StopReason
from agent_loop.turns.turn_loop import Call
from samplers.uid import session_of
from tests.fakes.real_tokenizers import real_tokenizer
from tests.json_lines import read_lines
from tests.verl_mixed.views.viewer.episodes import (
    COMPACTED,
    SPOKEN,
    as_bytes,
    line,
    session,
    write_run,
)
from verl_mixed.views.viewer.filters import Filter, parse_steps
from verl_mixed.views.viewer.index import Index
from verl_mixed.views.viewer.views import trajectory_view

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
    index=st.integers(0, 1),
    source=st.sampled_from(("math", "nq")),
    reward=st.sampled_from((0.0, 0.5, 1.0)),
    stop_reason=st.sampled_from(StopReason),
)


def open_index(run_dir: Path) -> Any:
    """A refreshed index, closed at the end."""
    index = Index(run_dir)
    index.refresh()
    return closing(index)


def seen(index: Index) -> list[tuple[str, str]]:
    return [(row["id"], row["key"]) for row in index.rows(Filter(), limit=1000)]


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
                sessions = [session_of(key) for _, key in expected]
                expected.sort(key=lambda each: sessions.index(session_of(each[1])))
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
        lost = each["fault"] is not None
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
        assert sorted(row["key"] for row in rows if row["fits"]) == sorted(
            each["key"] for each in lines if fits(each)
        )
        sessions = {session_of(each["key"]) for each in lines if fits(each)}
        assert sorted(row["key"] for row in rows) == sorted(
            each["key"] for each in lines if session_of(each["key"]) in sessions
        )
        assert index.count(chosen) == len(sessions)
        assert not outcome or all(outcome in row["outcomes"] for row in rows if row["fits"])


def test_pages_of_the_list_are_the_list(tmp_path: Path):
    lines = [line(step=step, member=member) for step in (2, 10) for member in range(5)]
    with open_index(write_run(tmp_path / "run", lines)) as index:
        whole = index.rows(Filter())
        paged = [row for at in range(0, 10, 3) for row in index.rows(Filter(), offset=at, limit=3)]
    assert paged == whole
    assert [row["step"] for row in whole] == [2] * 5 + [10] * 5


def test_a_session_of_several_rows_is_one_trajectory_in_all_counts(tmp_path: Path):
    lines = [*session(COMPACTED), line(member=1), *session(COMPACTED, member=2), line(member=10)]
    with open_index(write_run(tmp_path / "run", lines)) as index:
        pages = [index.rows(Filter(), offset=at, limit=2) for at in (0, 2)]
        found = index.rows(Filter(text="6"))
        counts = index.count(Filter()), index.counts("source"), index.counts("stop_reason")
    in_order = [(f"_0_{index}", depth) for index, depth in ((0, 0), (1, 1), (3, 2), (2, 3))]
    assert [(row["key"][-4:], row["depth"]) for row in pages[0]] == [*in_order, ("_1_0", 0)]
    assert [len(page) for page in pages] == [5, 5]
    assert {row["group_size"] for page in pages for row in page} == {4}
    assert counts == (4, {"math": 4}, {"answered": 4})
    assert [(row["key"][-3:], row["fits"]) for row in found[:4]] == [
        *(("0_0", False), ("0_1", False), ("0_3", True), ("0_2", False))
    ]


@pytest.mark.parametrize(
    ("settings", "trained"),
    [
        ({}, "model"),
        ({"state_masking": False}, "whole"),
        ({"stop_reason": StopReason.INFRA_ERROR}, None),
        ({"stop_reason": StopReason.MAX_TURNS, "on_truncated": "mask"}, None),
    ],
)
def test_trained_tokens_of_a_row_are_those_of_its_mask(
    tmp_path: Path, settings: dict[str, Any], trained: str | None
):
    with open_index(write_run(tmp_path / "run", [line(**settings)])) as index:
        [row] = index.rows(Filter())
        counts = trajectory_view("1.1", index.record("1.1"), decode)["counts"]
    of = {"model": counts["model"], "whole": counts["response"], None: 0}
    assert (row["length"], row["trained"]) == (counts["response"], of[trained])
    assert row["trained"] == counts["to_train"]


@pytest.mark.parametrize(
    ("change", "problems"),
    [
        (lambda rows: rows, []),
        (lambda rows: rows[1:], ["3 rows are there, of 4"]),
        (
            lambda rows: [*rows[:3], rows[3] | {"turns": rows[2]["turns"]}],
            [
                f"the engine's answer to request {n}"
                for n in ("4 is in no", "5 is in 2", "6 is in no")
            ],
        ),
        (lambda rows: [{k: r[k] for k in r if k not in ("rows", "requests")} for r in rows], []),
    ],
)
def test_a_session_has_the_problems_that_the_audit_of_masks_finds(
    tmp_path: Path, change: Any, problems: list[str]
):
    run_dir = write_run(tmp_path / "run", [*change(session(COMPACTED)), line(member=1)])
    with open_index(run_dir) as index:
        _, found = index.session(session_of(index.record("1.1").key))
    audited = [p for p in audit_masks(run_dir).problems if "session=" in p]
    assert [each.split(": ", 1)[1] for each in audited] == found
    assert len(found) == len(problems)
    assert all(each.startswith(start) for each, start in zip(found, problems, strict=True))


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
            text: {int(row["id"].split(".")[1]) for row in index.rows(Filter(text=text))}
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
        assert [row["id"] for row in index.rows(Filter())] == ["1.1", "2.1", "2.2"]
        (run_dir / "trajectories" / "1.jsonl").unlink()
        index.refresh()
        assert [row["id"] for row in index.rows(Filter())] == ["2.1", "2.2"]
        assert index.count(Filter(text="code")) == 2


def test_lines_that_are_no_trajectory_are_counted_and_named(tmp_path: Path):
    run_dir = write_run(tmp_path / "run", [])
    (run_dir / "trajectories").mkdir()
    bad = [b"{", b"[]", b'{"step": 1}', b"\xff", b"[" * 100_000, b'{"step": "one"}']
    whole = as_bytes([line()])
    (run_dir / "trajectories" / "1.jsonl").write_bytes(b"\n".join([*bad, b"", whole]))
    with open_index(run_dir) as index:
        number, why = index.unreadable()
        assert [row["id"] for row in index.rows(Filter())] == ["1.8"]
    assert number == len(bad)
    assert [each.split(":")[0] for each in why] == [f"1.jsonl line {n}" for n in range(1, 7)]


def test_nan_half_characters_and_huge_numbers_are_kept(tmp_path: Path):
    run_dir = write_run(tmp_path / "run", [])
    (run_dir / "trajectories").mkdir()
    odd = line([("model", "x")], reward=float("nan"), answer="\ud83d")
    odd["segments"][0][3] = "half \ud83d"
    odd["turns"][0]["request"] = 2**63
    (run_dir / "trajectories" / "1.jsonl").write_text(json.dumps(odd) + "\n")
    with open_index(run_dir) as index:
        [row] = index.rows(Filter(text="half"))
        assert row["reward"] is row["request"] is None
        assert index.record("1.1").answer == "\ud83d"


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_none_is_neither_solved_nor_within_bounds(tmp_path: Path, odd: float):
    run_dir = write_run(tmp_path / "run", [])
    (run_dir / "trajectories").mkdir()
    lines = [line(reward=1.0), line(member=1, reward=odd, acc=odd)]
    (run_dir / "trajectories" / "1.jsonl").write_bytes(as_bytes(lines))
    with open_index(run_dir) as index:
        for chosen, found in (
            (Filter(outcome="solved"), ["1.1"]),
            (Filter(outcome="unsolved"), ["1.2"]),
            (Filter(reward_min=0.0), ["1.1"]),
            (Filter(reward_max=9.0), ["1.1"]),
        ):
            assert [row["id"] for row in index.rows(chosen)] == found
        assert [row["outcomes"][0] for row in index.rows(Filter())] == ["solved", "unsolved"]


ODD = st.sampled_from(
    [
        *(0, -1, 2**31, 2**63, 2**64, 10**30, -(10**30), 10**400, 0.5, 1e300, float("nan")),
        *(float("inf"), "", "text", "\ud83d", "\0", None, True, [], [1], [[]], {}, {"a": 1}),
    ]
)


@given(data=st.data())
def test_no_line_takes_the_others_away(data: st.DataObject):
    calls = [Call(turn=1, action="code", arguments="1")]
    odd = line(calls=calls, advantage=0.0, parent=0, rows=1, requests=1)
    place: Any = odd
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        inside = isinstance(place[key], dict | list) and len(place[key]) > 0
        if not inside or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(ODD)
    with TemporaryDirectory() as name:
        folder = Path(name) / "trajectories"
        folder.mkdir()
        (folder / "1.jsonl").write_bytes(as_bytes([odd, line(member=1)]))
        with open_index(Path(name)) as index:
            read = {row["id"] for row in index.rows(Filter())}
            assert read == ({"1.2"} if index.unreadable()[0] else {"1.1", "1.2"})
            for identity in read:
                with suppress(ValueError):
                    record = index.record(identity)
                    session = index.session(record.session)
                    view = trajectory_view(identity, record, decode, *session)
                    json.dumps(view, allow_nan=False)


def decode(ids: Any) -> str:
    return real_tokenizer("pieces").backend_tokenizer.decode(list(ids), skip_special_tokens=False)


@pytest.mark.parametrize("kind", ["folder", "dangling link", "loop"])
def test_a_file_that_cannot_be_read_is_named_and_tried_again(tmp_path: Path, kind: str):
    run_dir = write_run(tmp_path / "run", [line()])
    odd = run_dir / "trajectories" / "99.jsonl"
    if kind == "folder":
        odd.mkdir()
    else:
        odd.symlink_to(tmp_path / "gone" if kind == "dangling link" else odd)
    with open_index(run_dir) as index:
        for _ in range(2):
            assert [row["id"] for row in index.rows(Filter())] == ["1.1"]
            number, [why] = index.unreadable()
            assert number == 1 and why.startswith("99.jsonl: ")
            index.refresh()
        if kind == "dangling link":
            (tmp_path / "gone").write_bytes(as_bytes([line(step=99)]))
        elif kind == "folder":
            odd.rmdir()
        else:
            odd.unlink()
        index.refresh()
        ids = ["1.1", "99.1"] if kind == "dangling link" else ["1.1"]
        assert [row["id"] for row in index.rows(Filter())] == ids
        assert index.unreadable() == (0, [])


def test_a_file_that_vanishes_while_the_folder_is_read_is_none(tmp_path: Path):
    run_dir = write_run(tmp_path / "run", [line(step=1), line(step=2)])

    def resume(said: str) -> None:
        (run_dir / "trajectories" / "2.jsonl").unlink(missing_ok=True)

    with closing(Index(run_dir, resume)) as index:
        index.refresh()
        assert [row["id"] for row in index.rows(Filter())] == ["1.1"]
        assert index.unreadable() == (0, [])


def test_unknown_names_are_refused(tmp_path: Path):
    with open_index(write_run(tmp_path / "run", [line()])) as index:
        for identity in ("1.2", "2.1", "1", "", "../1.1", "1.-1", "x.y", "1." + "9" * 30):
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
    assert (row["calls"], row["errors"]) == (3, 2)


def test_steps_are_one_or_a_range():
    assert [parse_steps(text) for text in ("", "3", "3-7", " 3 - 7 ")] == [
        *(None, (3, 3), (3, 7), (3, 7))
    ]
    for text in ("x", "-3", "3-", "3-x", "1.5", "7-3", "9" * 30, "9" * 5000, "\u0663"):
        with pytest.raises(ValueError, match="want one step, 3, or a range, 3-7"):
            parse_steps(text)
