"""The sentence on what a step waited for, and why."""

from typing import Any

import pytest

from verl_mixed.views.pace import pace_words

LEAD = {"mixed/nq/lead/groups": 6.0, "mixed/math/lead/groups": 14.0}
FLIGHTS = {"mixed/nq/lead/flight_s": 40.0, "mixed/math/lead/flight_s": 2.0}
SETS = {"mixed/nq/lead/sets_pace": 1.0, "mixed/math/lead/sets_pace": 0.0}


def line(step: int, limit: str | None = None, **waits: float) -> dict[str, Any]:
    metrics = {f"mixed/{name}/reward/mean": 0.5 for name in ("nq", "math")}
    metrics |= {f"mixed/{name}/wait_s": seconds for name, seconds in waits.items()}
    if limit is not None:
        metrics |= LEAD | FLIGHTS | SETS | {"mixed/lead/step_s": 4.0}
        for name in ("training", "in_flight", "staleness", "fixed"):
            metrics[f"mixed/lead/limit/{name}"] = float(name == limit)
    return {"step": step, "time": 0.0, "metrics": metrics}


@pytest.mark.parametrize(
    ("limit", "why"),
    [
        (None, ""),
        ("training", "; training sets the pace, not the groups"),
        ("staleness", "; nq sets the pace: a group of it is in flight for 40.0 s, and its"),
        ("in_flight", "; the number of open groups sets the pace (num_warmup_batches); seconds"),
        ("fixed", "; the number of open groups sets the pace (mixed.lead); seconds in flight"),
    ],
)
def test_it_names_the_longest_waits_and_what_sets_the_pace(limit: str | None, why: str):
    lines = [line(1, limit, nq=4.0), line(2, limit, nq=2.0, math=0.5)]
    words = pace_words(lines)
    assert words is not None
    assert words.startswith("a step waited 3.0 s for nq, 0.2 s for math" + why)
    assert why or words.endswith("for math")


def test_nothing_is_said_of_steps_that_did_not_wait_or_say_nothing():
    assert pace_words([]) is None
    assert pace_words([line(1), line(2, nq=0.01)]) is None
