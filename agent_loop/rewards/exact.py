"""The reward for answers that must equal a text."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agent_loop.rewards.attempt import Attempt, no_answer, verdict
from tool_server.wire.protocol import ToolBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactReward:
    """1 if the answer, without white space at its ends, equals `target` (or one of several) or
    `answer` of the ground truth."""

    name: str

    async def judge(self, attempt: Attempt, tools: ToolBackend) -> dict[str, float]:
        if attempt.answer is None:
            return no_answer()
        return verdict(float(attempt.answer.strip() in _wanted(attempt.ground_truth)))

    def truth_problem(self, ground_truth: Any) -> str | None:
        if isinstance(ground_truth, Mapping) and not {"target", "answer"} & ground_truth.keys():
            return "ground_truth has neither `target` nor `answer`"
        return None if _wanted(ground_truth) else "ground_truth holds no text to compare with"


def _wanted(ground_truth: Any) -> list[str]:
    """Every right text; none for an empty value, null or an object."""
    value = ground_truth
    if isinstance(ground_truth, Mapping):
        value = ground_truth.get("target", ground_truth.get("answer"))
    values: list[Any] = value if isinstance(value, list) else [value]
    texts = [str(each).strip() for each in values if isinstance(each, str | int | float)]
    return [text for text in texts if text]
