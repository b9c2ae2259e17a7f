"""Decisions: how many prompts of each source the next window of steps has, and why.

A decision is a function of the settings, of the decision before it and of the ledger's lines of the
window before it. It is a line of the ledger. So an audit computes each decision again, and a
resumed run reads its decisions instead of making them again. Standard library only.

It is made in three steps:

1. A rule proposes shares. `fixed` proposes the ratios. `progress` is SEC: the mean absolute
   advantage of a source's trajectories is smoothed over windows, and a softmax of it gives the
   shares (Chen et al. 2025, arXiv 2505.14970, sec. 3). `worst` is after MT-GRPO: a source gains if
   its reward is low or grows slowly (Ramesh et al. 2026, arXiv 2602.05547, sec. 4). Its shares
   follow exponentiated gradient: the last decided shares, after all bounds, times a factor. So a
   source that was at its floor for a long time rises as fast as any other.
2. The shares are clipped: to the floor and ceiling of each source, and to the largest change since
   the window before. A source that never had a difference of rewards in a group is held at its
   floor, or at what the ceilings of the others leave: its reward may be broken, and it teaches
   nothing.
3. The shares become whole prompts. What a source is owed (its due minus what it had, in the unit of
   the shares) is added to its due of the window, so rounding errors do not sum up.

Example: shares .5, .3, .2 in windows of 2 batches of 4 prompts. Due are 4, 2.4 and 1.6 prompts, so
the window has 4, 2 and 2. Owed are 0, .4 and -.4 prompts. In the next window due are 4, 2.8 and
1.2, so it has 4, 3 and 1, and owed are 0, -.2 and .2.

With `unit: trained_tokens` a prompt's tokens are not known before it is trained. They are foreseen
as those of the source's last window; without any, as the mean of the others. What was foreseen
wrong is owed: after each window a source lacks at most what was foreseen wrong in this window, of
all sources together, and one prompt of each source. Errors of earlier windows are not in it, except
what is more than half of a source's due of a window: it is made up for over several windows, so
that no source is left out meanwhile.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from samplers.apportionment import rounded
from samplers.ledger import Decision, LedgerEntry

Rule = Literal["fixed", "progress", "worst"]
Unit = Literal["prompts", "trajectories", "trained_tokens"]

MILLION = 10**6
"""Shares are whole millionths, so that they sum to 1 exactly and are the same on every machine."""

LEAST_PROMPTS = 16
"""Prompts of a source without any difference of rewards, from which on its reward counts as broken.
Of a source that solves one trajectory in ten, a group of 8 has no difference with a probability of
.43, so 16 groups of it have none with 1e-6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The settings by which decisions are made. Shares are in millionths."""

    rule: Rule
    unit: Unit
    window: int
    """Steps of a window."""

    batch_size: int
    """Prompts of a step."""

    floors: dict[str, int]
    ceilings: dict[str, int]
    max_change: int
    """Largest change of a share from one window to the next."""

    trajectories: dict[str, int]
    """Source -> trajectories of a prompt."""

    smoothing: float
    """Weight of the new window in the smoothed values of a rule, 0 to 1."""

    temperature: float
    """`progress`: smoothed mean absolute advantage that makes a share e times as large."""

    speed: float
    """`worst`: factor of a window's change of the logarithms of shares."""

    emphasis: float
    """`worst`: how much a low pass rate counts beside slow progress (MT-GRPO's lambda)."""


@dataclass(slots=True)
class _Seen:
    """What a source had in a window."""

    groups: int = 0
    """Trained and filtered; a filtered group counts for the rule with an advantage of 0."""

    prompts: int = 0
    trajectories: int = 0
    tokens: int = 0
    judged: int = 0
    solved: int = 0
    advantage: float = 0.0
    """Sum over the trajectories."""

    differences: int = 0


def first_decision(policy: Policy, ratios: Mapping[str, int]) -> Decision:
    """The decision for window 0: the shares that the run asks for, in millionths."""
    return _executed(
        policy,
        Decision(
            window=0,
            from_step=1,
            inputs={},
            state=dict.fromkeys(ratios, 0.0),
            passed={},
            proposed=dict(ratios),
            shares=dict(ratios),
            held=[],
            owed=dict.fromkeys(ratios, 0),
            foreseen=_foreseen(policy, {}, {}),
            prompts={},
        ),
    )


