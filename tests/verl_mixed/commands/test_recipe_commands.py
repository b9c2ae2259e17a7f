"""`check`, `plan`, `audit` and `train` with a recipe of verl's that sets `+data.mixture`."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from samplers.ledger import Ledger, LedgerEntry
from samplers.mixture_plan import MixturePlan, PlannedPrompt
from tests.samplers.made_runs import entries_of, entry_of, new_plan, write_step
from verl_mixed.cli import main

MIXTURE = "+data.mixture={openai/gsm8k: 0.5, search: 0.3, code: 0.2}"
CLASSES = (
    "data.custom_cls.path=pkg://verl_mixed.recipe",
    "data.custom_cls.name=MixedDataset",
    "trainer.v1.sampler.custom_sampler.path=pkg://samplers.recipe",
    "trainer.v1.sampler.custom_sampler.name=ExactMixture",
)
BATCH = ("data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16")

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def recipe(tmp_path: Path) -> list[str]:
    """A sound recipe, without its mixture."""
    rows = [{"data_source": "openai/gsm8k"}] * 60 + [{"data_source": "search"}] * 40
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text('{"data_source": "code"}\n' * 20)
    return [*CLASSES, *BATCH, f"data.train_files=[{tmp_path}/a.parquet,{tmp_path}/b.jsonl]"]


def squeezed(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


# --- check ----------------------------------------------------------------------------------------


def test_check_shows_shares_rows_and_what_an_epoch_is(recipe: list[str], capsys: Capture) -> None:
    assert main(["check", *recipe, MIXTURE, "data.filter_overlong_prompts=true"]) == 0

    screen = capsys.readouterr()
    lines = squeezed(screen.out)
    assert lines[:4] == ["source share rows", "openai/gsm8k 0.5 60", "search 0.3 40", "code 0.2 20"]
    assert lines[4].endswith("whatever the shares: 120 rows, 7 steps of 16 prompts")
    assert lines[5].startswith("note: data.filter_overlong_prompts=true: verl may leave out some")
    assert screen.err.startswith("no problems in what was looked at")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("+data.mixture={search: 0.7, code: 0.7}", "sum to 1.4: they must sum to 1"),
        ("+data.mixture={search: 0.7, code: 0.3}", "data_source='openai/gsm8k' has 60 rows and no"),
        ("data.train_batch_size=200", "has 120 rows, fewer than data.train_batch_size=200"),
        ("trainer.use_v1=false", "trainer.use_v1=false"),
        ("data.foo=1", "error: cannot compose the config: Could not override 'data.foo'"),
        ("+data.mixture={search: 0.7", "error: cannot compose the config: no viable alternative"),
        ("mixed.seed=1", "mixed.seed is of a run of `verl-mixed train`"),
        ("--config-dir=.", "--config-dir is of a run of `verl-mixed train`"),
    ],
)
def test_check_names_what_is_wrong(
    recipe: list[str], words: str, said: str, capsys: Capture
) -> None:
    given = [words] if words.startswith("+data.mixture") else [MIXTURE, words]
    assert main(["check", *recipe, *given]) == 2
    assert said in capsys.readouterr().err


def test_check_warns_of_updates_without_quotas(recipe: list[str], capsys: Capture) -> None:
    smaller = "actor_rollout_ref.actor.ppo_mini_batch_size=8"
    assert main(["check", *recipe, MIXTURE, smaller]) == 0
    assert "warning: ppo_mini_batch_size=8 is below" in capsys.readouterr().err


def test_a_part_of_the_door_is_checked_too(capsys: Capture) -> None:
    assert main(["check", *CLASSES[:2]]) == 2
    said = capsys.readouterr().err
    assert "data.mixture is not set" in said and "custom_sampler is not set" in said


def test_rows_on_another_machine_are_not_looked_at(capsys: Capture) -> None:
    mixture = "+data.mixture={search: 0.7, code: null}"
    assert main(["check", *CLASSES, *BATCH, mixture, "data.train_files=hdfs://x.parquet"]) == 0
    screen = capsys.readouterr()
    assert "code null ?" in squeezed(screen.out)
    assert "the rows (data.train_files has hdfs://x.parquet, which is not on this" in screen.err


def test_rows_that_a_class_of_the_users_reads_are_not_looked_at(
    recipe: list[str], tmp_path: Path, capsys: Capture
) -> None:
    base = f"+data.mixture_base={{path: {tmp_path}/own.py, name: Own}}"
    assert main(["check", *recipe, MIXTURE, base]) == 0
    assert "own.py, which is not on this machine, reads them" in capsys.readouterr().err
    (tmp_path / "own.py").write_text("class Own: ...")
    assert main(["check", *recipe, MIXTURE, base]) == 0
    assert "the class of data.mixture_base reads the training files" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise SystemExit('bye')", "SystemExit: bye"),
        ("class Own(", "SyntaxError: "),
        ("x = 1", "has no attribute 'Own'"),
        ("import not_on_this_machine", None),
    ],
)
def test_a_class_of_the_users_that_cannot_be_loaded_is_refused(
    recipe: list[str], tmp_path: Path, capsys: Capture, text: str, said: str | None
) -> None:
    (tmp_path / "own.py").write_text(text)
    base = f"+data.mixture_base={{path: {tmp_path}/own.py, name: Own}}"

    assert main(["check", *recipe, MIXTURE, base]) == (2 if said else 0)

    assert (said or "was not imported here (") in capsys.readouterr().err


def test_a_hydra_config_of_the_users_own_is_composed_as_main_ppo_does(
    recipe: list[str], tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "mine.yaml").write_text(
        "hydra: {searchpath: ['pkg://verl.trainer.config']}\n"
        "defaults: [ppo_trainer, _self_]\n"
        "data: {mixture: {openai/gsm8k: null, search: 0.5, code: 0}}\n"
    )
    named = [f"--config-path={tmp_path}", "--config-name=mine"]
    assert main(["check", *named, *recipe]) == 0
    assert "openai/gsm8k 0.5 60" in squeezed(capsys.readouterr().out)


# --- plan and train -------------------------------------------------------------------------------


def test_plan_prints_the_table_without_tool_calls(recipe: list[str], capsys: Capture) -> None:
    assert main(["plan", *recipe, MIXTURE, "trainer.total_epochs=2", "--batches=2"]) == 0

    lines = squeezed(capsys.readouterr().out)
    assert lines[0] == "batch code openai/gsm8k search"
    assert "total 6 16 10" in lines
    assert "prompts in the run 45 112 67" in lines
    assert "times each row is used 2.250 1.867 1.675" in lines
    assert lines[-1].startswith("an epoch is as many prompts as data.train_files has rows")
    assert not any("tool" in line or "turns" in line for line in lines)


def test_plan_as_json_has_no_tools(recipe: list[str], capsys: Capture) -> None:
    assert main(["plan", *recipe, MIXTURE, "trainer.total_training_steps=3", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["steps"], plan["tools"]) == (3, None)
    assert plan["sources"]["search"]["prompts"] + plan["sources"]["code"]["prompts"] == 24


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([MIXTURE], "trainer.total_training_steps=null needs the rows"),
        (["+data.mixture={search: null}", "trainer.total_training_steps=3"], "a share of null"),
        (["+data.mixture={search: 2}"], "data.mixture has search=2"),
        ([MIXTURE, "--diff=x"], "--diff compares runs of `verl-mixed train`"),
    ],
)
def test_a_plan_that_cannot_be_made_says_why(words: list[str], said: str, capsys: Capture) -> None:
    assert main(["plan", *CLASSES, *BATCH, "data.train_files=none.parquet", *words]) == 2
    assert said in capsys.readouterr().err


def test_train_sends_a_recipe_to_verl(recipe: list[str], capsys: Capture) -> None:
    for option in ([], ["--dry-run"], ["--validate-only"]):
        assert main(["train", *recipe, MIXTURE, *option]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "`python3 -m verl.trainer.main_ppo` starts" in line
        assert "shares are mixed.sources.<name>.ratio" in line


# --- audit ----------------------------------------------------------------------------------------


def ledger_of(folder: Path, plan: MixturePlan) -> Ledger:
    folder.mkdir(exist_ok=True)
    ledger = Ledger(folder / "ledger.jsonl")
    ledger.begin(plan.description())
    return ledger


def test_a_checkpoint_folder_is_audited_by_its_ledger_alone(
    tmp_path: Path, capsys: Capture
) -> None:
    plan = new_plan()
    ledger = ledger_of(tmp_path / "run", plan)
    for step in (1, 2, 3):
        write_step(ledger, plan, step, lost=[1])

    assert main(["audit", str(tmp_path / "run")]) == 0

    screen = capsys.readouterr().out
    assert (
        "3 steps" in screen and "every batch as planned, nothing skipped, nothing twice" in screen
    )
    assert "mask" not in screen


def test_a_place_that_a_failed_prompt_left_empty_is_named_with_its_remedy(
    tmp_path: Path, capsys: Capture
) -> None:
    plan = new_plan()
    ledger = ledger_of(tmp_path, plan)
    write_step(ledger, plan, 1)
    first, *others = entries_of(plan, 2)
    failed = replace(first, outcome="failed", trajectories=0, reward_mean=None)
    ledger.append_step(2, [failed, *others], plan.drawn)

    assert main(["audit", str(tmp_path)]) == 1

    said = capsys.readouterr().out
    assert "NOT as planned: step 2 trained" in said
    assert "1 failed and left their places empty; trainer.v1.sampler.sync_refill_failed" in said


def step_ahead(
    ledger: Ledger, plan: MixturePlan, step: int, under_way: list[PlannedPrompt], last: bool = False
) -> None:
    """Train a step of an asynchronous run, of the prompts that are under way."""
    under_way += plan.take(plan.batch_size)
    trained: list[PlannedPrompt] = []
    for source, count in plan.counts(step - 1).items():
        trained += [prompt for prompt in under_way if prompt.source == source][:count]
    under_way[:] = [prompt for prompt in under_way if prompt not in trained]
    entries: Sequence[LedgerEntry] = [entry_of(prompt, step) for prompt in trained]
    if last:
        entries = [*entries, *(entry_of(prompt, step, "unfinished") for prompt in under_way)]
    ledger.append_step(step, entries, plan.drawn)


@pytest.mark.parametrize("steps", [1, 3])
def test_prompts_of_an_asynchronous_run_may_be_under_way(
    tmp_path: Path, steps: int, capsys: Capture
) -> None:
    plan = new_plan()
    ledger = ledger_of(tmp_path, plan)
    under_way = plan.take(5)
    for step in range(1, steps + 1):
        step_ahead(ledger, plan, step, under_way)
    if steps == 1:  # the ledger cannot tell yet
        assert main(["audit", str(tmp_path)]) == 1
        assert "drawn and are not accounted for" in capsys.readouterr().out
        (tmp_path / "global_step_1" / "transfer_queue").mkdir(parents=True)

    assert main(["audit", str(tmp_path)]) == 0


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_complete_asynchronous_run_has_no_prompt_under_way(
    tmp_path: Path, is_lost: bool, capsys: Capture
) -> None:
    plan = new_plan()
    ledger = ledger_of(tmp_path, plan)
    under_way = plan.take(5)
    for step in (1, 2):
        step_ahead(ledger, plan, step, under_way)
    if is_lost:
        del under_way[0]
    step_ahead(ledger, plan, 3, under_way, last=True)

    assert main(["audit", str(tmp_path)]) == is_lost
    assert ("skipped, the first of them" in capsys.readouterr().out) == is_lost


def test_a_ledger_without_a_plan_is_no_run(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "ledger.jsonl").touch()
    assert main(["audit", str(tmp_path)]) == 2
    assert "ledger.jsonl has no plan" in capsys.readouterr().err
