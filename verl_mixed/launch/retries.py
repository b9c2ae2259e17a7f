"""Going on after a failure: whether a resume can mend it, and waiting for the cluster's nodes."""

import re
import time
from collections.abc import Callable, Mapping

from cluster.ray_cluster import ClusterUnreachable, ask
from config.lookup import at
from verl_mixed.launch.failure import RunFailed
from verl_mixed.launch.plan import Plan
from verl_mixed.run.text import clock

PAUSE_S = 10.0
"""Before the first retry. Each failure without a step in between doubles it, up to `LONGEST_S`."""

LONGEST_S = 300.0

NODES_S = 3600.0
"""How long the nodes of a cluster are waited for."""

ASK_EVERY_S = 5.0

_VARYING = re.compile(r"0x[0-9a-f]+|\d+")


class Retries:
    """Decides after each failure of a run whether it is started again.

    Args:
        most: how often it may be.
        say: prints a line.
        sleep, now: for tests.
    """

    def __init__(
        self,
        most: int,
        say: Callable[[str], None],
        *,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most, self._say, self._sleep, self._now = most, say, sleep, now
        self._used = 0
        self._idle = 0
        self._before: tuple[str, int] | None = None

    def go_on(self, failure: RunFailed, plan: Plan, environ: Mapping[str, str]) -> bool:
        """Wait until the run can be started again; False if it is not started again.

        A failure that no resume can mend ends the run, and so does the same failure at the same
        step twice in a row.
        """
        if not self._most:
            return False
        this = (_VARYING.sub("#", failure.cause), failure.step)
        reason = None
        if not failure.mends:
            reason = "a resume cannot mend this failure"
        elif this == self._before:
            reason = f"this failure came twice at step {failure.step}"
        elif self._used == self._most:
            reason = f"it was started again {self._most} times"
        if reason:
            self._say(f"not started again: {reason}")
            return False
        self._idle = self._idle + 1 if self._before and self._before[1] == failure.step else 0
        self._before = this
        self._used += 1
        pause = min(PAUSE_S * 2**self._idle, LONGEST_S)
        self._say(
            f"retry {self._used} of {self._most} in {clock(pause)}, after step {failure.step}: "
            f"{failure.cause}"
        )
        self._sleep(pause)
        return plan.cluster is None or self._wait_for_nodes(plan.cluster, plan, environ)

    def _wait_for_nodes(self, address: str, plan: Plan, environ: Mapping[str, str]) -> bool:
        wanted = int(at(plan.config, "trainer.nnodes"))
        deadline = self._now() + NODES_S
        said = ""
        while True:
            try:
                there = len(ask(address, environ=environ).nodes)
                words = f"{there} of {wanted} nodes are there"
            except ClusterUnreachable as error:
                there, words = 0, str(error)
            if there >= wanted:
                return True
            if self._now() > deadline:
                self._say(f"not started again: after {clock(NODES_S)} {words}")
                return False
            if words != said:
                self._say(f"waiting for the cluster: {words}")
                said = words
            self._sleep(ASK_EVERY_S)