def decide(
    policy: Policy, ratios: Mapping[str, int], before: Decision, entries: Iterable[LedgerEntry]
) -> Decision:
    """The decision for the next window.

    Args:
        ratios: source -> share that the run asks for in this window, in millionths.
        before: the decision for the window that has ended.
        entries: the ledger's lines of that window.
    """
    inputs = observed(entries, before)
    state, passed = _remembered(policy, before, inputs)
    proposed = _proposed(policy, ratios, before, state)
    held = _broken(policy, inputs)
    bounded = clipped(policy, proposed, before.shares, held)
    return _executed(
        policy,
        Decision(
            window=before.window + 1,
            from_step=before.from_step + policy.window,
            inputs=inputs,
            state=state,
            passed=passed,
            proposed=proposed,
            shares=dict(ratios) if policy.rule == "fixed" else bounded,
            held=held,
            owed=_owed(policy, before, inputs),
            foreseen=_foreseen(policy, inputs, before.foreseen),
            prompts={},
        ),
    )


def observed(entries: Iterable[LedgerEntry], before: Decision) -> dict[str, dict[str, float]]:
    """`Decision.inputs` of the window that has ended, of which `before` was the decision."""
    seen = {source: _Seen() for source in before.shares}
    for entry in entries:
        own = seen.get(entry.source)
        if own is None or entry.outcome not in ("trained", "filtered"):
            continue
        own.prompts += entry.outcome == "trained"
        own.groups += 1
        own.trajectories += entry.trajectories
        own.tokens += entry.tokens or 0
        own.solved += entry.solved or 0
        own.judged += entry.judged or 0
        own.advantage += (entry.advantage or 0.0) * (entry.judged or 0)
        own.differences += (entry.advantage or 0.0) > 0
    return {
        source: {
            "prompts": own.prompts,
            "trajectories": own.trajectories,
            "tokens": own.tokens,
            "judged": own.judged,
            "pass_rate": own.solved / max(1, own.judged),
            "advantage": own.advantage / max(1, own.judged),
            "seen": own.groups + before.inputs.get(source, {}).get("seen", 0),
            "differences": own.differences + before.inputs.get(source, {}).get("differences", 0),
        }
        for source, own in seen.items()
    }


def _remembered(
    policy: Policy, before: Decision, inputs: Mapping[str, Mapping[str, float]]
) -> tuple[dict[str, float], dict[str, float]]:
    """(`Decision.state`, `Decision.passed`) after a window."""
    state, passed = dict(before.state), dict(before.passed)
    new = {source: own for source, own in inputs.items() if own["judged"]}
    for source, own in new.items():
        passed[source] = _smoothed(policy, passed.get(source), own["pass_rate"])
    if policy.rule == "progress":
        for source, own in new.items():
            known = before.state[source] if source in before.passed else None
            state[source] = _smoothed(policy, known, own["advantage"])
    if policy.rule == "worst":
        merits = {
            source: max(-0.1, min(0.1, passed[source] - before.passed.get(source, passed[source])))
            + policy.emphasis * passed[source]
            for source in new
        }
        total = sum(before.shares[source] for source in new)
        mean = math.fsum(merits[s] * before.shares[s] for s in new) / total if total else 0.0
        state = {source: merits.get(source, mean) for source in state}
    return state, passed


def _smoothed(policy: Policy, before: float | None, new: float) -> float:
    return new if before is None else before + policy.smoothing * (new - before)


def _proposed(
    policy: Policy, ratios: Mapping[str, int], before: Decision, state: Mapping[str, float]
) -> dict[str, int]:
    """`fixed`: the ratios. `progress`: in proportion to ratio times exp(state / temperature).
    `worst`: in proportion to the share before times exp(-speed * state)."""
    if policy.rule == "fixed":
        return dict(ratios)
    factor = 1 / policy.temperature if policy.rule == "progress" else -policy.speed
    prior = ratios if policy.rule == "progress" else before.shares
    top = max(factor * state[source] for source in ratios)
    weights = {source: prior[source] * math.exp(factor * state[source] - top) for source in ratios}
    total = math.fsum(weights.values())
    return rounded({s: Fraction(weight / total) * MILLION for s, weight in weights.items()})


