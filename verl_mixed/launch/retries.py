"""Going on after a failure: whether a resume can mend it, and waiting for room on the cluster.

A launcher that was killed cannot decide anything. The script of its tmux session starts it again,
with `KILLED` in the environment, and the new launcher goes on where the old one's count stopped:
the count is in the run's folder as long as the run is to be kept up.
"""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from cluster.placement import need_of, placement_problems
from cluster.ray_cluster import ClusterUnreachable, RayCluster, ask
from config.disk import write_whole
from config.lookup import at
from verl_mixed.launch.failure import RunFailed, RunStopped
from verl_mixed.launch.plan import Plan
from verl_mixed.run.text import clock

KILLED = "VERL_MIXED_KILLED"
"""Environment variable with the exit code of the launcher that was killed, as a shell gives it."""

PAUSE_S = 10.0
"""Before the first retry. Each failure without a step in between doubles it, up to `LONGEST_S`."""

LONGEST_S = 300.0

NODES_S = 3600.0
"""How long the nodes of a cluster, and room on them, are waited for."""

ASK_EVERY_S = 5.0

_VARYING = re.compile(r"0x[0-9a-f]+|\d+")


class Retries:
    """Decides after each failure of a run whether it is started again.

    Args:
        most: how often it may be.
        say: prints a line.
        memory: file that keeps the count for the launcher after this one.
        record: file that gets a line for each failure, and stays.
        is_stopped: whether `verl-mixed stop`, or a signal, asked the run to stop.
        sleep, now: for tests.
    """

    def __init__(
        self,
        most: int,
        say: Callable[[str], None],
        *,
        memory: Path | None = None,
        record: Path | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most, self._say, self._sleep, self._now = most, say, sleep, now
        self._memory, self._record, self._is_stopped = memory, record, is_stopped
        self._used = 0
        self._idle = 0
        self._before: tuple[str, int] | None = None

    def begin(self) -> None:
        """Count from 0, because a person started the run."""
        if self._most:
            self._write()

    def recall(self) -> bool:
        """Take over the count of the launcher before this one; False if the run was stopped."""
        try:
            text = (self._memory or Path(os.devnull)).read_text()
            state = json.loads(text)
            self._used, self._idle = int(state["used"]), int(state["idle"])
            self._before = (state["cause"], int(state["step"])) if state["cause"] else None
        except FileNotFoundError:
            return False
        except (ValueError, KeyError, TypeError):
            pass  # the launcher was killed while it wrote the first count
        return True

    def end(self) -> None:
        """Forget the count: the run has ended, and a launcher after this one must not go on."""
        if self._memory:
            self._memory.unlink(missing_ok=True)

    def _write(self) -> None:
        if self._memory is None:
            return
        cause, step = self._before or ("", 0)
        state = {"used": self._used, "idle": self._idle, "cause": cause, "step": step}
        write_whole(self._memory, [json.dumps(state).encode()])

    def _note(self, failure: RunFailed, refusal: str | None) -> None:
        if self._record is None:
            return
        line = {
            "time": time.time(),
            "step": failure.step,
            "cause": failure.cause,
            "retry": None if refusal else self._used + 1,
            "refusal": refusal,
        }
        with self._record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def go_on(self, failure: RunFailed, plan: Plan, environ: Mapping[str, str]) -> bool:
        """Wait until the run can be started again; False if it is not started again.

        A failure that no resume can mend ends the run, and so does the same failure at the same
        step twice in a row.

        Raises:
            RunStopped: the run was asked to stop while it waited.
        """
        if not self._most:
            return False
        self._leave_if_stopped(failure)
        this = (_VARYING.sub("#", failure.cause), failure.step)
        reason = None
        if not failure.mends:
            reason = "a resume cannot mend this failure"
        elif this == self._before:
            reason = f"this failure came twice at step {failure.step}"
        elif self._used == self._most:
            reason = f"it was started again {self._most} times"
        self._note(failure, reason)
        if reason:
            self._say(f"not started again: {reason}")
            return False
        self._idle = self._idle + 1 if self._before and self._before[1] == failure.step else 0
        self._before = this
        self._used += 1
        self._write()
        pause = min(PAUSE_S * 2**self._idle, LONGEST_S)
        self._say(
            f"retry {self._used} of {self._most} in {clock(pause)}, after step {failure.step}: "
            f"{failure.cause}"
        )
        self._sleep(pause)
        self._leave_if_stopped(failure)
        return plan.cluster is None or self._wait_for_room(plan.cluster, plan, environ, failure)

    def _leave_if_stopped(self, failure: RunFailed) -> None:
        if self._is_stopped():
            raise RunStopped(
                f"stopped after step {failure.step}, as asked, between two starts; before "
                f"that it failed: {failure.cause}"
            )

    def _wait_for_room(
        self, address: str, plan: Plan, environ: Mapping[str, str], failure: RunFailed
    ) -> bool:
        """Wait until the nodes are there, and the killed run's own job and actors are not.

        verl fails at once if a GPU is still taken. Other runs of the cluster are no reason to wait
        where there is room beside them.
        """
        deadline = self._now() + NODES_S
        said = ""
        while True:
            try:
                words = _why_no_room(ask(address, environ=environ), plan)
            except ClusterUnreachable as error:
                words = str(error)
            if not words:
                return True
            if self._now() > deadline:
                self._say(f"not started again: after {clock(NODES_S)} {words}")
                return False
            if words != said:
                self._say(f"waiting for the cluster: {words}")
                said = words
            self._sleep(ASK_EVERY_S)
            self._leave_if_stopped(failure)


def _why_no_room(cluster: RayCluster, plan: Plan) -> str:
    """Why the run cannot start on the cluster now; empty if it can."""
    wanted, there = int(at(plan.config, "trainer.nnodes")), len(cluster.nodes)
    if there < wanted:
        return f"{there} of {wanted} nodes are there"
    if own := [job for job in cluster.jobs if str(plan.folder.config) in job]:
        return f"its job has not ended yet: {'; '.join(own)}"
    if (need := need_of(plan.config)) is None:
        return ""
    if problems := placement_problems(need, [node.free for node in cluster.nodes]):
        return f"others use it: {problems[0]}"
    return ""


def killed_launcher(environ: Mapping[str, str], step: int) -> RunFailed | None:
    """The end of the launcher before this one, if a signal killed it and this one replaces it."""
    if not (code := environ.get(KILLED, "")).isdecimal():
        return None
    name = f"signal {int(code) - 128}"
    with suppress(ValueError):
        name = signal.Signals(int(code) - 128).name
    return RunFailed(f"the launcher was killed by {name}", step=step)
