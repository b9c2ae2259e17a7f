"""The law over many processes with clocks of their own, and fair shares: no Ray, no real time."""

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from rate_limit.gcra import SECOND_NS, Rate
from rate_limit.lease_pool import Caller, LeasePool
from rate_limit.leases import (
    HORIZON_NS,
    SILENCE_NS,
    Answer,
    Ask,
    Keeper,
    Limits,
    Want,
    split_burst,
)

MILLISECOND_NS = 10**6
BEGIN_NS = 10**12


class Cluster:
    """A keeper and processes in one true time; messages take as long as `delays_ns` says."""

    def __init__(self, limits: Limits, processes: int, delays_ns: list[int]):
        self.limits, self.now_ns = limits, BEGIN_NS
        self.keeper = Keeper(limits, self.now_ns, fresh=True)
        self.processes = [Process(self, f"p{place}") for place in range(processes)]
        self.passed: list[tuple[int, int]] = []  # instant, calls
        self.errors: list[Exception] = []
        self.asks: list[Ask] = []
        self._delays_ns, self._delayed = delays_ns, 0
        self._events: list[tuple[int, int, Callable[[], object]]] = []
        self._order = count()
        self._lives = 0

    def at(self, instant_ns: int, event: Callable[[], object]) -> None:
        heapq.heappush(self._events, (max(instant_ns, self.now_ns), next(self._order), event))

    def delay_ns(self) -> int:
        self._delayed += 1
        return self._delays_ns[self._delayed % len(self._delays_ns)]

    def run(self, until_ns: int) -> None:
        """Let everything happen that happens before `until_ns`."""
        while self._events and self._events[0][0] <= until_ns:
            self.now_ns, _, event = heapq.heappop(self._events)
            event()
            self.settle()
        self.now_ns = until_ns

    def restart_keeper(self) -> None:
        self.keeper = Keeper(self.limits, self.now_ns, fresh=False)
        self._lives += 1

    def send(self, ask: Ask, process: "Process") -> None:
        """To the keeper and back; what was under way when it died is lost."""
        self.asks.append(ask)
        life, asked_ns = self._lives, self.now_ns

        def arrive() -> None:
            if life != self._lives:
                process.pool.ask_again()
                process.asking = False
                return
            answer = self.keeper.ask(process.name, ask, self.now_ns)
            self.at(self.now_ns + self.delay_ns(), lambda: process.served(answer, asked_ns))

        self.at(self.now_ns + self.delay_ns(), arrive)

    def settle(self) -> None:
        """See to what follows from the last event."""
        if self.keeper.next_ns is not None:
            self.at(self.keeper.next_ns, self._advance)
        for process in self.processes:
            process.settle()
            if process.listens and process.name in self.keeper.news:
                self.collect(process)

    def collect(self, process: "Process") -> None:
        """Answer a question that was asked a second ago and a delay on its way."""
        answer = self.keeper.answer(process.name, self.now_ns, held_ns=SECOND_NS)
        asked_ns = self.now_ns - SECOND_NS - self.delay_ns()
        self.at(self.now_ns + self.delay_ns(), lambda: process.heard(answer, asked_ns))

    def _advance(self) -> None:
        if self.keeper.next_ns is not None and self.keeper.next_ns <= self.now_ns:
            self.keeper.advance(self.now_ns)