def _broken(policy: Policy, inputs: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Sources that never had a difference of rewards in a group; none if no source had one."""
    if policy.rule == "fixed" or not any(own["differences"] for own in inputs.values()):
        return []
    return [
        source
        for source, own in sorted(inputs.items())
        if not own["differences"] and own["seen"] >= LEAST_PROMPTS
    ]


def clipped(
    policy: Policy, proposed: Mapping[str, int], before: Mapping[str, int], held: Sequence[str]
) -> dict[str, int]:
    """The shares nearest to the proposed ones, in proportion, within all bounds, in millionths."""
    low = {s: max(policy.floors[s], before[s] - policy.max_change) for s in before}
    high = {s: min(policy.ceilings[s], before[s] + policy.max_change) for s in before}
    for source in held:
        spare = sum(high.values()) - MILLION  # the others must be able to take what it gives up
        high[source] = max(low[source], high[source] - spare)
    left, shares = Fraction(MILLION), dict[str, Fraction]()
    free: list[str] = sorted(before)
    while free:
        total = sum(proposed[source] for source in free)
        wanted = {
            s: Fraction(proposed[s], total) * left if total else left / len(free) for s in free
        }
        bounded = {s: max(Fraction(low[s]), min(Fraction(high[s]), wanted[s])) for s in free}
        excess = _sum(bounded.values()) - left
        # Where too much is given out, what lies below its lower bound stays there; and vice versa.
        fixed = [
            s
            for s in free
            if (excess >= 0 and bounded[s] > wanted[s]) or (excess <= 0 and bounded[s] < wanted[s])
        ]
        for source in fixed or free:
            shares[source] = bounded[source]
        left -= _sum(shares[source] for source in fixed or free)
        free = [source for source in free if source not in shares]
    return rounded(shares)


def mean_advantage(rewards: Sequence[float]) -> float:
    """Mean absolute advantage of a group by GRPO: the rewards' mean distance from their mean,
    divided by their standard deviation. 0 if they are equal."""
    if len(set(rewards)) < 2:
        return 0.0
    scale = max(map(abs, rewards))  # so that no square overflows
    scaled = [reward / scale for reward in rewards]
    mean = math.fsum(scaled) / len(scaled)
    away = [abs(reward - mean) for reward in scaled]
    spread = math.sqrt(math.fsum(distance**2 for distance in away) / (len(away) - 1))
    return math.fsum(away) / len(away) / spread if spread else 0.0


def _amounts(policy: Policy, inputs: Mapping[str, Mapping[str, float]]) -> dict[str, int]:
    """Source -> what it had in a window, in the unit of the shares."""
    name = "tokens" if policy.unit == "trained_tokens" else policy.unit
    return {source: int(own[name]) for source, own in inputs.items()}


def _owed(
    policy: Policy, before: Decision, inputs: Mapping[str, Mapping[str, float]]
) -> dict[str, int]:
    had = _amounts(policy, inputs)
    total = sum(had.values())
    return {
        source: before.owed[source] + share * total - had[source] * MILLION
        for source, share in before.shares.items()
    }


def _foreseen(
    policy: Policy, inputs: Mapping[str, Mapping[str, float]], earlier: Mapping[str, str]
) -> dict[str, str]:
    if policy.unit == "prompts":
        return dict.fromkeys(policy.trajectories, "1")
    if policy.unit == "trajectories":
        return {source: str(count) for source, count in policy.trajectories.items()}
    measured = {source: own for source, own in inputs.items() if own["tokens"] and own["prompts"]}
    found = {
        source: str(Fraction(int(own["tokens"]), int(own["prompts"])))
        for source, own in measured.items()
    }
    tokens, prompts = (
        int(sum(own[name] for own in measured.values())) for name in ("tokens", "prompts")
    )
    mean = str(Fraction(tokens, prompts)) if measured else "1"
    return {
        source: found.get(source) or (mean if earlier.get(source, "1") == "1" else earlier[source])
        for source in policy.trajectories
    }


def _executed(policy: Policy, decision: Decision) -> Decision:
    """The decision with its prompts.

    At most half of a source's due is taken from it, or added to it, to make up for what it is owed.
    Where half of its due is less than a prompt, one prompt may be added, so that a small share is
    not rounded to nothing for ever. All additions together are at most half of the window.
    """
    size = {source: Fraction(text) for source, text in decision.foreseen.items()}
    share = {source: Fraction(own, MILLION) for source, own in decision.shares.items()}
    prompts = policy.window * policy.batch_size
    usual = prompts / _sum(share[source] / size[source] for source in share)
    owed = {
        source: min(
            max(usual * own / 2, size[source]) if own else Fraction(0),
            Fraction(decision.owed[source], MILLION),
        )
        for source, own in share.items()
    }
    added = _sum(max(Fraction(0), owed[source]) / size[source] for source in share)
    if 2 * added > prompts:
        owed = {source: min(own, own * prompts / (2 * added)) for source, own in owed.items()}
    halved = set[str]()
    while True:
        rest = [source for source in share if source not in halved]
        rate = _sum(share[s] / size[s] / (1 + (s in halved)) for s in share)
        total = (prompts - _sum(owed[s] / size[s] for s in rest)) / rate
        below = {s for s in rest if owed[s] < -share[s] * total / 2}
        if not below:
            break
        halved |= below
    exact = {
        s: (share[s] * total / 2 if s in halved else share[s] * total + owed[s]) / size[s]
        for s in share
    }
    return replace(decision, prompts=rounded(exact))


def _sum(numbers: Iterable[Fraction]) -> Fraction:
    return sum(numbers, Fraction(0))


def malformed(policy: Policy, number: int, decision: Decision) -> str:
    """Why a line of a ledger cannot be the decision with this number; empty if it can."""
    sources = policy.trajectories.keys()
    names = ("inputs", "state", "proposed", "shares", "owed", "foreseen", "prompts")
    for name in names:
        if getattr(decision, name).keys() != sources:
            return f"has {name} of {sorted(getattr(decision, name))}, want {sorted(sources)}"
    if decision.window != number:
        return f"is window={decision.window}, want {number}"
    total = policy.window * policy.batch_size
    if min(decision.prompts.values()) < 0 or sum(decision.prompts.values()) != total:
        return f"has prompts={decision.prompts}, want numbers that sum to {total}"
    if min(decision.shares.values()) < 0 or sum(decision.shares.values()) != MILLION:
        return f"has shares={decision.shares}, want numbers that sum to {MILLION}"
    try:
        sizes = [Fraction(text) for text in decision.foreseen.values()]
    except (ValueError, ZeroDivisionError):
        sizes = [Fraction(0)]
    return "" if min(sizes) > 0 else f"has foreseen={decision.foreseen}, want fractions above 0"


def shortcomings(
    policy: Policy,
    ratios: Mapping[str, int],
    before: Decision,
    after: Decision,
    entries: Iterable[LedgerEntry],
) -> list[str]:
    """How a decision differs from what `decide` makes of its inputs; empty if it does not.

    Proposed shares may differ by two millionths, because `exp` differs between machines.
    """
    again = decide(policy, ratios, before, entries)
    same = {
        "from_step": again.from_step == after.from_step and again.window == after.window,
        "inputs": _near(again.inputs, after.inputs),
        "state": _near({"": again.state}, {"": after.state}),
        "passed": _near({"": again.passed}, {"": after.passed}),
        "proposed": all(
            abs(again.proposed[source] - share) <= 2 for source, share in after.proposed.items()
        ),
        "held": again.held == after.held,
        "owed": again.owed == after.owed,
        "foreseen": again.foreseen == after.foreseen,
    }
    shares = clipped(policy, after.proposed, before.shares, after.held)
    same["shares"] = after.shares == (after.proposed if policy.rule == "fixed" else shares)
    same["prompts"] = after.prompts == _executed(policy, after).prompts
    return [
        f"has {name}={getattr(after, name)}, its rule gives {getattr(again, name)}"
        for name, holds in same.items()
        if not holds
    ]


def _near(one: Mapping[str, Mapping[str, float]], other: Mapping[str, Mapping[str, float]]) -> bool:
    return one.keys() == other.keys() and all(
        own.keys() == other[key].keys()
        and all(math.isclose(own[name], other[key][name], abs_tol=1e-9) for name in own)
        for key, own in one.items()
    )
