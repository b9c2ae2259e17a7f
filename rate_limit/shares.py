"""Weighted shares of one rate: a bucket per source, and a spare one for what they leave. Pure.

Each source has a bucket of its own, filled at its share of the rate, so nobody can take its tokens.
What runs over a full bucket runs into the spare one, from which all may take: the share of an idle
source is used by the others. Tokens come into being at the sustained rate and the buckets together
hold one burst, so no window of length t sees more than burst + rate * t calls, as without shares.

A call takes a token of its own source, or a spare one, whichever comes first. When its own comes is
certain. When the spare one comes is an estimate, that the others stay idle: its owner looks again
at that time (`confirm`). When one of its own would have come meanwhile it takes its place behind
those of its source who are waiting then; so it waits for its source's line twice at most.

Units: a token is `Rate.interval_parts` * sum of the weights. The clock of a source with weight w
runs w * `Rate.parts_per_ns` a nanosecond, the spare one by what runs over: all whole numbers.

Source: hierarchical token bucket, tc-htb(8) (rate, ceil); virtual scheduling as in `gcra`.
"""

import math
from functools import lru_cache
from typing import NamedTuple

from rate_limit.gcra import FULL_PACE, Rate, Terms


class Spread(NamedTuple):
    """What every call changes."""

    own: tuple[int, ...]
    """Theoretical arrival time of each source, by its own clock."""

    spare: int
    """That of the spare bucket, by its own clock; with the tokens that are waited for."""

    taken: int
    """The same without them."""

    spilt: int
    """The spare bucket's clock: what has run over."""

    generation: int
    """Changes when the spare tokens that are waited for are void."""

    granted: int
    """Calls granted since the state was made."""


class Grant(NamedTuple):
    """When calls may pass."""

    start_ns: int
    mark: int | None = None
    """The spare clock's time at which they may; None where `start_ns` is certain."""

    generation: int = 0
    """That of the mark."""

    latest_ns: float = math.inf
    """When a token of the source's own would have come: from then on one is taken."""


class _Buckets(NamedTuple):
    speeds: tuple[int, ...]  # of the clocks, a nanosecond
    sizes: tuple[int, ...]  # units
    spare_size: int
    token: int
    place: dict[str, int]


@lru_cache(maxsize=64)
def _buckets(rate: Rate) -> _Buckets:
    """Half of the burst goes to the sources by weight, at least a call each; the rest is spare."""
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


def burst_of(source: str, rate: Rate) -> int:
    """Calls of a source that may pass back to back, whatever the others do."""
    buckets = _buckets(rate)
    return buckets.sizes[buckets.place.get(source, buckets.place[""])] // buckets.token


def idle(rate: Rate) -> Spread:
    """Nobody called for a long time: all buckets are full."""
    return Spread((0,) * len(rate.weights), 0, 0, 0, 0, 0)


def drained(now_ns: int, rate: Rate, granted: int = 0) -> Spread:
    """Whatever passed until now: all buckets are empty at `now_ns`."""
    buckets = _buckets(rate)
    own = (now_ns * speed + size for speed, size in zip(buckets.speeds, buckets.sizes, strict=True))
    return Spread(tuple(own), buckets.spare_size, buckets.spare_size, 0, 0, granted)


def reserve(
    spread: Spread, now_ns: int, n: int, rate: Rate, pace: int = FULL_PACE, source: str = ""
) -> tuple[Grant, Spread]:
    """Grant the next n calls of a source.

    Args:
        spread: the state now.
        now_ns: the time now.
        n: calls that pass together, >= 1; above the source's burst they count as passing one by one
            at its share of the rate, and are granted when the last of them may.
        rate: the limits.
        pace: share of the rate in force, of `FULL_PACE`.
        source: one without a share counts as "".

    Returns:
        when the calls may pass, and the state after the grant.
    """
    spread = _spill(spread, now_ns, _buckets(rate))
    return _choose(spread, now_ns, n, rate, pace, source, math.inf)


def confirm(
    grant: Grant,
    spread: Spread,
    now_ns: int,
    n: int,
    rate: Rate,
    pace: int = FULL_PACE,
    source: str = "",
) -> tuple[Grant, Spread]:
    """Look again at a grant with a mark, at its time.

    Returns:
        a grant in its place, and the state then.
    """
    buckets = _buckets(rate)
    spread = _spill(spread, now_ns, buckets)
    if grant.mark is None or grant.generation != spread.generation:
        return _choose(spread, now_ns, n, rate, pace, source, grant.latest_ns)
    start_ns = _when(spread, grant.mark, now_ns, buckets)
    if start_ns <= now_ns:
        cost = n * buckets.token * FULL_PACE // pace
        return Grant(now_ns), spread._replace(taken=max(spread.taken, grant.mark) + cost)
    own, after = _of_own(spread, now_ns, n, buckets, pace, source)
    if start_ns <= min(own.start_ns, grant.latest_ns):
        return grant._replace(start_ns=start_ns), spread
    return own, _without_marks(after)


def leave(grant: Grant, spread: Spread, n: int) -> Spread:
    """Give back a grant with a mark."""
    spread = spread._replace(granted=spread.granted - n)
    return spread if grant.generation != spread.generation else _without_marks(spread)


