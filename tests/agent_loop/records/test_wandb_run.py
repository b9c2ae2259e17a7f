"""The table of trajectories for Weights & Biases."""

from msgspec.structs import replace

from agent_loop.records.trajectory_record import Call, StopReason, TrajectoryRecord, Turn
from agent_loop.records.wandb_run import COLUMNS, log_table, shown, trajectory_rows
from agent_loop.turns.trajectory import Trajectory
from agent_loop.turns.turn_loop import Rollout
from tests.fakes.engine import whole_of


def rolled_out() -> Rollout:
    rollout = Rollout(trajectory=Trajectory([1]), stop_reason=StopReason.ANSWERED, answer="4")
    rollout.trajectory.add_model_tokens([5, 6], [-0.5, -0.1])
    rollout.trajectory.cut_turn(2, "2+2?")
    rollout.trajectory.add_tool_tokens([7], "<b>4</b>")
    rollout.turns.append(Turn(tokens=2))
    rollout.calls.append(Call(turn=1, action="code", arguments="2+2"))
    return rollout


def trained(source: str, uid: str, draw: int) -> TrajectoryRecord:
    return replace(whole_of(rolled_out(), source, uid), draw=draw)


def test_the_table_shows_the_first_prompt_of_each_source_and_who_wrote_what():
    late, early = trained("nq", "late", 7), trained("nq", "early", 2)
    early.advantage = 0.5
    other = trained("math", "m", 9)
    chosen = shown([late, early, other], per_source=1)
    rows = trajectory_rows(chosen, lambda ids: f"prompt {ids}", step=3)
    table = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    assert [(row["source"], row["key"]) for row in table] == [
        ("math", "m_0_0"),
        ("nq", "early_0_0"),
    ]
    assert (table[0]["advantage"], table[1]["advantage"]) == (None, 0.5)
    assert table[1]["response"] == "[model] 2+2?\n[tool] <b>4</b>"
    assert (table[1]["tokens"], table[1]["trained_tokens"], table[1]["tool_calls"]) == (3, 2, 1)
    assert table[1]["prompt"] == "prompt [1]"


def test_of_a_trajectory_all_rows_are_sent_and_it_counts_once():
    rows = [
        replace(trained("nq", "u", 0), key=f"u_{session}_{index}")
        for session, index in ((0, 0), (1, 1), (2, 0), (0, 1), (1, 0))
    ]
    assert [each.key for each in shown(rows, per_source=2)] == ["u_0_0", "u_0_1", "u_1_0", "u_1_1"]


def test_without_a_run_of_wandb_nothing_is_sent():
    log_table([[0] * len(COLUMNS)], 1)
