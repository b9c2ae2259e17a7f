"""What every trajectory of this process waits for, and a log line for those that wait too long.

An `Activity` travels in a context variable, so that the tool client can say `limiter` or `tool`
without knowing whose call it makes. No verl.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Activity:
    """One trajectory under way."""

    source: str
    row_id: str
    turn: int = 0
    """From 1; 0 before the first."""

    waits_for: str = "start"
    """engine, limiter, tool or reward."""

    since: float = 0.0
    """When it began to wait, on the watchdog's clock."""

    reported_s: float = 0.0
    """How long it had waited when it was last logged."""


_current: ContextVar[Activity | None] = ContextVar("activity", default=None)


def waits_for(what: str, turn: int | None = None) -> None:
    """Note what the current trajectory waits for from now on; nothing without one.

    Args:
        what: engine, limiter, tool or reward.
        turn: the turn that begins, where one does.
    """
    activity = _current.get()
    if activity is None:
        return
    activity.waits_for, activity.since, activity.reported_s = what, time.monotonic(), 0.0
    if turn is not None:
        activity.turn = turn


@dataclass(slots=True)
class Watchdog:
    """Logs who is stuck.

    It ends nothing: deadlines do. A trajectory is named again each time its wait has doubled.

    Args:
        stuck_after_s: a longer wait for one thing is worth a line.
        clock: monotonic seconds, as `waits_for` takes them.
    """

    stuck_after_s: float
    clock: Callable[[], float] = time.monotonic
    under_way: dict[int, Activity] = field(default_factory=dict)

    @contextmanager
    def watch(self, source: str, row_id: str) -> Iterator[Activity]:
        """Follow one trajectory; what it waits for is said by `waits_for`."""
        activity = Activity(source=source, row_id=row_id, since=self.clock())
        token = _current.set(activity)
        self.under_way[id(activity)] = activity
        try:
            yield activity
        finally:
            del self.under_way[id(activity)]
            _current.reset(token)

    def report(self) -> list[str]:
        """Log who is stuck now, and return the lines."""
        now = self.clock()
        lines = []
        for activity in self.under_way.values():
            waited_s = now - activity.since
            if waited_s < max(self.stuck_after_s, 2 * activity.reported_s):
                continue
            activity.reported_s = waited_s
            lines.append(
                f"stuck source={activity.source} row_id={activity.row_id} turn={activity.turn} "
                f"waits_for={activity.waits_for} for_s={waited_s:.0f}"
            )
            logger.warning(lines[-1])
        return lines

    async def run(self) -> None:
        """Report for ever, four times in each `stuck_after_s`."""
        while True:
            await asyncio.sleep(self.stuck_after_s / 4)
            self.report()
