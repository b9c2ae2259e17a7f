"""Rewards by name: which there are, what all of them give, and what can be added to them."""

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop import rewards
from agent_loop.rewards.attempt import Attempt
from agent_loop.rewards.custom import split_path
from agent_loop.rewards.registry import REWARDS, reward_for, runs_programs
from agent_loop.rewards.terms import length_term, with_terms
from config.schema import ConfigError, RewardTerms, SourceConfig, default_reward, load_section
from tests.agent_loop.rewards.test_rewards_code import Doubler
from tool_server.wire.protocol import (
    Fault,
    ToolBackend,
    ToolCall,
    ToolRejected,
    ToolResult,
    ToolTimeout,
    ToolUnavailable,
)

TRUTHS = {
    "code": {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]},
    "qa": {"target": ["The Beatles", "Beatles band"]},
    "math": {"answer": "\\frac{1}{2}"},
    "exact": {"answer": "x"},
}
TESTED_ALONE = {"judge", "reasoning_gym"}  # see test_rewards_judge.py, test_reasoning_reward.py
WITHOUT_OPTIONS = [name for name in REWARDS if name not in TESTED_ALONE]
RIGHT = {"code": "double", "qa": "beatles", "math": "0.5", "exact": " x\n"}


def kind_of(name: str) -> str:
    return next(kind for kind in TRUTHS if kind in name)


async def judged(name: str, answer: str | None, truth: Any = None, **options: Any) -> Any:
    truth = TRUTHS[kind_of(name)] if truth is None else truth
    attempt = Attempt(answer=answer, ground_truth=truth, tool_calls=1)
    return await reward_for(name, options).judge(attempt, Doubler())


@pytest.mark.parametrize("name", WITHOUT_OPTIONS)
async def test_every_reward_gives_the_same_parts_to_a_right_a_wrong_and_no_answer(name):
    right, wrong, none = [
        await judged(name, answer) for answer in (RIGHT[kind_of(name)], "one", None)
    ]
    if name != "math_reward_string_equal":
        assert (right["score"], right["acc"], right["format"]) == (1.0, 1.0, 1.0)
    assert wrong["score"] < 1 and (wrong["acc"], wrong["format"]) == (0.0, 1.0)
    assert (none["score"], none["acc"], none["format"]) == (0.0, 0.0, 0.0)
    assert right.keys() == wrong.keys() == none.keys()


@pytest.mark.parametrize("name", WITHOUT_OPTIONS)
def test_every_reward_says_which_ground_truth_it_cannot_judge_by(name):
    reward = reward_for(name)
    assert reward.truth_problem(TRUTHS[kind_of(name)]) is None
    broken = ({}, {"other": 1}, [], {"target": []}, {"target": 5.5}, {"answer": " "},
              {"answer": None}, {"inputs": []}, None, 7)  # fmt: skip
    for truth in broken:
        if kind_of(name) != "exact" or truth not in ({"target": 5.5}, 7):
            assert reward.truth_problem(truth), truth


def test_an_unknown_reward_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown reward='qaa'.*exact_match"):
        reward_for("qaa")


def test_options_that_a_reward_does_not_have_are_refused():
    with pytest.raises(ValueError, match=r"reward_options=\['judge'\] of reward='math'"):
        reward_for("math", {"judge": "all"})
    with pytest.raises(ConfigError, match=r"reward_options\.judge: .*'fraction' or 'all'"):
        reward_for("code", {"judge": "some"})
    with pytest.raises(ConfigError, match=r"reward_options\.judges"):
        reward_for("code", {"judges": "all"})


def test_sources_have_a_default_reward():
    assert [default_reward(s) for s in ("taco", "nq", "math", "other")] == [
        "code",
        "qa",
        "math",
        "exact_match",
    ]
    assert rewards.default_reward is default_reward and rewards.Attempt is Attempt  # of 1.1.0
    assert [n for n in REWARDS if runs_programs(n)] == ["code", "code_reward"]


