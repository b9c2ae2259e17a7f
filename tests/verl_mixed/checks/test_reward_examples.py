"""The right answer of a row, written as the prompt asks for it, must earn the reward."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_loop.rewards.registry import REWARDS
from samplers.rows.schema import Row, write_rows
from samplers.rows.sources import json_qa, math, nq, taco
from tests.verl_mixed.conftest import RunEnviron, with_overrides
from verl_mixed.checks.config.answer_forms import (
    ACTIONS,
    SENTENCE,
    asks_for_program,
    named_forms,
    right_answers,
    wrong_answers,
)
from verl_mixed.checks.config.prompts import first_prompts, is_unused_template
from verl_mixed.checks.config.reward_examples import (
    Example,
    example_problems,
    reward_examples,
    untried,
)
from verl_mixed.cli import main
from verl_mixed.launch.plan import Plan, make_plan
from verl_mixed.run.compose import compose_config, resolve

S = "mixed.sources.s"
JUDGE = "{base_url: 'http://127.0.0.1:9/v1', model: m, rubric: 'Is {answer} right?'}"
TAGGED = ("code_execution_agent", "search_agent", "math_agent")
OURS = (*TAGGED, "react_agent", "native_agent")
VERLS = ("tool_agent", "single_turn_agent")


def _programs(**fields: Any) -> dict[str, Any]:
    tests = {"inputs": ["1\n", "5\n"], "outputs": ["3\n", "7\n"]}
    return {"question": "Read n and print n + 2.", "input_output": tests, **fields}


RECORDS: Mapping[str, tuple[Any, list[dict[str, Any]]]] = {
    "math": (
        math,
        [
            {"problem": "Half of 1?", "solution": r"\boxed{\frac{1}{2}}", "level": "Level 1"},
            {"problem": "Simplify.", "solution": r"\boxed{x^2+1}", "level": "Level 1"},
        ],
    ),
    "nq": (
        nq,
        [{"question": f"who wrote {n}", "answer": [n, f"{n} Jr"]} for n in ("Ida Brandt", "Tom")],
    ),
    "taco": (taco, [{**_programs(), "solutions": "[]", "starter_code": "", "difficulty": "EASY"}]),
    "gsm8k": (json_qa, [{"question": f"{n} and {n}?", "answer": str(2 * n)} for n in (24, 36)]),
    "text": (json_qa, [{"question": f"P{n}? Find n.", "answer": f"n = {n}"} for n in (4, 65)]),
    "choice": (json_qa, [{"question": "A, B or C?", "answer": letter} for letter in "AB"]),
    "program": (json_qa, [_programs(solution="print(int(input()) + 2)", answer="")]),
    "bad program": (json_qa, [_programs(solution="print(2)", answer="")]),
}
"""Kind of rows -> who converts its records, and these."""


def rows_of(kind: str, source: str = "s") -> list[Row]:
    reader, records = RECORDS[kind]
    options = {"answer_field": ""} if "program" in kind else {}
    return [
        reader.to_row({"type": "", **record}, split="train", index=n, source=source, **options)
        for n, record in enumerate(records)
    ]


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Plan]:
    """Prompts -> the plan of a run with the one source `s`, which is composed once."""
    folder = tmp_path_factory.mktemp("examples")
    for kind in RECORDS:
        write_rows(folder / f"{kind}.parquet", rows_of(kind))
    only = [f"mixed.sources.{name}=null" for name in ("taco", "nq", "math")]
    file = f"[{folder}/gsm8k.parquet]"
    return {
        prompts: make_plan(
            [
                f"prompts={prompts}",
                *only,
                "+mixed.sources.s={ratio: 1.0, agent: math_agent, reward: math}",
                f"data.train_files={file}",
                f"data.val_files={file}",
                "mixed.leakage=allow",
                "actor_rollout_ref.model.path=someone/model",
                "actor_rollout_ref.rollout.multi_turn.format=hermes",
            ],
            {"PROFILE": "laptop"},
        )
        for prompts in ("bare", "instructed", "few_shot")
    }


def tried(
    plans: Mapping[str, Plan], kind: str, *overrides: str, prompts: str = "bare"
) -> list[Example]:
    plan = plans[prompts]
    folder = Path(plan.config["data"]["train_files"][0]).parent
    files = f"data.train_files=['{folder}/{kind}.parquet']"
    config = with_overrides(plan, [files, *overrides]).config
    return reward_examples(config, own_tool_server=True)


def problem_of(examples: Sequence[Example]) -> str:
    (problem,) = example_problems(examples) or [""]
    return problem


# --- every shipped reward, agent, prompt and kind of row -----------------------------------------

QA = ("qa", "qa_em_reward", "qa_f1", "qa_f1_reward", "exact_match", "exact_match_reward")
MATH = tuple(sorted(name for name in REWARDS if name.startswith("math")))
CODE = ("code", "code_reward")


@pytest.mark.parametrize(
    ("prompts", "agent"),
    [
        *(("instructed", agent) for agent in OURS),
        *(("few_shot", agent) for agent in (*TAGGED, "react_agent")),
    ],
)
@pytest.mark.parametrize("kind", ["math", "nq", "gsm8k", "text", "choice", "program"])
def test_shipped_prompts_ask_for_an_answer_that_earns_the_reward(
    plans: dict[str, Plan], kind: str, prompts: str, agent: str
):
    fitting = {"math": (*MATH, *QA), "nq": QA, "program": CODE}.get(kind, (*MATH, *QA))
    fitting = [name for name in fitting if kind != "math" or not name.startswith("qa")]
    for reward in fitting:
        examples = tried(plans, kind, f"{S}.agent={agent}", f"{S}.reward={reward}", prompts=prompts)
        assert problem_of(examples) == "", reward
        assert examples and all(each.score == 1 > each.wrong for each in examples), reward  # type: ignore[operator]


@pytest.mark.parametrize(
    ("kind", "agent", "rewards"),
    [
        # prompts that name no form: what the agent takes must be what the reward compares
        ("gsm8k", "native_agent", [r for r in MATH if r != "math_reward_tool"]),
        ("gsm8k", "native_agent", ["math_reward_tool"]),
        ("math", "native_agent", MATH),
        ("text", "native_agent", MATH),
        ("gsm8k", "tool_agent", MATH),
        ("choice", "native_agent", MATH),
        ("program", "native_agent", CODE),
        ("program", "tool_agent", CODE),
        *((kind, "react_agent", [*MATH, *QA]) for kind in ("gsm8k", "text", "choice")),
        ("nq", "react_agent", QA),
        *((kind, "gateway", QA) for kind in ("gsm8k", "nq", "choice")),
    ],
)
def test_a_message_without_a_form_earns_it(
    plans: dict[str, Plan], kind: str, agent: str, rewards: Iterable[str]
):
    for reward in rewards:
        examples = tried(plans, kind, f"{S}.agent={agent}", f"{S}.reward={reward}")
        assert problem_of(examples) == "", reward
        assert examples and not any(each.skipped for each in examples), reward


@pytest.mark.parametrize(
    ("kind", "agent", "rewards", "prompts", "says"),
    [
        *(("gsm8k", agent, MATH, "bare", "between the answer tags") for agent in TAGGED),
        *(("nq", agent, QA, "bare", "alone") for agent in ("native_agent", *VERLS)),
        ("gsm8k", "native_agent", QA, "few_shot", "prompts=instructed"),
        ("gsm8k", "single_turn_agent", ["math_reward_tool"], "bare", "can make none"),
        ("gsm8k", "gateway", ["math_reward_tool"], "instructed", "can make none"),
        ("program", "code_execution_agent", CODE, "bare", "between the answer tags"),
        ("text", "native_agent", QA, "bare", "alone"),
    ],
)
def test_a_reward_that_nobody_can_earn_is_named_with_what_to_write(
    plans: dict[str, Plan],
    kind: str,
    agent: str,
    rewards: Iterable[str],
    prompts: str,
    says: str,
):
    for reward in rewards:
        examples = tried(plans, kind, f"{S}.agent={agent}", f"{S}.reward={reward}", prompts=prompts)
        problem = problem_of(examples)
        what, _, remedy = problem.rpartition("; ")
        assert f"agent={agent!r}" in what and f"reward={reward!r}" in what, reward
        assert f"{examples[0].written!r:.120}" in what, reward
        assert says in remedy or says in problem, (reward, problem)


@pytest.mark.parametrize("prompt", ["code", "{system: 'Write a program in {answer_start_tag}.'}"])
def test_a_prompt_that_asks_for_a_program_where_a_number_is_compared(
    plans: dict[str, Plan], prompt: str
):
    given = [f"{S}.agent=code_execution_agent", f"{S}.reward=math_reward_format"]
    problem = problem_of(tried(plans, "text", *given, f"{S}.prompt={prompt}", prompts="instructed"))
    assert "the right answer earns 0.1: the prompt asks for a program" in problem
    assert "prompts=instructed and leave mixed.sources.s.prompt out" in problem


def test_hidden_tests_are_run_where_a_row_carries_a_solution(plans: dict[str, Plan]):
    code = [f"{S}.agent=code_execution_agent", f"{S}.reward=code"]
    (good,) = tried(plans, "program", *code, prompts="instructed")
    assert (good.score, good.wrong, good.problem) == (1.0, 0.0, "")
    (bad,) = tried(plans, "bad program", *code, prompts="instructed")
    assert bad.is_doubt and bad.score == 0.0  # the solution itself may be wrong
    (unknown,) = untried(tried(plans, "taco", *code, prompts="instructed"))
    assert unknown.endswith("source=s was not tried: its rows have hidden tests and no solution")


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ([f"{S}.reward=loop"], "its agent loop or environment computes the reward"),
        (
            [
                f"{S}.reward=judge",
                f"{S}.reward_options={JUDGE}",
            ],
            "--reward-examples",
        ),
        (
            [f"{S}.agent=environment", f"{S}.reward=math", f"{S}.prompt={{}}"],
            "its environment rewards steps",
        ),
    ],
)
def test_what_holds_no_right_answer_is_named_as_not_tried(
    plans: dict[str, Plan], overrides: list[str], why: str
):
    (said,) = untried(tried(plans, "gsm8k", *overrides))
    assert why in said


def test_a_judge_without_its_server_is_not_tried(plans: dict[str, Plan]):
    plan = with_overrides(plans["bare"], [f"{S}.reward=judge", f"{S}.reward_options={JUDGE}"])
    (said,) = untried(reward_examples(plan.config, own_tool_server=True, asks_judges=True))
    assert "127.0.0.1:9" in said


# --- what a prompt asks for ----------------------------------------------------------------------

ANSWER = ("<answer>", "</answer>")


@pytest.mark.parametrize(
    ("text", "forms"),
    [
        ("Solve it.", ["in no form that this check knows; it tries a sentence"]),
        ("Write it between <answer> and </answer>.", ["between the answer tags"]),
        (r"Put your final answer within \boxed{}.", [r"in \boxed{}"]),
        ('Output the final answer after "####".', ["after ####"]),
        ("Final Answer: the answer", ["after `Final Answer:`"]),
        ('The last line is "Answer: $Answer".', ["after `Answer:`"]),
        ("End with **Answer:** and it", ["after `Answer:`"]),
        ('Reply as JSON: {"answer": x}', ["as JSON"]),
        ("Give the name, date or number alone, no sentence.", ["alone"]),
        ("Reply with only the letter of the right option.", ["alone"]),
        ("Answer with A, B, C or D.", ["alone"]),
        ("Output the letter and no other text.", ["alone"]),
        ("Answer with the number only.", ["alone"]),
        ("Answer yes or no.", ["alone"]),
        ("What is it? Answer: ", ["after `Answer:`", "alone"]),
        ("请只回答数字", ["alone"]),
    ],
)
def test_the_forms_that_a_prompt_names(text: str, forms: list[str]):
    assert [form.words for form in named_forms([text], ANSWER)] == forms


def test_a_form_in_the_question_of_one_row_is_not_the_prompt_s():
    texts = [
        "What is an <answer> element? Only one name.",
        "#### Problem 2",
        "What is the capital?",
    ]
    assert named_forms(texts, ANSWER) == [SENTENCE]
    assert [form.words for form in named_forms([f"{t} ####" for t in texts], ANSWER)] == [
        "after ####"
    ]


@pytest.mark.parametrize(
    ("text", "is_program"),
    [
        ("When your program is right, write all of it between <answer> and </answer>.", True),
        ("Try code to see what it prints, then the program between <answer> and </answer>.", True),
        ("Return the function in <answer>.", True),
        ("Write the complete Python code inside <answer></answer>.", True),
        ("When you know the answer, write it between <answer> and </answer>.", False),
        ("Use code between <code> and </code>, and put the final result in <answer>.", False),
        ("Run Python code in <code></code>, then finish with <answer>72</answer>.", False),
        ("Write a program in <code>. Write the answer between <answer> and </answer>.", False),
        ("Write the result of the program between <answer> and </answer>.", False),
        ("Use the code tool and give the output of the code inside <answer></answer>.", False),
        ("Return what your program prints in <answer></answer>.", False),
        ("Put your final answer for the function f(x) in <answer></answer>.", False),
        ("Write the country code between <answer> and </answer>.", False),
        ("Write a program that prints the sum.", False),
    ],
)
def test_whether_a_prompt_asks_for_a_program(text: str, is_program: bool):
    assert asks_for_program([text], ANSWER) is is_program


@pytest.mark.parametrize(
    ("truth", "right"),
    [
        ("72", ["72"]),
        (72, ["72"]),
        (["a", "b"], ["a", "b"]),
        ({"answer": "x", "target": ["y", "z"]}, ["y", "z"]),
        ({"answer": 0.5}, ["0.5"]),
        ({"task": "t", "entry": {"answer": "7"}}, ["7"]),
        ({"inputs": [], "outputs": []}, []),
        ({"target": 7, "numbers": [1, 2]}, []),
        ({"answer": ""}, []),
        (None, []),
    ],
)
def test_the_right_answers_of_a_ground_truth(truth: Any, right: list[str]):
    assert right_answers(truth) == right


@pytest.mark.parametrize(
    ("right", "others", "wrong"),
    [
        ("72", ["5"], ["73", "233"]),
        ("1,000", [], ["1001", "3017"]),
        ("1e999999999", [], ["no idea", "nothing of the kind"]),
        ("Ida Brandt", ["ida-brandt", "Tom Ashe"], ["Tom Ashe", "nothing of the kind"]),
        ("yes", ["Yes."], ["no idea", "nothing of the kind"]),
    ],
)
def test_wrong_answers_are_certainly_wrong(right: str, others: list[str], wrong: list[str]):
    assert wrong_answers(right, others) == wrong


# --- models that have learnt their form, rewards of the user's own -------------------------------


def test_a_model_that_has_learnt_its_form_need_not_be_told(plans: dict[str, Plan], tmp_path: Path):
    given = [f"{S}.agent=search_agent", f"{S}.reward=qa"]
    assert problem_of(tried(plans, "nq", *given))
    assert problem_of(tried(plans, "nq", *given, f"{S}.prompt={{}}")) == ""
    (tmp_path / "model").mkdir()
    model = f"actor_rollout_ref.model.path={tmp_path}/model"
    assert problem_of(tried(plans, "nq", *given, model))
    (tmp_path / "demo.json").write_text("{}")
    assert problem_of(tried(plans, "nq", *given, model)) == ""


REWARD_FILE = """
def anything(data_source, solution_str, ground_truth, extra_info):
    return 1.0
