"""Which prompt comes when: the stream of (source, row) that training draws from.

The plan is arithmetic. Prompt i is a function of (sizes, ratios, batch size, seed, i), so a resumed
run needs one number and no replay. Three laws hold:

1. After any i prompts, source s has been drawn within one prompt of i * share (`carry`). A batch
   whose quotas are whole numbers therefore holds exactly them, and remainders go on to the next.
2. A source repeats no row before all its rows were drawn; each pass has an order of its own.
3. `prompt(i)` depends on nothing that happened before.

The turns of the sources repeat with the period of the common denominator of the shares, and one
period is kept (up to 6 MiB, computed on first use, about a second at worst). Ratios whose common
denominator exceeds `MAX_PERIOD` are moved to the nearest shares with that denominator, by less than
one in a million; law 1 then holds for those, see `MixturePlan.shares`.
"""

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from samplers.apportionment import apportion, assign_turns, exact_shares
from samplers.permutation import order_key, rows_of_draws

_log = logging.getLogger(__name__)

MAX_PERIOD = 2**20
"""Most turns before the order of sources repeats; bounds memory."""

Apportionment = Literal["carry", "fixed"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Prompts of the stream, in stream order."""

    source_ids: NDArray[np.int16]
    """(B,) index into `MixturePlan.sources`."""

    rows: NDArray[np.int64]
    """(B,) row within its source."""


class MixturePlan:
    """The stream of prompts for one mixture; all methods are functions of their arguments.

    Only `position` changes: how many prompts were drawn so far. Whoever draws moves it, and it is
    what `state_dict` carries.

    Args:
        sizes: source -> rows it has.
        ratios: source -> relative ratio, finite and >= 0; 0 leaves a source out.
        batch_size: prompts per batch (B), >= 1.
        seed: seed of the orders of rows.
        apportionment: `carry` hands remainders on, so shares are exact over time; `fixed` gives
            every batch the same largest-remainder counts, so a small share may get no seat at all.

    Raises:
        ValueError: all mistakes at once.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        ratios: Mapping[str, float],
        batch_size: int,
        seed: int,
        apportionment: Apportionment = "carry",
    ):
        _check(sizes, ratios, batch_size, apportionment)
        asked = exact_shares(ratios)
        self.sources: tuple[str, ...] = tuple(sorted(asked))  # the mapping's order must not matter
        self.sizes: dict[str, int] = {name: int(sizes.get(name, 0)) for name in self.sources}
        self.ratios: dict[str, float] = {name: float(asked[name]) for name in self.sources}
        self.batch_size = int(batch_size)
        self.seed = int(seed)
        self.apportionment: Apportionment = apportionment
        self.position = 0

        if apportionment == "fixed":
            period = self.batch_size
        else:
            period = min(math.lcm(*(share.denominator for share in asked.values())), MAX_PERIOD)
        seats = apportion(asked, period)
        for name in self.sources:
            if asked[name] and not seats[name]:
                _log.warning(
                    "source=%s seats=0 batch_size=%d apportionment=fixed: it is never "
                    "drawn; use a larger batch or apportionment=carry",
                    name,
                    batch_size,
                )
        self.shares: dict[str, Fraction] = {
            name: Fraction(seats[name], period) for name in self.sources
        }
        """Source -> the exact share that the stream follows."""
        self._seats = np.array([seats[name] for name in self.sources], dtype=np.int64)
        self._period = period
        self._keys = [order_key(seed, name) for name in self.sources]

    def counts(self, batch_index: int) -> dict[str, int]:
        """Prompts per source in one batch; S entries that sum to the batch size."""
        turns = self._turns[self._positions_of(batch_index) % self._period]
        counts = np.bincount(turns, minlength=len(self.sources))
        return dict(zip(self.sources, counts.tolist(), strict=True))

    def batch(self, batch_index: int) -> Batch:
        """The prompts of one batch: positions batch_index * B .. (batch_index + 1) * B - 1."""
        return self.prompts(self._positions_of(batch_index))

    def prompt(self, i: int) -> tuple[str, int]:
        """Source and row of the i-th prompt of the stream, i >= 0."""
        one = self.prompts([i])
        return self.sources[int(one.source_ids[0])], int(one.rows[0])

    def prompts(self, positions: ArrayLike) -> Batch:
        """The prompts at any positions of the stream.

        Args:
            positions: (N,) positions, >= 0.

        Returns:
            N prompts, in the order of `positions`.
        """
        source_ids, draws = self.draws(positions)
        rows = np.empty(len(draws), dtype=np.int64)
        for source_id, name in enumerate(self.sources):
            here = np.flatnonzero(source_ids == source_id)
            if here.size:
                rows[here] = rows_of_draws(draws[here], self.sizes[name], self._keys[source_id])
        return Batch(source_ids=source_ids, rows=rows)

    def draws(self, positions: ArrayLike) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """Source at each position, and how many draws that source had before it.

        Args:
            positions: (N,) positions, >= 0.

        Returns:
            source ids (N,), and earlier draws from the same source (N,).
        """
        positions = np.asarray(positions, dtype=np.int64)
        if positions.size and positions.min() < 0:
            raise ValueError(f"no prompt at position={positions.min()}: positions start at 0")
        cycles, turn = np.divmod(positions, self._period)
        source_ids = self._turns[turn]
        return source_ids, cycles * self._seats[source_ids] + self._ranks[turn]

    def state_dict(self) -> dict[str, Any]:
        """Position, and what the stream was built from, as plain JSON values."""
        return {"position": int(self.position), **self._fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of `state`.

        Raises:
            ValueError: the state belongs to another stream; the message says what differs.
        """
        differing = [
            f"{field}={state.get(field)!r} where this plan has {own!r}"
            for field, own in self._fingerprint.items()
            if state.get(field) != own
        ]
        if differing:
            raise ValueError(
                f"cannot continue a plan from position={state.get('position')!r}: its state is "
                f"of another stream, {', '.join(differing)} (sizes and ratios as digests); resume "
                "with the settings of the saved run, or start a new one"
            )
        position = state.get("position")
        if not isinstance(position, int) or position < 0:
            raise ValueError(f"cannot continue a plan from position={position!r}: want an int >= 0")
        self.position = position

    @cached_property
    def _fingerprint(self) -> dict[str, Any]:
        return {
            "sizes": _digest(self.sizes),
            "ratios": _digest({name: str(share) for name, share in self.shares.items()}),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "apportionment": self.apportionment,
        }

    @cached_property
    def _turns(self) -> NDArray[np.int16]:
        """(period,) source of each turn."""
        return assign_turns(self._seats.tolist())

    @cached_property
    def _ranks(self) -> NDArray[np.int32]:
        """(period,) how many turns the source of each turn had before it in the period."""
        ranks = np.empty(self._period, dtype=np.int32)
        for source_id, own in enumerate(self._seats):
            ranks[self._turns == source_id] = np.arange(own, dtype=np.int32)
        return ranks

    def _positions_of(self, batch_index: int) -> NDArray[np.int64]:
        if batch_index < 0:
            raise ValueError(f"no batch at batch_index={batch_index}: batches start at 0")
        first = batch_index * self.batch_size
        return np.arange(first, first + self.batch_size, dtype=np.int64)


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=6).hexdigest()


def _check(
    sizes: Mapping[str, int], ratios: Mapping[str, float], batch_size: int, apportionment: str
) -> None:
    problems: list[str] = []
    for source in sizes:
        if source not in ratios:
            problems.append(f"source={source!r} has rows but no ratio")
    for source, ratio in ratios.items():
        if not (math.isfinite(ratio) and ratio >= 0):
            problems.append(f"ratio={ratio} of source={source!r} is not a finite number >= 0")
        elif ratio > 0 and sizes.get(source, 0) < 1:
            problems.append(f"source={source!r} has ratio={ratio} but no rows")
    if not any(ratios.values()):
        problems.append("no source has a ratio above 0")
    if batch_size < 1:
        problems.append(f"batch_size={batch_size} is below 1")
    if apportionment not in ("carry", "fixed"):
        problems.append(f"apportionment={apportionment!r} is neither 'carry' nor 'fixed'")
    if problems:
        raise ValueError(
            f"cannot plan the mixture: {'; '.join(problems)}; every source that takes part needs "
            "rows and a finite ratio above 0, under mixed.sources.<name>.ratio"
        )
