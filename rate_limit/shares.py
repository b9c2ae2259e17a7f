"""Weighted shares of one rate: a token bucket per source, and a spare bucket for unused tokens.

Each source has its own bucket, which is filled at the source's share of the rate, so no other
source can take its tokens. Tokens that do not fit into a full bucket go to the spare bucket, from
which all sources may take. So the share of an idle source is used by the others. Tokens arrive at
the sustained rate and all buckets together hold one burst; hence no window of length t sees more
than burst + rate * t calls, the same as without shares.

A call takes a token of its own source or a spare token, whichever comes first. The time of its own
token is certain. The time of a spare token is an estimate, because it assumes that the other
sources stay idle. Such a reservation has a mark, and its owner calls `confirm` at that time. If the
spare token is not there, and an own token would have come meanwhile, the call queues behind the
waiting calls of its source. So a call waits in its source's queue at most twice.

Example: one call a second, burst 6, weights a 3, b 1, and 1 for all other sources. The bucket of
each source holds 1 token and the spare bucket 3. All buckets are empty at time 0. Source a gets a
token every 5/3 s, b and the others one every 5 s each. Six calls of a ask at time 0, and b makes no
call:

| call of a | token | passes at |
| --- | --- | --- |
| 1 to 4 | own | 1.67, 3.33, 5.00, 6.67 s |
| 5 | spare | 7.50 s |
| 6 | own: the second spare token would come at 10 s | 8.33 s |

The buckets of b and the others are full at 5 s. From then on their 2/5 token a second is spare, so
the first spare token is complete at 7.5 s.

The time of call 5 is an estimate. If b calls at 6 s, b takes its own token, its bucket fills again
until 11 s, and only the others' 1/5 token a second is spare. At 7.5 s the spare bucket has 0.7
tokens. Call 6 has the own token of 8.33 s, so call 5 gets the next one, at 10.00 s.

Units: a token is `Rate.interval_parts` * sum of the weights. The clock of a source with weight w
advances by w * `Rate.parts_per_ns` per nanosecond; the spare bucket's clock advances by the tokens
that it receives. All are whole numbers.

Source: hierarchical token bucket, tc-htb(8) (rate, ceil); virtual scheduling as in `gcra`.
"""

import math
from functools import lru_cache
from typing import NamedTuple

from rate_limit.gcra import FULL_PACE, Rate, Throttle


class SharedState(NamedTuple):
    """The state that every call changes."""

    own: tuple[int, ...]
    """Theoretical arrival time of each source, on its own clock."""

    spare: int
    """Theoretical arrival time of the spare bucket on its clock, including tokens that calls wait
    for."""

    taken: int
    """The same, without the tokens that calls wait for."""

    spilt: int
    """The spare bucket's clock: the tokens that it has received."""

    generation: int
    """It changes when reservations of spare tokens become void."""

    granted: int
    """Calls granted since the state was made."""


class Reservation(NamedTuple):
    """The time at which calls may pass."""

    start_ns: int
    mark: int | None = None
    """The spare clock's time at which the calls may pass; None if `start_ns` is certain."""

    generation: int = 0

    latest_ns: float = math.inf
    """The time at which an own token would have come; from then on an own token is taken."""


class _Buckets(NamedTuple):
    speeds: tuple[int, ...]  # what each clock advances per nanosecond
    sizes: tuple[int, ...]  # size of each bucket, in units
    spare_size: int
    token: int
    place: dict[str, int]


