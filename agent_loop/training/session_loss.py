"""The weight of a sequence in a mean over sequences: its share of its session's tokens.

With `loss_agg_mode=seq-mean-token-mean`, verl's loss is a sum over sequences of the mean over a
sequence's tokens (`agg_loss` in trainer/ppo/core_algos.py at 0.9.1). A session that is cut into
sequences of 6 and 2 tokens would count twice, and each of the 2 tokens three times as much as each
of the 6. With the weights 6/8 and 2/8 the sum is the mean over the session's 8 tokens, as if it
were one sequence.

The weights are applied to the gradients, so that all terms of the loss have them, also KL and
entropy, whatever the policy loss is. The value of the loss, which verl logs, does not have them.

verl adapter: `ppo_loss` (workers/utils/losses.py), set by `set_loss_fn` of verl's workers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

SESSION_SHARE = "session_share"
"""Column of the batch: (B,) trained tokens of a sequence as a share of its session's."""


def session_loss_of(actor: Any) -> Callable[..., Any]:
    """verl's loss with the weights of `SESSION_SHARE`, for the `actor` section of the config."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.utils.losses import ppo_loss

    return partial(session_loss, loss=partial(ppo_loss, config=omega_conf_to_dataclass(actor)))


def session_loss(
    model_output: dict[str, Any], data: Any, dp_group: Any = None, *, loss: Callable[..., Any]
) -> Any:
    """`loss`, whose gradient by what the model puts out is multiplied by each sequence's share.

    Args:
        model_output: name -> nested (B, P + T) of `log_probs` and, if computed, `entropy`.
        data: verl's micro-batch; without the column `SESSION_SHARE` nothing is changed.
    """
    if SESSION_SHARE in data:
        shares = data[SESSION_SHARE]
        weighted = {
            name: _with_gradient_times(shares, values)
            for name, values in model_output.items()
            if name in ("log_probs", "entropy") and values is not None
        }
        model_output = {**model_output, **weighted}
    return loss(model_output=model_output, data=data, dp_group=dp_group)


def _with_gradient_times(shares: torch.Tensor, nested: Any) -> torch.Tensor:
    """The same values. A sequence's gradient, which flows back, is multiplied by its share."""
    values, offsets = nested.values(), nested.offsets()
    factor = shares.to(values).repeat_interleave(offsets.diff())
    fixed = values.detach()
    return torch.nested.nested_tensor_from_jagged(fixed + factor * (values - fixed), offsets)
