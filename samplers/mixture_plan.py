"""The mixture plan: the stream of (source, row) from which training takes its prompts.

Prompt i is a function of (sizes, ratios, batch size, seed, i). The plan keeps two promises:

1. After any i prompts, source s was drawn within one prompt of its due number (`carry`). This is
   i * share, or with a schedule the sum of the shares so far. Remainders are carried to the next
   batch. A source whose quota is the same whole number in all batches has exactly this number in
   each. With schedules, a batch is within one prompt of what is due so far, so a source may get one
   more prompt after its ratio has become 0. Shares may be rounded (`samplers.shares`). The due
   number is then less than i / 2**38 prompts from that of the exact shares, so the source is within
   1 + i / 2**38 prompts of the latter.
2. A source repeats no row before all its rows were drawn. Each pass has another order. No row is
   twice in one batch, unless the source has fewer rows than a batch may take: its largest quota
   rounded up, plus one.

Example: ratios 0.5, 0.3, 0.2 and batches of 4 give counts (2, 1, 1), (2, 2, 0), (2, 1, 1), ...;
after five batches the sources have exactly 10, 6 and 4 prompts.

A lost prompt is replaced by the next row of the same source. Each source counts its own draws, so
the state is `drawn` and `position`. A pin is added if the order is long, so that a resume does not
compute the order from its start.
"""

import hashlib
import json
import logging
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from samplers import prompt_order
from samplers.apportionment import apportion, exact_shares
from samplers.ledger import Decision, LedgerEntry
from samplers.permutation import RowOrder, order_key
from samplers.prompt_order import Dues, PromptOrder
from samplers.shares import Shares, steps_without_ratio

if TYPE_CHECKING:  # a plan with constant ratios needs none of them
    from samplers.adaptive.controller import Policy
    from samplers.adaptive.curriculum import ChosenRows, MappedOrder
    from samplers.adaptive.windows import Windows

_log = logging.getLogger(__name__)

Apportionment = Literal["carry", "fixed"]

Schedule = Mapping[int, float]
"""Batches before -> ratio, such as `{0: 0.5, 1000: 0.2}`. A schedule is constant before its first
entry and after its last. Between the entries of all sources together, the shares change linearly.
"""

Ratio = float | Schedule
"""A number relative to the other sources' ratios, or a schedule of such numbers."""

MAX_SOURCES = 2**15 - 1
"""Sources are numbered with 16 bits."""

MAX_STEP, MAX_BATCH_SIZE = 2**40, 2**21
"""Latest step of an entry and most prompts of a batch: prompts are counted with 63 bits."""

_CHUNK = 2**15
"""Prompts that `MixturePlan.batch` computes at a time, from the first batch that is asked for."""

