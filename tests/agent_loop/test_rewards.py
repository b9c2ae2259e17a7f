"""Rewards: what counts as solved, and that only the answer is judged."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.rewards import REWARDS, default_reward, reward_for
from agent_loop.rewards.code import same_output
from agent_loop.rewards.math import is_equal
from agent_loop.rewards.qa import f1, normalise
from agent_loop.tools.protocol import ToolCall, ToolResult, ToolUnavailable

TRUTH = {
    "code": {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]},
    "qa": {"target": ["The Beatles", "Beatles band"]},
    "math": {"answer": "\\frac{1}{2}"},
    "exact_match": {"answer": "x"},
}


class Doubler:
    """Runs `double` right, `one` right for the first test only; `dead` is a dead sandbox."""

    async def call(self, call: ToolCall) -> ToolResult:
        code, stdin = call.payload["code"], call.payload["stdin"]
        if code == "dead":
            raise ToolUnavailable("no sandbox")
        if code == "crash":
            return ToolResult(body={"status": "Failed", "run_result": {"stdout": "2"}})
        shown = {"double": str(2 * int(stdin)), "one": "2", "answer": "<answer>"}[code]
        return ToolResult(body={"status": "Success", "run_result": {"stdout": shown + " \n"}})


@pytest.mark.parametrize(
    ("program", "score", "acc"), [("double", 1.0, 1.0), ("one", 0.5, 0.0), ("crash", 0.0, 0.0)]
)
async def test_a_program_earns_the_share_of_hidden_tests_it_passes(program, score, acc):
    judged = await reward_for("code")(program, TRUTH["code"], Doubler())
    assert (judged["score"], judged["acc"], judged["format"]) == (score, acc, 1.0)


async def test_a_dead_sandbox_gives_no_verdict():
    with pytest.raises(ToolUnavailable):
        await reward_for("code")("dead", TRUTH["code"], Doubler())


async def test_a_test_that_found_no_sandbox_leaves_no_other_running():
    class DeadForTheFirst:
        running = 0

        async def call(self, call: ToolCall) -> ToolResult:
            if call.payload["stdin"] == "1\n":
                await asyncio.sleep(0)
                raise ToolUnavailable("no sandbox")
            self.running += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.running -= 1
            raise AssertionError("nothing sets the event")

    tools = DeadForTheFirst()
    judging = asyncio.ensure_future(reward_for("code")("double", TRUTH["code"], tools))
    await asyncio.wait([judging])
    assert isinstance(judging.exception(), ToolUnavailable)
    assert tools.running == 0


@pytest.mark.parametrize("name", sorted(REWARDS))
async def test_no_answer_earns_nothing_under_any_reward(name):
    kind = next(k for k in ("code", "qa", "math", "exact") if k in name)
    truth = TRUTH["exact_match" if kind == "exact" else kind]
    assert await reward_for(name)(None, truth, Doubler()) == {
        "score": 0.0,
        "acc": 0.0,
        "format": 0.0,
    }


@pytest.mark.parametrize(
    ("answer", "acc"), [("the beatles.", 1), ("BEATLES", 1), ("beatles band", 1), ("Stones", 0)]
)
async def test_questions_are_judged_after_squads_normalisation(answer, acc):
    assert (await reward_for("qa")(answer, TRUTH["qa"], Doubler()))["acc"] == acc


@given(st.text(max_size=30))
def test_normalising_twice_changes_nothing(text):
    assert normalise(normalise(text)) == normalise(text)


def test_f1_counts_shared_words():
    assert f1("lukas barrow", "Lukas Barrow the Second") == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("answer", "target", "equal"),
    [
        ("315", "315", True),
        (" 2,000", "2000", True),
        ("\\boxed{7}", "7", True),
        ("0.5", "\\frac{1}{2}", True),
        ("x+1", "1+x", True),
        ("3", "4", False),
        ("not mathematics ((", "4", False),
        ("", "4", False),
    ],
)
async def test_mathematics_is_compared_as_mathematics(answer, target, equal):
    assert await is_equal(answer, target) is equal


def test_white_space_at_line_ends_does_not_count():
    assert same_output("1 \n2\n\n", "1\n2")
    assert not same_output("1 2", "1\n2")


def test_an_unknown_reward_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown reward='qaa'.*exact_match"):
        reward_for("qaa")


def test_sources_have_a_default_reward():
    assert [default_reward(s) for s in ("taco", "nq", "math", "other")] == [
        "code",
        "qa",
        "math",
        "exact_match",
    ]