class Process:
    """A process: a lease pool on a clock that has nothing to do with the keeper's."""

    def __init__(self, cluster: Cluster, name: str):
        self.cluster, self.name = cluster, name
        self.offset_ns = 17 * SECOND_NS * int(name[1:])
        self.pool = LeasePool("x", cluster.limits.rate)
        self.asking = self.listens = False
        self.waiting: list[Caller] = []

    def clock_ns(self) -> int:
        return self.cluster.now_ns + self.offset_ns

    def call(self, n: int = 1, source: str = "", timeout_s: float | None = None) -> None:
        if self.pool.pass_now(n, source, self.clock_ns()):
            self.cluster.passed.append((self.cluster.now_ns, n))
            return
        caller = Caller(n, source, self.clock_ns(), timeout_s, lambda: self._told(caller))
        self.waiting.append(caller)
        self.pool.enter(caller, self.clock_ns())

    def cancel(self) -> None:
        """The caller that waits longest gives up."""
        if self.waiting:
            self.pool.leave(self.waiting.pop(0), self.clock_ns())

    def settle(self) -> None:
        if self.pool.must_ask and not self.asking:
            self.asking = True
            self.cluster.send(self.pool.ask(self.clock_ns()), self)

    def served(self, answer: Answer, asked_ns: int) -> None:
        if not self.listens:
            self._listen()
        self.asking, self.listens = False, True
        self.pool.served(answer, asked_ns + self.offset_ns, self.clock_ns())

    def heard(self, answer: Answer, asked_ns: int) -> None:
        self.pool.hear(answer, asked_ns + self.offset_ns, self.clock_ns())

    def _listen(self) -> None:
        """What a long poll does: be heard of each second, until killed."""
        if self in self.cluster.processes:
            if self.waiting:
                self.cluster.collect(self)
            self.cluster.at(self.cluster.now_ns + SECOND_NS, self._listen)

    def _told(self, caller: Caller) -> None:
        if caller.slot is None:
            assert caller.error is not None
            self.waiting.remove(caller)
            self.cluster.errors.append(caller.error)
            return
        self.cluster.at(caller.slot.from_ns - self.offset_ns, lambda: self._passes(caller))

    def _passes(self, caller: Caller) -> None:
        if caller in self.waiting:  # else it gave up
            self.waiting.remove(caller)
            self.cluster.passed.append((self.cluster.now_ns, caller.n))
            self.pool.passed(caller, self.clock_ns())


def assert_lawful(passed: list[tuple[int, int]], rate: Rate) -> None:
    """No window of length t holds more than burst + rate * t calls, to the nanosecond."""
    calls, farthest = 0, -(10**30)
    for instant_ns, n in sorted(passed):
        here = instant_ns * rate.parts_per_ns
        farthest = max(farthest, here - calls * rate.interval_parts)
        calls += n
        ahead = farthest - (here - (calls - rate.burst) * rate.interval_parts)
        assert ahead < rate.parts_per_ns  # instants are whole nanoseconds, rounded up


LIMITS = st.builds(
    lambda per_minute, burst, shares: Limits(
        Rate(per_minute=per_minute, burst=max(burst, len(shares) + 2), shares=shares)
    ),
    per_minute=st.sampled_from([77.0, 600.0, 6e4, 6e6]),
    burst=st.integers(1, 40),
    shares=st.sampled_from([{}, {"a": 3.0, "b": 1.0}]),
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["call"] * 6 + ["spell", "cancel", "kill", "restart", "pause"]),
        st.integers(0, 2),  # process
        st.sampled_from(["a", "b", ""]),
        st.sampled_from([None, None, 0.0, 0.05]),  # timeout
        st.integers(1, 3),  # calls
        st.sampled_from([0.0, 0.0, 0.01, 0.2, 0.9, 3.0]),  # then waits so many lingers
    ),
    min_size=1,
    max_size=60,
)


