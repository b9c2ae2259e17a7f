"""`verl-mixed` on the command line."""

import subprocess
import sys

import pytest

from cluster.cli import main
from tests.cluster.conftest import REPO_ROOT, RunEnviron

HEAVY = ("torch", "verl", "ray", "transformers", "hydra", "numpy", "rich", "pydantic")


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from cluster.cli import _parser; _parser().format_help(); "
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=REPO_ROOT
    )

    assert done.stdout == "[]\n"


@pytest.mark.parametrize("words", [[], ["nonsense"], ["audit"], ["plan", "--batches", "0"]])
def test_wrong_usage_is_exit_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)

    assert ended.value.code == 2


def set_environ(monkeypatch: pytest.MonkeyPatch, environ: RunEnviron) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


def test_check_prints_the_config_and_is_good_without_problems(
    run_environ: RunEnviron, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_environ(monkeypatch, run_environ)

    assert main(["check"]) == 0

    screen = capsys.readouterr()
    assert "train_batch_size: 4" in screen.out
    assert "no problems" in screen.err


def test_check_is_exit_2_with_problems(
    run_environ: RunEnviron, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_environ(monkeypatch, run_environ)

    assert main(["check", "actor_rollout_ref.actor.optim.lr=-1"]) == 2

    assert "1 problem" in capsys.readouterr().err


def test_plan_prints_whole_prompts_that_carry_their_remainders(
    run_environ: RunEnviron, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_environ(monkeypatch, run_environ | {"TRAIN_BATCH_SIZE": "3"})

    assert main(["plan", "--batches", "2"]) == 0

    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["batch", "math", "taco"]
    assert {tuple(row[1:]) for row in rows[1:3]} == {("1", "2"), ("2", "1")}
    assert rows[3] == ["total", "3", "3"]
    assert rows[4] == ["rows", "12", "12"]


def test_an_unreadable_run_is_exit_2_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "runs/never"]) == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: no ") and line.endswith("give runs/<experiment>")


def test_an_error_does_nothing_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "runs/\x1b]0;title\x07\u202e"]) == 2

    said = capsys.readouterr().err.removesuffix("\n")
    assert said.isprintable() and "]0;title" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["watch", "runs/x", "--interval", "abc"], "'abc': want seconds, 0.1 at least"),
        (["watch", "runs/x", "--interval", "nan"], "'nan': want seconds, 0.1 at least"),
        (["plan", "--batches", "many"], "'many': want a whole number, 1 at least"),
    ],
)
def test_what_is_no_number_is_told_what_is_wanted(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words)

    assert said in capsys.readouterr().err
