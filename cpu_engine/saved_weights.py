"""The weights that separate_async saves at the beginning of a step, on a CPU.

verl adapter: `fsdp2_sharded_save_to_cpu` (utils/fsdp_utils.py at 0.9.1).
"""

from collections.abc import Callable
from typing import Any


def save_copies(verls: Callable[..., Any], model: Any) -> Any:
    """What verl saves, copied. verl's `.cpu()` copies nothing on a CPU: the saved weights would
    change with the training, and the old log-probs with them."""
    state, spec = verls(model)
    return {name: (local.clone(), own) for name, (local, own) in state.items()}, spec