async def test_an_exact_match_is_the_very_text():
    assert (await judged("exact_match", "X"))["score"] == 0.0
    assert (await judged("exact_match", "b", {"target": ["a", "b"]}))["score"] == 1.0
    assert (await judged("exact_match", "7", {"answer": 7}))["score"] == 1.0
    assert (await judged("exact_match", "0", {"target": 0, "answer": 5}))["score"] == 1.0


@pytest.mark.parametrize("answer", ["", "None", "{'x': 1}"])
async def test_what_is_no_text_in_a_ground_truth_is_no_answer(answer):
    truth = {"target": ["a", "", None, {"x": 1}]}
    assert (await judged("exact_match", answer, truth))["score"] == 0.0


# --- terms ----------------------------------------------------------------------------------------


@given(st.integers(0, 5000), st.integers(0, 2000), st.integers(1, 2000))
def test_the_length_term_falls_from_0_to_minus_1_between_free_and_limit(length, free, width):
    limit = free + width
    value = length_term(length, free, limit)
    assert -1 <= value <= 0
    assert (value == 0) == (length <= free)
    assert (value == -1) == (length >= limit)
    assert value >= length_term(length + 1, free, limit)


def test_the_length_term_is_that_of_dapo():
    # Yu et al. 2025: L_max 20480, L_cache 4096
    assert [length_term(n, 16384, 20480) for n in (16384, 18432, 20480, 20481)] == [0, -0.5, -1, -1]


TERMS = {"format": {"weight": 0.1}, "length": {"weight": 0.2, "free": 512, "limit": 1024}}


@pytest.mark.parametrize(
    ("answer", "length", "score"),
    [("x", 100, 1.1), ("x", 768, 1.0), ("x", 5000, 0.9), ("y", 100, 0.1), (None, 5000, -0.2)],
)
async def test_terms_are_added_to_the_score_and_leave_solved_alone(answer, length, score):
    reward = with_terms(reward_for("exact_match"), RewardTerms.model_validate(TERMS))
    attempt = Attempt(answer=answer, ground_truth={"answer": "x"}, response_length=length)
    parts = await reward.judge(attempt, Doubler())
    assert parts["score"] == pytest.approx(score)
    assert parts["acc"] == parts["task"] == float(answer == "x")
    assert parts["term_format"] == float(answer is not None)


async def test_a_length_has_the_response_s_own_limit_where_none_is_named():
    reward = with_terms(reward_for("exact_match"), RewardTerms.model_validate({"length": {}}))
    for length, value in ((80, 0.0), (90, -0.5), (100, -1.0)):
        attempt = Attempt(
            answer="x", ground_truth={"answer": "x"}, response_length=length,
            max_response_length=100,
        )  # fmt: skip
        assert (await reward.judge(attempt, Doubler()))["term_length"] == value


def test_a_reward_without_terms_is_itself():
    reward = reward_for("exact_match")
    assert with_terms(reward, RewardTerms()) is reward


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        ({"brevity": {}}, "reward_terms.brevity"),
        ({"length": {"wieght": 1}}, "reward_terms.length.wieght"),
        ({"length": {"free": 9, "limit": 9}}, "free=9 must be below limit=9"),
        ({"format": {"weight": float("nan")}}, "reward_terms.format.weight"),
    ],
)
def test_a_term_that_is_none_is_refused_by_name(terms, said):
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        load_section(SourceConfig, {"ratio": 1, "reward_terms": terms}, "mixed.sources.x")


# --- a function of one's own ----------------------------------------------------------------------

