"""What `state_masked_grpo` cannot do in a trainer of verl's own.

verl adapter: `compute_advantage_for_multi_trajectories` (trainer/ppo/v1/utils.py at 0.9.1).
"""

import sys
from collections.abc import Mapping

import numpy as np

from samplers.uid import prompt_of


def refuse(index: np.ndarray, scale: Mapping[str, float] | None) -> None:
    """Refuse a scale of sources that no uid names, and sessions of several rows.

    verl counts each row of a session as a member of its group, unless the estimator is verl's
    `grpo`. The rows are known by their keys in TransferQueue.

    Args:
        index: (B,) uid of each row's group.
        scale: source -> factor.

    Raises:
        RuntimeError: a session has several rows.
        ValueError: `scale` is set, and the uids are not ours.
    """
    groups = {*map(str, index)}
    for uid in groups if scale else ():
        try:
            _ = uid.startswith("pad") or prompt_of(uid)
        except ValueError as error:
            raise ValueError(
                f"no source in uid={uid!r}: algorithm.state_masked_grpo.scale needs data.mixture "
                "and its two classes; add them, or remove scale"
            ) from error
    queue = sys.modules.get("transfer_queue.interface")
    if queue is None or getattr(queue, "_TQ_CLIENT", None) is None:
        return
    for key in (queue.kv_list("train") or {}).get("train", {}):
        uid, *place = key.rsplit("_", 2)
        if uid in groups and len(place) == 2 and place[1] != "0":
            raise RuntimeError(
                f"no advantage of state_masked_grpo for the session of the row {key}, which has "
                "several rows: verl's trainers would count each as a member of its group; set "
                "algorithm.adv_estimator=grpo, have the agent loop return one output, or train "
                "with `verl-mixed train`"
            )
