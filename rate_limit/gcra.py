"""When may the next call pass: the generic cell rate algorithm, in whole numbers. Pure.

The state is a theoretical arrival time (TAT): when the bucket would be full again. A reservation of
n calls moves it by n emission intervals and is granted the first instant at which it stays within
the burst. For any reservations whatever, no window of length t holds more than burst + rate * t.

Times are nanoseconds; an emission interval is a fraction of them (`Rate.interval_parts` over
`Rate.parts_per_ns`), so neither 7 calls a minute nor 300 million a second drift.

Four things are added to the textbook. Calls may be kept a least interval apart, which is a second
TAT without burst. More calls than a burst may be asked for; they are served over time. A server may
push everybody back (`penalise`): the TAT moves past the pause, and a new epoch tells those who
reserved before, and still wait, to reserve again. And a server that is overrun may slow everybody
down (`overloaded`): the rate is halved and recovers steadily.

Source: ITU-T I.371, Annex A (virtual scheduling); conformance is judged at the granted instant.
Additive increase, multiplicative decrease: Chiu and Jain 1989.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

SECOND_NS = 10**9
YEAR_NS = 365 * 86400 * SECOND_NS
_FARTHEST_NS = 250 * YEAR_NS  # keeps every time within 64 bits
_MOST_PARTS = 2**30
_MOST_SHARES, _MOST_WEIGHT = 17, 10**4

FULL_PACE = 2**20
"""`Terms.pace` of a rate that is not slowed down."""

SLOWEST_PACE = FULL_PACE // 64
RECOVERY_NS = 30 * SECOND_NS
"""From nothing to the full rate; half of it from one halving."""

STORM_STRIKES = 3
STORM_NS = SECOND_NS
"""So many overloads within this time are a storm; one storm halves the rate once."""


class LimiterTimeout(TimeoutError):
    """The limiter or a slot would make the caller wait longer than it allows; nothing was taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How many calls may pass.

    Raises:
        ValueError: every value out of range at once.
    """

    per_minute: float
    """Sustained calls a minute: above 0, below 6e10 (a call a nanosecond)."""

    burst: int
    """Calls that may pass back to back after an idle spell."""

    min_interval_s: float = 0.0
    """Least time between two calls, bursts included; 0 for none."""

    shares: Mapping[str, float] | None = field(default=None, compare=False)
    """Source -> weight, above 0: its share of the rate. None: who comes first, is served first."""

    weights: tuple[tuple[str, int], ...] = field(init=False)
    """`shares` in lowest whole numbers, to 1/10000; "" is all other sources, with the least one."""

    interval_parts: int = field(init=False)
    """Time per call at the sustained rate, in parts of a nanosecond."""

    parts_per_ns: int = field(init=False)
    """1 where the interval is a whole number of nanoseconds; at most 2^30. What is rounded then is
    rounded up, by less than a nanosecond over 10^9 calls: the rate is never exceeded."""

    min_interval_ns: int = field(init=False)
    """`min_interval_s`, rounded up."""

    def __post_init__(self) -> None:
        problems: list[str] = []
        if not 0 < self.per_minute < 60 * SECOND_NS:
            problems.append(f"per_minute={self.per_minute} must be above 0 and below 6e10")
        if type(self.burst) is not int or not 1 <= self.burst <= 10**6:
            problems.append(f"burst={self.burst} must be a whole number from 1 to 1000000")
        if not 0 <= self.min_interval_s <= 86400:
            problems.append(f"min_interval_s={self.min_interval_s} must be from 0 to 86400")
        object.__setattr__(self, "weights", self._weights(problems))
        if not problems:
            # By its decimal digits: 0.1 a minute is meant, not the double nearest to it.
            interval = 60 * SECOND_NS / Fraction(str(self.per_minute))
            if interval.denominator > _MOST_PARTS:
                interval = Fraction(math.ceil(interval * _MOST_PARTS), _MOST_PARTS)
            min_interval_ns = math.ceil(Fraction(str(self.min_interval_s)) * SECOND_NS)
            object.__setattr__(self, "interval_parts", interval.numerator)
            object.__setattr__(self, "parts_per_ns", interval.denominator)
            object.__setattr__(self, "min_interval_ns", min_interval_ns)
            if self.burst * max(interval, min_interval_ns) > YEAR_NS:
                problems.append(f"burst={self.burst} calls take more than a year at this rate")
        if problems:
            raise ValueError(
                f"cannot limit a rate: {'; '.join(problems)}; correct tool_config or "
                "mixed.rate_limit"
            )

    def _weights(self, problems: list[str]) -> tuple[tuple[str, int], ...]:
        shares = dict(self.shares or {})
        if not shares:
            return ()
        if not all(0 < weight < math.inf for weight in shares.values()):
            problems.append(f"shares={shares} must be finite and above 0")
            return ()
        shares.setdefault("", min(shares.values()))
        exact = {name: Fraction(str(weight)) for name, weight in sorted(shares.items())}
        unit = Fraction(1, math.lcm(*(weight.denominator for weight in exact.values())))
        if sum(exact.values()) > 2 * _MOST_WEIGHT * unit:
            unit = sum(exact.values()) / _MOST_WEIGHT
        whole = {name: max(1, round(weight / unit)) for name, weight in exact.items()}
        common = math.gcd(*whole.values())
        weights = tuple((name, weight // common) for name, weight in whole.items())
        if len(weights) > _MOST_SHARES or any(len(name.encode()) > 63 for name in exact):
            problems.append(f"shares of {len(weights)} sources: at most 17, names of 63 bytes")
        if len(weights) >= self.burst:
            problems.append(
                f"burst={self.burst} must be at least {len(weights) + 1}: one for each share, one "
                "for all other sources, one for what they leave"
            )
        if self.min_interval_s:
            problems.append(
                f"min_interval_s={self.min_interval_s} cannot be kept with shares; set it to 0 or "
                "take the shares away"
            )
        return weights

    @classmethod
    def within_window(
        cls, limit: int, window_s: float, burst: int, min_interval_s: float = 0.0
    ) -> "Rate":
        """Never more than `limit` calls in any `window_s` seconds, bursts included.

        Args:
            limit: calls, above `burst`.
            window_s: seconds; any window of this length, not those of a calendar.
            burst: calls that may pass back to back; what is left of `limit` is the rate.

        Raises:
            ValueError: a value out of range.
        """
        if not 0 < window_s < math.inf or not burst < limit:
            raise ValueError(
                f"cannot limit to {limit} calls in window_s={window_s}: the window must be above 0 "
                f"and the limit above burst={burst}; lower the burst"
            )
        per_minute = (limit - burst) * 60 / window_s
        return cls(per_minute=per_minute, burst=burst, min_interval_s=min_interval_s)

    @property
    def burst_ns(self) -> int:
        """How long an empty bucket takes to fill, rounded up."""
        return self.for_calls_ns(self.burst)

    @property
    def burst_tolerance_ns(self) -> int:
        """How far the TAT may lie ahead of a call that passes (tau), rounded up."""
        return self.for_calls_ns(self.burst - 1)

    def for_calls_ns(self, n: int) -> int:
        """Time that n calls take at the sustained rate, rounded up."""
        return -(-n * self.interval_parts // self.parts_per_ns)


class Arrivals(NamedTuple):
    """What every call changes: theoretical arrival times, nanoseconds on one clock."""

    tat_ns: int
    """TAT of the rate."""

    tat_parts: int
    """What is beyond the whole nanosecond, below `Rate.parts_per_ns`."""

    spaced_ns: int
    """When the next call keeps its distance from the last one granted."""

    granted: int
    """Calls granted since the state was made."""


class Terms(NamedTuple):
    """What seldom changes."""

    epoch: int = 0
    """Changes when reservations that still wait are void."""

    paused_ns: int = 0
    """End of the last pause that a server asked for."""

    penalties: int = 0
    """Pauses and overloads reported."""

    pace: int = FULL_PACE
    """Share of the rate that is in force at `paced_ns`, of `FULL_PACE`."""

    paced_ns: int = 0
    """When it was slowed down last."""

    strikes: int = 0
    """Overloads since `struck_ns`."""

    struck_ns: int = 0
    """The first overload of what may become a storm."""


def idle(rate: Rate | None = None) -> Arrivals:
    """Nobody called for a long time: the whole burst may pass."""
    return Arrivals(0, 0, 0, 0)


def drained(now_ns: int, rate: Rate, granted: int = 0) -> Arrivals:
    """Whatever passed until now, nothing passes too early: the bucket is empty at `now_ns`.

    For when the state was lost. Calls granted so far have moved the TAT at most this far.
    """
    spaced_ns = now_ns + rate.burst * rate.min_interval_ns
    return Arrivals(now_ns + rate.burst_ns, 0, spaced_ns, granted)


def reserve(
    arrivals: Arrivals, now_ns: int, n: int, rate: Rate, pace: int = FULL_PACE
) -> tuple[int, Arrivals]:
    """Grant the next n calls.

    Args:
        arrivals: the state now.
        now_ns: the time now.
        n: calls that pass together, >= 1; above the burst they count as passing one by one at the
            sustained rate, and are granted when the last of them may.
        rate: the limits.
        pace: share of the rate in force, of `FULL_PACE`.

    Returns:
        when the n calls may pass, at least `now_ns`, and the state after the grant.

    Raises:
        OverflowError: that would be centuries from now.
    """
    parts = rate.parts_per_ns
    now, tat = now_ns * parts, arrivals.tat_ns * parts + arrivals.tat_parts
    start = max(now, tat + (n - rate.burst) * rate.interval_parts)
    if n > rate.burst:
        start = max(start, now + (n - rate.burst) * rate.interval_parts)
    start_ns = max(-(-start // parts), arrivals.spaced_ns)
    late = n <= rate.burst and start_ns == arrivals.spaced_ns
    tat = max(tat, start_ns * parts if late else now)
    cost = n * rate.interval_parts
    tat += cost if pace == FULL_PACE else cost * FULL_PACE // pace
    tat_ns = tat // parts
    if tat_ns > _FARTHEST_NS:
        raise OverflowError(f"cannot reserve n={n} calls: the last one is centuries away")
    spaced_ns = start_ns + n * rate.min_interval_ns
    return start_ns, Arrivals(tat_ns, tat - tat_ns * parts, spaced_ns, arrivals.granted + n)


def penalise(
    arrivals: Arrivals, terms: Terms, now_ns: int, pause_ns: int, rate: Rate
) -> tuple[Arrivals, Terms]:
    """Let nobody pass before `now_ns + pause_ns`, those who already wait included.

    After the pause calls come at the sustained rate without a burst. A pause that ends no later
    than the one in force changes nothing but the count, so many callers may report the same one.
    """
    terms = terms._replace(penalties=terms.penalties + 1)
    paused_ns = now_ns + pause_ns
    if not pause_ns or paused_ns <= terms.paused_ns:
        return arrivals, terms
    # Waiting reservations are void; those that passed have moved the TAT at most to `drained`.
    limit = drained(now_ns, rate)
    tat_ns = max(min(arrivals.tat_ns + 1, limit.tat_ns), paused_ns + rate.burst_tolerance_ns)
    spaced_ns = min(arrivals.spaced_ns, limit.spaced_ns)
    return (
        Arrivals(tat_ns, 0, spaced_ns, arrivals.granted),
        terms._replace(epoch=terms.epoch + 1, paused_ns=paused_ns),
    )


def pause_ns(retry_after_s: float, until_s: float | None, now_ns: int) -> int:
    """How long a server wants a pause, from either way of saying it.

    Args:
        retry_after_s: seconds from now, 0 to 86400.
        until_s: in its place, the end of the pause, in seconds on the clock of `now_ns`.
        now_ns: the time now.

    Raises:
        ValueError: the pause is out of range.
    """
    if until_s is not None:
        retry_after_s = max(0.0, until_s - now_ns / SECOND_NS)
    if not 0 <= retry_after_s <= 86400:
        raise ValueError(
            f"cannot penalise by retry_after_s={retry_after_s}: must be from 0 to 86400"
        )
    return int(retry_after_s * SECOND_NS)


def joined(one: Arrivals, other: Arrivals, now_ns: int, rate: Rate) -> Arrivals:
    """What is no more than either allows, when no reservation waits any more."""
    limit = drained(now_ns, rate)
    return Arrivals(
        max(one.tat_ns, min(other.tat_ns + 1, limit.tat_ns)),
        0,
        max(one.spaced_ns, min(other.spaced_ns, limit.spaced_ns)),
        max(one.granted, other.granted),
    )


def latest_ns(arrivals: Arrivals, rate: Rate) -> int:
    """The theoretical arrival time that is farthest ahead."""
    return max(arrivals.tat_ns, arrivals.spaced_ns)


def overloaded(terms: Terms, now_ns: int) -> Terms:
    """Count an answer that says overload (429, 503); a storm of them halves the rate."""
    if now_ns - terms.struck_ns > STORM_NS:
        return terms._replace(strikes=1, struck_ns=now_ns)
    strikes = terms.strikes + 1
    if strikes != STORM_STRIKES:
        return terms._replace(strikes=strikes)
    pace = max(SLOWEST_PACE, pace_at(terms, now_ns) // 2)
    return terms._replace(strikes=strikes, pace=pace, paced_ns=now_ns)


def pace_at(terms: Terms, now_ns: int) -> int:
    """Share of the rate in force, of `FULL_PACE`: it recovers by the same amount each second."""
    if terms.pace >= FULL_PACE:
        return FULL_PACE
    recovered = max(0, now_ns - terms.paced_ns) * FULL_PACE // RECOVERY_NS
    return min(FULL_PACE, terms.pace + recovered)
