"""Five minutes of benchmarks/kill_every_minute.py: a run ends by itself, with the right rows."""

from pathlib import Path

import pytest

from benchmarks.kill_every_minute import Outcome, lines_of, measure
from tests.nodes.site import Site

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.nodes,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(5400),
]


@pytest.fixture(scope="module")
def outcome(can_have_sites: None, demo: Path) -> Outcome:
    site = Site()
    try:
        found = measure(site, demo, minutes=5, seed=1)
    finally:
        site.close()
    print("\n".join(lines_of(found)))
    return found


def test_a_run_that_something_of_is_killed_every_minute_is_complete(outcome: Outcome):
    assert outcome.is_complete, outcome.screen[-4000:]


def test_kills_ended_attempts_and_each_was_followed_by_new_steps(outcome: Outcome):
    large = [kill for kill in outcome.kills if kill.is_large]
    assert large
    assert outcome.failures
    assert all(line["retry"] for line in outcome.failures)


def test_its_audit_is_clean(outcome: Outcome):
    assert outcome.audit_code == 0, outcome.audit


def test_each_step_trained_the_rows_of_a_run_that_nobody_disturbed(outcome: Outcome):
    assert sorted(outcome.rows) == list(range(1, len(outcome.rows) + 1))
    assert outcome.rows == outcome.undisturbed_rows