def play(limits: Limits, steps: list[Any], delays_ns: list[int]) -> Cluster:
    """All the steps, with three processes; a spell is calls one after another, each at once."""
    kept, linger_ns = split_burst(limits.rate)
    cluster = Cluster(limits, 3, delays_ns)
    for position, (what, place, source, timeout_s, n, lingers) in enumerate(steps):
        process = cluster.processes[place]
        if what == "call":
            process.call(min(n, kept.burst), source, timeout_s)
        elif what == "spell":
            for _ in range(30):
                process.call(1, source)
                cluster.run(cluster.now_ns + linger_ns // 40 + 1000)
        elif what == "cancel":
            process.cancel()
        elif what == "kill":
            cluster.processes[place] = Process(cluster, f"p{3 + position}")
        elif what == "restart":
            cluster.restart_keeper()
        else:
            cluster.keeper.penalise(n * linger_ns, cluster.now_ns)
        cluster.settle()
        cluster.run(cluster.now_ns + int(lingers * max(linger_ns, MILLISECOND_NS)))
    cluster.run(cluster.now_ns + 60 * SECOND_NS)
    return cluster


@given(limits=LIMITS, steps=STEPS, delays=st.lists(st.floats(0, 1), min_size=1, max_size=9))
def test_no_window_sees_more_than_burst_plus_rate_times_window(
    limits: Limits, steps: list[Any], delays: list[float]
):
    _, linger_ns = split_burst(limits.rate)
    cluster = play(limits, steps, [int(delay * linger_ns) for delay in delays])
    assert_lawful(cluster.passed, limits.rate)


@given(rate=st.builds(Rate, per_minute=st.floats(0.1, 5e9), burst=st.integers(1, 5000)))
def test_the_linger_and_the_smaller_burst_make_up_the_burst(rate: Rate):
    kept, linger_ns = split_burst(rate)
    assert kept.burst >= (rate.burst + 1) // 2
    assert kept.for_calls_ns(rate.burst - kept.burst) >= linger_ns


@given(limits=LIMITS, steps=STEPS, delays_ms=st.lists(st.integers(0, 20), min_size=1, max_size=9))
def test_whoever_is_not_refused_passes_in_the_end(
    limits: Limits, steps: list[Any], delays_ms: list[int]
):
    patient = [(what, *step[:2], None, *step[3:]) for what, *step in steps if what != "kill"]
    cluster = play(limits, patient, [delay * MILLISECOND_NS for delay in delays_ms])
    cluster.run(cluster.now_ns + 1800 * SECOND_NS)
    assert [process.waiting for process in cluster.processes] == [[], [], []]
    assert cluster.errors == []


def ask(
    *wants: Want,
    fresh: bool = True,
    left: tuple[int, ...] = (),
    spare: dict[str, int] | None = None,
) -> Ask:
    return Ask(fresh, list(wants), list(left), spare or {}, {})


def wants(source: str, calls: int, first_id: int = 1, timeout_ns: int | None = None) -> list[Want]:
    return [Want(first_id + place, source, 1, timeout_ns) for place in range(calls)]


def drain(
    keeper: Keeper, *processes: str, until_ns: int, now_ns: int = BEGIN_NS
) -> list[tuple[int, str]]:
    """Every slot granted until then, in order: its instant and who got it."""
    slots: list[tuple[int, str]] = []
    while keeper.next_ns is not None and now_ns < until_ns:
        now_ns = min(keeper.next_ns, now_ns + SECOND_NS, until_ns)
        keeper.advance(now_ns)
        for process in processes:
            granted = keeper.answer(process, now_ns).granted
            slots += [(now_ns + delay_ns, process) for _, delay_ns in granted]
    return sorted(slots)


def keeper_of(per_minute: float, burst: int, **shares: float) -> Keeper:
    rate = Rate(per_minute=per_minute, burst=burst, shares=shares)
    return Keeper(Limits(rate), BEGIN_NS, fresh=True)


def test_the_example_of_the_module():
    rate = Rate(per_minute=600, burst=11)
    smaller, linger_ns = split_burst(rate)
    assert (smaller.burst, linger_ns) == (8, SECOND_NS // 4)
    pool = LeasePool("example", rate)
    asked_ns, received_ns, delay_ns = 100 * SECOND_NS, 100_020 * MILLISECOND_NS, 40 * MILLISECOND_NS
    slot = pool._slot(delay_ns, 1, asked_ns, received_ns)
    assert (slot.from_ns, slot.until_ns) == (100_060 * MILLISECOND_NS, 100_290 * MILLISECOND_NS)


def test_a_refused_call_consumes_nothing_and_learns_how_far_its_slot_is():
    keeper = keeper_of(per_minute=60, burst=1)
    keeper.ask("p", ask(*wants("", 2)), BEGIN_NS)
    for place in range(5):
        answer = keeper.ask("q", ask(*wants("", 1, place, timeout_ns=SECOND_NS)), BEGIN_NS)
        assert answer.refused == ((place, 2 * SECOND_NS),)
    answer = keeper.ask("q", ask(*wants("", 1, timeout_ns=2 * SECOND_NS)), BEGIN_NS)
    assert answer.refused == answer.granted == ()
    slots = drain(keeper, "p", "q", until_ns=BEGIN_NS + 9 * SECOND_NS)
    assert slots == [(BEGIN_NS + SECOND_NS, "p"), (BEGIN_NS + 2 * SECOND_NS, "q")]


def test_a_pause_beyond_a_timeout_refuses_at_once():
    keeper = keeper_of(per_minute=60, burst=1)
    keeper.ask("p", ask(*wants("", 1), *wants("", 1, 2, 3 * SECOND_NS), *wants("", 1, 3)), BEGIN_NS)
    keeper.penalise(10 * SECOND_NS, BEGIN_NS)
    answer = keeper.answer("p", BEGIN_NS)
    assert answer.refused == ((2, 10 * SECOND_NS),)
    assert answer.epoch == 1
    assert drain(keeper, "p", until_ns=BEGIN_NS + 60 * SECOND_NS) == [
        (BEGIN_NS + 10 * SECOND_NS, "p")
    ]


def test_who_comes_first_is_served_first():
    keeper = keeper_of(per_minute=6000, burst=1)
    for place in range(40):
        keeper.ask("pq"[place % 2], ask(*wants("", 1, place), fresh=place < 2), BEGIN_NS)
    slots = drain(keeper, "p", "q", until_ns=BEGIN_NS + SECOND_NS)
    assert [process for _, process in slots[-30:]] == ["p", "q"] * 15


@given(weights=st.tuples(st.integers(1, 9), st.integers(1, 9)), burst=st.integers(4, 9))
def test_sources_that_both_wait_get_their_weights_within_a_few_calls(
    weights: tuple[int, int], burst: int
):
    keeper = keeper_of(per_minute=6000, burst=burst, a=weights[0], b=weights[1])
    keeper.ask("p", ask(*wants("a", 500)), BEGIN_NS)
    keeper.ask("q", ask(*wants("b", 500)), BEGIN_NS)
    slots = drain(keeper, "p", "q", until_ns=BEGIN_NS + 2 * SECOND_NS)
    after_start = [process for at_ns, process in slots if at_ns > BEGIN_NS + 2 * HORIZON_NS]
    assert len(after_start) > 100
    for calls in range(len(after_start) + 1):
        share_a = calls * weights[0] / sum(weights)
        assert abs(after_start[:calls].count("p") - share_a) <= 2


def test_the_share_of_an_idle_source_is_used_by_the_others():
    keeper = keeper_of(per_minute=6000, burst=4, a=1, b=99)
    keeper.ask("p", ask(*wants("a", 500)), BEGIN_NS)
    slots = drain(keeper, "p", until_ns=BEGIN_NS + 2 * SECOND_NS)
    assert len(slots) >= 195


def test_a_source_that_wakes_up_is_served_within_the_horizon():
    keeper = keeper_of(per_minute=6000, burst=4, a=1, b=1)
    keeper.ask("p", ask(*wants("a", 900)), BEGIN_NS)
    drain(keeper, "p", until_ns=BEGIN_NS + SECOND_NS)
    woke_ns = BEGIN_NS + SECOND_NS
    first = keeper.ask("q", ask(*wants("b", 6)), woke_ns).granted
    slots = drain(keeper, "q", until_ns=woke_ns + SECOND_NS, now_ns=woke_ns)
    assert len(first) + len(slots) == 6
    interval_ns = SECOND_NS // 100
    assert slots[-1][0] <= woke_ns + HORIZON_NS + 13 * interval_ns


def test_sources_without_a_weight_share_the_smallest():
    keeper = keeper_of(per_minute=6000, burst=4, a=8, b=2)
    keeper.ask("p", ask(*wants("a", 500)), BEGIN_NS)
    keeper.ask("q", ask(*wants("x", 250), *wants("y", 250, 300)), BEGIN_NS)
    slots = drain(keeper, "p", "q", until_ns=BEGIN_NS + 2 * SECOND_NS)
    others = [process for _, process in slots[50:150]].count("q")
    assert 18 <= others <= 22


def test_a_silent_process_loses_its_places_and_the_others_go_on():
    keeper = keeper_of(per_minute=60, burst=1)
    keeper.ask("dead", ask(*wants("", 50)), BEGIN_NS)
    keeper.ask("p", ask(*wants("", 1)), BEGIN_NS)
    granted: list[int] = []
    for second in range(1, 6):
        now_ns = BEGIN_NS + second * SECOND_NS
        keeper.advance(now_ns)
        granted += [now_ns + delay_ns for _, delay_ns in keeper.answer("p", now_ns).granted]
    assert granted
    assert granted[0] <= BEGIN_NS + SILENCE_NS + 2 * SECOND_NS
    assert not keeper.answer("dead", BEGIN_NS + 6 * SECOND_NS).known


def test_spare_slots_are_only_what_nobody_waits_for():
    keeper = keeper_of(per_minute=600, burst=9)  # reserves with a burst of 6
    answer = keeper.ask("p", ask(spare={"": 3}), BEGIN_NS)
    assert sum(n for _, _, n in answer.spare) == 3
    keeper.ask("p", ask(Want(1, "", 6, None), fresh=False), BEGIN_NS)
    assert keeper.ask("q", ask(spare={"": 3}), BEGIN_NS).spare == ()


@example(up_ms=0, down_ms=280, delay_ms=50, late_ms=0)
@given(
    up_ms=st.integers(0, 200),
    down_ms=st.integers(0, 400),
    delay_ms=st.integers(0, 50),
    late_ms=st.integers(-300, 700),
)
def test_a_spare_slot_passes_between_its_instant_and_its_linger_later(
    up_ms: int, down_ms: int, delay_ms: int, late_ms: int
):
    rate = Rate(per_minute=6000, burst=100)
    _, linger_ns = split_burst(rate)
    pool = LeasePool("x", rate)
    replied_ns = BEGIN_NS + up_ms * MILLISECOND_NS
    heard_ns = replied_ns + down_ms * MILLISECOND_NS
    spare = (("", delay_ms * MILLISECOND_NS, 1),)
    pool.served(Answer(known=True, spare=spare), BEGIN_NS, heard_ns)
    slot_ns = replied_ns + delay_ms * MILLISECOND_NS
    now_ns = max(heard_ns, slot_ns + late_ms * MILLISECOND_NS)
    caller = Caller(1, "", now_ns, None, lambda: None)
    if pool.pass_now(1, "", now_ns):
        assert slot_ns <= now_ns <= slot_ns + linger_ns
    else:
        pool.enter(caller, now_ns)
        assert caller.slot is None or slot_ns <= caller.slot.from_ns <= slot_ns + linger_ns


def test_slots_used_as_late_as_may_be_beside_new_ones_are_one_burst():
    rate = Rate(per_minute=60_000, burst=21)
    kept, linger_ns = split_burst(rate)
    assert (kept.burst, linger_ns) == (11, 10 * MILLISECOND_NS)
    keeper, pool = Keeper(Limits(rate), BEGIN_NS, fresh=True), LeasePool("x", rate)
    answer = keeper.ask("p", ask(spare={"": 11}), BEGIN_NS)
    pool.served(answer, BEGIN_NS, BEGIN_NS)
    now_ns = BEGIN_NS + linger_ns
    passed = [pool.pass_now(1, "", now_ns) for _ in range(11)]
    new = keeper.ask("q", ask(*wants("", 30, timeout_ns=0)), now_ns).granted
    assert sum(passed) + len(new) == 21
    assert not pool.pass_now(1, "", now_ns + 1)


def test_after_a_pause_spare_slots_are_void():
    keeper, pool = (
        keeper_of(per_minute=60_000, burst=21),
        LeasePool("x", Rate(per_minute=60_000, burst=21)),
    )
    pool.served(keeper.ask("p", ask(spare={"": 5}), BEGIN_NS), BEGIN_NS, BEGIN_NS)
    assert pool.pass_now(1, "", BEGIN_NS)
    keeper.penalise(SECOND_NS, BEGIN_NS)
    assert keeper.news == {"p"}
    pool.hear(keeper.answer("p", BEGIN_NS), BEGIN_NS, BEGIN_NS)
    assert not pool.pass_now(1, "", BEGIN_NS)


def test_a_keeper_that_lost_its_state_begins_with_an_empty_bucket():
    keeper = Keeper(Limits(Rate(per_minute=600, burst=9)), BEGIN_NS, fresh=False)
    answer = keeper.ask("p", ask(*wants("", 5, timeout_ns=SECOND_NS // 10)), BEGIN_NS)
    assert (answer.granted, len(answer.refused)) == ((), 5)
    assert answer.refused[0] == (1, HORIZON_NS + SECOND_NS // 10)


def test_more_calls_than_a_burst_are_served_over_time():
    keeper = keeper_of(per_minute=60, burst=1)
    keeper.ask("p", ask(Want(1, "", 4, None)), BEGIN_NS)
    slots = drain(keeper, "p", until_ns=BEGIN_NS + 5 * SECOND_NS)
    assert slots == [(BEGIN_NS + 3 * SECOND_NS, "p")]


def test_a_call_that_leaves_its_line_costs_nothing():
    keeper = keeper_of(per_minute=60, burst=1)
    keeper.ask("p", ask(*wants("", 3)), BEGIN_NS)
    keeper.ask("p", ask(fresh=False, left=(2,)), BEGIN_NS)
    slots = drain(keeper, "p", until_ns=BEGIN_NS + 5 * SECOND_NS)
    assert slots == [(BEGIN_NS + SECOND_NS, "p")]


def test_the_slot_of_a_cancelled_waiter_goes_to_the_next_caller_of_the_process():
    cluster = Cluster(Limits(Rate(per_minute=60, burst=1)), 1, [0])
    (process,) = cluster.processes
    for _ in range(2):
        process.call()
        cluster.settle()
    cluster.run(BEGIN_NS + SECOND_NS - HORIZON_NS // 4)  # the second has its slot
    process.cancel()
    process.call(timeout_s=0.1)
    cluster.run(BEGIN_NS + 9 * SECOND_NS)
    assert [at_ns for at_ns, _ in cluster.passed] == [BEGIN_NS, BEGIN_NS + SECOND_NS]


def test_leases_grow_to_hundreds_of_slots_and_vanish_for_rare_callers():
    cluster = Cluster(Limits(Rate(per_minute=6e6, burst=4000)), 1, [50_000])
    (process,) = cluster.processes
    asked = cluster.asks
    for _ in range(20_000):
        process.call()
        cluster.settle()
        cluster.run(cluster.now_ns + 20_000)
    assert max(ask.spare.get("", 0) for ask in asked) >= 100
    assert len(cluster.passed) / len(asked) >= 80
    cluster.run(cluster.now_ns + SECOND_NS)
    asked.clear()
    for _ in range(10):
        process.call()
        cluster.settle()
        cluster.run(cluster.now_ns + SECOND_NS)
    assert sum(sum(ask.spare.values()) for ask in asked[1:]) == 0


def test_what_an_idle_process_leaves_unused_is_bounded_and_counted():
    limits = Limits(Rate(per_minute=6e4, burst=200))
    cluster = Cluster(limits, 1, [50_000])
    (process,) = cluster.processes
    for _ in range(1000):
        process.call()
        cluster.settle()
        cluster.run(cluster.now_ns + MILLISECOND_NS)
    cluster.run(cluster.now_ns + SECOND_NS)
    cluster.keeper.ask("p0", process.pool.ask(process.clock_ns()), cluster.now_ns)
    snapshot = cluster.keeper.snapshot(cluster.now_ns)
    kept, _ = split_burst(limits.rate)
    assert snapshot.sources[""].granted == len(cluster.passed)
    assert snapshot.granted - snapshot.abandoned == len(cluster.passed)
    assert 0 < snapshot.abandoned <= limits.rate.burst - kept.burst


def test_a_storm_of_overloads_halves_the_rate():
    limits = Limits(Rate(per_minute=6000, burst=1), adaptive=True)
    keeper = Keeper(limits, BEGIN_NS, fresh=True)
    for _ in range(3):
        keeper.penalise(0, BEGIN_NS)
    snapshot = keeper.snapshot(BEGIN_NS)
    assert (snapshot.penalties, snapshot.rate_factor) == (3, 0.5)
