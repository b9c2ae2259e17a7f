"""The cause of a whole log comes first, before what followed from it and despite the noise."""

import pytest

from tests.verl_mixed.diagnose.whole_logs import LOGS, LOST, RAY, STEPS
from verl_mixed.diagnose.log_scan import Scan


def findings(log: str) -> list[tuple[str, str]]:
    scan = Scan()
    scan.read([log.encode()], "train.log")
    return [(finding.signature.id, finding.severity) for finding in scan.ordered()]


@pytest.mark.parametrize("name", LOGS)
def test_the_cause_of_a_whole_log_comes_first(name: str) -> None:
    cause, log = LOGS[name]

    assert findings(log)[:1] == [(cause, "fatal")]


def test_the_noise_alone_is_no_finding() -> None:
    assert findings(RAY + STEPS * 3) == []


def test_what_ends_after_the_run_was_complete_is_a_warning() -> None:
    complete = "(TaskRunner pid=4711) ('Final validation metrics: '\n"

    assert findings(RAY + STEPS + complete + LOST) == [("worker-lost", "warning")]
    again = "ray init kwargs: {'num_cpus': 16}\n" + RAY + LOST
    assert findings(RAY + STEPS + complete + again) == [("worker-lost", "fatal")]
