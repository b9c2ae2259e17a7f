"""Records what each trajectory of this process waits for, and logs those that wait too long.

A context variable has the `Activity` of the current trajectory. So the tool client can record
`limiter`, `server` or `tool` without knowing the trajectory. Trajectories that wait for the work of
another one, or for work of all, follow its activity. No verl.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class Activity:
    """A running trajectory and what it waits for."""

    source: str
    row_id: str
    turn: int = 0
    """From 1; 0 before the first."""

    waits_for: str = "start"
    """start, engine, limiter, tool, server (a tool's server that is away or overloaded), agent (a
    program behind the gateway), reward, or what the caller of `waits_for` names."""

    since: float = 0.0
    """When the wait began, on the watchdog's clock."""

    reported_s: float = 0.0
    """Length of the wait when it was last logged."""

    clock: Callable[[], float] = time.monotonic
    waited_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """What it waited for -> seconds, without the wait that has not ended."""

    whole: "Activity | None" = None
    """That of which this one is a part; see `part_of_activity`."""

    followers: "list[Activity]" = field(default_factory=list)
    """Those that wait for what this one waits for; see `following`."""

    def note(self, what: str, turn: int | None = None) -> None:
        for activity in (self, *self.followers):
            activity._note(what, turn)

    def _note(self, what: str, turn: int | None) -> None:
        now = self.clock()
        self.waited_s[self.waits_for] += now - self.since
        self.waits_for, self.since, self.reported_s = what, now, 0.0
        if turn is not None:
            self.turn = turn
        if self.whole is not None:
            self.whole._note(what, turn)

    def waited_for_s(self, what: str) -> float:
        """Seconds that it waited for this, with a wait that has not ended."""
        now_s = self.clock() - self.since if self.waits_for == what else 0.0
        return self.waited_s.get(what, 0.0) + now_s


_current: ContextVar[Activity | None] = ContextVar("activity", default=None)


def activity_now() -> Activity | None:
    """The activity of the current trajectory; None if nobody records one."""
    return _current.get()


def start_for_all(work: Coroutine[Any, Any, T]) -> "tuple[asyncio.Task[T], Activity]":
    """Start work that is of no single trajectory, in a task that has none of the caller's context
    variables; and its activity, which those follow who wait for it."""
    activity = Activity(source="", row_id="", waits_for="")
    context = Context()
    context.run(_current.set, activity)
    return context.run(asyncio.ensure_future, work), activity


@contextmanager
def following(other: Activity | None) -> Iterator[None]:
    """The current trajectory, if there is one, waits inside for whatever another one waits for."""
    activity = _current.get()
    if activity is None or other is None or activity is other:
        yield
        return
    if other.waits_for:
        activity.note(other.waits_for)
    other.followers.append(activity)
    try:
        yield
    finally:
        other.followers.remove(activity)


@contextmanager
def current_activity(clock: Callable[[], float]) -> Iterator[Activity]:
    """The activity of the current trajectory; a new one if nobody watches the trajectory."""
    activity = _current.get()
    if activity is not None:
        yield activity
        return
    activity = Activity(source="", row_id="", since=clock(), clock=clock)
    token = _current.set(activity)
    try:
        yield activity
    finally:
        _current.reset(token)


@contextmanager
def part_of_activity() -> Iterator[Activity]:
    """The activity of a part of the current trajectory, for example of one of several calls side by
    side: only its own waits are in it, and they are recorded for the trajectory too."""
    whole = _current.get()
    clock = time.monotonic if whole is None else whole.clock
    part = Activity(source="", row_id="", since=clock(), clock=clock, whole=whole)
    token = _current.set(part)
    try:
        yield part
    finally:
        _current.reset(token)


@contextmanager
def unwatched() -> Iterator[None]:
    """Waits inside are not told apart: they are part of the wait that has begun."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


def waits_for(what: str, turn: int | None = None) -> None:
    """Record what the current trajectory, if there is one, waits for from now on, and the number of
    the turn, if one begins."""
    activity = _current.get()
    if activity is not None:
        activity.note(what, turn)


@dataclass(slots=True)
class Watchdog:
    """Logs trajectories that wait longer than `stuck_after_s` for one thing, and again each time
    the wait has doubled. Deadlines end them, not the watchdog."""

    stuck_after_s: float
    clock: Callable[[], float] = time.monotonic
    """Monotonic seconds, as used by `waits_for`."""

    under_way: dict[int, Activity] = field(default_factory=dict)

    @contextmanager
    def watch(self, source: str, row_id: str) -> Iterator[Activity]:
        """Watch one trajectory, whose waits are recorded by `waits_for`."""
        activity = Activity(source=source, row_id=row_id, since=self.clock(), clock=self.clock)
        token = _current.set(activity)
        self.under_way[id(activity)] = activity
        try:
            yield activity
        finally:
            del self.under_way[id(activity)]
            _current.reset(token)

    def report(self) -> list[str]:
        """Log the trajectories that are stuck now, and return the lines."""
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
