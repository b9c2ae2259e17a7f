"""The reward for short answers: exact match and token F1, after SQuAD's normalisation.

Source: Rajpurkar et al. 2016, the evaluation script of SQuAD v1.1: lower case, no ASCII
punctuation, no articles, single spaces; the best of several right answers counts. As in that
script, two texts with an empty normal form are an exact match with F1 0; for them the reward
requires the same text, and gives F1 1 then.
"""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from agent_loop.rewards.attempt import Attempt, no_answer, verdict
from tool_server.wire.protocol import ToolBackend

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """SQuAD's form of an answer."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


_normal_target = lru_cache(1 << 16)(normalise)  # each trajectory of a group has the same target


@lru_cache(1 << 16)
def _words(target: str) -> Counter[str]:
    return Counter(_normal_target(target).split())


def exact_match(answer: str, targets: Sequence[str]) -> float:
    """1.0 if the answer and one of the targets have the same normal form."""
    normal = normalise(answer)
    return float(any(normal == _normal_target(target) for target in targets))


def f1(answer: str, targets: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over the words of the normal forms, for the best
    target."""
    words = Counter(normalise(answer).split())
    best = 0.0
    for target in targets:
        wanted = _words(target)
        if common := (words & wanted).total():  # 2PR / (P + R)
            best = max(best, 2 * common / (words.total() + wanted.total()))
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class QAReward:
    """Compare the answer with the `target` of the ground truth, one text or several. The parts are
    `em` and `f1`; solved means an exact match."""

    name: str
    by_f1: bool = False

    async def judge(self, attempt: Attempt, tools: ToolBackend) -> dict[str, float]:
        if attempt.answer is None:
            return no_answer() | {"em": 0.0, "f1": 0.0}
        targets = _targets(attempt.ground_truth)
        em, share = exact_match(attempt.answer, targets), f1(attempt.answer, targets)
        if em and not normalise(attempt.answer):
            # Otherwise `!` would equal `A`, because both have an empty normal form.
            em = share = float(attempt.answer.lower() in {target.lower() for target in targets})
        return verdict(share if self.by_f1 else em, acc=em) | {"em": em, "f1": share}

    def truth_problem(self, ground_truth: Any) -> str | None:
        if not isinstance(ground_truth, Mapping) or "target" not in ground_truth:
            return "ground_truth has no `target`"
        targets = _targets(ground_truth)
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            return f"ground_truth.target={targets!r}: a text is needed, or a list of one or more"
        if not any(target.strip() for target in targets):
            return "ground_truth.target holds no text but empty ones"
        return None


def _targets(ground_truth: Mapping[str, Any]) -> list[str]:
    target = ground_truth["target"]
    return [target] if isinstance(target, str) else target
