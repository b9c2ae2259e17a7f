"""What stops a run, or is said aloud."""

from typing import Any

import pytest
from msgspec.structs import replace

from agent_loop.records.trajectory_record import StopReason, TrajectoryRecord
from agent_loop.training.alarms import (
    MIN_GROUPS,
    MOST_LAG_S,
    FaultWindow,
    TooManyFaults,
    drift_problems,
    exceeds,
    faults_by_group,
    late_loops,
    loop_error,
    nothing_to_train,
)
from agent_loop.turns.trajectory import Trajectory
from agent_loop.turns.turn_loop import Rollout
from samplers.faults import GroupFaults
from tests.fakes.engine import CharTokenizer, trained_of, whole_of

CODEC = CharTokenizer()


def rolled_out(fault: str | None = None, trace: str | None = None) -> Rollout:
    rollout = Rollout(trajectory=Trajectory([1]), stop_reason=StopReason.ANSWERED, answer="4")
    rollout.trajectory.add_model_tokens(CODEC.encode("ab"), [-0.5, 0.0])
    rollout.trajectory.cut_turn(2, "ab")
    rollout.trajectory.add_tool_tokens(CODEC.encode("[c]"), "[c]")
    if fault is not None:
        rollout.lose("loop" if trace else "search", fault)
        rollout.loop_error = trace
        rollout.trajectory.without_gradient()
    return rollout


def trajectory(
    fault: str | None = None, source: str = "nq", trace: str | None = None
) -> TrajectoryRecord:
    return trained_of(rolled_out(fault, trace), source)


def drift(rollout: Rollout, **changes: Any) -> list[str]:
    """The problems of a trajectory of which some fields were changed on the way."""
    return drift_problems(replace(whole_of(rollout), **changes), CODEC.decode)


def step(lost: int, of: int, source: str = "nq") -> list[TrajectoryRecord]:
    return [trajectory(f"fault {i}" if i < lost else None, source) for i in range(of)]


def groups(lost: int, of: int, source: str = "nq") -> list[GroupFaults]:
    """Groups of two, the first of them lost."""
    faults = [f"tool=search, last error: fault {i}" for i in range(lost)]
    return [
        GroupFaults(source=source, trajectories=2, faults=tuple(faults[at : at + 2]))
        for at in range(0, of, 2)
    ]


def test_too_many_faults_over_the_last_steps_stop_the_run():
    window = FaultWindow(0.5, steps=2)
    window.check(1, groups(4, of=8))  # a share at the limit is none beyond it
    window.check(2, groups(4, of=8))
    with pytest.raises(TooManyFaults):
        window.check(3, groups(5, of=8))


def test_steps_before_the_last_ones_are_forgotten():
    window = FaultWindow(0.5, steps=2)
    for number, lost in enumerate((0, 0, 8)):
        window.check(number, groups(lost, of=8))
    with pytest.raises(TooManyFaults, match="lost 16 of 16"):
        window.check(3, groups(8, of=8))


def test_the_parts_of_a_step_are_one_step_of_the_window():
    window = FaultWindow(0.5, steps=2)
    for number in (1, 2):
        for lost in (0, 6, 2):
            window.check(number, groups(lost, of=8))
    with pytest.raises(TooManyFaults, match=r"lost 24 of 40 .* last 2 steps"):
        for _ in range(2):
            window.check(3, groups(8, of=8))


def test_one_bad_source_is_not_hidden_by_a_good_one_and_does_not_blame_it():
    with pytest.raises(TooManyFaults, match="source=math lost 6 of 6"):
        FaultWindow(0.5, steps=2).check(1, groups(0, of=50) + groups(6, of=6, source="math"))


def test_a_source_with_few_groups_is_not_judged_by_one_failed_request():
    window = FaultWindow(0.5, steps=5)
    for number in range(1, MIN_GROUPS):
        window.check(number, groups(2, of=2))
    with pytest.raises(TooManyFaults, match="lost 6 of 6"):
        window.check(MIN_GROUPS, groups(2, of=2))


