"""The input of a reward (`Attempt`), the interface of rewards (`Reward`), and their common keys."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from tool_server.wire.protocol import ToolBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One trajectory as rewards see it; it contains no tool output, only the number of calls."""

    answer: str | None
    """The text between the answer tags; None without an answer or with an empty one."""

    answer_is_message: bool = False
    """Whether no tags and no box hold the answer: it is the whole last message, or what follows
    ReAct's `Final Answer:`. The rewards of mathematics then look for the answer in it."""

    ground_truth: Any
    """The row's ground truth, parsed from JSON; its shape depends on the kind of data."""

    text: str = ""
    """All text that the model wrote, turn after turn."""

    tool_calls: int = 0
    """Calls that a tool executed; a wrongly written action and a call that the tool refused are
    none."""

    question: str = ""
    """Text of the last user message of the prompt, as the model read it."""

    source: str = ""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """The row's `extra_info`; its `extras` are already parsed from JSON."""

    response_length: int = 0
    """Tokens of the response, including tool results."""

    max_response_length: int = 0
    """Most tokens that the response could have."""


class Reward(Protocol):
    """Judges attempts."""

    @property
    def name(self) -> str: ...

    async def judge(self, attempt: Attempt, tools: ToolBackend) -> dict[str, float]:
        """The reward of one trajectory, with the keys that `agent_loop.rewards` describes.

        Every attempt has the same keys. The tools are for rewards that run the answer, or that ask
        a judge.

        Raises:
            ToolUnavailable: a tool could not be reached, so there is no reward.
        """
        ...

    def truth_problem(self, ground_truth: Any) -> str | None:
        """Why the reward cannot judge with this ground truth; None if it can."""
        ...


def verdict(score: float, *, acc: float | None = None) -> dict[str, float]:
    """The result for an answer; `acc` defaults to the score."""
    return {"score": score, "acc": score if acc is None else acc, "format": 1.0}


def no_answer() -> dict[str, float]:
    return {"score": 0.0, "acc": 0.0, "format": 0.0}
