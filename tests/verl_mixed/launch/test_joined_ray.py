"""Which Ray a run uses on a machine where `ray start` was typed before, with real Rays."""

import io
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from tests.fakes.ray_head import ray_head
from tests.verl_mixed.conftest import RunEnviron
from verl_mixed.launch.launcher import train

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PROBE = (sys.executable, "-m", "tests.fakes.ray_probe_trainer")
STALE = "127.0.0.1:1"


@pytest.fixture
def tmpdir_of_ray() -> Iterator[Path]:
    """TMPDIR of a `ray start` and of the runs after it; short, because Ray makes sockets below."""
    folder = Path(tempfile.mkdtemp(prefix="vm", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def started_by_hand(tmpdir_of_ray: Path) -> Iterator[str]:
    """The address of a Ray that `ray start --head` started and recorded."""
    settings = {"RAY_AUTH_MODE": "disabled", "TMPDIR": str(tmpdir_of_ray)}
    # by "block forever" it has recorded its address
    with ray_head("--num-cpus=16", "--num-gpus=1", environ=settings, until="block forever"):
        yield (tmpdir_of_ray / "ray" / "ray_current_cluster").read_text()


def joined_by(environ: RunEnviron, tmpdir: Path, **settings: str) -> tuple[str, str]:
    """The address of the Ray that a start uses, and its screen."""
    handlers = {number: signal.getsignal(number) for number in (2, 15, 1)}
    screen = io.StringIO()
    answer = Path("runs/trial/joined")
    answer.unlink(missing_ok=True)
    try:
        train(
            ["ray_kwargs.ray_init.include_dashboard=false"] * ("RAY_ADDRESS" not in settings),
            environ | {"TMPDIR": str(tmpdir)} | settings,
            trainer=PROBE,
            console=Console(file=screen, width=200, highlight=False, soft_wrap=True),
        )
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    log = Path("runs/trial/train.log")
    said = screen.getvalue() + (log.read_text() if log.exists() else "")
    assert answer.exists(), said
    return answer.read_text(), screen.getvalue()


def test_an_address_that_an_earlier_ray_left_neither_fails_a_run_nor_is_joined(
    run_environ: RunEnviron, tmpdir_of_ray: Path
) -> None:
    record = tmpdir_of_ray / "ray" / "ray_current_cluster"
    record.parent.mkdir()
    record.write_text(STALE)

    address, screen = joined_by(run_environ, tmpdir_of_ray)

    assert address != STALE
    assert STALE not in screen
    assert record.read_text() == STALE


@pytest.mark.algorithm  # ./run_tests.sh --long: it asks a live head, which has 20 s to answer
def test_a_ray_that_was_started_by_hand_is_named_and_joined_when_ray_address_says_so(
    run_environ: RunEnviron, tmpdir_of_ray: Path, started_by_hand: str
) -> None:
    own, screen = joined_by(run_environ, tmpdir_of_ray)

    assert own != started_by_hand
    assert (
        f"ray          found {started_by_hand}, started by hand; this run starts its own" in screen
    )
    assert f"RAY_ADDRESS={started_by_hand} joins it" in screen

    # in a `ray job submit` with variables, which ray.init refuses to take a second time
    job = {"runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1", "NCCL_DEBUG": "WARN"}}}
    as_a_job = {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job)} | job["runtime_env"]["env_vars"]
    address, screen = joined_by(run_environ, tmpdir_of_ray, RAY_ADDRESS="auto", **as_a_job)

    assert address == started_by_hand
    assert f"cluster      {started_by_hand} (1 nodes)" in screen and "started by hand" not in screen