def half(data_source, solution_str, ground_truth, extra_info):
    return 0.5 * (extra_info["answer"] == ground_truth)
def hashes(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str.rpartition("#### ")[2] == ground_truth)
def thoughts(data_source, solution_str, ground_truth, extra_info):
    return float("<think>" in solution_str)
def wrong_key(data_source, solution_str, ground_truth, extra_info):
    return float(extra_info["result"])
def as_json(data_source, solution_str, ground_truth, extra_info):
    import json
    return float(json.loads(solution_str)["answer"] == ground_truth)
def as_number(data_source, solution_str, ground_truth, extra_info):
    return float(int(solution_str.removeprefix("##")) == int(ground_truth))
def away(data_source, solution_str, ground_truth, extra_info):
    raise ConnectionRefusedError("no server at 10.0.0.1")
"""


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("anything", "a wrong answer earns 1, as the right one"),
        ("half", ""),
        ("hashes", "ask for the answer after ####"),
        ("wrong_key", "raised KeyError: 'result'; correct the function of mixed.sources.s.reward"),
    ],
)
def test_a_reward_of_the_user_s_own(
    plans: dict[str, Plan], tmp_path: Path, function: str, says: str
):
    (tmp_path / "rewards.py").write_text(REWARD_FILE)
    reward = f"{S}.reward='{tmp_path}/rewards.py:{function}'"
    problem = problem_of(tried(plans, "gsm8k", f"{S}.agent=react_agent", reward))
    assert says in problem and bool(says) is bool(problem)


def test_an_answer_as_json(plans: dict[str, Plan], tmp_path: Path):
    (tmp_path / "rewards.py").write_text(REWARD_FILE)
    given = [f"{S}.reward='{tmp_path}/rewards.py:as_json'", f"{S}.agent=native_agent"]
    asks = f"""{S}.system_prompt='Reply as {{"answer": ...}}.'"""
    assert problem_of(tried(plans, "gsm8k", *given, asks)) == ""
    assert "ask for the answer as JSON" in problem_of(tried(plans, "gsm8k", *given))


def test_what_no_check_can_guess_is_a_warning(plans: dict[str, Plan], tmp_path: Path):
    (tmp_path / "rewards.py").write_text(REWARD_FILE)
    reward = f"{S}.reward='{tmp_path}/rewards.py:thoughts'"
    examples = tried(plans, "gsm8k", reward, f"{S}.agent=native_agent")
    assert example_problems(examples) == []
    (doubt,) = example_problems(examples, doubts=True)
    assert "see what mixed.sources.s.reward wants" in doubt
    reward = f"{S}.reward='{tmp_path}/rewards.py:as_number'"
    examples = tried(plans, "text", reward, f"{S}.agent=native_agent")
    assert example_problems(examples) == []
    (doubt,) = example_problems(examples, doubts=True)
    assert "gets no verdict" in doubt and "ValueError" in doubt
    (why,) = untried(tried(plans, "gsm8k", f"{S}.reward='{tmp_path}/rewards.py:away'"))
    assert "no server at 10.0.0.1" in why


LOOPS = """
from agent_loop.turn_agent_loop import TaggedAgentLoop
from agent_loop.code_execution_agent_loop import CodeExecutionAgentLoop
from agent_loop.native_agent_loop import NativeAgentLoop