def test_a_source_with_few_groups_is_judged_once_the_window_is_full():
    window = FaultWindow(0.5, steps=2)
    window.check(1, groups(2, of=2))
    with pytest.raises(TooManyFaults, match="lost 4 of 4"):
        window.check(2, groups(2, of=2))


def test_a_step_without_a_fault_stops_nothing():
    window = FaultWindow(0.5, steps=3)
    with pytest.raises(TooManyFaults):
        window.check(1, groups(8, of=8))
    window.check(2, groups(0, of=2))


def test_a_limit_of_one_never_stops_a_run():
    FaultWindow(1.0, steps=2).check(1, groups(8, of=8))


def test_the_message_names_the_tool_and_its_last_error():
    with pytest.raises(TooManyFaults) as raised:
        FaultWindow(0.1, steps=1).check(1, faults_by_group(step(3, of=8)))
    for part in ("source=nq", "3 of 8", "0.1", "tool=search", "last error: fault 2", "doctor"):
        assert part in str(raised.value)


def test_a_batch_without_a_token_to_train_says_why():
    assert nothing_to_train(step(3, of=4)) is None
    late = replace(trajectory(), trained_tokens=0, stop_reason=str(StopReason.DEADLINE))
    assert nothing_to_train([*step(2, of=2), late]) == (
        "stop reasons={'infra_error': 2, 'deadline': 1}, tool=search, last error: fault 1"
    )
    assert nothing_to_train([late]) == "stop reasons={'deadline': 1}, no fault"


@pytest.mark.parametrize("seen", [0.2, float("inf"), float("nan")])
def test_what_is_above_a_limit_or_no_number_exceeds_it(seen: float):
    assert exceeds(seen, 0.1)
    assert not exceeds(seen, None)
    assert not exceeds(0.1, 0.1)


def test_the_first_exception_of_a_loop_is_named_with_its_row():
    assert loop_error(step(3, of=4)) is None
    raised = trajectory("KeyError: 'k'", "math", trace="Traceback ...\nKeyError: 'k'")
    assert loop_error([*step(1, of=2), raised]) == "source=math row_id=math:0: KeyError: 'k'"


def test_a_trajectory_as_its_loop_left_it_does_not_drift():
    for rollout in (rolled_out(), rolled_out("dead"), rolled_out("raised", trace="t")):
        assert drift(rollout) == []


@pytest.mark.parametrize(
    ("fault", "changes", "problem"),
    [
        (
            "dead",
            {"response_mask": [1, 0, 0, 0, 0], "trained_tokens": 1},
            "a lost trajectory has mask 1",
        ),
        # without state masking every token is in the loss, and words are still checked
        (
            None,
            {
                "response_ids": [99, 1, 2, 3, 4],
                "response_mask": [1] * 5,
                "trained_tokens": 5,
                "state_masking": False,
            },
            "tokens from 0 say",
        ),
        (
            None,
            {"response_mask": [1, 1, 0, 1, 0], "trained_tokens": 3},
            "mask 1 is not on the 2 sampled tokens",
        ),
        (None, {"trained_tokens": 3}, "2 bits are 1, its loop counted 3"),
        (None, {"log_probs": [-0.5, 0.0, 0.0, 0.0]}, "5 ids, 5 bits, 4 log-probs"),
    ],
)
def test_what_differs_from_the_loop_is_noticed(fault, changes, problem):
    assert drift(rolled_out(fault), **changes)[0].startswith(problem)


def test_without_state_masking_all_bits_may_be_one():
    assert drift(rolled_out(), response_mask=[1] * 5, trained_tokens=5, state_masking=False) == []


def test_event_loops_that_run_late_are_named_with_what_to_do():
    assert late_loops(None) is late_loops(0.0) is late_loops(MOST_LAG_S) is None
    words = late_loops(0.75) or ""
    assert "mixed/loop_lag_s/p99=0.75" in words and "rollout.agent.num_workers" in words
