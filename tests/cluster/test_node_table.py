"""The table of the nodes."""

import json
from pathlib import Path

import pytest

from cluster.node_table import duration, main, rows, used_of

UP = {"session": "ours_alive", "uptime_s": "4000"}


def in_ray(name: str) -> dict[str, object]:
    return {
        "node": name,
        "version": "2.60.0",
        "CPU": [3.0, 8.0],
        "GPU": [0.0, 0.0],
        "object_store_memory": [2.0**30, 2.0**33],
    }


def test_a_node_is_there_when_its_session_lives_and_ray_lists_it() -> None:
    table, complete = rows({"10.0.0.1": UP, "10.0.0.2": UP}, [in_ray("head"), in_ray("node0")])

    assert complete
    assert table[0] == [
        *("10.0.0.1", "head", "head", "alive", "3 / 8", "-", "1 / 8 GiB", "2.60.0", "1 h 06 min")
    ]
    assert table[1][1:3] == ["worker", "node0"]


@pytest.mark.parametrize(
    ("status", "listed", "cells"),
    [
        ({}, False, ["no answer", "-"]),
        ({"session": "none"}, False, ["-", "-"]),
        ({"session": "foreign"}, False, ["not ours", "-"]),
        ({"session": "ours_dead"}, True, ["node0 (ended)", "alive"]),
        (UP, False, ["node0", "-"]),
    ],
)
def test_a_node_that_is_not_there_makes_it_incomplete(
    status: dict[str, str], listed: bool, cells: list[str]
) -> None:
    records = [in_ray("head"), *([in_ray("node0")] if listed else [])]
    table, complete = rows({"h": UP, "w": status}, records)

    assert not complete
    assert table[1][2:4] == cells


def test_durations_and_shares_are_short() -> None:
    assert [duration(s) for s in (5, 200, 26000, 200000)] == [
        *("5 s", "3 min", "7 h 13 min", "2 d 07 h")
    ]
    assert used_of([0.5, 16.0]) == "0.5 / 16"
    assert used_of([-1e-9, 16.0]) == "0 / 16"
    assert used_of(None) == "-"


def test_the_command_prints_table_and_jobs_and_says_by_its_exit_whether_all_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = {"job": "01", "entrypoint": "python train.py", "host": "10.0.0.1", "pid": 7}
    (tmp_path / "0.status").write_text("session=ours_alive\nuptime_s=70\nrun=none\n")
    (tmp_path / "ray.jsonl").write_text(f"motd\n{json.dumps(in_ray('head'))}\n{json.dumps(job)}\n")

    assert main([str(tmp_path), "10.0.0.1"]) == 0
    printed = capsys.readouterr().out
    assert "alive" in printed
    assert "job 01 runs: python train.py (10.0.0.1, process 7)" in printed
    (tmp_path / "ray.jsonl").write_text("")
    assert main([str(tmp_path), "10.0.0.1"]) == 1
