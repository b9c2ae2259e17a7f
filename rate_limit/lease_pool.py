"""The leased slots of one process, and its waiting callers. Pure; `leases` has the rules."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from rate_limit.gcra import SECOND_NS, LimiterTimeout, Rate
from rate_limit.leases import Answer, Ask, Want, split_burst
from rate_limit.snapshot import ABANDONED, GRANTED, REFUSED, of_passed


class Slot(NamedTuple):
    """A leased slot, on the clock of the process."""

    from_ns: int
    until_ns: int
    """The slot must be taken by this time."""

    n: int


@dataclass(slots=True, eq=False)
class Caller:
    """A caller of this process that waits or has a slot."""

    n: int
    source: str
    entered_ns: int
    timeout_s: float | None
    wake: Callable[[], object]
    id: int = 0
    slot: Slot | None = None
    error: Exception | None = None

    @property
    def deadline_ns(self) -> int | None:
        timeout_s = self.timeout_s
        return None if timeout_s is None else self.entered_ns + int(timeout_s * SECOND_NS)

    def want(self, now_ns: int) -> Want:
        deadline_ns = self.deadline_ns
        left_ns = None if deadline_ns is None else max(0, deadline_ns - now_ns)
        return Want(self.id, self.source, self.n, left_ns)


class LeasePool:
    """The slots that one process has leased, and its waiting callers.

    Every method takes the time of the process. It is not safe with threads; the owner locks it.
    """

    def __init__(self, name: str, rate: Rate):
        _, self._linger_ns = split_burst(rate)
        self._most_spare = self._linger_ns * rate.parts_per_ns // rate.interval_parts
        self._name = name
        self._ids = count(1)
        self._unasked: dict[int, Caller] = {}
        self._asked: dict[int, Caller] = {}
        self._leaving: dict[int, Caller] = {}  # the keeper must be told that they left
        self._told: dict[int, Caller] = {}  # the keeper is being told
        self._sources: defaultdict[str, _Source] = defaultdict(_Source)
        self._fresh = True
        self._epoch = 0
        self._round_trip_ns = 0

    @property
    def must_ask(self) -> bool:
        """Whether there is a request or a report for the keeper now."""
        return bool(self._unasked or self._leaving) or any(
            source.is_low for source in self._sources.values()
        )

    @property
    def must_listen(self) -> bool:
        """Whether the keeper may have answers."""
        return bool(self._asked) or any(source.left for source in self._sources.values())

    @property
    def must_report(self) -> bool:
        return any(source.left or source.counts for source in self._sources.values())

    def pass_now(self, n: int, source_name: str, now_ns: int) -> bool:
        """Let n calls pass with a spare slot, if there is one."""
        source = self._sources.get(source_name)
        if source is None or not source.left:
            return False
        slot = source.first(n, now_ns)
        if slot is None or slot.from_ns > now_ns:
            return False
        source.take(n)
        source.counts[GRANTED] += n
        return True

    def is_low(self, source_name: str) -> bool:
        return self._sources[source_name].is_low

    def enter(self, caller: Caller, now_ns: int) -> None:
        """Give a caller a near spare slot, or let it wait for the keeper."""
        source = self._sources[caller.source]
        slot, deadline_ns = source.first(caller.n, now_ns), caller.deadline_ns
        if slot is None or (deadline_ns is not None and slot.from_ns > deadline_ns):
            caller.id = next(self._ids)
            self._unasked[caller.id] = caller
            return
        source.take(caller.n)
        self._settle(caller, slot._replace(n=caller.n))

    def leave(self, caller: Caller, now_ns: int) -> None:
        """Remove a caller; the next caller gets its slot."""
        if caller.slot is not None:
            self._sources[caller.source].give_back(caller.slot, now_ns)
        elif self._unasked.pop(caller.id, None) is None and self._asked.pop(caller.id, None):
            self._leaving[caller.id] = caller

    def passed(self, caller: Caller, now_ns: int) -> float:
        """Count a caller that passed; returns the seconds it waited."""
        waited_s = max(0, now_ns - caller.entered_ns) / SECOND_NS
        self._sources[caller.source].counts.update(of_passed(caller.n, waited_s))
        return waited_s

    def refused(self, caller: Caller) -> None:
        self._sources[caller.source].counts[REFUSED] += caller.n

    def ask(self, now_ns: int) -> Ask:
        """The next request and report to the keeper; `served` takes the answer."""
        wants = [caller.want(now_ns) for caller in self._unasked.values()]
        self._asked.update(self._unasked)
        self._told, self._leaving, self._unasked = self._leaving, {}, {}
        far = 2 * self._round_trip_ns > self._linger_ns  # spare slots would arrive too late
        spare: dict[str, int] = {}
        counts: dict[str, Counter[int]] = {}
        for name, source in self._sources.items():
            source.first(0, now_ns)  # drops slots whose time has passed
            if source.is_low or not source.left:
                worth = source.worth(now_ns, self._linger_ns, self._most_spare)
                if worth and not far:
                    spare[name] = worth
            if source.counts:
                counts[name], source.counts = source.counts, Counter()
        return Ask(self._fresh, wants, list(self._told), spare, counts)

    def served(self, answer: Answer, asked_ns: int, now_ns: int) -> None:
        """Apply the answer to `ask`."""
        self._round_trip_ns = now_ns - asked_ns
        self._fresh = False
        self.hear(answer, asked_ns, now_ns)
        self._told = {}
        for name, delay_ns, n in answer.spare:
            source = self._sources[name]
            slot = self._slot(delay_ns, n, asked_ns, now_ns)
            if slot.from_ns > slot.until_ns:  # no caller waits for it, so it must not be used late
                source.counts[ABANDONED] += n
                continue
            source.give_back(slot, now_ns)
            source.low = source.left // 2
        for caller in list(self._unasked.values()):  # these callers came during the request
            del self._unasked[caller.id]
            self.enter(caller, now_ns)

    def hear(self, answer: Answer, asked_ns: int, now_ns: int) -> None:
        """Apply the keeper's answers to earlier requests; they were fetched at `asked_ns`."""
        if not answer.known:
            self.ask_again()
            return
        asked_ns += answer.held_ns
        if answer.epoch != self._epoch:
            self._epoch = answer.epoch
            for source in self._sources.values():
                source.void()
        for key, delay_ns in answer.granted:
            if caller := self._asked.pop(key, None):
                self._settle(caller, self._slot(delay_ns, caller.n, asked_ns, now_ns))
            elif caller := self._leaving.pop(key, None) or self._told.pop(key, None):
                slot = self._slot(delay_ns, caller.n, asked_ns, now_ns)
                self._sources[caller.source].give_back(slot, now_ns)
        for key, delay_ns in answer.refused:
            if caller := self._asked.pop(key, None):
                caller.error = self._too_far(caller, now_ns + delay_ns)
                caller.wake()

    def ask_again(self) -> None:
        """Request again for all waiting callers in order, because the keeper lost its state."""
        self._unasked = {**self._asked, **self._unasked}
        self._asked, self._leaving, self._told = {}, {}, {}
        self._fresh = True

    def fail(self, error: Exception) -> None:
        """Give the error to all waiting callers."""
        waiting = [*self._asked.values(), *self._unasked.values()]
        self._asked, self._unasked = {}, {}
        for caller in waiting:
            caller.error = error
            caller.wake()

    def _slot(self, delay_ns: int, n: int, asked_ns: int, now_ns: int) -> Slot:
        # The keeper replied between `asked_ns` and `now_ns`. The later time is safe for the start,
        # the earlier one for the end.
        return Slot(now_ns + delay_ns, asked_ns + delay_ns + self._linger_ns, n)

    def _settle(self, caller: Caller, slot: Slot) -> None:
        self._sources[caller.source].used += caller.n
        caller.slot = slot
        caller.wake()

    def _too_far(self, caller: Caller, slot_ns: int) -> LimiterTimeout:
        deadline_ns = caller.deadline_ns
        assert deadline_ns is not None
        return LimiterTimeout(
            f"no slot for n={caller.n} calls from limiter {self._name!r}: the next is "
            f"{(slot_ns - caller.entered_ns) / SECOND_NS:.3f} s away, beyond "
            f"timeout_s={(deadline_ns - caller.entered_ns) / SECOND_NS}; "
            "wait longer or raise the rate"
        )


