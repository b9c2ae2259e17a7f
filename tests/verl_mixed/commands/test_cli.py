"""`verl-mixed` on the command line."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import hydra
import pytest

from config.lookup import files_at
from samplers.adaptive.profiles import RowProfile, row_ids_of, write_profile
from tests.verl_mixed.conftest import REPO_ROOT, RunEnviron
from verl_mixed.cli import main, parser_for
from verl_mixed.commands import facts
from verl_mixed.launch.plan import make_plan
from verl_mixed.run.settings import SETTINGS

HEAVY = ("torch", "verl", "ray", "transformers", "hydra", "numpy", "rich", "pydantic")


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from verl_mixed.cli import parser_for; parser_for().format_help(); "
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=REPO_ROOT
    )

    assert done.stdout == "[]\n"


@pytest.mark.parametrize("words", [[], ["audit"], ["plan", "--batches", "0"]])
def test_wrong_usage_is_exit_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)

    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("plan a=1 --batches 2 b=2 --json c=3", {"batches": 2, "json": True}),
        ("plan a=1 --batches=2 b=2 --bat 3 c=3", {"batches": 3}),
        ("train a=1 --dry-run b=2 --log-file x=1 c=3", {"dry_run": True, "log_file": Path("x=1")}),
        ("check --config-dir d a=1 --config f.yaml b=2 c=3", {"config_dir": Path("d")}),
        ("doctor a=1 --json b=2 c=3", {"json": True}),
        ("tools a=1 --call x {} b=2 c=3", {"call": ["x", "{}"]}),
        (
            "evaluate --step 2 4 a=1 --label l=1 b=2 --source nq c=3",
            {"step": [2, 4], "source": ["nq"]},
        ),
        ("profile a=1 --source nq math b=2 --step 1 c=3", {"source": ["nq", "math"], "step": [1]}),
    ],
)
def test_overrides_stand_anywhere_among_options_and_keep_their_order(
    words: str, given: dict[str, object]
) -> None:
    arguments = parser_for(words.split()).parse_args(words.split())

    assert arguments.overrides == ["a=1", "b=2", "c=3"]
    assert {name: getattr(arguments, name) for name in given} == given


def test_the_facts_of_a_run_take_overrides_on_both_sides_of_an_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["mixed.experiment=one", "--facts", "mixed.seed=3"]

    assert facts.main(words) == 0
    assert "runs/one" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", ["plan a=1 --bogus b=2", "tools a=1 --bogus=3", "report a --bogus"]
)
def test_an_unknown_option_among_overrides_is_exit_2(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())

    assert ended.value.code == 2
    assert "unrecognized arguments: --bogus" in capsys.readouterr().err


def set_environ(monkeypatch: pytest.MonkeyPatch, environ: RunEnviron) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


@pytest.mark.slow
def test_check_prints_the_config_and_is_good_without_problems(
    run_environ: RunEnviron, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_environ(monkeypatch, run_environ)

    assert main(["check"]) == 0

    screen = capsys.readouterr()
    assert "train_batch_size: 4" in screen.out
    assert "--- estimate of a step" in screen.out
    assert "\nTransferQueue holds up to 44 rows" in screen.out  # 24 are of validation
    assert "no problems" in screen.err


@pytest.mark.slow
@pytest.mark.usefixtures("verl_is_asked_elsewhere")
def test_check_is_exit_2_with_problems(
    run_environ: RunEnviron, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_environ(monkeypatch, run_environ)

    assert main(["check", "actor_rollout_ref.actor.optim.lr=-1"]) == 2
    assert main(["check", "actor_rollout_ref.actor.loss_agg_mode=foo"]) == 2  # verl refuses it

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


AGENT_CONFIG = """
agent: {num_chains: 10, template: qwen2.5, max_steps: 2}
monitoring: {experiment_name: from_file}
"""


@pytest.fixture
def agent_config(tmp_path: Path) -> Path:
    path = tmp_path / "agent_config.yaml"
    path.write_text(AGENT_CONFIG)
    return path


@pytest.mark.slow
def test_a_dry_run_says_what_would_happen_and_starts_and_writes_nothing(
    run_environ: RunEnviron,
    agent_config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_environ(monkeypatch, run_environ)
    before = sorted(Path().rglob("*"))

    assert main(["train", "--config", str(agent_config), "--dry-run", "mixed.seed=3"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{agent_config}:"
    assert "  agent.num_chains = 10 -> actor_rollout_ref.rollout.n=10" in lines
    said = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines[4:]}
    assert said["run"] == "runs/from_file (new, 3 steps)"
    assert said["tools"] == run_environ["TOOL_SERVER_URL"]
    assert said["config"] == "kept in runs/from_file/config as <time>-agent_config.yaml"
    words = shlex.split(said["command"])
    assert words[:2] == ["verl-mixed", "train"]
    assert {"actor_rollout_ref.rollout.n=10", "mixed.seed=3", "data.train_batch_size=4"} < {*words}
    assert "actor_rollout_ref.rollout.n=5" not in words  # of the environment
    assert sorted(Path().rglob("*")) == before


@pytest.mark.slow
def test_the_command_that_a_dry_run_prints_is_the_same_run_without_files_and_environment(
    run_environ: RunEnviron,
    agent_config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_environ(monkeypatch, run_environ)
    main(["train", "--config", str(agent_config), "--dry-run"])
    out = capsys.readouterr().out
    (command,) = [line for line in out.splitlines() if line.startswith("command ")]
    _, _, _, *overrides = shlex.split(command)
    main(["check", "--config", str(agent_config)])
    with_file = capsys.readouterr().out

    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    assert main(["check", *overrides]) == 0

    assert capsys.readouterr().out == with_file


@pytest.mark.slow
def test_raw_files_are_named_and_not_prepared_by_a_dry_run(
    run_environ: RunEnviron, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_environ(monkeypatch, run_environ)
    Path("mine.json").write_text('[{"question": "1+1?", "answer": "2"}]')
    Path("my.yaml").write_text("data: {train_files: mine.json, val_files: mine.json}")

    assert main(["train", "--config", "my.yaml", "--dry-run"]) == 0

    said = capsys.readouterr().out
    file = Path("mine.json").absolute()
    assert f"first        {file}: its rows of kind json are prepared for source json" in said
    assert not Path("data").exists()


@pytest.mark.slow
def test_a_dry_run_finds_the_profiles_of_prepared_rows(
    run_environ: RunEnviron, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_environ(monkeypatch, run_environ)
    Path("mine.json").write_text('[{"question": "1+1?", "answer": "2"}]')
    entry = "+mixed.sources.mine={ratio: 1, kind: json, files: [mine.json], val_files: [mine.json]}"
    overrides = [entry, "+mixed.sources.mine.difficulty={min: 0.1}"]
    files = files_at(make_plan([entry], run_environ).config, "data.train_files")
    [file] = [name for name in files if "prepared" in name]
    [row_id] = row_ids_of([file])["mine"]
    one = RowProfile(row_id=row_id, trials=2, passed=1, low=0.1, high=0.9, by="a test")

    assert main(["train", "--dry-run", *overrides]) == 2
    assert "source='mine' has no row to draw" in capsys.readouterr().err
    write_profile(file, [one])
    assert main(["train", "--dry-run", *overrides]) == 0, capsys.readouterr().err


def without_settings(monkeypatch: pytest.MonkeyPatch, **environ: str) -> None:
    for name in (*SETTINGS, "MASTER_IP", "WORKER_NODES"):
        monkeypatch.delenv(name, raising=False)
    set_environ(monkeypatch, environ)


def test_a_dry_run_that_could_not_start_says_why_and_shows_no_model_of_verls_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    without_settings(monkeypatch, PROFILE="gpu")

    assert main(["train", "--dry-run", "actor_rollout_ref.actor.optim.lr=-1"]) == 2

    said = capsys.readouterr()
    assert "data         none; set TRAIN_FILES\n" in said.out
    assert "data         none; set VAL_FILES\n" in said.out
    assert "model        none; set MODEL_PATH\n" in said.out
    assert "deepseek" not in said.out and "gsm8k" not in said.out
    assert "problem: actor_rollout_ref.model.path: no value; set MODEL_PATH" in said.err
    assert "problem: actor_rollout_ref.actor.optim.lr=-1" in said.err


def test_a_kind_that_is_not_there_is_a_problem_of_a_dry_run(
    run_environ: RunEnviron, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_environ(monkeypatch, run_environ)
    entry = "+mixed.sources.mine={ratio: 1, files: a.x, kind: nope}"

    assert main(["train", "--dry-run", entry]) == 2

    assert "mixed.sources.mine.files[0]: no kind of data in 'nope'" in capsys.readouterr().err


@pytest.mark.slow
def test_what_a_start_would_fetch_for_the_pretrained_model_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    without_settings(monkeypatch, PROFILE="smollm")

    assert main(["train", "--dry-run"]) == 0
    dry_run = capsys.readouterr().out
    assert main(["check"]) == 0
    check = capsys.readouterr().out

    fetched = "SmolLM2-135M-Instruct is not there yet "
    for said in (dry_run, check):
        (line,) = [line for line in said.splitlines() if fetched in line]
        assert "93 MB from PyPI" in line
        assert "the demo" not in said
    assert not Path("data").exists()


@pytest.mark.slow
def test_a_dry_run_of_the_demo_says_that_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    without_settings(monkeypatch, PROFILE="laptop")

    assert main(["train", "--dry-run"]) == 0

    assert "first        the demo is not made yet " in capsys.readouterr().out


@pytest.mark.slow
def test_a_dry_run_composes_the_config_once(
    run_environ: RunEnviron, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_environ(monkeypatch, run_environ)
    make_plan([], run_environ)  # what the project ships is composed once for a process
    composed: list[object] = []

    def compose(*words: Any, **options: Any) -> Any:
        composed.append(words)
        return hydra.compose(*words, **options)

    monkeypatch.setattr("verl_mixed.run.compose.compose", compose)

    assert main(["train", "--dry-run"]) == 0

    assert len(composed) == 1


@pytest.mark.slow
def test_validate_only_is_check_of_the_same_config(
    run_environ: RunEnviron,
    agent_config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_environ(monkeypatch, run_environ)
    words = ["--config", str(agent_config), "actor_rollout_ref.actor.optim.lr=-1"]

    assert main(["train", "--validate-only", *words]) == 2
    said = capsys.readouterr()
    assert main(["check", *words]) == 2

    assert said.err.endswith("1 problems\n")
    assert said == capsys.readouterr()
    assert main(["train", "--validate-only", "--config", str(agent_config)]) == 0
    assert not Path("runs").exists()


def test_the_translation_stays_out_of_what_other_commands_print(
    run_environ: RunEnviron,
    agent_config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_environ(monkeypatch, run_environ)

    assert main(["plan", "--json", "--config", str(agent_config)]) == 0

    said = capsys.readouterr()
    assert json.loads(said.out)
    assert said.err.startswith(f"{agent_config}:\n  agent.num_chains = 10 -> ")


def test_mistakes_of_a_config_file_are_said_at_once_and_nothing_starts(
    run_environ: RunEnviron, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_environ(monkeypatch, run_environ)
    Path("my.yaml").write_text("agent: {num_chain: 6, max_steps: x}")

    assert main(["train", "--config", "my.yaml"]) == 2

    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and all(line.startswith("error: ") for line in errors)
    assert not Path("runs").exists()


@pytest.mark.slow
def test_a_refused_run_keeps_no_config_files_and_what_is_printed_is_in_a_file(
    run_environ: RunEnviron, agent_config: Path
) -> None:
    command = [sys.executable, "-m", "verl_mixed", "train", "--config", str(agent_config)]
    command += ["--log-file", "screen.txt", "mixed.sources.math.reward=none_such"]

    done = subprocess.run(command, capture_output=True, text=True, env=run_environ)

    assert done.returncode == 2
    assert not Path("runs/from_file/config").exists()
    assert "cannot start, 1 problem" in done.stdout
    assert Path("screen.txt").read_text() == done.stdout + done.stderr


def test_a_log_file_has_the_errors_too_and_is_added_to(run_environ: RunEnviron) -> None:
    Path("screen.txt").write_text("before\n")
    command = [sys.executable, "-m", "verl_mixed", "train", "--log-file", "screen.txt"]

    done = subprocess.run(
        [*command, "--config", "never.yaml"], capture_output=True, text=True, env=run_environ
    )

    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot read --config never.yaml")
    assert Path("screen.txt").read_text() == "before\n" + done.stderr


def test_a_log_file_has_the_traceback_of_a_crash(run_environ: RunEnviron) -> None:
    crash = (
        "from pathlib import Path; from verl_mixed.run.screen_log import copied_to\n"
        "with copied_to(Path('screen.txt')): raise RuntimeError('it crashed')"
    )

    done = subprocess.run(
        [sys.executable, "-c", crash], capture_output=True, text=True, env=run_environ
    )

    assert done.returncode == 1
    assert done.stderr.endswith("RuntimeError: it crashed\n")
    assert Path("screen.txt").read_text() == done.stderr


def test_a_log_file_that_cannot_be_written_is_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--log-file", "/proc/never/x", "--dry-run"]) == 1

    assert "/proc/never/x: No such file" in capsys.readouterr().err


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
