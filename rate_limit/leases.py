"""A rate for many processes with unrelated clocks: a keeper leases slots to them. Pure: no Ray.

The `Keeper` reserves slots (gcra) on its own clock, in the order of requests or by fair shares, at
most `HORIZON_NS` ahead. Each process has a `LeasePool`. It requests a slot for each waiting caller
and, if calls come fast, spare slots for later calls. Messages contain delays, never times.

In no window of length t do more than burst + rate * t calls pass, over all processes:

- A slot for instant T is sent as `delay = T - replied`. It may be used from `received + delay`,
  which is never before T. A caller must take it by `asked + held + delay + linger`, which is never
  after T + linger, because the keeper replied after `asked + held` and before `received`.
- So the calls that pass in a window of length t have their instants T in a window of length
  t + linger, and the keeper reserves with the burst less rate * linger (`split_burst`).
- A keeper that lost its state starts with a bucket that is empty at now + `HORIZON_NS`. All slots
  leased before are earlier than that.

Example: 10 calls a second, burst 11. The linger is 0.25 s, in which 2.5 calls are earned. So 3
calls of the burst are kept back, and the keeper reserves with a burst of 8. A process asks at
100.00 s of its clock. The request travels 5 ms. The keeper grants the slot of its
instant T, 40 ms ahead, and sends the delay 0.04 s. The process gets the answer at 100.02 s.

- The process knows that the keeper replied between 100.00 and 100.02 s. In truth it was 100.005 s,
  so T is 100.045 s of the process's clock.
- The slot may be used from 100.02 + 0.04 = 100.06 s. This is after T.
- It must be taken by 100.00 + 0.04 + 0.25 = 100.29 s. This is before T + 0.25 s = 100.295 s.
- Calls of a window of 1 s have their instants T in 1.25 s: at most 8 + 10 * 1.25 = 20.5 calls. The
  limit allows 11 + 10 * 1 = 21.

The limit holds for the taken slots: a caller that gets the answer or wakes more than `linger` late
passes late. If `linger` is 0 (a burst below 3, or a minimum interval between calls), there are no
spare slots. Spare slots that are not taken in time are lost; a process holds at most rate * linger
of them per source.

Fair shares: the callers of a source form a queue, and the queue that was served least for its
weight is served next. Sources without a weight form one common queue, with the weight of "" or else
the smallest weight. An idle source saves nothing: it continues level with the others.

Source: start-time fair queueing: Goyal, Vin and Cheng 1996. Leases: Gray and Cheriton 1989.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rate_limit.gcra import (
    FULL_PACE,
    SECOND_NS,
    GcraState,
    Rate,
    Throttle,
    drained,
    idle,
    overloaded,
    pace_at,
    penalise,
    reserve,
)
from rate_limit.snapshot import ABANDONED, WAITING, Snapshot, SourceSnapshot

HORIZON_NS = SECOND_NS // 20
"""How far ahead slots are granted; pauses and newly active sources affect all later slots."""

SILENCE_NS = 3 * SECOND_NS
"""A process that was silent for this time counts as dead, and its callers lose their places."""

_LONGEST_LINGER_NS = SECOND_NS // 4
_BATCH_NS = SECOND_NS // 1000  # spare slots are granted together, as many as this time earns
_MINUTE_S = 60


class Limits(NamedTuple):
    """The limits, the same for all processes that share a limiter."""

    rate: Rate
    adaptive: bool = False

    def __str__(self) -> str:
        return f"{self.rate} adaptive={self.adaptive}"


def split_burst(rate: Rate) -> tuple[Rate, int]:
    """Split the burst: (the rate for reservations, the time in ns that a slot may linger)."""
    quarter = -(-_LONGEST_LINGER_NS * rate.parts_per_ns // rate.interval_parts)
    calls = 0 if rate.min_interval_ns else min(quarter, (rate.burst - 1) // 2)
    linger_ns = min(_LONGEST_LINGER_NS, calls * rate.interval_parts // rate.parts_per_ns)
    return replace(rate, burst=rate.burst - calls, shares=None), linger_ns


class Want(NamedTuple):
    """The request of a waiting caller."""

    id: int
    source: str
    n: int
    timeout_ns: int | None


class Ask(NamedTuple):
    """A message from a process to the keeper."""

    fresh: bool
    """The process starts again, so its earlier requests are void."""

    wants: list[Want]
    left: list[int]
    """Callers that left."""

    spare: dict[str, int]
    """Source -> number of spare slots requested."""

    counts: dict[str, Counter[int]]
    """Source -> what its calls did since the last report; see `rate_limit.snapshot`."""


class Answer(NamedTuple):
    """A message from the keeper to a process; delays are in nanoseconds from its creation."""

    known: bool = False
    """Whether the keeper knows what the process asked for before; else it must ask again."""

    epoch: int = 0
    """Spare slots of other epochs are void."""

    held_ns: int = 0
    """How long the keeper had been asked when it answered."""

    granted: tuple[tuple[int, int], ...] = ()
    """Caller and delay."""

    refused: tuple[tuple[int, int], ...] = ()
    """Caller and delay of the slot, which lies beyond its timeout."""

    spare: tuple[tuple[str, int, int], ...] = ()
    """Source, delay, slots."""


class Keeper:
    """Reserves the slots and decides who gets them. Every method takes the keeper's time."""

    def __init__(self, limits: Limits, now_ns: int, *, fresh: bool):
        """`fresh`: nobody kept this rate before, so the bucket is full."""
        self.limits = limits
        self.next_ns: int | None = None
        """When to `advance` at the latest; None when nobody waits."""

        self.news: set[str] = set()
        """Processes for which there is an answer."""

        self._rate, _ = split_burst(limits.rate)
        self._state = idle() if fresh else drained(now_ns + HORIZON_NS, self._rate)
        self._throttle = Throttle()
        per_batch = _BATCH_NS * self._rate.parts_per_ns // self._rate.interval_parts
        self._batch = max(1, min(per_batch, self._rate.burst))
        weights = dict(limits.rate.weights) or {"": 1}
        self._lines = {source: _Queue(weight) for source, weight in weights.items()}
        self._virtual = 0.0
        self._processes: dict[str, _Process] = {}
        self._totals: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self._seconds = deque[tuple[int, int]]()  # (second, slots granted in the second)
        self._wasted = 0

    def ask(self, process: str, ask: Ask, now_ns: int) -> Answer:
        """Take in what a process wants, and say what it gets at once."""
        for source, counts in ask.counts.items():
            self._totals[source].update(counts)
        if ask.fresh:
            for gone in [key for key in self._processes if self._is_silent(key, now_ns)]:
                self._forget(gone)
            self._forget(process)
            self._processes[process] = _Process(now_ns)
        elif process not in self._processes:
            return Answer()
        if ask.left:
            left = set(ask.left)
            self._drop(lambda place: place.process == process and place.want.id in left)
        for want in ask.wants:
            self._enter(process, want, now_ns)
        self.advance(now_ns)
        spare = tuple(
            (source, start_ns - now_ns, n)
            for source, wanted in ask.spare.items()
            for start_ns, n in self._grant_spare(source, wanted, now_ns)
        )
        return self.answer(process, now_ns)._replace(spare=spare)

    def answer(self, process: str, now_ns: int, held_ns: int = 0) -> Answer:
        """What there is for a process that asked before; called at least each `SILENCE_NS`."""
        self.news.discard(process)
        state = self._processes.get(process)
        if state is None:
            return Answer()
        state.heard_ns = now_ns
        granted = tuple((caller, start_ns - now_ns) for caller, start_ns in state.granted)
        refused = tuple((caller, start_ns - now_ns) for caller, start_ns in state.refused)
        state.granted, state.refused = [], []
        return Answer(True, self._throttle.epoch, held_ns, granted, refused)

    def advance(self, now_ns: int) -> None:
        """Grant the slots that are near."""
        self.next_ns = None
        while waiting := [line for line in self._lines.values() if line.places]:
            line = min(waiting, key=lambda line: line.tag)
            place = line.places[0]
            if self._is_silent(place.process, now_ns):
                self._forget(place.process)
                continue
            # More calls than a burst pass one by one; the caller gets the last slot.
            n = place.missing if place.missing <= self._rate.burst else 1
            start_ns, after = self._reserve(n, now_ns)
            last_ns = start_ns + self._rate.for_calls_ns(place.missing - n)
            if place.is_late(last_ns):
                self._drop(lambda other, late=place: other is late)
                self._refuse(place, last_ns)
            elif start_ns > now_ns + HORIZON_NS:
                self.next_ns = start_ns - HORIZON_NS // 2
                return
            else:
                self._grant(line, n, after, now_ns)
                line.backlog -= n
                place.missing -= n
                if not place.missing:
                    line.places.popleft()
                    self._processes[place.process].granted.append((place.want.id, start_ns))
                    self.news.add(place.process)

    def penalise(self, pause_ns: int, now_ns: int) -> None:
        """A server pushes back: no more slots before the pause is over, spare ones are void."""
        pushed, throttle = penalise(self._state, self._throttle, now_ns, pause_ns, self._rate)
        if pushed.tat_ns > self._state.tat_ns:  # near slots may still pass, so they count
            spaced_ns = max(pushed.spaced_ns, self._state.spaced_ns)
            self._state = pushed._replace(spaced_ns=spaced_ns)
        if throttle.epoch != self._throttle.epoch:
            self.news.update(self._processes)
        self._throttle = overloaded(throttle, now_ns) if self.limits.adaptive else throttle
        for place in self._drop(lambda place: place.is_late(throttle.paused_ns)):
            self._refuse(place, throttle.paused_ns)
        self.advance(now_ns)

    def snapshot(self, now_ns: int) -> Snapshot:
        """The counts so far; calls that use a lease are counted up to a second late."""
        totals = defaultdict(Counter[int], {s: Counter(n) for s, n in self._totals.items()})
        for line in self._lines.values():
            for place in line.places:
                totals[place.want.source][WAITING] += 1
        since = now_ns // SECOND_NS - _MINUTE_S
        minute = sum(slots for second, slots in self._seconds if second > since)
        rate = self.limits.rate
        return Snapshot(
            per_minute=rate.per_minute,
            burst=rate.burst,
            granted=self._state.granted,
            utilisation=minute / rate.per_minute,
            penalties=self._throttle.penalties,
            rate_factor=pace_at(self._throttle, now_ns) / FULL_PACE,
            paused_s=max(0, self._throttle.paused_ns - now_ns) / SECOND_NS,
            abandoned=self._wasted + sum(counts[ABANDONED] for counts in totals.values()),
            sources={name: SourceSnapshot.of(totals[name]) for name in sorted(totals)},
        )

    def _line(self, source: str) -> "_Queue":
        return self._lines.get(source) or self._lines[""]

    def _reserve(self, n: int, now_ns: int) -> tuple[int, GcraState]:
        return reserve(self._state, now_ns, n, self._rate, pace_at(self._throttle, now_ns))

    def _enter(self, process: str, want: Want, now_ns: int) -> None:
        """Join the queue, unless the slot would be too late."""
        line = self._line(want.source)
        if not line.places:
            line.tag = max(line.tag, self._virtual)
        deadline_ns = None if want.timeout_ns is None else now_ns + want.timeout_ns
        place = _Place(process, want, deadline_ns, missing=want.n)
        if deadline_ns is not None:
            slot_ns = self._expected_ns(line, want.n, now_ns)
            if place.is_late(slot_ns):
                self._refuse(place, slot_ns)
                return
        line.places.append(place)
        line.backlog += want.n

    def _expected_ns(self, line: "_Queue", n: int, now_ns: int) -> int:
        """The time at which n calls that join a queue now would pass, if no other call comes."""
        tag = line.tag + line.backlog / line.weight
        ahead = line.backlog + sum(
            min(other.backlog, math.ceil(max(0.0, tag - other.tag) * other.weight))
            for other in self._lines.values()
            if other is not line
        )
        state, rate, pace = self._state, self._rate, pace_at(self._throttle, now_ns)
        if ahead:
            ahead_ns = rate.for_calls_ns(ahead) * FULL_PACE // pace
            state = state._replace(
                tat_ns=max(state.tat_ns, now_ns) + ahead_ns,
                spaced_ns=max(state.spaced_ns, now_ns) + ahead * rate.min_interval_ns,
            )
        return reserve(state, now_ns, n, rate, pace)[0]

    def _grant(self, line: "_Queue", n: int, after: GcraState, now_ns: int) -> None:
        self._state = after
        self._virtual = max(self._virtual, line.tag)
        line.tag += n / line.weight
        second = now_ns // SECOND_NS
        if self._seconds and self._seconds[-1][0] == second:
            n += self._seconds.pop()[1]
        self._seconds.append((second, n))
        while self._seconds[0][0] <= second - _MINUTE_S:
            self._seconds.popleft()

    def _grant_spare(self, source: str, wanted: int, now_ns: int) -> list[tuple[int, int]]:
        """(instant, slot) of spare slots."""
        slots: list[tuple[int, int]] = []
        line = self._line(source)
        line.tag = max(line.tag, self._virtual)
        while wanted and not any(line.places for line in self._lines.values()):
            n = min(wanted, self._batch)
            start_ns, after = self._reserve(n, now_ns)
            if start_ns > now_ns + HORIZON_NS:
                break
            self._grant(line, n, after, now_ns)
            slots.append((start_ns, n))
            wanted -= n
        return slots

    def _refuse(self, place: "_Place", slot_ns: int) -> None:
        self._processes[place.process].refused.append((place.want.id, slot_ns))
        self.news.add(place.process)

    def _is_silent(self, process: str, now_ns: int) -> bool:
        return now_ns - self._processes[process].heard_ns > SILENCE_NS

    def _forget(self, process: str) -> None:
        self._drop(lambda place: place.process == process)
        self._processes.pop(process, None)
        self.news.discard(process)

    def _drop(self, leaves: "Callable[[_Place], bool]") -> "list[_Place]":
        """Remove places from the queues; the partial slots of a caller of more than a burst are
        lost."""
        gone: list[_Place] = []
        for line in self._lines.values():
            gone_here = [place for place in line.places if leaves(place)]
            if gone_here:
                line.places = deque(place for place in line.places if not leaves(place))
                line.backlog -= sum(place.missing for place in gone_here)
            gone += gone_here
        self._wasted += sum(place.want.n - place.missing for place in gone)
        return gone


@dataclass(slots=True, eq=False)
class _Place:
    """A caller's place in a queue."""

    process: str
    want: Want
    deadline_ns: int | None
    missing: int
    """Calls that are not granted yet."""

    def is_late(self, slot_ns: int) -> bool:
        return self.deadline_ns is not None and slot_ns > self.deadline_ns


@dataclass(slots=True, eq=False)
class _Queue:
    """The queued callers of one source, or of the sources of the common queue."""

    weight: int
    places: deque[_Place] = field(default_factory=deque[_Place])
    backlog: int = 0
    """Calls requested by all of them."""

    tag: float = 0.0
    """Virtual time at which the first caller is served."""


@dataclass(slots=True, eq=False)
class _Process:
    """The keeper's record of a process."""

    heard_ns: int
    granted: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    refused: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
