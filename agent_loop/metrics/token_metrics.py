"""Metrics per source from a batch's tokens: entropy, KL, importance, shares of the gradient. Pure.

The shares show each source's effect on the weights: a source whose groups are all solved has
prompts in the batch but no gradient.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.floating]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTokens:
    """The response of one trained trajectory as the optimizer saw it; every array is (T,)."""

    key: str
    """verl's key, `<uid>_<session>_<index>`."""

    source: str
    mask: NDArray[np.bool_]
    """Tokens in the loss."""

    advantages: Floats
    entropy: Floats | None = None
    """Entropy of the policy before the update, in nats; None if verl did not compute it."""

    old_log_probs: Floats | None = None
    ref_log_probs: Floats | None = None
    """Log-probs of the reference policy; None without one."""

    importance: Floats | None = None
    """Weights of the importance correction (`algorithm.rollout_correction.rollout_is`), after the
    cut at the threshold; None without it, and of a row that is in no advantage."""

    @property
    def advantage(self) -> float | None:
        """Mean over the tokens in the loss; None without one."""
        return float(self.advantages[self.mask].mean()) if self.mask.any() else None

    @property
    def kl(self) -> Floats | None:
        """The k3 estimate of KL(policy || reference) of each token; None without a reference.

        Source: Schulman 2020, "Approximating KL Divergence".
        """
        if self.ref_log_probs is None or self.old_log_probs is None:
            return None
        ratio = self.ref_log_probs - self.old_log_probs
        return np.expm1(ratio) - ratio


def token_metrics(rows: Iterable[TrainedTokens]) -> dict[str, float]:
    """`mixed/<source>/{entropy/mean, kl/mean, importance/{mean,min,max}, advantage_share,
    gradient_token_share}`.

    Means are over the tokens in the loss. `advantage_share` is the source's share of the sum of |A|
    over these tokens; `gradient_token_share` is its share of the tokens with A != 0. If every
    advantage of the batch is 0, both metrics are missing.
    """
    by_source: dict[str, list[TrainedTokens]] = defaultdict(list)
    for row in rows:
        by_source[row.source].append(row)
    strength, moving = {}, {}
    metrics: dict[str, float] = {}
    for source, own in sorted(by_source.items()):
        advantages = np.abs(_in_loss(own, lambda row: row.advantages))
        strength[source], moving[source] = float(advantages.sum()), int((advantages > 0).sum())
        entropy, kl = _in_loss(own, lambda row: row.entropy), _in_loss(own, lambda row: row.kl)
        if entropy.size:
            metrics[f"mixed/{source}/entropy/mean"] = float(entropy.mean())
        if kl.size:
            metrics[f"mixed/{source}/kl/mean"] = float(kl.mean())
        weights = _in_loss(own, lambda row: row.importance)
        if weights.size:
            for name in ("mean", "min", "max"):
                metrics[f"mixed/{source}/importance/{name}"] = float(getattr(weights, name)())
    for name, of_sources in (("advantage_share", strength), ("gradient_token_share", moving)):
        if total := sum(of_sources.values()):
            for source, value in of_sources.items():
                metrics[f"mixed/{source}/{name}"] = value / total
    return metrics


def _in_loss(
    rows: Sequence[TrainedTokens], values_of: Callable[[TrainedTokens], Floats | None]
) -> Floats:
    """Values of the tokens in the loss, of all rows that have them."""
    known = [(values_of(row), row.mask) for row in rows]
    kept = [values[mask] for values, mask in known if values is not None]
    return np.concatenate(kept) if kept else np.empty(0)
