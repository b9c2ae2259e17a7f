"""A source of one's own, from outside the repository: one YAML entry, and a file where the kind of
data or the reward is new."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from config.lookup import at
from config.schema import ConfigError
from tests.verl_mixed.conftest import RunEnviron
from verl_mixed.launch.plan import make_plan

TRIVIA = [
    {"question": f"Who wrote book {n}?", "answer": f"Author {n}", "year": n} for n in range(9)
]

ENTRY = """\
# @package mixed
defaults: [three_sources]
sources:
  trivia:
    {ratio: 0.2, agent: search_agent, reward: qa_f1, prompt: search,
     kind: json, files: trivia.json, val_files: trivia_val.jsonl}
"""

KIND = """
from samplers.kind import BadRecord, Kind, Option
from samplers.rows.schema import Row, row_id


def to_row(record, *, split, index, source="riddles", agent="react_agent", shout=False):
    if "riddle" not in record:
        raise BadRecord("riddle is missing: a record needs one", reason="riddle is missing")
    question = record["riddle"].upper() if shout else record["riddle"]
    return Row(
        data_source=source, agent_name=agent, question=question, ability="riddle",
        ground_truth={"answer": record["solution"]}, split=split, index=index,
        row_id=row_id(source, record), extras={},
    )


KIND = Kind(
    name="riddles", agent="react_agent", to_row=to_row, help="riddles",
    options=(Option(name="shout", type=bool, default=False, help="in capitals"),),
)
"""

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0):
    return {"score": float(extra_info["answer"] == ground_truth) + bonus, "vowels": 1.0}
"""


@pytest.fixture
def outside(run_environ: RunEnviron, tmp_path: Path) -> Path:
    """A folder of a user's, which is also where the run is started."""
    (tmp_path / "mixture").mkdir()
    (tmp_path / "mixture" / "mine.yaml").write_text(ENTRY)
    (tmp_path / "trivia.json").write_text(json.dumps(TRIVIA[:6]))
    (tmp_path / "trivia_val.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in TRIVIA[6:])
    )
    return tmp_path


@pytest.mark.slow
def test_an_entry_in_a_file_outside_is_all_that_a_source_needs(
    run_environ: RunEnviron, outside: Path
) -> None:
    entry = ["--config-dir", outside, "mixture=mine", "prompts=instructed"]
    checked = subprocess.run(
        [sys.executable, "-m", "verl_mixed", "check", *entry],
        env=run_environ,
        capture_output=True,
        text=True,
    )

    assert checked.returncode == 0, checked.stderr
    (_, prompt) = checked.stdout.split("--- first prompt of source=trivia\n")
    assert prompt.startswith("system: You answer questions with the help of a search engine.")
    assert "\nuser: Question: Who wrote book 0?\n" in prompt
    assert "no problems" in checked.stderr


@pytest.mark.slow
def test_its_files_are_prepared_once_and_join_those_of_the_run(
    run_environ: RunEnviron, outside: Path
) -> None:
    arguments = [f"hydra.searchpath=['file://{outside}']", "mixture=mine"]
    config = make_plan(arguments, run_environ).config
    (trained,) = at(config, "mixed.sources.trivia.files")
    (validated,) = at(config, "mixed.sources.trivia.val_files")

    assert at(config, "data.train_files")[-1] == trained
    assert at(config, "data.val_files")[-1] == validated
    rows = pq.read_table(trained).to_pylist()
    assert [row["prompt"][-1]["content"] for row in rows] == [
        record["question"] for record in TRIVIA[:6]
    ]
    assert {(row["data_source"], row["agent_name"]) for row in rows} == {("trivia", "search_agent")}

    before = Path(trained).stat()
    assert make_plan(arguments, run_environ).config == config
    assert Path(trained).stat() == before  # not written again


@pytest.mark.slow
def test_a_kind_and_a_reward_of_one_s_own_are_files(run_environ: RunEnviron, outside: Path) -> None:
    (outside / "riddle_kind.py").write_text(KIND)
    (outside / "riddle_reward.py").write_text(REWARD)
    for name, first in (("riddles", 0), ("riddles_val", 5)):
        lines = [
            json.dumps({"riddle": f"what is {n}?", "solution": "x"})
            for n in range(first, first + 5)
        ]
        (outside / f"{name}.jsonl").write_text("\n".join(lines))
    entry = (
        "+mixed.sources.riddles={ratio: 1, reward: riddle_reward.py:compute_score, "
        "reward_options: {bonus: 1}, kind: riddle_kind.py, kind_options: {shout: true}, "
        "files: riddles.jsonl, val_files: riddles_val.jsonl}"
    )

    plan = make_plan([entry], run_environ)

    assert plan.problems() == []
    reward = at(plan.config, "mixed.sources.riddles.reward")
    assert reward == f"{outside / 'riddle_reward.py'}:compute_score"  # workers run elsewhere
    (trained,) = at(plan.config, "mixed.sources.riddles.files")
    assert pq.read_table(trained)["prompt"][0].as_py()[0]["content"] == "WHAT IS 0?"


def test_a_file_that_the_run_names_too_counts_once_however_it_is_spelled(
    run_environ: RunEnviron, outside: Path
) -> None:
    assert (outside / "math_train.parquet").is_file()
    plan = make_plan(["mixed.sources.math.files=./math_train.parquet"], run_environ)
    assert plan.problems() == []
    assert at(plan.config, "data.train_files") == run_environ["TRAIN_FILES"].split(",")


def test_what_a_source_without_a_share_trains_on_is_left_alone(
    run_environ: RunEnviron, outside: Path
) -> None:
    (outside / "trivia.json").write_text("broken")
    arguments = [f"hydra.searchpath=['file://{outside}']", "mixture=mine"]

    plan = make_plan([*arguments, "mixed.sources.trivia.ratio=0"], run_environ)

    assert plan.problems() == []
    assert at(plan.config, "data.train_files") == run_environ["TRAIN_FILES"].split(",")
    assert at(plan.config, "data.val_files")[-1].endswith(".validation.parquet")


def test_what_cannot_be_prepared_is_named_by_key_and_file(
    run_environ: RunEnviron, outside: Path
) -> None:
    (outside / "trivia.json").write_text('[{"question": "no answer?"}]')
    (outside / "trivia_val.jsonl").unlink()

    with pytest.raises(ConfigError) as caught:
        make_plan([f"hydra.searchpath=['file://{outside}']", "mixture=mine"], run_environ)

    first, second = caught.value.problems
    assert first.startswith("mixed.sources.trivia.files[0]: ") and "trivia.json" in first
    assert second.startswith("mixed.sources.trivia.val_files[0]: ") and "trivia_val" in second


def test_the_demo_can_be_mixed_with_a_source_of_one_s_own(
    outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(outside)
    plan = make_plan([f"hydra.searchpath=['file://{outside}']", "mixture=mine"], {})

    assert plan.generated is not None
    names = [Path(file).name.split(".")[0] for file in at(plan.config, "data.train_files")]
    assert names == ["math_train", "nq_train", "taco_train", "trivia"]
    assert not [problem for problem in plan.problems(data=False) if "no rows of" in problem]
