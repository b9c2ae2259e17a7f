"""The reward of reasoning-gym's tasks: each task's own scorer, in killable processes."""

from dataclasses import dataclass
from typing import Any

from agent_loop.rewards.attempt import Attempt, no_answer, verdict
from agent_loop.rewards.number import reward_number
from agent_loop.rewards.reasoning_process import judged, prepare, scorer_and_entry
from agent_loop.rewards.scoring import Scorer
from samplers.rows.made_records import installed_version
from samplers.rows.sources.reasoning_gym import KIND
from tool_server.wire.protocol import ToolBackend, ToolUnavailable

_SCORER = Scorer("reasoning_gym", prepare)


def missing_package() -> str | None:
    """Why the reward cannot judge at all; None if the package is there."""
    try:
        installed_version(KIND)
    except ValueError as error:
        return str(error)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningReward:
    """The score of the task's own scorer, often with a part of a point for a form or a near miss.
    A prompt is solved with a score of 1.

    The part `timeout` is 1 if the scorer used up its CPU time, and `scorer_error` is 1 if it
    raised, which scorers do on answers that they cannot read. Both score 0. Without a scorer for
    the ground truth the trajectory is lost, because that says nothing about its answer.
    """

    name: str

    async def judge(self, attempt: Attempt, tools: ToolBackend) -> dict[str, float]:
        own = {"timeout": 0.0, "scorer_error": 0.0}
        if attempt.answer is None:
            return no_answer() | own
        try:
            found = await _SCORER.run(judged, attempt.ground_truth, attempt.answer)
        except ValueError as error:  # says nothing about the answer
            raise ToolUnavailable(
                f"{error}; prepare the data again, or install the reasoning-gym that made it",
                tool=self.name,
            ) from error
        if found is None:
            return verdict(0.0) | own | {"timeout": 1.0}
        if (score := reward_number(found)) is None:
            return verdict(0.0) | own | {"scorer_error": 1.0}
        return verdict(score, acc=float(score >= 1.0)) | own

    def truth_problem(self, ground_truth: Any) -> str | None:
        task = ground_truth.get("task") if isinstance(ground_truth, dict) else None
        entry = ground_truth.get("entry") if isinstance(ground_truth, dict) else None
        if not isinstance(task, str) or not isinstance(entry, dict):
            return "ground_truth has no `task` and `entry`, which kind=reasoning_gym writes"
        if missing := {"question", "answer", "metadata"} - entry.keys():
            return f"ground_truth.entry has no {', '.join(sorted(missing))}"
        if not isinstance(ground_truth.get("config", {}), dict):
            return "ground_truth.config is no object"
        try:
            scorer_and_entry(ground_truth)
        except ImportError:  # where the package is missing, only a run can tell
            return None
        except ValueError as error:
            return str(error)
        return None
