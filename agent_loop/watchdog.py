"""What every trajectory of this process waits for, and a log line for those that wait too long.

An `Activity` travels in a context variable, so that the tool client can say `limiter` or `tool`
without knowing whose call it makes. Work that several trajectories share has a `Company` there.
No verl.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
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

    def note(self, what: str, turn: int | None = None) -> None:
        self.waits_for, self.since, self.reported_s = what, time.monotonic(), 0.0
        if turn is not None:
            self.turn = turn


@dataclass(slots=True, eq=False)
class Company:
    """The trajectories that wait for the same work; they may come late and leave early."""

    _waits_for: str | None = None
    _present: "list[Activity | Company]" = field(default_factory=list)

    def note(self, what: str, turn: int | None = None) -> None:
        self._waits_for = what
        for each in self._present:
            each.note(what, turn)

    def start(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """A task whose `waits_for` speaks for all; it has none of the caller's context."""
        context = Context()
        context.run(_current.set, self)
        return context.run(asyncio.ensure_future, work)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """The current trajectory, if there is one, waits with the others."""
        activity = _current.get()
        if activity is None:
            yield
            return
        self._present.append(activity)
        if self._waits_for is not None:
            activity.note(self._waits_for)
        try:
            yield
        finally:
            self._present.remove(activity)


_current: ContextVar[Activity | Company | None] = ContextVar("activity", default=None)


def waits_for(what: str, turn: int | None = None) -> None:
    """Note what the current trajectory waits for from now on; nothing without one.

    Args:
        what: engine, limiter, tool or reward.
        turn: the turn that begins, where one does.
    """
    activity = _current.get()
    if activity is not None:
        activity.note(what, turn)


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
