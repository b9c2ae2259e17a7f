"""One trajectory's tokens, and the only code that writes `response_mask`.

Tokens go in as the engine returned them (mask 1, with log-probs) or as the environment wrote them
(mask 0, log-prob 0.0), and come out as three lists of one length. Nothing is tokenised again, and
nothing is looked for in text here: where a turn is cut is decided in `agent_loop.turns.tags` and
done here, on ids, mask and log-probs at once.
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
    """`model` or `tool`; the template's glue around a tool's words is the tool's."""

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
        self.engine_turns: list[list[int]] = []
        """Token ids as the engine returned them, a list per turn, before any cut."""

    def __len__(self) -> int:
        return len(self.response_ids)

    @property
    def ids(self) -> list[int]:
        """Prompt and response together: what the engine continues."""
        return self.prompt_ids + self.response_ids

    def add_model_tokens(self, token_ids: Sequence[int], log_probs: Sequence[float]) -> None:
        """Append what the policy sampled in one turn, all of it: mask 1.

        Args:
            token_ids: (t,) as the engine returned them.
            log_probs: (t,) log-prob of each under the policy that sampled it.

        Raises:
            ValueError: ids and log-probs differ in length: the engine left some out.
        """
        if len(token_ids) != len(log_probs):
            raise ValueError(
                f"cannot append {len(token_ids)} model tokens with {len(log_probs)} log-probs: "
                "each needs one; set rollout.calculate_log_probs=true"
            )
        self.engine_turns.append(list(token_ids))
        self._append("model", token_ids, [1] * len(token_ids), log_probs, "")

    def cut_turn(self, keep: int, text: str) -> None:
        """Drop all but the first tokens of the last turn, and note what they say.

        Args:
            keep: tokens of the turn that stay.
            text: their decoding, which the loop acts on.
        """
        last = self.segments[-1]
        assert last.author == "model" and 0 <= keep <= last.length, (last, keep)
        end = last.start + keep
        del self.response_ids[end:], self.response_mask[end:], self.log_probs[end:]
        self.segments[-1] = Segment(author="model", start=last.start, length=keep, text=text)
        self._assert_one_length()

    def add_tool_tokens(self, token_ids: Sequence[int], text: str) -> None:
        """Append what the environment wrote: mask 0, log-prob 0.0."""
        self._append("tool", token_ids, [0] * len(token_ids), [0.0] * len(token_ids), text)

    def finish(self, filler_id: int) -> None:
        """Check every rule of the class once more; after it nothing is appended.

        Args:
            filler_id: one such token stands for an empty response, since verl lays the reward on
                the last response token.
        """
        turns = iter(self.engine_turns)
        kept = [next(turns)[: s.length] for s in self.segments if s.author == "model"]
        sampled = [t for t, bit in zip(self.response_ids, self.response_mask, strict=True) if bit]
        assert sampled == [token for turn in kept for token in turn], "mask 1 is not the engine's"
        if not self.response_ids:
            self.add_tool_tokens([filler_id], "")
        self._assert_one_length()

    def without_gradient(self) -> None:
        """Blank the mask of a finished trajectory: it trains nothing."""
        self.response_mask = [0] * len(self)
        self.log_probs = [0.0] * len(self)

    def loss_mask(self, state_masking: bool) -> list[int]:
        """(T,) what the loss is taken over: `response_mask`, or, for an ablation without state
        masking, every token of a trajectory that is not lost."""
        return self.response_mask if state_masking else [int(any(self.response_mask))] * len(self)

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
        self._assert_one_length()

    def _assert_one_length(self) -> None:
        assert len(self.response_ids) == len(self.response_mask) == len(self.log_probs)