_AHEAD = 256
"""Rows of a source that are computed at a time when prompts are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Prompts of the stream, in stream order."""

    source_ids: NDArray[np.int16]
    """(B,) index into `MixturePlan.sources`."""

    rows: NDArray[np.int64]
    """(B,) row within its source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPrompt:
    """One prompt that was drawn."""

    source: str
    draw: int
    """Number of prompts of its source that were drawn before; it identifies the prompt."""

    row: int
    """Row within its source, in the order of the files."""


class MixturePlan:
    """The stream of prompts of one mixture.

    Only `take`, `replace`, `give_back` and `load_state_dict` change the state, and the trainer sets
    `trained`. All other methods are functions of their arguments or tell the state.

    Args:
        sizes: source -> rows it has.
        ratios: source -> relative ratio, finite and >= 0; 0 leaves a source out. Or a schedule.
        batch_size: prompts per batch (B), 1 to `MAX_BATCH_SIZE`.
        seed: seed of the order of each source's rows.
        apportionment: `carry` carries remainders to the next batch; `fixed` gives every batch the
            same largest-remainder counts, so a small share may get no prompt at all.
        parts: see `Shares`; a description has it.
        policy: the shares are decided for one window of steps at a time
            (`samplers.adaptive.controller`); the ratios are those of the first window. None: the
            ratios hold for the whole run.
        choices: source -> the rows that may be drawn, in which order; its size is their number. The
            other sources draw all their rows.

    Raises:
        ValueError: lists every mistake.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        ratios: Mapping[str, Ratio],
        batch_size: int,
        seed: int,
        apportionment: Apportionment = "carry",
        parts: int | None = None,
        policy: "Policy | None" = None,
        choices: "Mapping[str, ChosenRows] | None" = None,
    ):
        schedules: dict[str, Schedule] = {
            name: ratio if isinstance(ratio, Mapping) else {0: ratio}
            for name, ratio in ratios.items()
        }
        _check(sizes, schedules, batch_size, apportionment)
        self.sources: tuple[str, ...] = tuple(sorted(ratios))  # the mapping's order must not matter
        self.sizes: dict[str, int] = {name: int(sizes.get(name, 0)) for name in self.sources}
        self.batch_size: int = int(batch_size)
        self.seed: int = int(seed)
        self.apportionment: Apportionment = apportionment
        self._starved: list[str] = []
        """Sources with a ratio that `fixed` gives no prompt."""
        if apportionment == "fixed":
            only = {name: next(iter(own.values())) for name, own in sorted(schedules.items())}
            shares = exact_shares(only)
            seats = apportion(shares, self.batch_size)
            self._starved = [name for name, share in shares.items() if share and not seats[name]]
            self._say_starved()
            schedules = {name: {0: count} for name, count in seats.items()}
        self.policy: Policy | None = policy
        self.choices: dict[str, ChosenRows] = dict(choices or {})
        self.decisions: list[Decision] = []
        """The decisions so far, if there is a policy."""
        self._follow(Shares(schedules, self.batch_size, parts))

        self.position: int = 0
        """Prompts of the stream drawn so far, without replacements."""
        self.drawn: dict[str, int] = dict.fromkeys(self.sources, 0)
        """Source -> rows drawn so far, with replacements; this is its next draw."""
        self.trained: int | None = None
        """Prompts of the stream in the steps trained so far, if the trainer tells it. Asynchronous
        modes draw prompts ahead, so a resumed run asks for the counts of batches from here on."""

    def counts(self, batch_index: int) -> dict[str, int]:
        """Prompts per source in one batch; S entries that sum to the batch size."""
        if batch_index < 0:
            raise ValueError(f"no batch at batch_index={batch_index}: batches start at 0")
        first = batch_index * self.batch_size
        return self.counts_between(first, first + self.batch_size)

    def counts_between(self, first: int, last: int) -> dict[str, int]:
        """Prompts per source at the positions first .. last - 1, for example of a mini-batch."""
        before, after = self._prompt_order.had(first), self._prompt_order.had(last)
        return {name: b - a for name, a, b in zip(self.sources, before, after, strict=True)}

    def batch(self, batch_index: int) -> Batch:
        """The prompts of one batch: positions batch_index * B .. (batch_index + 1) * B - 1."""
        if batch_index < 0:
            raise ValueError(f"no batch at batch_index={batch_index}: batches start at 0")
        first = batch_index * self.batch_size
        prompts = max(1, _CHUNK // self.batch_size) * self.batch_size
        if self._chunk is None or not 0 <= first - self._chunk[0] < prompts:
            self._chunk = first, self._between(first, first + prompts)
        chunk, start = self._chunk[1], first - self._chunk[0]
        stop = start + self.batch_size
        return Batch(source_ids=chunk.source_ids[start:stop], rows=chunk.rows[start:stop])

    def prompt(self, i: int) -> tuple[str, int]:
        """Source and row of the i-th prompt of the stream, i >= 0."""
        if i < 0:
            raise ValueError(f"no prompt at position={i}: positions start at 0")
        one = self._between(i, i + 1)
        return self.sources[int(one.source_ids[0])], int(one.rows[0])

    def due(self, prompts: int) -> dict[str, Fraction]:
        """The number of the first `prompts` prompts that each source is due; S entries."""
        wholes, parts = (numbers.tolist() for numbers in self._dues.after(prompts))
        return {
            name: whole + Fraction(part, self._dues.scale)
            for name, whole, part in zip(self.sources, wholes, parts, strict=True)
        }

    def ahead(self, prompts: int) -> NDArray[np.float64]:
        """(S,) prompts by which each source is ahead of `due` after the first `prompts` prompts.

        A thousand sources take 0.3 ms, because no fractions are made.
        """
        wholes, parts = self._dues.after(prompts)
        had = np.array(self._prompt_order.had(prompts))
        return (had - wholes - parts / self._dues.scale).astype(np.float64)

    def batches_of_passes(self, passes: int) -> int:
        """The fewest batches in which each source with a share draws all its rows `passes` times.

        The source that needs the longest decides; the others repeat rows until then. Example: 8
        rows at a ratio of 0.5 and 40 at 0.5, in batches of 4: 20 batches are one pass, in which the
        rows of the first source are drawn 5 times.

        Raises:
            ValueError: a source with a ratio never draws its rows that often: `fixed` gives it no
                prompt, its ratio becomes 0 before, or more than `MAX_STEP` batches are needed.
        """
        instead = "set trainer.total_training_steps instead of trainer.total_epochs"
        if self.policy is not None:
            raise ValueError(f"shares that are decided on the way have no passes; {instead}")
        for name, choice in self.choices.items():
            if choice.curriculum is not None:
                raise ValueError(f"source={name!r} has a curriculum, and so no passes; {instead}")
        if self._starved:
            raise ValueError(
                f"source={self._starved[0]!r} gets no prompt of a batch "
                f"(mixed.apportionment=fixed), so it never draws its rows; {instead}"
            )
        last = max(self._shares)
        needed = {
            name: passes * self.sizes[name]
            for name, parts in zip(
                self.sources, zip(*self._shares.values(), strict=True), strict=True
            )
            if any(parts)
        }
        for name, share in zip(self.sources, self._shares[last], strict=True):
            drawn = math.floor(self.due((last + 1) * self.batch_size)[name])
            if name in needed and not share and drawn < needed[name]:
                raise ValueError(
                    f"source={name!r} never draws its {self.sizes[name]} rows {passes} times: its "
                    f"ratio becomes 0 at step={last}, after {drawn} prompts; {instead}"
                )

        def lacking(batches: int) -> Fraction:
            due = self.due(batches * self.batch_size)
            return max(count - due[name] for name, count in needed.items())

        def is_drawn(batches: int) -> bool:
            had = self.counts_between(0, batches * self.batch_size)
            return all(had[name] >= count for name, count in needed.items())

        if lacking(MAX_STEP) > 0:
            raise ValueError(f"{passes} passes need more than {MAX_STEP} batches; {instead}")
        # every source is within one prompt of what is due
        batches = bisect_left(range(MAX_STEP), True, key=lambda batches: lacking(batches) < 1)
        while not is_drawn(batches):  # forwards, because the order is computed forwards
            batches += 1
        return batches

    def rows(self, source: str, draws: ArrayLike) -> NDArray[np.int64]:
        """(N,) rows of the draws (N,) of one source, in the order of `draws`.

        Raises:
            ValueError: a draw is negative.
        """
        draws = np.asarray(draws, dtype=np.int64)
        if draws.size and draws.min() < 0:
            raise ValueError(f"no draw={draws.min()} of source={source!r}: draws start at 0")
        return self._orders[source].rows_at(draws)

    # --- drawing ------------------------------------------------------------------------------

    def take(self, prompts: int) -> list[PlannedPrompt]:
        """Draw the next prompts of the stream, in stream order."""
        source_ids = self._prompt_order.between(self.position, self.position + prompts)
        self.position += prompts
        return self._draw(source_ids)

    def replace(self, wanted: Mapping[str, int]) -> list[PlannedPrompt]:
        """Draw a number of prompts per source outside the stream, for prompts that were lost."""
        source_ids = [self.sources.index(name) for name in wanted]
        return self._draw(np.repeat(source_ids, [*wanted.values()]).astype(np.int16))

    def give_back(self, drawn: Mapping[str, int]) -> None:
        """Set `drawn` of some sources back, so that the later draws are drawn again.

        Raises:
            ValueError: a value is above what was drawn.
        """
        for name, count in drawn.items():
            if not 0 <= count <= self.drawn[name]:
                raise ValueError(
                    f"cannot set draws of source={name!r} back to {count}: "
                    f"{self.drawn[name]} were drawn"
                )
        self.drawn.update(drawn)

    def _draw(self, source_ids: NDArray[np.int16]) -> list[PlannedPrompt]:
        """The next draw of each source (N,), in this order."""
        order, counts = self._by_source(source_ids)
        firsts = np.array([self.drawn[name] for name in self.sources])
        pieces = [order[:0]]
        for name, count in zip(self.sources, counts.tolist(), strict=True):
            if count:
                draw = self.drawn[name]
                first, coming = self._coming.get(name, (draw, order[:0]))
                if not first <= draw <= first + len(coming) - count:
                    first, coming = draw, self._orders[name].rows(draw, max(count, _AHEAD))
                    self._coming[name] = first, coming
                pieces.append(coming[draw - first : draw - first + count])
                self.drawn[name] = draw + count
        draws, rows = np.empty_like(order), np.empty_like(order)
        rows[order] = np.concatenate(pieces)
        draws[order] = np.repeat(firsts - np.cumsum(counts) + counts, counts) + np.arange(
            len(order)
        )
        ids: list[int] = source_ids.tolist()
        names = [self.sources[source_id] for source_id in ids]
        return [
            PlannedPrompt(source=name, draw=draw, row=row)
            for name, draw, row in zip(names, draws.tolist(), rows.tolist(), strict=True)
        ]

    def _by_source(
        self, source_ids: NDArray[np.int16]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(N,) places in `source_ids` in the order of sources, (S,) places of each source."""
        counts = np.bincount(source_ids, minlength=len(self.sources))
        return np.argsort(source_ids, kind="stable"), counts

    # --- decisions ----------------------------------------------------------------------------

    def decide(self, entries: Iterable[LedgerEntry]) -> Decision:
        """Decide the next window; see `samplers.adaptive.controller`.

        Args:
            entries: the ledger's lines of the last window that is decided.
        """
        from samplers.adaptive import controller, windows

        assert self.policy is not None
        assert isinstance(self._prompt_order, windows.Windows)
        asked = self.asked(len(self.decisions))
        decision = controller.decide(self.policy, asked, self.decisions[-1], entries)
        self.decisions.append(decision)
        self._prompt_order.append(self._counts_of(decision))
        self._chunk = None
        return decision

    def follow(self, decisions: Sequence[Decision]) -> None:
        """Draw by the decisions that were made before, instead of deciding again."""
        self.decisions = list(decisions)
        self._follow(self._shares)

    def asked(self, window: int) -> dict[str, int]:
        """Source -> its mean share of a window by the configured ratios, in millionths."""
        from samplers.adaptive.controller import MILLION

        assert self.policy is not None
        length = self.policy.window * self.batch_size
        before, after = (self._asked.after(length * (window + more)) for more in (0, 1))
        shares = {
            name: Fraction(
                int(b - a) * self._asked.scale + int(d) - int(c), length * self._asked.scale
            )
            for name, a, b, c, d in zip(
                self.sources, before[0], after[0], before[1], after[1], strict=True
            )
        }
        return apportion(shares, MILLION)

    def _counts_of(self, decision: Decision) -> list[int]:
        return [decision.prompts[name] for name in self.sources]

    # --- resume -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Position, draws, pin and the arguments of the stream, as plain JSON values."""
        shares = self._shares
        trained = self.position if self.trained is None else self.trained
        pin = self._prompt_order.pin(min(self.position, trained))
        return {
            "position": self.position,
            "drawn": dict(self.drawn),
            **self._fingerprint,
            **({"parts": shares.parts} if shares.is_chosen else {}),
            **({"pin": pin | {"digest": _digest_of_pin(pin, self._fingerprint)}} if pin else {}),
            **({"decisions": [*map(asdict, self.decisions)]} if self.policy is not None else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, on_change: str = "refuse") -> None:
        """Continue where `state` was taken.

        A state of release 1.0.0 has no `parts`. Its stream continues with exact shares, as that
        release had them; a later state of this stream has no `parts` either, if its exact shares
        need too many. The first batch takes longer, because a state of 1.0.0 has no pin.

        Args:
            on_change: `refuse` a state of another stream; or `continue`: each source in both
                streams continues with its next draw, a new source starts at its first, and the
                position is that of the same batch.

        Raises:
            ValueError: the state belongs to another stream, lacks a source, or is not a state.
        """
        position, drawn = state.get("position"), state.get("drawn")
        if not isinstance(position, int) or position < 0:
            raise ValueError(f"cannot continue a plan from position={position!r}: want an int >= 0")
        if not isinstance(drawn, Mapping) or not all(
            isinstance(count, int) and count >= 0
            for count in cast(Mapping[str, Any], drawn).values()
        ):
            raise ValueError(
                f"cannot continue a plan from drawn={drawn!r}: want ints >= 0 by source"
            )
        before, shares = cast(Mapping[str, int], drawn), self._shares_of(state)
        if differing := self._differences(state, shares):
            if on_change != "continue":
                raise ValueError(
                    f"cannot continue a plan from position={position!r}: its state is of another "
                    f"stream, {', '.join(differing)} (sizes and ratios as digests); resume with "
                    "the settings of the saved run, start a new one, or set "
                    "mixed.on_change=continue to carry each source's draws over"
                )
            batch_size = state.get("batch_size")
            if not isinstance(batch_size, int) or batch_size < 1:
                raise ValueError(
                    f"cannot continue a plan with batch_size={batch_size!r}: want an int >= 1"
                )
            position = round(Fraction(position, batch_size) * self.batch_size)
        else:
            if on_change != "continue" and before.keys() != self.drawn.keys():
                raise ValueError(
                    f"cannot continue a plan from the draws of sources={sorted(before)}: the "
                    f"stream has sources={list(self.sources)}; resume from another checkpoint "
                    "(trainer.resume_from_path), or set mixed.on_change=continue to start the "
                    "missing sources at their first rows"
                )
            if shares is not self._shares:
                self._follow(shares)
            if self.policy is not None:
                self.follow([Decision(**each) for each in state["decisions"]])
            if (pin := state.get("pin")) and isinstance(self._prompt_order, PromptOrder):
                self._load_pin(self._prompt_order, pin)
        self.position = position
        self.drawn.update({name: before.get(name, 0) for name in self.drawn})

    def differences(self, state: Mapping[str, Any]) -> list[str]:
        """The differences between a state's stream and this plan, one phrase each."""
        return self._differences(state, self._shares_of(state))

    def _differences(self, state: Mapping[str, Any], shares: Shares) -> list[str]:
        own = dict.fromkeys(("policy", "choices")) | self._fingerprint_of(shares)
        return [
            f"{field}={state.get(field)!r} where this plan has {value!r}"
            for field, value in own.items()
            if state.get(field) != value
        ]

    def description(self) -> dict[str, Any]:
        """All arguments of the stream as plain JSON values, for `from_description`."""
        return self._described(self._shares)

    def _described(self, shares: Shares) -> dict[str, Any]:
        return {
            "sizes": self.sizes,
            "ratios": shares.description(),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "apportionment": self.apportionment,
            **({} if shares.exact else {"parts": shares.parts}),
            **({} if self.policy is None else {"policy": asdict(self.policy)}),
            **({"choices": self._digests} if self.choices else {}),
        }

    @property
    def _digests(self) -> dict[str, str]:
        return {name: choice.digest for name, choice in sorted(self.choices.items())}

    @classmethod
    def from_description(
        cls, description: Mapping[str, Any], choices: "Mapping[str, ChosenRows] | None" = None
    ) -> "MixturePlan":
        """The plan with this `description`.

        Args:
            choices: those of the run, which are too large for a description. None: the plan has the
                counts of the described plan, and not its rows.

        Raises:
            ValueError: it is no description, or was made with other choices.
        """
        policy = None
        try:
            if "policy" in description:
                from samplers.adaptive.controller import Policy

                policy = Policy(**description["policy"])
            ratios = {
                name: {int(step): Fraction(share) for step, share in shares.items()}
                for name, shares in description["ratios"].items()
            }
            digests = description.get("choices", {})
            known = {name: choice for name, choice in (choices or {}).items() if name in digests}
            plan = cls(
                description["sizes"],
                cast(Mapping[str, Ratio], ratios),
                description["batch_size"],
                description["seed"],
                description["apportionment"],
                description.get("parts", 0),
                policy,
                known,
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"not the description of a mixture plan: {error!r}") from error
        if choices is not None and plan._digests != digests:
            raise ValueError(
                f"the plan drew rows by the profiles {digests}, and those of the run's files are "
                f"{plan._digests}; put the profiles back that the run began with"
            )
        return plan

    def _fingerprint_of(self, shares: Shares) -> dict[str, Any]:
        own = shares is self._shares
        return self._fingerprint if own else _fingerprint(self._described(shares))

    @cached_property
    def _fingerprint(self) -> dict[str, Any]:
        return _fingerprint(self.description())

    # --- inside -------------------------------------------------------------------------------

    def _between(self, first: int, last: int) -> Batch:
        """The prompts at the positions first .. last - 1 if nothing is replaced."""
        source_ids = self._prompt_order.between(first, last)
        rows = np.empty(last - first, dtype=np.int64)
        order, counts = self._by_source(source_ids)
        pieces = [
            self._orders[name].rows(had, count)
            for name, had, count in zip(
                self.sources, self._prompt_order.had(first), counts.tolist(), strict=True
            )
            if count
        ]
        rows[order] = np.concatenate(pieces)
        source_ids.flags.writeable = rows.flags.writeable = False
        return Batch(source_ids=source_ids, rows=rows)

    def _follow(self, shares: Shares) -> None:
        """Draw by these shares."""
        self._shares = shares
        self._asked = Dues(shares, self.batch_size)
        self._dues: Dues | Windows = self._asked
        self._prompt_order: PromptOrder | Windows
        if self.policy is None:
            self._prompt_order = PromptOrder(self._asked)
        else:
            from samplers.adaptive import controller, windows

            asked = self.asked(0)
            self.decisions = self.decisions or [controller.first_decision(self.policy, asked)]
            first = self._counts_of(self.decisions[0])
            window = self.policy.window
            self._prompt_order = self._dues = windows.Windows(first, window, self.batch_size)
            for decision in self.decisions[1:]:
                self._prompt_order.append(self._counts_of(decision))
        most = shares.most(self.batch_size)
        self._orders = {
            name: self._order_of(name, self._most_in_a_batch(most[name]))
            for name, size in self.sizes.items()
            if size
        }
        self._chunk: tuple[int, Batch] | None = None
        self._coming: dict[str, tuple[int, NDArray[np.int64]]] = {}
        """Source -> (a draw, the rows from this draw on)."""
        self.__dict__.pop("_fingerprint", None)

    def _order_of(self, name: str, most: int) -> "RowOrder | MappedOrder":
        key = order_key(self.seed, name)
        if (choice := self.choices.get(name)) is None:
            return RowOrder(self.sizes[name], most, key)
        usual, draws = most, 0
        if (curriculum := choice.curriculum) is not None:
            wholes, _ = self._asked.after(curriculum.steps * self.batch_size)
            draws = int(wholes[self.sources.index(name)])
            usual = min(most, math.ceil(self._shares.most(self.batch_size)[name]) + 1)
        return choice.order(most, usual, key, draws)

    def _shares_of(self, state: Mapping[str, Any]) -> Shares:
        """The shares that a state of this plan was drawn with; exact without `parts`.

        Exact shares of many schedules take long. They are not computed for a state that is of
        another stream whatever its ratios are.
        """
        fields = ("sizes", "batch_size", "seed", "apportionment")
        is_other = any(state.get(field) != self._fingerprint[field] for field in fields)
        if self._shares.exact or "parts" in state or is_other:
            return self._shares
        _log.info("sources=%d state=1.0.0 shares=exact: this may take long", len(self.sources))
        return Shares(self._shares.ratios, self.batch_size, 0)

    def _load_pin(self, order: PromptOrder, pin: Any) -> None:
        """Take over the pin of a state; without it, the order is computed from its start."""
        own = dict(cast(Mapping[str, Any], pin)) if isinstance(pin, Mapping) else {}
        digest = own.pop("digest", None)
        if digest == _digest_of_pin(own, self._fingerprint):
            order.load_pin(own)
        else:
            _log.warning(
                "pin=ignored: the checkpoint was written by another release or is damaged; the "
                "order is computed from its start, so the first batch takes longer"
            )

    def _most_in_a_batch(self, quota: Fraction | float) -> int:
        """An upper bound of a source's prompts in one batch, for its largest quota."""
        if self.policy is not None:
            return self.batch_size
        if len(self._shares) == 1 and isinstance(quota, Fraction) and quota.denominator == 1:
            return int(quota)
        return min(self.batch_size, math.ceil(quota) + 1)

    def _say_starved(self) -> None:
        for name in self._starved:
            _log.warning(
                "source=%s seats=0 batch_size=%d apportionment=fixed: it is never "
                "drawn; use a larger batch or apportionment=carry",
                name,
                self.batch_size,
            )


def _fingerprint(description: Mapping[str, Any]) -> dict[str, Any]:
    """A description with its long fields as digests."""
    return {
        **description,
        "sizes": _digest(description["sizes"]),
        "ratios": _digest(description["ratios"]),
    }


def _digest_of_pin(pin: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> str:
    """Digest of a pin, without its digest, and of all that it depends on."""
    blocks = [prompt_order.BLOCK, prompt_order.MAX_PERIOD]
    return _digest({**fingerprint, "pin": pin, "blocks": blocks})


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=4).hexdigest()


def _check(
    sizes: Mapping[str, int],
    schedules: Mapping[str, Schedule],
    batch_size: int,
    apportionment: str,
) -> None:
    problems = [
        f"source={source!r} has rows but no ratio" for source in sizes if source not in schedules
    ]
    for source, schedule in schedules.items():
        if not schedule or any(step < 0 for step in schedule):
            problems.append(
                f"the schedule of source={source!r} is {dict(schedule)}; want one entry or more, "
                "each at a number of batches >= 0"
            )
            continue
        if max(schedule) > MAX_STEP:
            problems.append(
                f"the schedule of source={source!r} has an entry at step={max(schedule)}; steps "
                f"go up to {MAX_STEP}"
            )
        wrong = [own for own in schedule.values() if not (math.isfinite(own) and own >= 0)]
        problems += [
            f"ratio={own} of source={source!r} is not a finite number >= 0" for own in wrong
        ]
        if not wrong and any(schedule.values()) and sizes.get(source, 0) < 1:
            ratio = schedule[0] if list(schedule) == [0] else schedule
            problems.append(f"source={source!r} has ratio={ratio} but no rows")
        if len(schedule) > 1 and apportionment == "fixed":
            problems.append(
                f"source={source!r} has a schedule, and apportionment='fixed' gives every batch "
                "the same counts; use carry"
            )
    if not problems:
        problems = [
            "no source has a ratio above 0" + (f" after {step} batches" if step else "")
            for step in steps_without_ratio(schedules)
        ]
    elif not any(any(schedule.values()) for schedule in schedules.values()):
        problems.append("no source has a ratio above 0")
    if len(schedules) > MAX_SOURCES:
        problems.append(f"there are {len(schedules)} sources; want at most {MAX_SOURCES}")
    if not 1 <= batch_size <= MAX_BATCH_SIZE:
        problems.append(f"batch_size={batch_size} is not between 1 and {MAX_BATCH_SIZE}")
    if apportionment not in ("carry", "fixed"):
        problems.append(f"apportionment={apportionment!r} is neither 'carry' nor 'fixed'")
    if problems:
        raise ValueError(
            f"cannot plan the mixture: {'; '.join(problems)}; every source that takes part needs "
            "rows and a finite ratio above 0, under mixed.sources.<name>.ratio"
        )