def undo(
    before: Spread, made_ns: int, after: Spread, spread: Spread, n: int, rate: Rate, source: str
) -> Spread | None:
    """Give back a grant without a mark; None where the source has been granted another since.

    Args:
        before: the state before it.
        made_ns: when it was made.
        after: the state after it.
        spread: the state now.
    """
    buckets = _buckets(rate)
    i = buckets.place.get(source, buckets.place[""])
    if spread.own[i] != after.own[i]:
        return None
    tat = max(before.own[i], made_ns * buckets.speeds[i])
    own = (*spread.own[:i], tat, *spread.own[i + 1 :])
    return spread._replace(own=own, granted=spread.granted - n)


def _without_marks(spread: Spread) -> Spread:
    """Let all who count on spare tokens choose again, rather than wait for those of who left."""
    return spread._replace(spare=spread.taken, generation=spread.generation + 1)


def penalise(
    spread: Spread, terms: Terms, now_ns: int, pause_ns: int, rate: Rate
) -> tuple[Spread, Terms]:
    """As `gcra.penalise`: nobody passes before `now_ns + pause_ns`, nor in a burst after it."""
    terms = terms._replace(penalties=terms.penalties + 1)
    paused_ns = now_ns + pause_ns
    if not pause_ns or paused_ns <= terms.paused_ns:
        return spread, terms
    buckets = _buckets(rate)
    spread = _spill(spread, now_ns, buckets)
    limit = drained(now_ns, rate)
    # At its end the buckets together hold one token.
    least = (
        paused_ns * speed + size - buckets.token * speed // sum(buckets.speeds)
        for speed, size in zip(buckets.speeds, buckets.sizes, strict=True)
    )
    own = tuple(map(max, map(min, spread.own, limit.own), least))
    spare = spread.spilt + buckets.spare_size
    generation = spread.generation + 1
    spread = spread._replace(own=own, spare=spare, taken=spare, generation=generation)
    return spread, terms._replace(epoch=terms.epoch + 1, paused_ns=paused_ns)


def joined(one: Spread, other: Spread, now_ns: int, rate: Rate) -> Spread:
    """What is no more than either allows, when no reservation waits any more."""
    limit = drained(now_ns, rate, max(one.granted, other.granted))
    own = tuple(map(min, map(max, one.own, other.own), limit.own))
    return limit._replace(own=own)


def latest_ns(spread: Spread, rate: Rate) -> int:
    """The theoretical arrival time that is farthest ahead, on the clock."""
    return max(tat // speed for tat, speed in zip(spread.own, _buckets(rate).speeds, strict=True))


def _spill(spread: Spread, now_ns: int, buckets: _Buckets) -> Spread:
    """What ran over the sources' buckets until now is in the spare one."""
    own = tuple(
        max(tat, now_ns * speed) for tat, speed in zip(spread.own, buckets.speeds, strict=True)
    )
    if own == spread.own:
        return spread
    return spread._replace(own=own, spilt=spread.spilt + sum(own) - sum(spread.own))


def _choose(
    spread: Spread,
    now_ns: int,
    n: int,
    rate: Rate,
    pace: int,
    source: str,
    latest_ns: float,
) -> tuple[Grant, Spread]:
    """Tokens of the source's own, or spare ones that come sooner, and before `latest_ns`."""
    buckets = _buckets(rate)
    cost = n * buckets.token
    own, after = _of_own(spread, now_ns, n, buckets, pace, source)
    if own.start_ns <= now_ns or cost > buckets.spare_size:
        return own, after
    mark = spread.spare + cost - buckets.spare_size
    start_ns = _when(spread, mark, now_ns, buckets)
    latest_ns = min(latest_ns, own.start_ns)
    if start_ns > now_ns and start_ns >= latest_ns:
        return own, after
    spare = max(spread.spare, spread.spilt) + cost * FULL_PACE // pace
    spread = spread._replace(spare=spare, granted=spread.granted + n)
    if start_ns <= now_ns:
        taken = max(spread.taken, spread.spilt) + cost * FULL_PACE // pace
        return Grant(now_ns), spread._replace(taken=taken)
    return Grant(start_ns, mark, spread.generation, latest_ns), spread


def _of_own(
    spread: Spread, now_ns: int, n: int, buckets: _Buckets, pace: int, source: str
) -> tuple[Grant, Spread]:
    """Grant n calls from the source's own bucket; it must have been spilled until now."""
    i = buckets.place.get(source, buckets.place[""])
    speed, tat, cost = buckets.speeds[i], spread.own[i], n * buckets.token
    beyond = cost - buckets.sizes[i]
    start = max(now_ns * speed + max(0, beyond), tat + beyond)
    own = (*spread.own[:i], tat + cost * FULL_PACE // pace, *spread.own[i + 1 :])
    return Grant(-(-start // speed)), spread._replace(own=own, granted=spread.granted + n)


def _when(spread: Spread, mark: int, now_ns: int, buckets: _Buckets) -> int:
    """When the spare clock reaches the mark, if nobody calls until then."""
    missing = mark - spread.spilt
    if missing <= 0:
        return now_ns
    start_ns = speeds = 0
    # Each source spills from its theoretical arrival time on.
    for tat_ns, tat, speed in sorted(
        (-(-tat // speed), tat, speed)
        for tat, speed in zip(spread.own, buckets.speeds, strict=True)
    ):
        if speeds and start_ns <= tat_ns:
            break
        missing, speeds = missing + tat, speeds + speed
        start_ns = -(-missing // speeds)
    return start_ns
