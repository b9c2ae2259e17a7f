"""Sources whose kind makes their rows, in the plan of a run."""

from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from config.lookup import at
from config.schema import ConfigError
from tests.fakes.toy_reasoning_gym import install_toy
from tests.verl_mixed.conftest import RunEnviron
from verl_mixed.launch.plan import make_plan

ENTRY = (
    "+mixed.sources.sums={ratio: 1, agent: math_agent, prompt: {}, kind: reasoning_gym, "
    "kind_options: {task: sums, size: 200, val_size: 8}}"
)
SIX = ("arithmetic", "decimals", "divisors", "equations", "products", "sums")


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    install_toy(monkeypatch)


def splits_of(files: list[str]) -> Counter[str]:
    return Counter(
        row["extra_info"]["split"]
        for file in files
        if "reasoning_gym." in file
        for row in pq.read_table(file).to_pylist()
    )


def test_a_source_without_files_gets_the_rows_of_its_kind(run_environ: RunEnviron) -> None:
    plan = make_plan([ENTRY], run_environ)

    assert plan.problems() == []
    assert splits_of(at(plan.config, "data.train_files")) == {"train": 200}
    assert splits_of(at(plan.config, "data.val_files")) == {"validation": 8}
    (made,) = at(plan.config, "mixed.sources.sums.files")
    assert made in at(plan.config, "data.train_files")


def test_the_same_options_are_made_once_and_others_in_another_file(
    run_environ: RunEnviron,
) -> None:
    files = [
        at(make_plan([ENTRY, *more], run_environ).config, "mixed.sources.sums.files")[0]
        for more in ([], [], ["mixed.sources.sums.kind_options.size=201"])
    ]

    assert files[0] == files[1] != files[2]
    assert pq.read_metadata(files[0]).num_rows == 200  # a run may still read it


def test_a_config_that_has_the_made_rows_is_planned_again(run_environ: RunEnviron) -> None:
    first = make_plan([ENTRY], run_environ)
    made = {key: at(first.config, f"mixed.sources.sums.{key}")[0] for key in ("files", "val_files")}
    again = [f"+mixed.sources.sums.{key}=[{file}]" for key, file in made.items()]

    plan = make_plan([ENTRY, *again], run_environ)

    assert plan.problems() == []
    assert at(plan.config, "data.train_files") == at(first.config, "data.train_files")


def test_files_and_wrong_options_are_named_by_their_key(
    run_environ: RunEnviron, tmp_path: Path
) -> None:
    (tmp_path / "raw.json").write_text("[]")
    wrong = ["+mixed.sources.sums.files=raw.json", "mixed.sources.sums.kind_options.task=sum"]

    with pytest.raises(ConfigError) as caught:
        make_plan([ENTRY, *wrong], run_environ)

    kind, file = caught.value.problems
    assert kind.startswith("mixed.sources.sums.kind: no task='sum'")
    assert file.startswith("mixed.sources.sums.files[0]: ") and "reads no file" in file


@pytest.mark.parametrize("profile", ["laptop", "smollm"])
@pytest.mark.slow
def test_a_model_of_the_demo_trains_on_made_rows_alone(
    profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sources = ", ".join(
        f"{name}: {{ratio: 1, agent: math_agent, kind: reasoning_gym, "
        f"kind_options: {{task: sums, seed: {seed}, size: 20, val_size: 4}}}}"
        for seed, name in enumerate(SIX)
    )
    (tmp_path / "mixture").mkdir()
    (tmp_path / "mixture" / "toys.yaml").write_text(f"# @package mixed\nsources: {{{sources}}}\n")
    arguments = [f"hydra.searchpath=['file://{tmp_path}']", "mixture=toys"]

    plan = make_plan(arguments, {"PROFILE": profile})

    assert plan.generated is not None and not plan.generated.exists()
    assert len(at(plan.config, "data.train_files")) == len(SIX)
    assert not [problem for problem in plan.problems(data=False) if "no rows of" in problem]


def test_the_demo_needs_no_rows_of_a_source_that_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = make_plan([ENTRY, "mixed.sources.sums.ratio=0"], {"PROFILE": "laptop"})

    assert not [problem for problem in plan.problems(data=False) if "no rows of" in problem]


def test_rows_of_seeds_with_one_question_are_no_leakage(run_environ: RunEnviron) -> None:
    seeds = (
        "+mixed.sources.game={ratio: 1, agent: math_agent, kind: seeds, prompt: {}, "
        "kind_options: {size: 200, val_size: 8, question: 'Play until <answer>.'}}"
    )
    assert make_plan([seeds], run_environ).problems() == []
