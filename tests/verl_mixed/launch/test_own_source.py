"""A source of one's own, from outside the repository: one YAML entry, and a file where the kind of
data or the reward is new."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from config.lookup import at, files_at
from config.schema import ConfigError
from samplers.adaptive.profiles import RowProfile, read_profile, row_ids_of, write_profile
from tests.verl_mixed.conftest import RunEnviron
from verl_mixed.launch.dry_run import dry_run
from verl_mixed.launch.plan import Plan, make_plan
from verl_mixed.run.compose import save_config

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


def rows_of(config: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """File of the source -> its rows."""
    keys = ("mixed.sources.trivia.files", "mixed.sources.trivia.val_files")
    return {file: rows_in(file) for key in keys for file in files_at(config, key)}


def rows_in(file: str) -> list[dict[str, Any]]:
    return pq.read_table(file).to_pylist()


def started(plan: Plan) -> Plan:
    """The plan, of a run that has trained a step."""
    (plan.folder.path / "checkpoints" / "global_step_1").mkdir(parents=True)
    (plan.folder.path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1")
    save_config(plan.config, plan.folder.config)
    return plan


@pytest.mark.slow
def test_rows_are_named_by_the_content_that_they_were_made_of(
    run_environ: RunEnviron, outside: Path
) -> None:
    arguments = [f"hydra.searchpath=['file://{outside}']", "mixture=mine"]
    first = rows_of(make_plan(arguments, run_environ).config)
    file, text = outside / "trivia.json", (outside / "trivia.json").read_text()

    file.write_text(text.replace("Author 1", "Author 7"))  # of the same size
    second = rows_of(make_plan(arguments, run_environ).config)
    kind = ["+mixed.sources.trivia.kind_options={question_field: answer, answer_field: question}"]
    third = rows_of(make_plan([*arguments, *kind], run_environ).config)
    file.write_text(text)  # at another time
    fourth = rows_of(make_plan(arguments, run_environ).config)

    trained = [next(iter(found)) for found in (first, second, third, fourth)]
    assert trained[0] == trained[3] and len(set(trained)) == 3
    assert first == fourth
    for found in (first, second, third):
        assert all(rows_in(file) == rows for file, rows in found.items())
    assert len(list(Path("data/prepared/trivia").glob("*.validation.parquet"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("named", ["by this release", "by 1.1.0", "by a kind that is written anew"])
@pytest.mark.parametrize("since", ["nothing", "the time", "the content", "prepared rows removed"])
def test_a_run_keeps_its_rows_and_a_start_and_a_dry_run_say_so(
    since: str, named: str, run_environ: RunEnviron, outside: Path
) -> None:
    arguments = [f"hydra.searchpath=['file://{outside}']", "mixture=mine", "prompts=instructed"]
    plan = make_plan(arguments, run_environ)
    if named != "by this release":  # 1.1.0 named them by the path of the raw file
        text = json.dumps(plan.config)
        for file in rows_of(plan.config):
            old = re.sub(r"\.\w{8}\.", ".0a1b2c3d.", file)
            Path(file).rename(old)
            text = text.replace(file, old)
            if named == "by a kind that is written anew":
                pq.write_table(pq.read_table(old), old)  # no account of how it was made
        plan = replace(plan, config=json.loads(text))
    before = rows_of(started(plan).config)
    if since == "the time":
        (outside / "trivia.json").write_text((outside / "trivia.json").read_text())
    if since == "the content":
        (outside / "trivia.json").write_text(json.dumps(TRIVIA[:5]))
    if since == "prepared rows removed":
        shutil.rmtree("data")

    lines, problems, _ = dry_run(arguments, run_environ)
    again = make_plan(arguments, run_environ)

    assert [each for each in problems if "was started" in each] == again.folder_problems()
    if since == "the content" or (since == "prepared rows removed" and "release" not in named):
        assert any("mixed.sources.trivia.files" in each for each in problems)
        assert since != "the content" or {file: rows_in(file) for file in before} == before
        return
    assert problems == [] and rows_of(again.config) == before
    assert any("resumes from checkpoint global_step_1" in line for line in lines)
    prepared = [line for line in lines if "are prepared for source" in line]
    again_by_name = {"prepared rows removed": 2, "the time": 1 if "release" in named else 0}
    assert len(prepared) == again_by_name.get(since, 0)


@pytest.mark.slow
def test_a_profile_holds_for_the_rows_that_an_edited_file_still_has(
    run_environ: RunEnviron, outside: Path
) -> None:
    arguments = [f"hydra.searchpath=['file://{outside}']", "mixture=mine"]
    (file,) = at(make_plan(arguments, run_environ).config, "mixed.sources.trivia.files")
    ids = row_ids_of([file])["trivia"]
    one = RowProfile(row_id=ids[0], trials=2, passed=1, low=0.1, high=0.9, by="a test")
    write_profile(file, [one])
    (outside / "trivia.json").write_text(json.dumps(TRIVIA[:5]))

    (other,) = at(make_plan(arguments, run_environ).config, "mixed.sources.trivia.files")

    assert other != file and read_profile(other) == {ids[0]: one}


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
