"""The reward of a finished trajectory, within its deadline. No verl.

It is computed where the trajectory was made, not in verl's reward worker: it then sees the model's
own words and nothing else, and an infrastructure fault while judging is handled as any other.
"""

import json
import traceback
from collections.abc import Mapping
from typing import Any

from agent_loop.compat import timeout
from agent_loop.rewards.attempt import Attempt
from agent_loop.rewards.verdict import no_answer
from agent_loop.tools.protocol import ToolBackend, ToolError
from agent_loop.turns.loop_settings import LoopSettings
from agent_loop.turns.turn_loop import Rollout
from agent_loop.watchdog import waits_for

FOR_ALL = ("score", "acc", "format", "infra_error", "loop_error")
"""The parts that every source has; verl stacks them, so it is given no others."""


async def judge(
    rollout: Rollout, row: Mapping[str, Any], settings: LoopSettings, tools: ToolBackend
) -> dict[str, float]:
    """The parts of a trajectory's reward; `rollout` is lost where there is no verdict.

    Args:
        rollout: the trajectory; without a verdict it loses its gradient.
        row: the prompt's row.
        settings: which reward the row's source has, and the deadline for its verdict.
        tools: for rewards that run the answer.

    Returns:
        `FOR_ALL`, of which the last two are 1 or 0, and the reward's own parts where it judged.
    """
    source, timeout_s = row["data_source"], settings.mixed.deadlines.reward_s
    reward = settings.reward_name_of(source)
    parts = no_answer()
    if not rollout.is_lost:
        waits_for("reward")
        deadline = timeout(timeout_s)
        try:
            async with deadline:
                attempt = attempt_of(rollout, row, settings.budget_of(source).response_length)
                parts = await settings.reward_of(source).judge(attempt, tools)
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


def attempt_of(rollout: Rollout, row: Mapping[str, Any], max_response_length: int) -> Attempt:
    """A trajectory as rewards see it.

    Args:
        rollout: the trajectory.
        row: the prompt's row.
        max_response_length: tokens that the response could have.
    """
    extra_info = dict(row.get("extra_info") or {})
    extra_info["extras"] = json.loads(extra_info.get("extras") or "{}")
    own = [s.text for s in rollout.trajectory.segments if s.author == "model"]
    return Attempt(
        answer=rollout.answer if rollout.answer and not rollout.answer.isspace() else None,
        ground_truth=json.loads(row["reward_model"]["ground_truth"]),
        text="\n".join(own),
        source=row["data_source"],
        extra_info=extra_info,
        response_length=len(rollout.trajectory),
        max_response_length=max_response_length,
    )
