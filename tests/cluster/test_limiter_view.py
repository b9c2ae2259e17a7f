"""`verl-mixed limiter` on state files."""

import json
from pathlib import Path

import pytest

from cluster.cli import main
from cluster.exit_codes import GOOD, USAGE
from rate_limit.file_limiter import FileRateLimiter


@pytest.fixture
def limiter(tmp_path: Path) -> FileRateLimiter:
    limiter = FileRateLimiter(tmp_path / "rate_limit.state", per_minute=60_000, burst=2)
    for _ in range(5):
        limiter.acquire(source="nq")
    return limiter


def test_a_run_folder_or_a_state_file_is_shown(limiter, tmp_path, capsys):
    for path in (tmp_path, limiter.path):
        assert main(["limiter", str(path)]) == GOOD
        shown = capsys.readouterr().out
        assert "60000 calls a minute, 2 back to back" in shown
        assert [word for word in shown.split() if word in ("nq", "5")] == ["nq", "5", "5"]


def test_json_has_everything(limiter, tmp_path, capsys):
    assert main(["limiter", "--json", str(tmp_path)]) == GOOD
    shown = json.loads(capsys.readouterr().out)
    assert (shown["granted"], shown["waiting"]) == (5, 0)
    assert shown["sources"]["nq"]["granted"] == 5
    assert len(shown["sources"]["nq"]["waits"]) == len(shown["wait_bounds_s"]) + 1


def test_reset_begins_anew(limiter, tmp_path, capsys):
    limiter.penalise(600)
    assert main(["limiter", "--reset", "--json", str(tmp_path)]) == GOOD
    shown = json.loads(capsys.readouterr().out)
    assert (shown["granted"], shown["penalties"], shown["paused_s"]) == (0, 0, 0)
    limiter.acquire(source="nq")
    assert limiter.snapshot().granted == 1


def test_no_limiter_is_a_usage_error_that_names_the_file(tmp_path, capsys):
    assert main(["limiter", str(tmp_path)]) == USAGE
    assert "rate_limit.state" in capsys.readouterr().err
    (tmp_path / "junk").write_text("junk")
    assert main(["limiter", str(tmp_path / "junk")]) == USAGE
    assert "no record of a limiter" in capsys.readouterr().err
