"""How the end of a trainer is noticed and explained, with stand-ins for trainer and cluster."""

import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from verl_mixed.launch import watching
from verl_mixed.launch.failure import RunFailed
from verl_mixed.launch.watching import RunProcesses, watch_run
from verl_mixed.run.state import RunFolder

DIED = "the process of an actor died: SimpleStorageUnit (pid 9 on 10.0.0.2)"


class Screen(nullcontext[None]):
    """A view and a reader that show nothing."""

    def update(self, state: object) -> None: ...

    def read(self) -> None: ...

    def state(self) -> None: ...


def failure_of(folder: Path, code: int | None, lost: str = "", lost_actor: str = "") -> RunFailed:
    """The failure of a trainer that ended with a code, or hangs."""
    run = RunFolder(folder)
    run.log.write_text(
        "Traceback (most recent call last):\nOSError: no route\n"
        if code is not None
        else "step 3\n"
    )
    cluster = SimpleNamespace(lost=lost, lost_actor=lost_actor, explain=lambda reason: lost)
    trainer = SimpleNamespace(poll=lambda: code)
    running = RunProcesses(
        trainer=cast("subprocess.Popen[bytes]", trainer),
        log_start=0,
        server=None,
        cluster=cast(Any, cluster),
    )
    start = SimpleNamespace(action="begins again with step 1")
    plan: Any = SimpleNamespace(folder=run, total_steps=9, cluster="10.0.0.1:6379")
    plan.next_start = lambda: start
    with pytest.raises(RunFailed) as caught:
        watch_run(plan, running, cast(Any, Screen()), cast(Any, Screen()))
    return caught.value


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "LOST_NODE_S", 0.0)
    monkeypatch.setattr(watching, "POLL_S", 0.0)


def test_a_trainer_that_hangs_after_an_actor_died_is_ended_and_the_actor_named(tmp_path: Path):
    failure = failure_of(tmp_path, None, lost_actor=DIED)
    assert failure.cause == DIED
    assert failure.mends
    assert str(failure).startswith(DIED)


def test_an_actor_that_died_explains_an_end_and_a_lost_node_explains_both(tmp_path: Path):
    assert failure_of(tmp_path, 1, lost_actor=DIED).cause == DIED
    assert failure_of(tmp_path, 1, lost="lost node a", lost_actor=DIED).cause == "lost node a"
    assert failure_of(tmp_path, 1).cause == "OSError: no route"
