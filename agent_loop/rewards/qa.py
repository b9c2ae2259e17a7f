"""Short answers: exact match and token F1 after SQuAD's normalisation.

Source: Rajpurkar et al. 2016 (SQuAD), the evaluation script's rules: lower case, no punctuation, no
articles, single spaces; the best of several right answers counts.
"""

import re
import string
from collections import Counter
from typing import Any

from agent_loop.rewards.verdict import no_answer, verdict
from agent_loop.tools.protocol import ToolBackend

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """SQuAD's form of an answer."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, target: str) -> float:
    """1.0 when both have the same normal form."""
    return float(normalise(answer) == normalise(target))


def f1(answer: str, target: str) -> float:
    """Harmonic mean of precision and recall over the words of the normal forms."""
    ours, theirs = normalise(answer).split(), normalise(target).split()
    if not ours or not theirs:
        return float(ours == theirs)
    common = sum((Counter(ours) & Counter(theirs)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(ours), common / len(theirs)
    return 2 * precision * recall / (precision + recall)


async def score(
    answer: str | None, ground_truth: dict[str, Any], tools: ToolBackend
) -> dict[str, float]:
    """Exact match with the best of `ground_truth["target"]`."""
    if answer is None:
        return no_answer()
    best = max(exact_match(answer, target) for target in ground_truth["target"])
    return verdict(best)


async def score_f1(
    answer: str | None, ground_truth: dict[str, Any], tools: ToolBackend
) -> dict[str, float]:
    """F1 with the best of `ground_truth["target"]`; solved means exact match."""
    judged = await score(answer, ground_truth, tools)
    if answer is not None:
        judged["score"] = max(f1(answer, target) for target in ground_truth["target"])
    return judged


async def score_exact(
    answer: str | None, ground_truth: dict[str, Any], tools: ToolBackend
) -> dict[str, float]:
    """The very text of `ground_truth["target"]` or `["answer"]`, white space at its ends aside."""
    if answer is None:
        return no_answer()
    targets = ground_truth.get("target") or [ground_truth["answer"]]
    same = float(any(answer.strip() == str(target).strip() for target in targets))
    return verdict(same)