class _Source:
    """The spare slots of one source in a process, and its counts to report."""

    def __init__(self) -> None:
        self.slots = deque[Slot]()  # in order of time
        self.left = 0
        self.low = -1
        """With at most this many slots left, more are requested."""

        self.used = 0
        """Slots taken since `sized_ns`."""

        self.sized_ns = 0
        self.counts = Counter[int]()

    @property
    def is_low(self) -> bool:
        return self.left <= self.low

    def first(self, n: int, now_ns: int) -> Slot | None:
        """The next slot, if it has room for n calls."""
        while self.slots and self.slots[0].until_ns < now_ns:
            self._lose(self.slots.popleft().n)
        return self.slots[0] if self.slots and self.slots[0].n >= n else None

    def take(self, n: int) -> None:
        slot = self.slots[0]
        if slot.n == n:
            self.slots.popleft()
        else:
            self.slots[0] = slot._replace(n=slot.n - n)
        self.left -= n
        self.used += n

    def give_back(self, slot: Slot, now_ns: int) -> None:
        """Add a spare slot, unless its time has passed."""
        if slot.until_ns < now_ns:
            self.counts[ABANDONED] += slot.n
            return
        if self.slots and slot < self.slots[-1]:
            self.slots = deque(sorted([*self.slots, slot]))
        else:
            self.slots.append(slot)
        self.left += slot.n

    def void(self) -> None:
        self.slots.clear()
        self._lose(self.left)

    def worth(self, now_ns: int, linger_ns: int, most: int) -> int:
        """The number of further spare slots that will likely be used in half of their lifetime."""
        elapsed_ns = max(1, now_ns - self.sized_ns)
        likely = self.used * linger_ns // (2 * elapsed_ns)
        worth = min(2 * self.used, likely, most) - self.left
        self.used, self.sized_ns, self.low = 0, now_ns, -1
        return max(0, worth)

    def _lose(self, n: int) -> None:
        self.left -= n
        self.counts[ABANDONED] += n
