"""The generic cell rate algorithm (GCRA) in whole numbers: when may the next call pass. Pure.

The state is a theoretical arrival time (TAT), the time at which the bucket would be full again. A
reservation of n calls moves the TAT by n emission intervals. It is granted the first instant at
which the TAT is within the burst. For any reservations, no window of length t holds more than
burst + rate * t calls.

Example: 60 calls a minute, burst 3, from an idle state at time 0. Five calls at once are granted at
0, 0, 0, 1 and 2 s.

Times are nanoseconds. An emission interval is a fraction of nanoseconds (`Rate.interval_parts` over
`Rate.parts_per_ns`), so neither 7 calls a minute nor 300 million a second drift.

Added to the standard algorithm: a minimum interval between calls (a second TAT without burst), more
calls than a burst in one reservation (served over time), pauses (`penalise`; a new epoch makes
callers that still wait reserve again), and a rate that is halved by overloads (`overloaded`).

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
"""`Throttle.pace` of the full rate."""

SLOWEST_PACE = FULL_PACE // 64
RECOVERY_NS = 30 * SECOND_NS
"""Time to recover from zero to the full rate; half of it after one halving."""

STORM_STRIKES = 3
STORM_NS = SECOND_NS
"""This many overloads within this time are a storm; a storm halves the rate once."""


class LimiterTimeout(TimeoutError):
    """The caller would wait longer than its timeout; nothing was reserved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The limits of a rate.

    Raises:
        ValueError: lists every value that is out of range.
    """

    per_minute: float
    """Sustained calls a minute: above 0, below 6e10 (a call a nanosecond)."""

    burst: int
    """Calls that may pass at once after an idle time."""

    min_interval_s: float = 0.0
    """Minimum seconds between two calls, also within a burst; 0 for none."""

    shares: Mapping[str, float] | None = field(default=None, compare=False)
    """Source -> weight of its share of the rate, above 0. None for first come, first served."""

    weights: tuple[tuple[str, int], ...] = field(init=False)
    """`shares` as smallest whole numbers, rounded to 1/10000; "" stands for all other sources."""

    interval_parts: int = field(init=False)
    """Time per call at the sustained rate, in parts of a nanosecond."""

    parts_per_ns: int = field(init=False)
    """1 if the interval is a whole number of nanoseconds, at most 2^30. Intervals are rounded up,
    by less than a nanosecond over 10^9 calls, so the rate is never exceeded."""

    min_interval_ns: int = field(init=False)
    """`min_interval_s` in nanoseconds, rounded up."""

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
            # A rate means its decimal digits: 0.1 a minute, not the nearest float.
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

    def __str__(self) -> str:
        shares = f" shares={dict(self.weights)}" if self.weights else ""
        return (
            f"per_minute={float(self.per_minute)} burst={self.burst} "
            f"min_interval_s={float(self.min_interval_s)}{shares}"
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
    def within_window(cls, limit: int, window_s: float, burst: int) -> "Rate":
        """The rate with at most `limit` calls in any `window_s` seconds, bursts included.

        Args:
            limit: calls, above `burst`.
            window_s: length in seconds of every window, at any start.
            burst: calls that may pass at once; the rate is the rest of `limit`.

        Raises:
            ValueError: a value out of range.
        """
        if not 0 < window_s < math.inf or not burst < limit:
            raise ValueError(
                f"cannot limit to {limit} calls in window_s={window_s}: the window must be above 0 "
                f"and the limit above burst={burst}; lower the burst"
            )
        return cls(per_minute=(limit - burst) * 60 / window_s, burst=burst)

    @property
    def burst_ns(self) -> int:
        """Time to fill an empty bucket, rounded up."""
        return self.for_calls_ns(self.burst)

    def for_calls_ns(self, n: int) -> int:
        """Time that n calls take at the sustained rate, rounded up."""
        return -(-n * self.interval_parts // self.parts_per_ns)


class GcraState(NamedTuple):
    """The state that every call changes: theoretical arrival times, in nanoseconds on one clock."""

    tat_ns: int
    """TAT of the rate."""

    tat_parts: int
    """The fraction of a nanosecond of the TAT, below `Rate.parts_per_ns`."""

    spaced_ns: int
    """The first time at which the next call keeps the minimum interval."""

    granted: int
    """Calls granted since the state was made."""


class Throttle(NamedTuple):
    """What slows all calls: pauses and overloads that servers reported. It changes rarely."""

    epoch: int = 0
    """It changes when waiting reservations become void."""

    paused_ns: int = 0
    """End of the last pause that a server asked for."""

    penalties: int = 0
    """Pauses and overloads reported."""

    pace: int = FULL_PACE
    """The part of the rate in force at `paced_ns`, out of `FULL_PACE`."""

    paced_ns: int = 0
    """When the rate was last slowed down."""

    strikes: int = 0
    """Overloads since `struck_ns`."""

    struck_ns: int = 0
    """The first overload that counts in `strikes`."""


def idle(rate: Rate | None = None) -> GcraState:
    """The state after a long time without calls: a whole burst may pass."""
    return GcraState(0, 0, 0, 0)


def drained(now_ns: int, rate: Rate, granted: int = 0) -> GcraState:
    """The state with an empty bucket at `now_ns`, which allows nothing too early.

    It is used when the state was lost: the calls granted so far moved the TAT at most this far.
    """
    spaced_ns = now_ns + rate.burst * rate.min_interval_ns
    return GcraState(now_ns + rate.burst_ns, 0, spaced_ns, granted)


def reserve(
    state: GcraState, now_ns: int, n: int, rate: Rate, pace: int = FULL_PACE
) -> tuple[int, GcraState]:
    """Reserve the next n calls.

    Args:
        state: the state now.
        now_ns: the time now.
        n: calls that pass together, >= 1; above the burst they count as passing one by one at the
            sustained rate, and are granted when the last of them may.
        rate: the limits.
        pace: share of the rate in force, of `FULL_PACE`.

    Returns:
        (when the n calls may pass, at least `now_ns`; the state after the reservation).

    Raises:
        OverflowError: the calls could pass only centuries from now.
    """
    parts = rate.parts_per_ns
    now, tat = now_ns * parts, state.tat_ns * parts + state.tat_parts
    start = max(now, tat + (n - rate.burst) * rate.interval_parts)
    if n > rate.burst:
        start = max(start, now + (n - rate.burst) * rate.interval_parts)
    start_ns = max(-(-start // parts), state.spaced_ns)
    late = n <= rate.burst and start_ns == state.spaced_ns
    tat = max(tat, start_ns * parts if late else now)
    cost = n * rate.interval_parts
    tat += cost if pace == FULL_PACE else cost * FULL_PACE // pace
    tat_ns = tat // parts
    if tat_ns > _FARTHEST_NS:
        raise OverflowError(f"cannot reserve n={n} calls: the last one is centuries away")
    spaced_ns = start_ns + n * rate.min_interval_ns
    return start_ns, GcraState(tat_ns, tat - tat_ns * parts, spaced_ns, state.granted + n)


def penalise(
    state: GcraState, throttle: Throttle, now_ns: int, pause_ns: int, rate: Rate
) -> tuple[GcraState, Throttle]:
    """Pause all calls until `now_ns + pause_ns`, including calls that already wait.

    After the pause, calls pass at the sustained rate without a burst. A pause that ends no later
    than the current one only increases the count, so many callers may report the same pause.
    """
    throttle = throttle._replace(penalties=throttle.penalties + 1)
    paused_ns = now_ns + pause_ns
    if not pause_ns or paused_ns <= throttle.paused_ns:
        return state, throttle
    # Waiting reservations become void; calls that passed moved the TAT at most to `drained`.
    limit = drained(now_ns, rate)
    tau_ns = rate.for_calls_ns(rate.burst - 1)  # how far the TAT of a call that passes is ahead
    tat_ns = max(min(state.tat_ns + 1, limit.tat_ns), paused_ns + tau_ns)
    spaced_ns = min(state.spaced_ns, limit.spaced_ns)
    return (
        GcraState(tat_ns, 0, spaced_ns, state.granted),
        throttle._replace(epoch=throttle.epoch + 1, paused_ns=paused_ns),
    )


def pause_ns(retry_after_s: float) -> int:
    """The length of a pause in nanoseconds.

    Raises:
        ValueError: the pause is not from 0 to 86400 s.
    """
    if not 0 <= retry_after_s <= 86400:
        raise ValueError(
            f"cannot penalise by retry_after_s={retry_after_s}: must be from 0 to 86400"
        )
    return int(retry_after_s * SECOND_NS)


def joined(one: GcraState, other: GcraState, now_ns: int, rate: Rate) -> GcraState:
    """A state that allows no more than either of two states, for when no reservation waits."""
    limit = drained(now_ns, rate)
    known = min((other.tat_ns, other.tat_parts), (limit.tat_ns, 0))
    return GcraState(
        *max((one.tat_ns, one.tat_parts), known),
        max(one.spaced_ns, min(other.spaced_ns, limit.spaced_ns)),
        max(one.granted, other.granted),
    )


def latest_ns(state: GcraState, rate: Rate) -> int:
    """The theoretical arrival time that is farthest ahead."""
    return max(state.tat_ns, state.spaced_ns)


def overloaded(throttle: Throttle, now_ns: int) -> Throttle:
    """Count an overload (429, 503) that a server reported; a storm of overloads halves the rate."""
    if now_ns - throttle.struck_ns > STORM_NS:
        return throttle._replace(strikes=1, struck_ns=now_ns)
    strikes = throttle.strikes + 1
    if strikes != STORM_STRIKES:
        return throttle._replace(strikes=strikes)
    pace = max(SLOWEST_PACE, pace_at(throttle, now_ns) // 2)
    return throttle._replace(strikes=strikes, pace=pace, paced_ns=now_ns)


def pace_at(throttle: Throttle, now_ns: int) -> int:
    """The part of the rate in force, out of `FULL_PACE`; it recovers linearly."""
    if throttle.pace >= FULL_PACE:
        return FULL_PACE
    recovered = max(0, now_ns - throttle.paced_ns) * FULL_PACE // RECOVERY_NS
    return min(FULL_PACE, throttle.pace + recovered)
