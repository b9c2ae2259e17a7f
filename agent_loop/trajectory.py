"""One trajectory's tokens, and the only code that writes `response_mask`.

Tokens go in as the engine returned them (mask 1, with log-probs) or as the environment wrote them
(mask 0, log-prob 0.0), and come out as three lists of one length. Nothing is tokenised again, and
nothing is looked for in text here: cutting is by token count, decided in `agent_loop.tags`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from agent_loop.compat import StrEnum


class StopReason(StrEnum):
    """Why a trajectory ended; every trajectory has exactly one."""

    ANSWERED = "answered"
    NO_ACTION = "no_action"
    MAX_TURNS = "max_turns"
    RESPONSE_BUDGET = "response_budget"
    DEADLINE = "deadline"
    INFRA_ERROR = "infra_error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive tokens of one author within the response."""

    author: str
    """`model` or `tool`."""

    start: int
    """Index of the first token in the response."""

    length: int
    """Tokens."""

    text: str
    """What the tokens say, for people; never tokenised again."""


class Trajectory:
    """The response of one rollout, growing token by token.

    It keeps one length for ids, mask and log-probs, and mask 1 exactly on the tokens that the
    engine returned, in the order it returned them. It does not know tags, tools or budgets.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.prompt_ids: list[int] = list(prompt_ids)  # (P,)
        self.response_ids: list[int] = []  # (T,)
        self.response_mask: list[int] = []  # (T,)
        self.log_probs: list[float] = []  # (T,)
        self.segments: list[Segment] = []

    def __len__(self) -> int:
        return len(self.response_ids)

    @property
    def ids(self) -> list[int]:
        """Prompt and response together: what the engine continues."""
        return self.prompt_ids + self.response_ids

    def add_model_tokens(
        self, token_ids: Sequence[int], log_probs: Sequence[float], text: str
    ) -> None:
        """Append what the policy sampled, cut already: mask 1.

        Args:
            token_ids: (t,) as the engine returned them, from the first one on.
            log_probs: (t,) log-prob of each under the policy that sampled it.
            text: their decoding.

        Raises:
            ValueError: ids and log-probs differ in length: the engine left some out.
        """
        if len(token_ids) != len(log_probs):
            raise ValueError(
                f"cannot append {len(token_ids)} model tokens with {len(log_probs)} log-probs: "
                "each needs one; set rollout.calculate_log_probs=true"
            )
        self._append("model", token_ids, [1] * len(token_ids), log_probs, text)

    def add_tool_tokens(self, token_ids: Sequence[int], text: str) -> None:
        """Append what the environment wrote: mask 0, log-prob 0.0."""
        self._append("tool", token_ids, [0] * len(token_ids), [0.0] * len(token_ids), text)

    def without_gradient(self, filler_id: int) -> None:
        """Blank the mask: this trajectory trains nothing (an infrastructure fault ended it).

        Args:
            filler_id: one such token stands for an empty response, since verl lays the reward on
                the last response token.
        """
        if not self.response_ids:
            self.add_tool_tokens([filler_id], "")
        self.response_mask = [0] * len(self.response_mask)
        self.log_probs = [0.0] * len(self.log_probs)

    def _append(
        self,
        author: str,
        token_ids: Sequence[int],
        mask: Sequence[int],
        log_probs: Sequence[float],
        text: str,
    ) -> None:
        start = len(self.response_ids)
        self.segments.append(Segment(author=author, start=start, length=len(token_ids), text=text))
        self.response_ids.extend(token_ids)
        self.response_mask.extend(mask)
        self.log_probs.extend(log_probs)
        assert len(self.response_ids) == len(self.response_mask) == len(self.log_probs)