class Own(TaggedAgentLoop):
    actions, own_tags = ("answer",), {"answer": ("<final>", "</final>")}
    async def act(self, action, extras): ...

class Code(CodeExecutionAgentLoop):
    own_tags = {"answer": ("<final>", "</final>")}

class Native(NativeAgentLoop):
    def dialogue(self, *given): ...

class Late(TaggedAgentLoop):
    actions = property(lambda self: ("answer",))
    async def act(self, action, extras): ...
"""


@pytest.mark.parametrize(
    ("loop", "says", "earns"),
    [
        ("Own", "Answer between <final> and </final>.", True),
        ("Own", "Answer between <answer> and </answer>.", False),
        ("Code", "Answer between <final> and </final>.", True),
        ("Code", "Answer between <answer> and </answer>.", False),
        ("Native", "Answer.", None),
        ("Late", "Answer.", None),
    ],
)
def test_a_loop_of_the_user_s_own_is_read_by_its_own_tags(
    plans: dict[str, Plan],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    loop: str,
    says: str,
    earns: bool | None,
):
    (tmp_path / "loops_of_examples.py").write_text(LOOPS)
    monkeypatch.syspath_prepend(tmp_path)
    mine = f"+agent_loops.mine._target_=loops_of_examples.{loop}"
    examples = tried(
        plans, "gsm8k", mine, f"{S}.agent=mine", f"{S}.reward=math", f"{S}.system_prompt='{says}'"
    )
    if earns is None:
        assert [*untried(examples)]
    else:
        assert bool(problem_of(examples)) is not earns


def test_a_source_s_own_tools_are_listed_before_the_answers_are_tried(
    plans: dict[str, Plan], tmp_path: Path
):
    (tmp_path / "tools.py").write_text('def look_up(word: str) -> str:\n    """Look up."""\n')
    tools = f"{S}.tools=['{tmp_path}/tools.py:look_up']"
    assert (
        problem_of(tried(plans, "gsm8k", f"{S}.agent=native_agent", f"{S}.reward=math", tools))
        == ""
    )


def test_a_reward_that_wants_a_call_needs_a_turn_for_it(plans: dict[str, Plan]):
    given = [f"{S}.agent=native_agent", f"{S}.reward=math_reward_tool"]
    assert problem_of(tried(plans, "gsm8k", *given)) == ""
    assert "allow 2 turns" in problem_of(tried(plans, "gsm8k", *given, f"{S}.max_turns=1"))


def test_a_class_that_cannot_be_imported_is_no_second_problem(plans: dict[str, Plan]):
    mine = "+agent_loops.mine._target_=nowhere.Loop"
    assert [*untried(tried(plans, "gsm8k", mine, f"{S}.agent=mine", f"{S}.reward=math"))]


def test_one_row_of_several_is_a_warning(plans: dict[str, Plan]):
    records = [
        {"question": f"{n} and {n}?", "answer": answer}
        for n, answer in enumerate(["12", "twelve fifths, roughly", "24"])
    ]
    rows = [json_qa.to_row(r, split="train", index=n, source="s") for n, r in enumerate(records)]
    folder = Path(plans["bare"].config["data"]["train_files"][0]).parent
    write_rows(folder / "mixed kinds.parquet", rows)
    examples = tried(plans, "mixed kinds", f"{S}.agent=native_agent", f"{S}.reward=exact_match")
    assert problem_of(examples)  # all three
    given = [f"{S}.agent=native_agent", f"{S}.reward=math_reward_string_equal"]
    examples = tried(plans, "mixed kinds", *given, f"{S}.system_prompt='Think first.'")
    assert example_problems(examples) == []


def test_each_agent_that_rows_name_is_tried(plans: dict[str, Plan]):
    rows = [*rows_of("nq"), *rows_of("nq")]
    rows[2:] = [replace(row, agent_name="native_agent") for row in rows[2:]]
    folder = Path(plans["bare"].config["data"]["train_files"][0]).parent
    write_rows(folder / "two agents.parquet", rows)
    given = [f"{S}.agent=null", f"{S}.reward=qa", f"{S}.prompt={{system: '{{search_start_tag}}'}}"]
    examples = tried(plans, "two agents", *given)
    assert {each.agent for each in examples} == {"search_agent", "native_agent"}


def test_a_function_that_never_returns_is_not_waited_for(plans: dict[str, Plan], tmp_path: Path):
    body = "    import threading\n    threading.Event().wait()\n"
    (tmp_path / "rewards.py").write_text(f"def hangs(**_):\n{body}")
    given = [f"{S}.reward='{tmp_path}/rewards.py:hangs'", "mixed.deadlines.reward_s=0.05"]
    examples = tried(plans, "gsm8k", *given)
    assert len(examples) == 1 and "no verdict within mixed.deadlines" in examples[0].skipped


# --- where it is said ----------------------------------------------------------------------------


def test_check_prints_the_table_and_the_problem(
    run_environ: RunEnviron, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for key, value in run_environ.items():
        monkeypatch.setenv(key, value)
    assert main(["check", "--reward-examples", "prompts=instructed"]) == 0
    out = capsys.readouterr().out
    assert "<answer>" in out.partition("--- reward examples")[2].partition("---\n")[0]
    assert "note: the reward of source=taco was not tried: its rows have hidden tests" in out
    assert main(["check", "prompts=instructed", "mixed.sources.math.prompt=code"]) == 2
    captured = capsys.readouterr()
    assert "--- reward examples" not in captured.out
    assert "problem: source='math': " in captured.err


def test_the_first_prompt_is_what_the_parts_say(plans: dict[str, Plan]):
    given = [f"{S}.agent=react_agent", f"{S}.system_prompt=SOURCE", f"{S}.prompt={{system: T}}"]
    config = with_overrides(plans["bare"], given).config
    assert first_prompts(config)["s"].startswith(
        "system: SOURCE\n\nT\n\nAnswer the question. You may use these tools:\nrun_code: run"
    )


def test_instructions_of_the_user_s_own_must_name_react_s_lines(
    plans: dict[str, Plan], tmp_path: Path
):
    loop = "+agent_loops.mine._target_=agent_loop.react_agent_loop.ReactAgentLoop"
    for text, is_told in (("Use {tools}", False), ("{tools}. Write Final Answer: last.", True)):
        mine = f"+agent_loops.mine.system_prompt='{text}'"
        problem = problem_of(tried(plans, "gsm8k", loop, mine, f"{S}.agent=mine"))
        assert ("after `Final Answer:`" in problem) is not is_told


def test_the_actions_are_those_of_the_classes():
    pytest.importorskip("verl")
    from hydra.utils import get_class

    for target, actions in ACTIONS.items():
        assert tuple(get_class(target).actions) == actions


def test_a_run_of_before_goes_on_if_no_source_takes_the_new_templates():
    run = ["prompts=instructed", "mixed.run_dir=/x"]
    config = resolve(compose_config(run), complete=False)
    key = "data.prompts.search_agent.system"
    assert is_unused_template(key, config)
    assert not is_unused_template("mixed.prompts.search.system", config)
    assert is_unused_template("mixed.prompts.search_agent_maths.system", config)
    config["mixed"]["sources"]["nq"] |= {"prompt": None, "reward": "math"}
    assert not is_unused_template(key, config)
    assert not is_unused_template("mixed.prompts.search_agent_maths.system", config)


def test_a_run_that_began_before_the_templates_keeps_its_prompts(
    run_environ: RunEnviron, tmp_path: Path
):
    math = "mixed.sources.math"
    agent = [f"{math}.agent=native_agent", f"{math}.prompt=null", "prompts=instructed"]
    given = [*agent, "actor_rollout_ref.rollout.multi_turn.format=hermes"]
    plan = make_plan(given, run_environ)
    assert "between <answer>" in first_prompts(plan.config)["math"]
    prompts = plan.config["mixed"]["prompts"]
    before = {name: one for name, one in prompts.items() if not name.startswith("native_agent_")}
    config = {**plan.config, "mixed": {**plan.config["mixed"], "prompts": before}}
    config["data"] = {**config["data"], "prompts": before}
    run = plan.folder.path
    (run / "checkpoints" / "global_step_1").mkdir(parents=True)
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1")
    (run / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "metrics": {}}\n')
    (run / "config.yaml").write_text(json.dumps(config))

    resumed = make_plan(given, run_environ)

    assert resumed.refused_changes() == []
    assert "<answer> and" not in first_prompts(resumed.config)["math"]
