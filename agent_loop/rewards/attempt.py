"""What a reward is given, the model's own words and what to compare them with; what it gives."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from agent_loop.tools.protocol import ToolBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One trajectory, as rewards see it. Nothing in it was written by a tool."""

    answer: str | None
    """What stands between the answer tags; None without an answer, or with an empty one."""

    ground_truth: Any
    """The row's, read from its JSON text; another shape for each kind of data."""

    text: str = ""
    """All that the model wrote, turn after turn."""

    source: str = ""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """The row's; `extras` in it already read from its JSON text."""

    response_length: int = 0
    """Tokens of the response, those of tools included."""

    max_response_length: int = 0
    """Tokens that the response could have."""


class Reward(Protocol):
    """Judges attempts."""

    @property
    def name(self) -> str:
        """As the config has it."""
        ...

    async def judge(self, attempt: Attempt, tools: ToolBackend) -> dict[str, float]:
        """Give the reward of one trajectory.

        Args:
            attempt: the trajectory.
            tools: for rewards that run the answer.

        Returns:
            `score`, which is trained, `acc`, 1 when the prompt counts as solved, `format`, 1 when
            an answer was given, and the reward's own parts: the same keys for every attempt.

        Raises:
            ToolUnavailable: a tool could not be reached: no verdict.
        """
        ...

    def truth_problem(self, ground_truth: Any) -> str | None:
        """Why it could not judge by this ground truth; None where it can."""
        ...
