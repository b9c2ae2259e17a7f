"""`verl-mixed profile`: pass rates from a ledger, and what a model is asked to try."""

import json
from pathlib import Path

import pytest

from config.lookup import at, files_at
from samplers.adaptive.profiles import read_profile, row_ids_of
from samplers.ledger import Ledger, LedgerEntry
from tests.fakes.records import record
from tests.verl_mixed.conftest import RunEnviron
from verl_mixed.cli import main, parser_for
from verl_mixed.commands.evaluate_targets import targets_of
from verl_mixed.launch.plan import make_plan
from verl_mixed.run.profiles import of_records


def trained(run: Path, source: str, row_id: str, counts: list[int], **changes: object) -> None:
    ledger = Ledger(run / "ledger.jsonl")
    if not ledger.last_step:
        ledger.begin({})
    for number in counts:
        step = ledger.last_step + 1
        entry = {
            "step": step,
            "source": source,
            "draw": step,
            "row": 0,
            "row_id": row_id,
            "outcome": "trained",
            "trajectories": 8,
            "reward_mean": 0.5,
            "judged": 8,
            "solved": number,
            "advantage": 0.5,
            "tokens": 100,
        }
        ledger.append_step(step, [LedgerEntry(**(entry | changes))], {})  # type: ignore[arg-type]


def test_a_ledger_has_the_pass_rates_of_the_rows_it_trained(run: Path, run_environ, capsys):
    files = files_at(make_plan([], run_environ).config, "data.train_files")
    [file] = [file for file in files if "math" in row_ids_of([file])]
    ids = row_ids_of([file])["math"]
    trained(run, "math", ids[0], [2, 4])
    trained(run, "math", ids[1], [8])
    assert main(["profile", str(run)]) == 0
    found = read_profile(file)
    assert {i: (own.trials, own.passed) for i, own in found.items()} == {
        ids[0]: (16, 6),
        ids[1]: (8, 8),
    }
    assert found[ids[0]].by == "trial, steps 1 to 3"
    assert found[ids[0]].low < 6 / 16 < found[ids[0]].high
    printed = capsys.readouterr().out
    assert f"math: 2 of {len(ids)} rows, mean 0.69, never solved 0, always solved 1" in printed
    assert "math.profile.jsonl" in printed or ".profile.jsonl" in printed


def test_a_ledger_without_counts_is_refused(run: Path, capsys):
    trained(run, "math", "math:1", [1], judged=None, solved=None)
    assert main(["profile", str(run)]) == 2
    assert "does not count solved trajectories" in capsys.readouterr().err


def test_a_model_tries_the_training_rows(run: Path, run_environ: RunEnviron):
    words = ["profile", str(run), "--step", "0", "--source", "math"]
    arguments = parser_for(words).parse_args(words)
    [one] = targets_of(arguments, [str(run)], [], run_environ, lambda line: None)
    config = one.plan.config
    assert at(config, "data.val_files") == at(config, "data.train_files")
    assert one.plan.folder.path.name == "profile_step_0"
    assert one.job.selection.samples == at(config, "actor_rollout_ref.rollout.n")


@pytest.mark.parametrize(
    "words",
    [["--samples", "4"], ["--source", "math"], ["--limit", "3"], ["another"], ["mixed.seed=4"]],
)
def test_what_a_ledger_cannot_follow_is_refused(run: Path, capsys, words: list[str]):
    trained(run, "math", "math:1", [1])
    assert main(["profile", str(run), *words]) == 2
    assert f"error: {words[0]}: without --step" in capsys.readouterr().err


def test_a_server_that_is_named_beside_a_run_is_not_ignored(run: Path, capsys):
    assert main(["profile", str(run), "--base-url", "http://127.0.0.1:1/v1"]) == 2
    assert "RUN or MODEL, or --base-url URL, and not both" in capsys.readouterr().err


def test_rows_that_are_to_be_chosen_by_a_profile_can_be_profiled(
    run: Path, run_environ: RunEnviron
):
    words = ["profile", "--run", str(run), str(run)]
    overrides = ["+mixed.sources.math.difficulty={min: 0.1, max: 0.9}"]
    arguments = parser_for(words).parse_args(words)
    arguments.config_of = None
    arguments.step = [0]
    [one] = targets_of(arguments, [str(run)], overrides, run_environ, lambda line: None)
    assert at(one.plan.config, "mixed.sources.math.difficulty") is None


def test_a_training_file_that_is_gone_is_named(run: Path, run_environ: RunEnviron, capsys):
    trained(run, "math", "math:1", [1])
    [file] = [name for name in run_environ["TRAIN_FILES"].split(",") if "math" in name]
    Path(file).unlink()
    assert main(["profile", str(run)]) != 0
    assert f"{file}: this training file" in capsys.readouterr().err


def test_several_steps_are_refused(run: Path, capsys):
    assert main(["profile", str(run), "--step", "1", "2"]) == 2
    assert "a profile is of one step" in capsys.readouterr().err


def test_records_become_profiles_and_lost_ones_do_not_count():
    records = [record(row="1", sample=n, reward=float(n < 2), lost=n == 3) for n in range(4)]
    found = of_records(records, "mine")
    assert json.loads(json.dumps(sorted(found))) == ["nq:1"]
    assert (found["nq:1"].trials, found["nq:1"].passed, found["nq:1"].by) == (3, 2, "mine")
