"""The tokens of one trajectory, and the only code that writes `response_mask`.

Tokens of the engine get mask 1 and their log-probs; tokens of the environment get mask 0 and
log-prob 0.0. Ids, mask and log-probs are three lists of one length. Nothing is tokenised again, and
no text is searched here: `agent_loop.turns.tags` decides where a turn is cut, and this module cuts
all three lists there.
"""

from collections.abc import Sequence

from agent_loop.records.trajectory_record import Segment
from agent_loop.records.trajectory_record import StopReason as StopReason  # for users' loops


class Trajectory:
    """The response of one rollout, growing token by token.

    Ids, mask and log-probs always have one length. Mask 1 is exactly on the tokens that the engine
    returned, in the order of the engine. Only `without_gradient` removes it.
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
        """Prompt and response, which the engine continues."""
        return self.prompt_ids + self.response_ids

    @property
    def last_id(self) -> int:
        return (self.response_ids or self.prompt_ids)[-1]

    def add_model_tokens(self, token_ids: Sequence[int], log_probs: Sequence[float]) -> None:
        """Append all tokens (t,) that the engine returned in one turn, with mask 1.

        `log_probs` (t,) are of the policy that sampled them.

        Raises:
            ValueError: the numbers of ids and log-probs differ.
        """
        if len(token_ids) != len(log_probs):
            raise ValueError(
                f"cannot append {len(token_ids)} model tokens with {len(log_probs)} log-probs: "
                "each needs one; set rollout.calculate_log_probs=true"
            )
        self.engine_turns.append(list(token_ids))
        self._append("model", token_ids, log_probs, "")

    def cut_turn(self, keep: int, text: str) -> None:
        """Keep the first tokens of the last turn, and set their text, on which the loop acts."""
        last = self.segments[-1]
        assert last.author == "model" and 0 <= keep <= last.length, (last, keep)
        end = last.start + keep
        del self.response_ids[end:], self.response_mask[end:], self.log_probs[end:]
        self.segments[-1] = Segment(author="model", start=last.start, length=keep, text=text)
        self._assert_one_length()

    def add_tool_tokens(self, token_ids: Sequence[int], text: str) -> None:
        """Append tokens of the environment, with mask 0 and log-prob 0.0."""
        self._append("tool", token_ids, [0.0] * len(token_ids), text)

    def finish(self, filler_id: int) -> None:
        """Check the rules of the class again. Nothing may be appended afterwards.

        An empty response gets the token `filler_id`, because verl puts the reward on the last one.
        """
        turns = iter(self.engine_turns)
        kept = [next(turns)[: s.length] for s in self.segments if s.author == "model"]
        sampled = [t for t, bit in zip(self.response_ids, self.response_mask, strict=True) if bit]
        assert sampled == [token for turn in kept for token in turn], "mask 1 is not the engine's"
        if not self.response_ids:
            self.add_tool_tokens([filler_id], "")
        self._assert_one_length()

    def without_gradient(self) -> None:
        """Set the mask of a finished trajectory to 0, so that it is not trained."""
        self.response_mask = [0] * len(self)
        self.log_probs = [0.0] * len(self)

    def loss_mask(self, state_masking: bool) -> list[int]:
        """(T,) mask of the loss: `response_mask`; without state masking (an ablation) 1 for every
        token of a trajectory that is not lost."""
        return self.response_mask if state_masking else [int(any(self.response_mask))] * len(self)

    def _append(
        self, author: str, token_ids: Sequence[int], log_probs: Sequence[float], text: str
    ) -> None:
        start = len(self.response_ids)
        self.segments.append(Segment(author=author, start=start, length=len(token_ids), text=text))
        self.response_ids.extend(token_ids)
        self.response_mask.extend([int(author == "model")] * len(token_ids))
        self.log_probs.extend(log_probs)
        self._assert_one_length()

    def _assert_one_length(self) -> None:
        assert len(self.response_ids) == len(self.response_mask) == len(self.log_probs)
