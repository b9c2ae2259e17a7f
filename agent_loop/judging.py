"""The reward of a finished trajectory, within its deadline. No verl.

It is computed where the trajectory was made, not in verl's reward worker: it then sees the model's
own words and nothing else, and an infrastructure fault while judging is handled as any other.
"""

import json
import traceback
from collections.abc import Mapping
from typing import Any

from agent_loop.compat import timeout
from agent_loop.rewards import reward_for
from agent_loop.rewards.verdict import no_answer
from agent_loop.tools.protocol import ToolBackend, ToolError
from agent_loop.turn_loop import Rollout
from agent_loop.watchdog import waits_for


async def judge(
    rollout: Rollout, row: Mapping[str, Any], reward: str, tools: ToolBackend, timeout_s: float
) -> dict[str, float]:
    """The parts of a trajectory's reward; `rollout` is lost where there is no verdict.

    Args:
        rollout: the trajectory; without a verdict it loses its gradient.
        row: the prompt's row.
        reward: a name of `agent_loop.rewards`.
        tools: for rewards that run the answer.
        timeout_s: seconds for the verdict.

    Returns:
        `score`, `acc`, `format`, and 1 or 0 for `infra_error` and `loop_error`.
    """
    parts = no_answer()
    if not rollout.is_lost:
        waits_for("reward")
        deadline = timeout(timeout_s)
        try:
            async with deadline:
                ground_truth = json.loads(row["reward_model"]["ground_truth"])
                parts = await reward_for(reward)(rollout.answer, ground_truth, tools)
        except ToolError as error:
            rollout.lose(error.tool or "reward", f"reward={reward}: {error}")
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline.expired():  # else the reward's own
                rollout.lose("reward", f"reward={reward}: no verdict within reward_s={timeout_s} s")
            else:
                rollout.lose("loop", f"reward={reward}: {type(error).__name__}: {error}")
                rollout.loop_error = traceback.format_exc()
        if rollout.is_lost:
            rollout.trajectory.without_gradient()
    return parts | {
        "infra_error": float(rollout.is_lost and rollout.loop_error is None),
        "loop_error": float(rollout.loop_error is not None),
    }
