"""The reward of reasoning-gym's tasks: what it tells of a truth, and what scorers may evaluate."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.rewards.attempt import Attempt
from agent_loop.rewards.reasoning_gym import NAMES, ReasoningReward, _scorer, algebra
from agent_loop.rewards.registry import _reward_for, reward_for
from agent_loop.rewards.scoring import Scorer
from config.schema import LOOPS_OWN, default_reward
from samplers.rows.sources.reasoning_gym import records, to_row
from samplers.rows.tagged_json import tagged
from tests.fakes.toy_reasoning_gym import SumConfig, Sums, install_toy
from tool_server.wire.protocol import ToolTimeout, ToolUnavailable

REWARD = ReasoningReward(name="reasoning_gym")
ENTRY = tagged(Sums(SumConfig(seed=3))[0])
DAMAGED = ENTRY | {"metadata": {"__items__": 3}}


def test_the_kind_decides_the_default_reward_and_then_the_source() -> None:
    assert default_reward("sums", "reasoning_gym") == "reasoning_gym"
    assert default_reward("game", "seeds") == LOOPS_OWN
    assert default_reward("math", None) == default_reward("math", "json") == "math"
    assert default_reward("trivia") == "exact_match"


def test_a_missing_package_is_told_when_the_reward_is_made(monkeypatch) -> None:
    def missing(kind: str) -> str:
        raise ValueError("install it")

    monkeypatch.setattr("agent_loop.rewards.registry.installed_version", missing)
    _reward_for.cache_clear()
    with pytest.raises(ValueError, match="reward='reasoning_gym': install it"):
        reward_for("reasoning_gym")


def test_it_has_no_options() -> None:
    with pytest.raises(ValueError, match="it has no options"):
        reward_for("reasoning_gym", {"strict": True})


@pytest.mark.parametrize(
    ("truth", "words"),
    [
        ({"task": "sums", "entry": ENTRY}, None),
        ({"answer": "3"}, "no `task` and `entry`"),
        ([1], "no `task` and `entry`"),
        ({"task": "sums", "entry": {"question": "?"}}, "no answer, metadata"),
        ({"task": "sums", "entry": ENTRY, "config": {"near": 0.5}}, None),
        ({"task": "sums", "entry": ENTRY, "config": [1]}, "config is no object"),
        ({"task": "sums", "entry": ENTRY, "config": {"far": 1}}, "makes no scorer"),
        ({"task": "products", "entry": ENTRY}, "no task='products'"),
        ({"task": "sums", "entry": DAMAGED}, "entry of task='sums' is damaged"),
    ],
)
def test_what_is_wrong_with_a_truth(monkeypatch, truth, words) -> None:
    install_toy(monkeypatch)
    _scorer.cache_clear()
    found = REWARD.truth_problem(truth)
    assert found is None if words is None else words in found


@pytest.mark.parametrize(("answer", "score"), [("1.0", 0.0), ("12", 0.01), ("right", 1.0)])
async def test_the_score_is_the_scorers_and_one_is_solved(monkeypatch, answer, score) -> None:
    install_toy(monkeypatch)
    _in_this_process(monkeypatch)
    attempt = Attempt(
        answer=ENTRY["answer"] if answer == "right" else answer,
        ground_truth={"task": "sums", "entry": ENTRY},
    )

    found = await REWARD.judge(attempt, None)  # type: ignore[arg-type]

    assert found == {
        **{"score": score, "acc": float(score == 1), "format": 1.0},
        **{"timeout": 0.0, "scorer_error": 0.0},
    }


@pytest.mark.parametrize(
    ("config", "score"), [({}, 0.01), ({"near": 0.5}, 0.5), ({"near": 0.25, "most": 5}, 0.25)]
)
async def test_the_scorer_has_the_config_that_made_the_row(monkeypatch, config, score) -> None:
    install_toy(monkeypatch)
    _in_this_process(monkeypatch)
    options = {"task": "sums", "config": config, "val_size": 1}
    [record] = records(split="validation", **options)
    truth = json.loads(json.dumps(to_row(record, split="validation", index=0).ground_truth))

    found = await REWARD.judge(Attempt(answer="9999", ground_truth=truth), None)  # type: ignore[arg-type]

    assert (truth["config"], found["score"]) == (config, score)


@pytest.mark.parametrize(
    "truth",
    [
        {"task": "products", "entry": ENTRY},
        {"task": "sums", "entry": ENTRY, "config": {"far": 1}},
        {"task": "sums", "entry": DAMAGED},
        {"task": "sums", "entry": {"question": "?", "answer": "1"}},
    ],
)
async def test_without_a_scorer_or_an_entry_the_trajectory_is_lost(monkeypatch, truth) -> None:
    install_toy(monkeypatch)
    _in_this_process(monkeypatch)
    with pytest.raises(ToolUnavailable, match="prepare the data again"):
        await REWARD.judge(Attempt(answer="1", ground_truth=truth), None)  # type: ignore[arg-type]


async def test_no_answer_and_a_scorer_that_raises_score_nothing(monkeypatch) -> None:
    install_toy(monkeypatch)
    _in_this_process(monkeypatch)
    broken = ENTRY | {"metadata": {"pair": [1, 2]}}  # no tuple: the scorer asserts that

    none = await REWARD.judge(Attempt(answer=None, ground_truth={}), None)  # type: ignore[arg-type]
    raised = await REWARD.judge(
        Attempt(answer="1", ground_truth={"task": "sums", "entry": broken}),
        None,  # type: ignore[arg-type]
    )

    assert (none["score"], none["format"], none.keys()) == (0.0, 0.0, raised.keys())
    assert (raised["score"], raised["scorer_error"], raised["format"]) == (0.0, 1.0, 1.0)


async def test_cpu_time_is_a_verdict_and_waiting_is_not(monkeypatch) -> None:
    async def used_up(*_: object) -> None:
        return None

    async def waited(*_: object) -> None:
        raise ToolTimeout("overloaded", tool="reasoning_gym")

    attempt = Attempt(answer="1", ground_truth={"task": "sums", "entry": ENTRY})
    monkeypatch.setattr(Scorer, "run", used_up)
    found = await REWARD.judge(attempt, None)  # type: ignore[arg-type]
    assert (found["score"], found["timeout"]) == (0.0, 1.0)
    monkeypatch.setattr(Scorer, "run", waited)
    with pytest.raises(ToolTimeout):
        await REWARD.judge(attempt, None)  # type: ignore[arg-type]


def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(self: object, function, *arguments):
        return function(*arguments)

    monkeypatch.setattr(Scorer, "run", run)
    _scorer.cache_clear()


# --- what may be evaluated ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "3*x**2 + 2*x - 1",
        "-2.5*sin(x) + C",
        "(4 + 4) * 3",
        "exp(2*x)/2",
        "2.*y",
        "x**3*Abs(x)",
        "7",
    ],
)
def test_algebra_is_evaluated(text: str) -> None:
    assert algebra(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "().__class__",
        "x.free_symbols",
        "x. free_symbols",
        "x.E",
        "x. E",
        "x.\n E",
        "open(x)",
        "lambda: 1",
        "[1][0]",
        "{1: 2}",
        "'a'",
        "exec(x)",
        "x if y else z",
        "(y := 3)",
        "S(x)(1).func",
        "getattr(x, y)",
        "x; y",
        "sympify(x)",
    ],
)
def test_code_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no algebra"):
        algebra(text)


@given(st.text(alphabet="xyCE019+-*/^() .,_'[]:=abimpsnotrl\n", max_size=24))
def test_what_is_algebra_has_no_attribute_and_no_name_of_python(text: str) -> None:
    import ast

    try:
        parsed = ast.parse(algebra(text).strip(), mode="eval")
    except (ValueError, SyntaxError):
        return
    for node in ast.walk(parsed):
        assert not isinstance(node, ast.Attribute | ast.Subscript | ast.Lambda | ast.IfExp)
        if isinstance(node, ast.Name):
            assert len(node.id) == 1 or node.id in NAMES
