"""The reward for short answers: exact match and token F1, after SQuAD's normalisation.

Source: Rajpurkar et al. 2016, the evaluation script of SQuAD v1.1: lower case, no ASCII
punctuation, no articles, single spaces; the best of several right answers counts. Two differences,
both where the article "a" would be lost. A right answer that is an option or several, such as `(B)`
or `A, C`, is compared by its letters. One of which nothing is left, such as `The`, is compared as
it is.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from agent_loop.rewards.attempt import Attempt, no_answer, verdict
from tool_server.wire.protocol import ToolBackend

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_BESIDE_OPTION = re.compile(r"\b(an|the|option|choice)\b")
"""Words that do not count beside the letter of an option."""

_OPTIONS = re.compile("[a-z](?: (?:and )?[a-z])*")

_PUNCTUATION = str.maketrans("", "", string.punctuation)


@lru_cache(256)  # an answer is compared with each target, twice
def normalise(text: str, ignored: re.Pattern[str] = _ARTICLES) -> str:
    """SQuAD's form of an answer."""
    return " ".join(ignored.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _option(text: str) -> str:
    return normalise(text, _BESIDE_OPTION)


@lru_cache(1 << 16)  # each trajectory of a group has the same target
def _wanted(target: str) -> tuple[Callable[[str], str], str, Counter[str]]:
    """(how answers are normalised for a target, its normal form, the words of that)."""
    form = _option if _OPTIONS.fullmatch(_option(target)) else normalise
    form = form if form(target) else str.lower
    return form, form(target), Counter(form(target).split())


def exact_match(answer: str, targets: Sequence[str]) -> float:
    """1.0 if the answer and one of the targets have the same normal form."""
    return float(any(form(answer) == normal for form, normal, _ in map(_wanted, targets)))


def f1(answer: str, targets: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over the words of the normal forms, for the best
    target."""
    best = 0.0
    for form, _, wanted in map(_wanted, targets):
        words = Counter(form(answer).split())
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