@lru_cache(maxsize=64)
def _buckets(rate: Rate) -> _Buckets:
    """Half of the burst is shared by weight, at least one call per source; the rest is spare."""
    weights = [weight for _, weight in rate.weights]
    total = sum(weights)
    token = rate.interval_parts * total
    left = rate.burst - len(weights)
    calls = [1 + left // 2 * weight // total for weight in weights]
    return _Buckets(
        speeds=tuple(weight * rate.parts_per_ns for weight in weights),
        sizes=tuple(count * token for count in calls),
        spare_size=(rate.burst - sum(calls)) * token,
        token=token,
        place={name: i for i, (name, _) in enumerate(rate.weights)},
    )


def idle(rate: Rate) -> SharedState:
    """The state with all buckets full, after a long time without calls."""
    return SharedState((0,) * len(rate.weights), 0, 0, 0, 0, 0)


def drained(now_ns: int, rate: Rate, granted: int = 0) -> SharedState:
    """The state with all buckets empty at `now_ns`, whatever passed before."""
    buckets = _buckets(rate)
    own = (now_ns * speed + size for speed, size in zip(buckets.speeds, buckets.sizes, strict=True))
    return SharedState(tuple(own), buckets.spare_size, buckets.spare_size, 0, 0, granted)


def reserve(
    state: SharedState, now_ns: int, n: int, rate: Rate, pace: int = FULL_PACE, source: str = ""
) -> tuple[Reservation, SharedState]:
    """Reserve the next n calls of a source, as `gcra.reserve`; one without a share counts as "".

    Calls above the source's burst count as passing one by one at its share of the rate.
    """
    state = _spill(state, now_ns, _buckets(rate))
    return _choose(state, now_ns, n, rate, pace, source, math.inf)


def confirm(
    reservation: Reservation,
    state: SharedState,
    now_ns: int,
    n: int,
    rate: Rate,
    pace: int = FULL_PACE,
    source: str = "",
) -> tuple[Reservation, SharedState]:
    """Confirm or replace a reservation with a mark, at its time; returns as `reserve`."""
    buckets = _buckets(rate)
    state = _spill(state, now_ns, buckets)
    if reservation.mark is None or reservation.generation != state.generation:
        return _choose(state, now_ns, n, rate, pace, source, reservation.latest_ns)
    start_ns = _when(state, reservation.mark, now_ns, buckets)
    if start_ns <= now_ns:
        cost = n * buckets.token * FULL_PACE // pace
        return Reservation(now_ns), state._replace(taken=max(state.taken, reservation.mark) + cost)
    own, after = _of_own(state, now_ns, n, buckets, pace, source)
    if start_ns <= min(own.start_ns, reservation.latest_ns):
        return reservation._replace(start_ns=start_ns), state
    return own, _without_marks(after)


def leave(reservation: Reservation, state: SharedState, n: int) -> SharedState:
    """Give back a reservation with a mark."""
    state = state._replace(granted=state.granted - n)
    return state if reservation.generation != state.generation else _without_marks(state)


def undo(
    before: SharedState,
    made_ns: int,
    after: SharedState,
    state: SharedState,
    n: int,
    rate: Rate,
    source: str,
) -> SharedState | None:
    """Give back a reservation without a mark; None if the source was granted another one since.

    `before` and `after` are the states around the reservation at `made_ns`; `state` is that now.
    """
    buckets = _buckets(rate)
    i = buckets.place.get(source, buckets.place[""])
    if state.own[i] != after.own[i]:
        return None
    tat = max(before.own[i], made_ns * buckets.speeds[i])
    own = (*state.own[:i], tat, *state.own[i + 1 :])
    return state._replace(own=own, granted=state.granted - n)


def _without_marks(state: SharedState) -> SharedState:
    """Make all waiting reservations of spare tokens void, so that their calls choose again."""
    return state._replace(spare=state.taken, generation=state.generation + 1)


def penalise(
    state: SharedState, throttle: Throttle, now_ns: int, pause_ns: int, rate: Rate
) -> tuple[SharedState, Throttle]:
    """Pause all calls until `now_ns + pause_ns`, with no burst after it; see `gcra.penalise`."""
    throttle = throttle._replace(penalties=throttle.penalties + 1)
    paused_ns = now_ns + pause_ns
    if not pause_ns or paused_ns <= throttle.paused_ns:
        return state, throttle
    buckets = _buckets(rate)
    state = _spill(state, now_ns, buckets)
    limit = drained(now_ns, rate)
    # At the end of the pause the buckets together hold one token.
    least = (
        paused_ns * speed + size - buckets.token * speed // sum(buckets.speeds)
        for speed, size in zip(buckets.speeds, buckets.sizes, strict=True)
    )
    own = tuple(map(max, map(min, state.own, limit.own), least))
    spare = state.spilt + buckets.spare_size
    generation = state.generation + 1
    state = state._replace(own=own, spare=spare, taken=spare, generation=generation)
    return state, throttle._replace(epoch=throttle.epoch + 1, paused_ns=paused_ns)


def joined(one: SharedState, other: SharedState, now_ns: int, rate: Rate) -> SharedState:
    """A state that allows no more than either of two states, for when no reservation waits."""
    limit = drained(now_ns, rate, max(one.granted, other.granted))
    own = tuple(map(min, map(max, one.own, other.own), limit.own))
    return limit._replace(own=own)


def latest_ns(state: SharedState, rate: Rate) -> int:
    """The theoretical arrival time that is farthest ahead, on the clock."""
    return max(tat // speed for tat, speed in zip(state.own, _buckets(rate).speeds, strict=True))


def _spill(state: SharedState, now_ns: int, buckets: _Buckets) -> SharedState:
    """Move the tokens that did not fit into the sources' buckets until now to the spare bucket."""
    own = tuple(
        max(tat, now_ns * speed) for tat, speed in zip(state.own, buckets.speeds, strict=True)
    )
    if own == state.own:
        return state
    return state._replace(own=own, spilt=state.spilt + sum(own) - sum(state.own))


def _choose(
    state: SharedState,
    now_ns: int,
    n: int,
    rate: Rate,
    pace: int,
    source: str,
    latest_ns: float,
) -> tuple[Reservation, SharedState]:
    """Reserve own tokens, or spare tokens if they come earlier and before `latest_ns`."""
    buckets = _buckets(rate)
    cost = n * buckets.token
    own, after = _of_own(state, now_ns, n, buckets, pace, source)
    if own.start_ns <= now_ns or cost > buckets.spare_size:
        return own, after
    mark = state.spare + cost - buckets.spare_size
    start_ns = _when(state, mark, now_ns, buckets)
    latest_ns = min(latest_ns, own.start_ns)
    if start_ns > now_ns and start_ns >= latest_ns:
        return own, after
    spare = max(state.spare, state.spilt) + cost * FULL_PACE // pace
    state = state._replace(spare=spare, granted=state.granted + n)
    if start_ns <= now_ns:
        taken = max(state.taken, state.spilt) + cost * FULL_PACE // pace
        return Reservation(now_ns), state._replace(taken=taken)
    return Reservation(start_ns, mark, state.generation, latest_ns), state


def _of_own(
    state: SharedState, now_ns: int, n: int, buckets: _Buckets, pace: int, source: str
) -> tuple[Reservation, SharedState]:
    """Reserve n calls from the source's own bucket, after `_spill`."""
    i = buckets.place.get(source, buckets.place[""])
    speed, tat, cost = buckets.speeds[i], state.own[i], n * buckets.token
    beyond = cost - buckets.sizes[i]
    start = max(now_ns * speed + max(0, beyond), tat + beyond)
    own = (*state.own[:i], tat + cost * FULL_PACE // pace, *state.own[i + 1 :])
    return Reservation(-(-start // speed)), state._replace(own=own, granted=state.granted + n)


def _when(state: SharedState, mark: int, now_ns: int, buckets: _Buckets) -> int:
    """When the spare clock reaches the mark, if nobody calls until then."""
    missing = mark - state.spilt
    if missing <= 0:
        return now_ns
    start_ns = speeds = 0
    # A source's tokens go to the spare bucket from its theoretical arrival time on.
    for tat_ns, tat, speed in sorted(
        (-(-tat // speed), tat, speed) for tat, speed in zip(state.own, buckets.speeds, strict=True)
    ):
        if speeds and start_ns <= tat_ns:
            break
        missing, speeds = missing + tat, speeds + speed
        start_ns = -(-missing // speeds)
    return start_ns
