"""Computes the reward of a finished trajectory within a deadline. No verl.

The reward is computed in the process of the agent loop, not in verl's reward worker. So the reward
gets only the model's own text, and a fault of the infrastructure is handled as in a tool call.
"""

import traceback
from collections.abc import Sequence
from itertools import pairwise

from agent_loop.loop_settings import LoopSettings
from agent_loop.rewards.attempt import Attempt, no_answer
from agent_loop.row import Row
from agent_loop.turns.turn_loop import Rollout
from agent_loop.watchdog import waits_for
from config.compat import timeout
from tool_server.wire.protocol import Fault, ToolBackend


async def judge(
    rollout: Rollout,
    row: Row,
    settings: LoopSettings,
    tools: ToolBackend,
    earlier: Sequence[Rollout] = (),
) -> dict[str, float]:
    """The parts of a trajectory's reward: `COMMON_PARTS`, of which the last two are 1 or 0, and the
    reward's own. A trajectory without a verdict becomes an `infra_error`.

    Args:
        rollout: the last sequence, which answers.
        earlier: the other sequences of its session.
    """
    source, timeout_s = row.source, settings.mixed.deadlines.reward_s
    reward = settings.reward_name_of(source)
    parts = no_answer()
    if not rollout.is_lost:
        waits_for("reward")
        deadline = timeout(timeout_s)
        try:
            async with deadline:
                longest = settings.budget_of(source).response_length
                attempt = attempt_of(rollout, row, longest, earlier)
                parts = await settings.reward_of(source, rollout.verdict).judge(attempt, tools)
        except Fault as error:
            rollout.lose(error.tool or "reward", f"reward={reward}: {error}")
        except Exception as error:
            # A `TimeoutError` of the reward's own code is not the deadline.
            if isinstance(error, TimeoutError) and deadline.expired():
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


def attempt_of(
    rollout: Rollout,
    row: Row,
    max_response_length: int,
    earlier: Sequence[Rollout] = (),
) -> Attempt:
    """What a reward judges: the answer of the last sequence, and the words, calls and tokens of all
    sequences of the session, so that a reward does not depend on how the session is cut."""
    sequences = [*earlier, rollout]
    own = [s.text for each in sequences for s in each.trajectory.segments if s.author == "model"]
    return Attempt(
        answer=rollout.answer if rollout.answer and not rollout.answer.isspace() else None,
        answer_is_message=rollout.answer_is_message,
        ground_truth=row.ground_truth,
        text="\n".join(own),
        question=row.question,
        tool_calls=sum(map(_executed_calls, sequences)),
        source=row.source,
        extra_info={**row.extra_info, "extras": row.extras},
        response_length=sum(len(each.trajectory) for each in sequences),
        max_response_length=max_response_length,
    )


def _executed_calls(rollout: Rollout) -> int:
    """Calls that a tool executed. A loop of another project records none: there, what the
    environment wrote after a turn of the model is the result of a call."""
    if rollout.knows_calls:
        return sum(call.status == "ok" for call in rollout.calls)
    authors = [segment.author for segment in rollout.trajectory.segments]
    return sum(pair == ("model", "tool") for pair in pairwise(authors))
