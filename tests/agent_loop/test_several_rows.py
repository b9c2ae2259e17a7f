"""Sessions of several rows: the examples of the documentation, through our worker and verl's
post-processing, and the audit of what they write."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

pytest.importorskip("verl")

from agent_loop.records.mask_audit import audit_masks
from agent_loop.records.source_metrics import sessions_of
from agent_loop.records.trajectory_record import Call, TrajectoryRecord, Turn, line_of
from agent_loop.turns.turn_loop import Observation
from docs.examples.compacting_loop import GO_ON, SUM_UP, CompactingAgentLoop
from docs.examples.delegating_loop import DelegatingAgentLoop
from tests.agent_loop.test_passed_on import TOKENIZER, Engine, rows_of
from tests.fakes.engine import record_in


class Compacting(CompactingAgentLoop):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, context_length=30, **kwargs)

    async def act(self, action: Any, extras: Any) -> Observation:
        return Observation(text="4" * 30)


class Delegating(DelegatingAgentLoop):
    async def help(self, action: Any) -> Observation:
        return Observation(text="4")


COMPACTED = ["<code>2+2</code>", "it is 4", "<answer>ab</answer>"]
DELEGATED = [
    *("<delegate>add 2 and 2</delegate>", "<code>2+2</code>", "<answer>4</answer>"),
    "<answer>ab</answer>",
]


def records_of(rows: list[Any], session: int = 0) -> list[TrajectoryRecord]:
    """The rows as in a trajectory file."""
    records = [record_in(row) for row in rows]
    for index, record in enumerate(records):
        record.step, record.source, record.row_id = 1, "nq", "nq:1"
        record.key = f"u_{session}_{index}"
    return records


def audit(folder: Path, records: list[TrajectoryRecord]) -> Any:
    (folder / "trajectories").mkdir(exist_ok=True)
    (folder / "trajectories" / "1.jsonl").write_bytes(b"".join(map(line_of, records)))
    return audit_masks(folder)


@pytest.mark.parametrize(
    ("agent", "texts", "causes", "parents"),
    [
        (Compacting, COMPACTED, ["", "summary", "compaction"], [None, 0, 1]),
        (Delegating, DELEGATED, ["sub-agent", ""], [1, None]),
    ],
)
async def test_each_answer_of_the_engine_is_trained_in_one_row_with_the_reward_of_the_session(
    agent: Any, texts: list[str], causes: list[str], parents: list[Any], tmp_path, monkeypatch
):
    rows = await rows_of(agent, monkeypatch, *texts, max_turns=4)
    records = [record_in(row) for row in rows]
    assert [record.cause for record in records] == causes
    assert [record.parent for record in records] == parents
    assert {record.requests for record in records} == {len(texts)}
    sampled = [TOKENIZER.decode(row["responses"][row["response_mask"].bool()]) for row in rows]
    assert sorted("".join(sampled)) == sorted("".join(texts))
    for row in rows:
        scores = row["rm_scores"].tolist()
        assert scores[row["response_mask"].nonzero()[-1]] == sum(scores) == 1.0
    report = audit(tmp_path, records_of(rows))
    assert (report.ok, report.trajectories, report.rows) == (True, 1, len(rows))
    assert f"1 trajectories in {len(rows)} rows" in str(report)


async def test_a_compacted_context_is_the_question_and_the_summary(monkeypatch):
    first, summary, last = await rows_of(Compacting, monkeypatch, *COMPACTED)
    read = [TOKENIZER.decode(row["prompts"]) for row in (first, summary, last)]
    assert all("what?" in text for text in read)
    assert SUM_UP in read[1] and "<code>2+2</code>" in read[1]
    assert GO_ON.format(summary="it is 4") in read[2] and "<code>" not in read[2]


async def test_a_fault_in_one_row_loses_the_session(monkeypatch, tmp_path):
    class Failing(Engine):
        async def generate(self, *args: Any, **how: Any) -> Any:
            read = TOKENIZER.decode(how["prompt_ids"])
            if "add 2 and 2" in read and "what?" not in read:  # the helper's conversation
                raise RuntimeError("the engine is gone")
            return await super().generate(*args, **how)

    monkeypatch.setattr("tests.agent_loop.test_passed_on.Engine", Failing)
    rows = await rows_of(Delegating, monkeypatch, *DELEGATED, max_turns=4)
    assert not any(row["response_mask"].any() for row in rows)
    records = [record_in(row) for row in rows]
    assert {record.fault_tool for record in records} == {"engine"}
    assert audit(tmp_path, records_of(rows)).ok


class SideBySide(Compacting):
    async def conversations(self, messages: Any) -> Any:
        return await asyncio.gather(*(self.converse([*messages]) for _ in range(3)))


async def test_conversations_side_by_side_share_the_turns(monkeypatch):
    rows = await rows_of(SideBySide, monkeypatch, *["<code>2+2</code>"] * 9)
    assert record_in(rows[-1]).requests == 3


async def test_the_turns_of_all_rows_count_together(monkeypatch):
    endless = ["<code>2+2</code>", "so"] * 9  # three turns are allowed
    *_, last = await rows_of(Compacting, monkeypatch, *endless)
    assert record_in(last).stop_reason == "max_turns"
    assert record_in(last).requests == 3


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda own: own[:-1], "1 rows are there, of 2"),
        (lambda own: [replace(own[0], turns=own[1].turns), own[1]], "2 is in no rows"),
        (lambda own: [replace(own[0], turns=own[1].turns), own[1]], "1 is in 2 rows"),
        (lambda own: [replace(one, requests=5) for one in own], "request 5 is in no rows"),
        (lambda own: [replace(one, requests=2**31) for one in own], "request 9 is in no rows"),
    ],
)
async def test_the_audit_names_an_answer_that_is_trained_twice_or_not_at_all(
    change: Any, problem: str, tmp_path, monkeypatch
):
    records = records_of(await rows_of(Delegating, monkeypatch, *DELEGATED, max_turns=4))
    report = audit(tmp_path, change(records))
    assert not report.ok and any(problem in each for each in report.problems)


def test_a_session_of_several_rows_counts_as_one_trajectory():
    rows = [
        TrajectoryRecord(
            key=f"u_{session}_{index}",
            source="nq",
            row_id="nq:1",
            reward=1.0,
            acc=1.0,
            prompt_tokens=7 + index,
            response_tokens=10,
            trained_tokens=4,
            turns=[Turn(tokens=4)],
            calls=[Call(turn=1, action=str(index))],
        )
        for session, index in [(0, 0), (1, 0), (0, 1)]
    ]
    joined_up, single = sessions_of(rows)
    assert single is rows[1]
    assert (joined_up.rows, joined_up.prompt_tokens, joined_up.response_tokens) == (2, 7, 20)
    assert joined_up.trained_tokens == 8 and [call.action for call in joined_up.calls] == ["0", "1"]
    assert len(joined_up.turns) == 2 and len(rows[0].turns) == 1