OWN = """
import asyncio, threading

def plain(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    assert data_source == "mine" and extra_info["extras"] == {"level": 3}
    return float(ground_truth in solution_str) * kwargs.get("scale", 1.0)

async def waits(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0)
    own = extra_info["answer"] == ground_truth
    return {"score": 0.5 * own, "acc": own, "tone": 2, "why": "text"}

def where(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1, "thread": threading.current_thread() is not threading.main_thread()}

def raises(data_source, solution_str, ground_truth, extra_info=None):
    return 1 / 0

def nothing_next(data_source, solution_str, ground_truth, extra_info=None):
    return next(iter([]))

def exits(data_source, solution_str, ground_truth, extra_info=None):
    raise SystemExit(3)

async def exits_later(data_source, solution_str, ground_truth, extra_info=None):
    raise SystemExit(3)

def arrays(data_source, solution_str, ground_truth, extra_info=None):
    import numpy as np
    return {"score": np.array(0.5), "solved": np.bool_(True), "many": np.ones(2)}

def beside(data_source, solution_str, ground_truth, extra_info=None):
    import beside_own
    return beside_own.SCORE

def says(data_source, solution_str, ground_truth, extra_info=None, value=None):
    return float(value) if value == "nan" else value

def gets(data_source, solution_str, ground_truth, extra_info, truth):
    return float(ground_truth == truth)

def short(solution_str, ground_truth):
    return 1.0

async def asks(data_source, solution_str, ground_truth, extra_info, tools, code="21"):
    from tool_server.wire.protocol import run_code_call
    result = await tools.call(run_code_call(code, ""))
    return float(result.body["run_result"]["stdout"] == "42\\n")

class Asking:
    async def __call__(self, tools=None, **given):
        return await asks(**given, tools=tools)

asks_too = Asking()

def cannot_ask(data_source, solution_str, ground_truth, extra_info, tools=None):
    return float(tools == "mine")
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


async def judged_by(
    path: Path, function: str, backend: ToolBackend | None = None, **options: Any
) -> Any:
    attempt = Attempt(
        answer="7", ground_truth={"answer": "7"}, text="so <answer>7</answer>", source="mine",
        extra_info={"extras": {"level": 3}},
    )  # fmt: skip
    return await reward_for(f"{path}:{function}", options).judge(attempt, backend or Doubler())


@pytest.mark.parametrize(
    ("truth", "given"),
    [
        ({"answer": "7"}, "7"),  # math; verl's gsm8k
        ({"answer": "7", "target": ["7"]}, "7"),  # json
        ({"answer": "7", "target": ["7", "VII"]}, {"answer": "7", "target": ["7", "VII"]}),
        ({"answer": "7", "inputs": ["1"], "outputs": ["2"]},) * 2,
        ({"target": ["7"]},) * 2,  # nq; verl's search_r1_like_qa_em
        ("7", "7"),
        ({},) * 2,
    ],
)
async def test_a_function_of_one_s_own_gets_the_text_of_a_single_answer(own, truth, given):
    attempt = Attempt(answer="7", ground_truth=truth)
    reward = reward_for(f"{own}:gets", {"truth": given})
    assert (await reward.judge(attempt, Doubler()))["score"] == 1.0


async def test_a_function_of_one_s_own_judges(own):
    assert await judged_by(own, "plain") == {"score": 1.0, "acc": 1.0, "format": 1.0}
    assert (await judged_by(own, "plain", scale=0.5))["score"] == 0.5
    parts = await judged_by(own, "waits")
    assert parts == {"score": 0.5, "acc": 1.0, "format": 1.0, "tone": 2.0}
    assert (await judged_by(own, "where"))["thread"] == 1.0


async def test_what_a_function_of_one_s_own_raises_names_it(own):
    with pytest.raises(RuntimeError, match=r"own\.py:raises raised ZeroDivisionError: division"):
        await judged_by(own, "raises")


@pytest.mark.parametrize(
    ("function", "error"),
    [
        ("nothing_next", "StopIteration"),
        ("exits", "SystemExit: 3"),
        ("exits_later", "SystemExit: 3"),
    ],
)
async def test_nothing_that_a_function_raises_ends_the_worker_or_is_lost(own, function, error):
    with pytest.raises(RuntimeError, match=rf"own\.py:{function} raised {error}"):
        await judged_by(own, function)


class Answering:
    """A tool backend that prints 42, or raises."""

    def __init__(self, error: Fault | None = None) -> None:
        self.error = error

    async def call(self, call: ToolCall) -> ToolResult:
        if self.error is not None:
            raise self.error
        return ToolResult(body={"status": "Success", "run_result": {"stdout": "42\n"}})


@pytest.mark.parametrize("function", ["asks", "asks_too"])
async def test_a_function_with_a_parameter_tools_gets_the_tool_client(own, function):
    assert (await judged_by(own, function, Answering()))["score"] == 1.0


@pytest.mark.parametrize("kind", [ToolUnavailable, ToolRejected, ToolTimeout])
async def test_a_fault_of_a_tool_is_the_function_s_fault_with_its_type(own, kind):
    with pytest.raises(kind, match="gone") as caught:
        await judged_by(own, "asks", Answering(kind("gone", tool="run_code")))
    assert caught.value.tool == "run_code"


async def test_an_option_named_tools_is_the_user_s_own(own):
    assert (await judged_by(own, "cannot_ask", tools="mine"))["score"] == 1.0


async def test_a_score_may_be_an_array_s_or_a_tensor_s(own):
    parts = await judged_by(own, "arrays")
    assert parts == {"score": 0.5, "acc": 0.0, "format": 1.0, "solved": 1.0}


async def test_a_file_of_one_s_own_imports_what_is_beside_it(own, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    own.with_name("beside_own.py").write_text("SCORE = 0.25")
    assert (await judged_by(own, "beside"))["score"] == 0.25


@pytest.mark.parametrize(
    "value", [None, "nan", "text", {"acc": 1}, {"score": None}, [1.0], 10**400, 1e30]
)
async def test_what_is_no_score_is_refused(own, value):
    with pytest.raises(ValueError, match=r"own\.py:says returned .*want a finite number"):
        await judged_by(own, "says", value=value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("{own}:other", r"has no function 'other', but plain, waits, where"),
        ("{own}:cannot_ask", r"it has a parameter 'tools'.* write `async def cannot_ask`"),
        ("{own}:short", r"unexpected keyword argument 'data_source'"),
        ("{own}.py:plain", r"no file .*own\.py\.py"),
        ("{broken}:plain", r"the file is not Python: SyntaxError"),
        ("{missing}:plain", r"the file raised ModuleNotFoundError"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_the_run(own, name, said):
    (own.parent / "broken.py").write_text("def plain(:")
    (own.parent / "missing.py").write_text("import no_such_module")
    files = {stem: str(own.with_name(f"{stem}.py")) for stem in ("own", "broken", "missing")}
    with pytest.raises(ValueError, match=rf"cannot load reward=.*{said}"):
        reward_for(name.format(**files))


def test_only_a_file_s_function_is_taken_for_one():
    assert split_path("/a/b.py:f") == ("/a/b.py", "f")
    assert split_path("C:/a.py:f") == ("C:/a.py", "f")
    assert [split_path(name) for name in ("math", "a:b", "b.py")] == [None, None, None]


def test_verl_s_own_functions_can_be_named():
    reward_score = pytest.importorskip("verl.utils.reward_score")
    path = Path(reward_score.__file__).with_name("gsm8k.py")
    with pytest.raises(ValueError, match="data_source"):
        reward_for(f"{path}:compute_score")  # another signature than verl asks of users
    default = reward_for(f"{reward_score.__file__}:default_compute_score")
    attempt = Attempt(
        answer="72", ground_truth={"answer": "72"}, text="#### 72", source="openai/gsm8k"
    )
    assert asyncio.run(default.judge(attempt, SimpleNamespace()))["score"] == 1.0  # type: ignore[arg-type]
