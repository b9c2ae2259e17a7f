"""A source from outside the repository is trained: its kind, reward and prompt are its own. Another
source has an agent loop of the documentation, whose sessions are several rows. A controller decides
the shares, in tokens."""

import json
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.e2e.jobs import CONTROL, decisions, finish, job_of, start
from tests.json_lines import read_lines
from verl_mixed.run.audit import audit_run, describe
from verl_mixed.run.compose import load_config
from verl_mixed.run.state import RunFolder

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

KIND = """
from samplers.kind import Kind
from samplers.rows.schema import Row, row_id


def to_row(record, *, split, index, source="colours", agent="search_agent"):
    return Row(
        data_source=source, agent_name=agent, question=record["thing"], ability="qa",
        ground_truth={"answer": record["colour"]}, split=split, index=index,
        row_id=row_id(source, record), extras={},
    )


KIND = Kind(name="colours", agent="search_agent", to_row=to_row, help="things and their colours")
"""

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, per_letter=0.0):
    return {"score": per_letter * len(solution_str), "letters": float(len(solution_str))}
"""

ENTRY = """\
# @package mixed
defaults: [three_sources]
sources:
  taco: {ratio: 2}
  nq: {ratio: 2}
  math: {ratio: 3, agent: compacting}
  colours:
    {ratio: 3, reward: letters.py:compute_score, reward_options: {per_letter: 0.01},
     prompt: {user: "{search_start_tag}? {question}"},
     kind: colours.py, files: colours.jsonl, val_files: colours_val.jsonl}
agent_loops:
  compacting:
    {_target_: docs.examples.compacting_loop.CompactingAgentLoop, context_length: 12}
"""


def test_one_entry_and_two_files_train_a_source_of_one_s_own(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)  # the run's files have paths from here
    (tmp_path / "mixture").mkdir()
    (tmp_path / "mixture" / "mine.yaml").write_text(ENTRY)
    (tmp_path / "colours.py").write_text(KIND)
    (tmp_path / "letters.py").write_text(REWARD)
    for name, first in (("colours", 0), ("colours_val", 20)):
        records = [{"thing": f"thing {n}", "colour": "red"} for n in range(first, first + 20)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    overrides = [
        *("mixture=mine", "data.max_prompt_length=200"),
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
        *("mixed.controller=progress", "mixed.unit=trained_tokens", *CONTROL),
    ]
    job = job_of("own", demo, tmp_path, overrides, 2)
    command = [*job.command, "--config-dir", str(tmp_path)]

    finish(start(command, tmp_path, tmp_path / "out.txt"), tmp_path / "out.txt")

    decided = decisions(job)
    assert [each.window for each in decided] == [1, 2]
    assert len(set(decided[1].foreseen.values())) == 4
    trained = [line for line in job.ledger() if line.get("outcome") == "trained"]
    trained = [line for line in trained if line["step"] == 1]
    assert Counter(line["source"] for line in trained) == {
        "taco": 2,
        "nq": 2,
        "math": 3,
        "colours": 3,
    }
    records, later = (read_lines(job.folder / "trajectories" / f"{step}.jsonl") for step in (1, 2))
    math = [record for record in records if record["source"] == "math"]
    sessions = {record["key"].rsplit("_", 1)[0] for record in math}
    assert len(sessions) == 3 * 4 < len(math)
    assert {record["cause"] for record in math} == {"", "summary", "compaction"}
    assert {record["fault"] for record in records} == {None}
    trained = {line["source"]: line["trajectories"] for line in trained}
    assert set(trained.values()) == {4}  # sessions, not rows
    audit = audit_run(RunFolder(job.folder), load_config(job.folder / "config.yaml"))
    assert audit.ok and audit.masks.rows == len(records) + len(later), describe(audit)
    own = [record for record in records if record["source"] == "colours"]
    assert len(own) == 3 * 4
    tokenizer = AutoTokenizer.from_pretrained(str(demo / "model"))
    assert all("<search>? thing " in tokenizer.decode(record["prompt_ids"]) for record in own)
    parts = [record["reward_parts"] for record in own]
    assert all(part["score"] == 0.01 * part["letters"] for part in parts)
    assert any(part["letters"] > 0 for part in parts)
    metrics = read_lines(job.folder / "metrics.jsonl")[1]["metrics"]
    letters = [part["letters"] for part in parts]
    assert metrics["mixed/colours/reward_parts/letters"] == sum(letters) / len(letters)
