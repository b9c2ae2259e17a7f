"""Exact match and F1 beside the published definition of SQuAD v1.1, written out here once more."""

import re
import string
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.rewards import qa
from agent_loop.rewards.attempt import Attempt
from agent_loop.rewards.qa import exact_match, f1, normalise
from agent_loop.rewards.registry import reward_for

TOOLS: Any = None


def published_normal_form(text: str) -> str:
    """Lower text, remove punctuation, articles and extra white space, in this order."""
    kept = "".join(ch for ch in text.lower() if ch not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def published_f1(prediction: str, ground_truth: str) -> float:
    """Shared tokens, counted as often as both have them; 0 where there are none."""
    ours = published_normal_form(prediction).split()
    theirs = published_normal_form(ground_truth).split()
    shared = sum((Counter(ours) & Counter(theirs)).values())
    if shared == 0:
        return 0.0
    precision, recall = 1.0 * shared / len(ours), 1.0 * shared / len(theirs)
    return (2 * precision * recall) / (precision + recall)


CASES = [
    # answer, targets, exact match, F1
    ("the beatles.", ["The Beatles"], 1, 1),
    ("BEATLES", ["The Beatles", "Beatles band"], 1, 1),
    ("a band, the Beatles", ["The Beatles", "Beatles band"], 0, 1),
    ("Stones", ["The Beatles"], 0, 0),
    ("Lukas Barrow", ["Lukas Barrow the Second"], 0, 0.8),
    ("in 1969", ["1969"], 0, 2 / 3),
    ("July 20, 1969", ["20 July 1969"], 0, 1),
    ("to be or not to be", ["to be"], 0, 0.5),
    ("New-York", ["NewYork"], 1, 1),
    ("New-York", ["New York"], 0, 0),
    ("U.S.A.", ["USA"], 1, 1),
    ("Zürich", ["zürich"], 1, 1),
    ("ZÜRICH", ["Zürich"], 1, 1),
    ("Zurich", ["Zürich"], 0, 0),
    ("«Paris»", ["Paris"], 0, 0),  # only ASCII punctuation goes
    ("Paris\u00a0(France)", ["paris france"], 1, 1),
    ("東京", ["東京"], 1, 1),
    ("", ["Paris"], 0, 0),
    ("...", ["Paris"], 0, 0),
    ("yes", ["Yes."], 1, 1),
    ("yes", ["no"], 0, 0),
    ("yes it is", ["yes"], 0, 0.5),
    ("theory", ["ory"], 0, 0),
    ("vitamin A", ["vitamin"], 1, 1),
]


@pytest.mark.parametrize(("answer", "targets", "em", "share"), CASES)
async def test_answers_are_judged_as_squad_judges_them(answer, targets, em, share):
    assert exact_match(answer, targets) == em
    assert f1(answer, targets) == pytest.approx(share)
    attempt = Attempt(answer=answer, ground_truth={"target": targets})
    by_em = await reward_for("qa_em_reward").judge(attempt, TOOLS)
    by_f1 = await reward_for("qa_f1_reward").judge(attempt, TOOLS)
    assert by_em["score"] == by_em["acc"] == by_f1["acc"] == by_f1["em"] == em
    assert by_f1["score"] == by_em["f1"] == pytest.approx(share)


@pytest.mark.parametrize(
    ("answer", "em"), [("The", 1), ("the", 1), ("an", 0), ("!", 0), ("", 0), ("the!", 0)]
)
def test_a_target_of_which_nothing_is_left_has_to_be_the_very_text(answer, em):
    assert exact_match(answer, ["The"]) == f1(answer, ["The"]) == em


OPTIONS = ["@", "(@)", "@.", "@)", "[@]", "@:", '"@"', "**@**", " @ ", "Option @", "option (@)",
           "Choice @.", "the option @", "an @"]  # fmt: skip


@pytest.mark.parametrize("written", OPTIONS)
@pytest.mark.parametrize("target", ["@", "(@)", "@.", "Option @", "@)"])
async def test_each_letter_of_an_option_is_judged_as_every_other(written, target):
    for letter in "ABCD":
        truth = {"target": [target.replace("@", letter)]}
        for other in "ABCD":
            for text in (other, other.lower()):
                attempt = Attempt(answer=written.replace("@", text), ground_truth=truth)
                for name in ("qa", "qa_f1"):
                    score = (await reward_for(name).judge(attempt, TOOLS))["score"]
                    assert score == (other == letter)


@pytest.mark.parametrize("target", ["A, C", "(A) and (C)", "A C"])
def test_the_letter_a_counts_among_several_options(target):
    assert exact_match(target, [target]) == f1(target, [target]) == 1
    assert exact_match("C", [target]) == 0
    assert f1("C", [target]) < 1


@pytest.mark.parametrize(
    ("answer", "em", "share"),
    [
        ("@ or #", 0, 0.5),
        ("@, #", 0, 2 / 3),
        ("@. Paris", 0, 2 / 3),
        ("the answer is @", 0, 0.5),
        ("#", 0, 0),
        ("option", 0, 0),
        ("", 0, 0),
    ],
)
def test_more_than_an_option_is_no_option(answer, em, share):
    for letter, other in ("AB", "BA", "CD"):
        text = answer.replace("@", letter).replace("#", other)
        assert exact_match(text, [letter]) == em
        assert f1(text, [letter]) == pytest.approx(share)


@pytest.mark.parametrize("target", [5, None, [], [5], ["x", None], {"a": 1}, "", [" "]])
def test_a_target_that_is_no_text_is_named_and_raises_nothing(target):
    problem = reward_for("qa").truth_problem({"target": target})
    assert problem is not None and problem.startswith("ground_truth.target")


WORDS = st.lists(
    st.sampled_from(["a", "The", "an", "Paris", "paris", "x.", "-", "1969", "ü", "東", "the-"]),
    max_size=6,
).map(" ".join)
TEXTS = st.one_of(WORDS, st.text(max_size=20))


PLAIN = TEXTS.filter(lambda text: qa._wanted(text)[0] is normalise)


@given(TEXTS, st.lists(PLAIN, min_size=1, max_size=4))
def test_any_answer_has_the_published_exact_match_and_f1(answer, targets):
    normal = published_normal_form(answer)
    assert normalise(answer) == normal
    assert exact_match(answer, targets) == max(
        float(published_normal_form(target) == normal) for target in targets
    )
    assert f1(answer, targets) == pytest.approx(
        max(published_f1(answer, target) for target in targets)
    )


async def test_a_single_right_answer_needs_no_list():
    attempt = Attempt(answer="Paris", ground_truth={"target": "paris"})
    assert (await reward_for("qa").judge(attempt, TOOLS))["score"] == 1.0
    assert (await reward_for("qa").judge(Attempt(answer="p", ground_truth={"target": "paris"}),
                                         TOOLS))["score"] == 0.0  # fmt: skip
