"""`verl-mixed limiter` on state files."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
from omegaconf import OmegaConf

from rate_limit import ray_limiter
from rate_limit.file_limiter import FileRateLimiter
from verl_mixed.cli import main
from verl_mixed.exit_codes import GOOD, USAGE
from verl_mixed.run.compose import save_config
from verl_mixed.run.settings import TOOL_CONFIG


@pytest.fixture
def limiter(tmp_path: Path) -> FileRateLimiter:
    limiter = FileRateLimiter(tmp_path / "rate_limit.state", per_minute=60_000, burst=2)
    for _ in range(5):
        limiter.acquire(source="nq")
    limiter.snapshot()  # others see the calls of the last 10 ms too
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


def test_limits_that_tools_have_of_their_own_are_shown_and_reset(limiter, tmp_path, capsys):
    for name, calls in (("search-1", 2), ("look_up-2", 0)):
        own = FileRateLimiter(tmp_path / "rate_limit.tools" / f"{name}.state", 6000, 1)
        for _ in range(calls):
            own.acquire(source="math")
        own.snapshot()
    assert main(["limiter", str(tmp_path)]) == GOOD
    shown = capsys.readouterr().out
    titles = [line.strip() for line in shown.splitlines() if "calls a minute" in line]
    assert titles == [
        "60000 calls a minute, 2 back to back",
        "look_up-2: 6000 calls a minute, 1 back to back",
        "search-1: 6000 calls a minute, 1 back to back",
    ]
    assert main(["limiter", "--json", str(tmp_path)]) == GOOD
    shown = json.loads(capsys.readouterr().out)
    assert {name: own["granted"] for name, own in shown["tools"].items()} == {
        "look_up-2": 0,
        "search-1": 2,
    }
    assert shown["tools"]["search-1"]["sources"]["math"]["granted"] == 2
    assert shown["granted"] == 5
    assert main(["limiter", "--reset", "--json", str(limiter.path)]) == GOOD
    shown = json.loads(capsys.readouterr().out)
    assert [shown["granted"], *(own["granted"] for own in shown["tools"].values())] == [0, 0, 0]


def test_actors_that_keep_a_rate_of_a_tool_or_judge_are_shown(
    limiter, tmp_path, capsys, monkeypatch
):
    actors = ["rate_limit.state", *(f"rate_limit.tools/{x}.state" for x in ("search-1", "judge-2"))]
    names = [str(tmp_path / name) for name in (*actors, "other.tools/search-3.state")]
    monkeypatch.setattr("verl_mixed.views.limiter.recorded_address", lambda _: None)
    monkeypatch.setattr("ray.init", lambda **_: None)
    monkeypatch.setattr(ray_limiter, "names", lambda: names)
    monkeypatch.setattr(ray_limiter, "snapshot_of", lambda _: limiter.snapshot())
    assert main(["limiter", "--json", "--ray", "auto", str(tmp_path)]) == GOOD
    assert [*json.loads(capsys.readouterr().out)["tools"]] == ["judge-2", "search-1"]


def test_no_limiter_is_a_usage_error_that_names_the_file(tmp_path, capsys):
    assert main(["limiter", str(tmp_path)]) == USAGE
    message = capsys.readouterr().err
    assert str(tmp_path / "rate_limit.state") in message
    assert "start a run" in message and "rate_limit_file" in message and "--ray" in message
    (tmp_path / "junk").write_text("junk")
    assert main(["limiter", str(tmp_path / "junk")]) == USAGE
    assert "no record of a limiter" in capsys.readouterr().err


def test_a_run_with_a_shared_limiter_is_shown_that_one(limiter, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    config = OmegaConf.create()
    OmegaConf.update(config, f"{TOOL_CONFIG}.rate_limit_file", str(limiter.path))
    save_config(cast(dict[str, Any], OmegaConf.to_container(config)), run / "config.yaml")
    assert main(["limiter", "--json", str(run)]) == GOOD
    assert json.loads(capsys.readouterr().out)["granted"] == 5


def test_a_source_may_have_any_name(limiter, tmp_path, capsys):
    limiter.acquire(source="[/b]")
    limiter.close()  # what it counted is written by then
    assert main(["limiter", str(tmp_path)]) == GOOD
    assert "[/b]" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--json"], []])
def test_watching_goes_on_while_the_file_is_gone(limiter, tmp_path, capsys, monkeypatch, words):
    """Sleeps: the file exists, is deleted, exists again, then the user presses Ctrl-C."""
    away = tmp_path / "away"
    moves = iter([(limiter.path, away), (away, limiter.path)])

    def sleep(_: float) -> None:
        move = next(moves, None)
        if move is None:
            raise KeyboardInterrupt
        move[0].rename(move[1])

    monkeypatch.setattr("verl_mixed.views.limiter.sleep", sleep)
    assert main(["limiter", "--watch", *words, str(tmp_path)]) == GOOD
    screen = capsys.readouterr()
    if words:
        assert [json.loads(line)["granted"] for line in screen.out.splitlines()] == [5, 5]
        assert screen.err == "no limiter yet\n"
    else:
        assert "60000 calls a minute" in screen.out


def test_watching_says_that_there_is_no_limiter_yet(tmp_path, capsys, monkeypatch):
    def sleep(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("verl_mixed.views.limiter.sleep", sleep)
    assert main(["limiter", "--watch", str(tmp_path)]) == GOOD
    assert "no limiter yet" in capsys.readouterr().out
