"""Metrics per source from a batch's tokens: entropy, KL, importance, shares of the gradient. Pure.

The tokens of a row are added up first (`token_sums`), so that what is kept grows with the rows. The
shares show each source's effect on the weights: a source whose groups are all solved has prompts in
the batch but no gradient.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.floating]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSums:
    """Sums over the tokens in the loss of one trained trajectory, as the optimizer saw them."""

    key: str
    """verl's key, `<uid>_<session>_<index>`."""

    source: str
    tokens: int
    """Tokens in the loss."""

    advantage: float
    strength: float
    """Sum of |A|."""

    moving: int
    """Tokens with A != 0."""

    entropy: float | None = None
    """Entropy of the policy before the update, in nats; None if verl did not compute it."""

    kl: float | None = None
    """The k3 estimate of KL(policy || reference); None without a reference.

    Source: Schulman 2020, "Approximating KL Divergence".
    """

    importance: tuple[float, float, float] | None = None
    """Sum, smallest and largest weight of the importance correction
    (`algorithm.rollout_correction.rollout_is`), after the cut at the threshold; None without it,
    and of a row that is in no advantage."""

    @property
    def mean_advantage(self) -> float | None:
        """Mean over the tokens in the loss; None without one."""
        return self.advantage / self.tokens if self.tokens else None


def token_sums(
    keys: Sequence[str],
    sources: Sequence[str],
    lengths: Sequence[int],
    mask: NDArray[np.bool_],
    columns: Mapping[str, Floats],
) -> list[TokenSums]:
    """Add up the tokens of each row.

    Args:
        keys: (B,) verl's keys.
        sources: (B,) source of each row.
        lengths: (B,) tokens of each response, at least 1; N together.
        mask: (N,) tokens in the loss, row after row.
        columns: verl's names -> (N,): `advantages`, and what there is of `entropy`,
            `old_log_probs`, `ref_log_prob` and `rollout_is_weights`.
    """
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])

    def sums(values: Floats) -> Floats:
        """(N,) -> (B,), in double precision."""
        return np.add.reduceat(np.where(mask, values, 0.0).astype(np.float64), starts)

    advantages = columns["advantages"]
    own: dict[str, Floats] = {
        "tokens": np.add.reduceat(mask.astype(np.int64), starts),
        "advantage": sums(advantages),
        "strength": sums(np.abs(advantages)),
        "moving": np.add.reduceat((mask & (advantages != 0)).astype(np.int64), starts),
    }
    if "entropy" in columns:
        own["entropy"] = sums(columns["entropy"])
    if "ref_log_prob" in columns and "old_log_probs" in columns:
        ratio = columns["ref_log_prob"] - columns["old_log_probs"]
        own["kl"] = sums(np.expm1(ratio) - ratio)
    rows = [{name: values[row].item() for name, values in own.items()} for row in range(len(keys))]
    if "rollout_is_weights" in columns:
        weights = columns["rollout_is_weights"]
        least = np.minimum.reduceat(np.where(mask, weights, np.inf), starts)
        most = np.maximum.reduceat(np.where(mask, weights, -np.inf), starts)
        # A row that is in no advantage was filled with zeros; the weight of a token is above 0.
        is_there = np.maximum.reduceat(weights, starts) > 0
        for row, each in enumerate(zip(sums(weights).tolist(), least, most, strict=True)):
            if is_there[row] and rows[row]["tokens"]:
                rows[row]["importance"] = tuple(float(value) for value in each)
    return [
        TokenSums(key=key, source=source, **row)
        for key, source, row in zip(keys, sources, rows, strict=True)
    ]


def token_metrics(rows: Iterable[TokenSums]) -> dict[str, float]:
    """`mixed/<source>/{entropy/mean, kl/mean, importance/{mean,min,max}, advantage_share,
    gradient_token_share}`.

    Means are over the tokens in the loss. `advantage_share` is the source's share of the sum of |A|
    over these tokens; `gradient_token_share` is its share of the tokens with A != 0. If every
    advantage of the batch is 0, both metrics are missing.
    """
    by_source: dict[str, list[TokenSums]] = defaultdict(list)
    for row in rows:
        by_source[row.source].append(row)
    strength, moving = {}, {}
    metrics: dict[str, float] = {}
    for source, own in sorted(by_source.items()):
        strength[source] = sum(row.strength for row in own)
        moving[source] = sum(row.moving for row in own)
        sums = {"entropy": [row.entropy for row in own], "kl": [row.kl for row in own]}
        for name, values in sums.items():
            known = [(x, row.tokens) for x, row in zip(values, own, strict=True) if x is not None]
            if tokens := sum(count for _, count in known):
                metrics[f"mixed/{source}/{name}/mean"] = sum(x for x, _ in known) / tokens
        weights = [(*row.importance, row.tokens) for row in own if row.importance is not None]
        if weights:
            totals, least, most, counts = zip(*weights, strict=True)
            metrics[f"mixed/{source}/importance/mean"] = sum(totals) / sum(counts)
            metrics[f"mixed/{source}/importance/min"] = min(least)
            metrics[f"mixed/{source}/importance/max"] = max(most)
    for name, of_sources in (("advantage_share", strength), ("gradient_token_share", moving)):
        if total := sum(of_sources.values()):
            for source, value in of_sources.items():
                metrics[f"mixed/{source}/{name}"] = value / total
    return metrics
