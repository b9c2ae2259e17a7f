"""Terms that can be added to any reward: for the format of an answer and for its length.

score = reward + sum of weight x term. `acc`, which says if a prompt is solved, stays the same.
"""

from dataclasses import dataclass
from typing import Any

from agent_loop.rewards.attempt import Attempt, Reward
from config.schema import LengthTermConfig, RewardTerms
from tool_server.wire.protocol import ToolBackend

FREE_SHARE = 0.8
"""Default of `free` as a share of `limit`, as in DAPO's own runs."""


def free_length(term: LengthTermConfig, max_response_length: int) -> int:
    """Tokens up to which a response has no penalty."""
    limit = term.limit or max_response_length
    return int(FREE_SHARE * limit) if term.free is None else term.free


def length_term(length: int, free: int, limit: int) -> float:
    """Soft overlong punishment: 0 up to `free` tokens, falling to -1 at `limit`.

    Source: DAPO, Yu et al. 2025, eq. 13, with `limit` as L_max and `limit - free` as L_cache.
    """
    if length <= free:
        return 0.0
    return (free - length) / (limit - free) if length <= limit else -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedReward:
    """A reward with terms. Its parts are the parts of the reward, the reward's own score as `task`,
    and each term without its weight as `term_<name>`."""

    reward: Reward
    terms: RewardTerms

    @property
    def name(self) -> str:
        return self.reward.name

    async def judge(self, attempt: Attempt, tools: ToolBackend) -> dict[str, float]:
        parts = dict(await self.reward.judge(attempt, tools))
        parts["task"] = parts["score"]
        if (form := self.terms.format) is not None:
            parts["term_format"] = parts["format"]
            parts["score"] += form.weight * parts["format"]
        if (length := self.terms.length) is not None:
            limit = length.limit or attempt.max_response_length
            free = min(free_length(length, attempt.max_response_length), limit - 1)
            value = length_term(attempt.response_length, free, limit)
            parts["term_length"] = value
            parts["score"] += length.weight * value
        return parts

    def truth_problem(self, ground_truth: Any) -> str | None:
        return self.reward.truth_problem(ground_truth)


def with_terms(reward: Reward, terms: RewardTerms) -> Reward:
    """The reward with its terms; the reward itself if there are none."""
    is_plain = terms.format is None and terms.length is None
    return reward if is_plain else ShapedReward(reward=reward, terms=terms)
