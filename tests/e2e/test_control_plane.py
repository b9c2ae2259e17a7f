"""The benchmark of the trainer process runs: verl's `fit`, with stand-ins for models."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.control_plane import RUN, exponents

pytestmark = [pytest.mark.slow, pytest.mark.algorithm]


def seen_of(**options: Any) -> dict[str, Any]:
    job = {"trainer": "mixed", "size": "6x2x64", "in_process": True, "update_s": 0.0, **options}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN, json.dumps(job)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.getcwd(), "PYTHONHASHSEED": "0"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_step_is_measured_by_part():
    seen = seen_of()
    assert {"prompts", "check and order", "accounts", "thread: sums over tokens"} <= {
        *seen["parts"]
    }
    assert 6 * 2 * 128 < seen["tokens"] <= 6 * 2 * (128 + 64)


def test_memory_is_read_after_every_so_many_steps_and_the_run_is_audited():
    seen = seen_of(steps=4, every=2)
    assert [step for step, _ in seen["marks"]] == [2, 4]
    assert seen["audit"] == 0 and seen["audit_bytes"] > 1 << 20


def test_exponents_of_a_known_cost():
    points = [(a, b, 1e-3 * a * b**0.5) for a in (16, 64) for b in (128, 512)]
    assert exponents(points) == "trajectories^1.00, tokens^0.50"
