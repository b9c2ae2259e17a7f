"""What is said of a run that failed: the reason, and the verdict of `verl-mixed diagnose`."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verl_mixed.launch.watching import _why_failed

UNREACHABLE = "ConnectionError: Could not find any running Ray instance.\n"
UNKNOWN = (
    'Traceback (most recent call last):\n  File "/srv/reward.py", line 7, in f\nown.TornError: 7\n'
)


def why(log: str, folder: Path, cluster: str | None) -> Any:
    path = folder / "train.log"
    path.write_text(log)
    plan: Any = SimpleNamespace(folder=SimpleNamespace(log=path), cluster=cluster)
    running: Any = SimpleNamespace(log_start=0, cluster=None)
    return _why_failed(plan, running, 1)


@pytest.mark.parametrize("cluster", [None, "10.0.0.4:6379"])
def test_only_a_run_on_a_cluster_gets_advice_about_it(tmp_path: Path, cluster: str | None) -> None:
    said = why(UNREACHABLE, tmp_path, cluster)

    assert "the Ray head cannot be reached [ray-unreachable]\n  line:   Conn" in said.words
    assert ("setup_cluster.sh" in said.words) is (cluster is not None)
    assert said.cause == "the Ray head cannot be reached"


def test_an_error_that_no_signature_knows_is_told_too(tmp_path: Path) -> None:
    said = why(UNKNOWN, tmp_path, None)

    assert "  line:   own.TornError: 7\n  cause:" in said.words
    assert (said.cause, said.mends) == ("own.TornError: 7", True)


def test_a_failure_that_no_resume_mends_says_so(tmp_path: Path) -> None:
    assert not why("ModuleNotFoundError: No module named 'vllm'\n", tmp_path, None).mends
