"""Programs judged by hidden tests: what counts as passed, and how the failures are told apart."""

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.rewards.attempt import Attempt
from agent_loop.rewards.code import (
    Outcome,
    calling_program,
    chosen,
    returned,
    same_output,
    same_value,
    time_limit_s,
)
from agent_loop.rewards.registry import reward_for
from tests.agent_loop.rewards.programs import FAIL_CALLS, FAIL_STDIN, PASS_CALLS, PASS_STDIN
from tool_server.run_code import run_answer
from tool_server.sandbox import Limits, Program, Sandbox, choose_sandbox
from tool_server.wire.protocol import ToolCall, ToolRejected, ToolResult, ToolUnavailable

TESTS = {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]}


class Doubler:
    """Runs `double` right, `one` right for the first test only; `dead` is a dead sandbox."""

    def __init__(self) -> None:
        self.calls: list[ToolCall] = []

    async def call(self, call: ToolCall) -> ToolResult:
        self.calls.append(call)
        code, stdin = call.payload["code"], call.payload["stdin"]
        if code == "dead":
            raise ToolUnavailable("no sandbox")
        if code == "huge":
            raise ToolRejected("413")
        if code == "crash":
            return ToolResult(body={"status": "Failed", "run_result": {"stdout": "2"}})
        shown = {"double": str(2 * int(stdin)), "one": "2"}.get(code, "<answer>")
        return ToolResult(body={"status": "Success", "run_result": {"stdout": shown + " \n"}})


async def judged(
    program: str | None, truth: Any, tools: Any, extras: Any = None, **options: Any
) -> dict[str, float]:
    attempt = Attempt(answer=program, ground_truth=truth, extra_info={"extras": extras or {}})
    return await reward_for("code", options).judge(attempt, tools)


@pytest.mark.parametrize(
    ("program", "score", "acc"),
    [
        ("double", 1, 1),
        ("one", 0.5, 0),
        ("crash", 0, 0),
        ("huge", 0, 0),
        ("```\ndouble\n```", 1, 1),
    ],
)
async def test_a_program_earns_the_share_of_hidden_tests_it_passes(program, score, acc):
    parts = await judged(program, TESTS, Doubler())
    assert (parts["score"], parts["acc"], parts["format"]) == (score, acc, 1.0)


@pytest.mark.parametrize(("program", "score"), [("double", 1.0), ("one", 0.0)])
async def test_all_tests_have_to_be_passed_where_that_is_asked(program, score):
    parts = await judged(program, TESTS, Doubler(), judge="all")
    assert parts["score"] == parts["acc"] == score


async def test_the_first_failure_ends_it_where_all_are_needed():
    truth = {"inputs": [f"{n}\n" for n in range(100)], "outputs": ["2\n"] * 100}
    tools = Doubler()
    assert (await judged("double", truth, tools, judge="all"))["score"] == 0.0
    assert len(tools.calls) == 1
    tools = Doubler()
    assert (await judged("double", truth, tools))["score"] == 0.01
    assert len(tools.calls) == 100


async def test_a_dead_sandbox_gives_no_verdict():
    with pytest.raises(ToolUnavailable):
        await judged("dead", TESTS, Doubler())


async def test_a_test_that_found_no_sandbox_leaves_no_other_running():
    class DeadForTheSecond:
        running = 0

        async def call(self, call: ToolCall) -> ToolResult:
            if call.payload["stdin"] == "1":
                return ToolResult(body={"status": "Success", "run_result": {"stdout": "1"}})
            if call.payload["stdin"] == "2":
                await asyncio.sleep(0)
                raise ToolUnavailable("no sandbox")
            self.running += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.running -= 1
            raise AssertionError("nothing sets the event")

    tools = DeadForTheSecond()
    truth = {"inputs": ["1", "2", "3"], "outputs": ["1", "2", "3"]}
    with pytest.raises(ToolUnavailable):
        await judged("double", truth, tools)
    assert tools.running == 0


@pytest.mark.parametrize(
    ("truth", "said"),
    [
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": [], "outputs": []}, "at least one"),
        ({"inputs": [1], "outputs": ["1"]}, "must be texts"),
        ({"inputs": ["1"], "outputs": [1], "fn_name": "f"}, "list of arguments"),
        ({"inputs": [[1]], "outputs": [1], "fn_name": "f("}, "no name of a function"),
    ],
)
async def test_a_row_without_usable_tests_is_an_error_and_no_verdict(truth, said):
    with pytest.raises(ValueError, match=said):
        await judged("double", truth, Doubler())


# --- which tests ----------------------------------------------------------------------------------


@given(st.integers(1, 300), st.one_of(st.none(), st.integers(1, 300)))
def test_chosen_tests_are_spread_over_all_with_first_and_last(count, most):
    tests = chosen(count, most)
    assert len(tests) == min(count, most or count)
    assert tests == sorted(set(tests)) and tests[-1] == count - 1
    assert len(tests) == 1 or tests[0] == 0
    gaps = {b - a for a, b in pairwise(tests)}
    assert not gaps or max(gaps) - min(gaps) <= 1


async def test_no_more_tests_are_run_than_asked_for():
    truth = {"inputs": [f"{n}\n" for n in range(9)], "outputs": [f"{2 * n}" for n in range(9)]}
    tools = Doubler()
    assert (await judged("double", truth, tools, max_tests=3))["score"] == 1.0
    assert [call.payload["stdin"] for call in tools.calls] == ["0\n", "4\n", "8\n"]


@pytest.mark.parametrize(
    ("asked", "limit_s"), [(None, None), (1.0, 5.0), (7, 7.0), (60.0, 10.0), ("x", None), (0, None)]
)
async def test_a_row_s_time_limit_is_kept_within_reason(asked, limit_s):
    tools = Doubler()
    await judged("double", TESTS, tools, extras={"time_limit_s": asked})
    assert time_limit_s(asked) == limit_s
    assert {call.payload.get("run_timeout") for call in tools.calls} == {limit_s}


# --- outputs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        ("1 \n2\n\n", "1\n2", True),
        ("1  2", "1 2\n", True),
        ("1\r\n2", "1\n2", True),
        ("1\n\n2", "1\n2", True),
        ("1 2", "1\n2", False),
        ("0.3333333", "0.33333333333", True),
        ("1.0", "1", True),
        ("1e-9", "0.0", True),
        ("0.334", "0.33333333333", False),
        ("1000000", "1000001", False),
        ("1000001.0", "1000000", False),
        ("1e6", "1000000", True),
        ("4.9999999", "5", True),
        ("1000000000000000000.0", "1000000000000000001", False),
        ("-3.0", "-3", True),
        ("1e999", "5", False),
        ("1e999", "5.0", False),
        ("1e999", "1e998", False),
        ("1e5000", "9" * 5000, False),
        ("yes", "YES", False),
        ("nan", "nan", True),
        ("", "0", False),
        ("a.b", "a.c", False),
    ],
)
def test_outputs_are_compared_by_words_and_numbers(got, expected, same):
    assert same_output(got, expected) is same


@given(st.text(alphabet="01. \n-e", max_size=40))
def test_an_output_is_itself(text):
    assert same_output(text, text)
    assert same_output(f" {text}\n\n", text)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_a_result_is_found_behind_its_marker_and_is_itself(value):
    printed = f"noise\nm1 noise\nm{json.dumps(value)}\n"
    found, result = returned(printed, "m")
    assert found and same_value(result, value)


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        ([1, [2.0000001]], [1, [2]], True),
        ([1, 2], [2, 1], False),
        ("1", 1, False),
        ({"1": [0.5]}, {"1": [0.5]}, True),
        (True, 1, True),
        (1.0, "1.0", False),
        (10**20, 10**20 + 1, False),
        (1000001.0, 1000000, False),
        (2.0000001, 2, True),
        (2, 2.0000001, True),
        (10**400, 1.5, False),
        (float("inf"), 7, False),
        (float("nan"), 7, False),
    ],
)
def test_results_are_compared_as_json_values(got, expected, same):
    assert same_value(got, expected) is same


def test_what_is_expected_is_not_in_the_program_that_runs():
    code = calling_program("def f(x): ...", "f", "marker")
    compile(code, "solution.py", "exec")
    assert "expected" not in code


# --- in the sandbox -------------------------------------------------------------------------------


class InSandbox:
    """Tools that run programs as the tool server does."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self.calls = 0

    async def call(self, call: ToolCall) -> ToolResult:
        self.calls += 1
        program = Program(code=call.payload["code"], language="python", stdin=call.payload["stdin"])
        return ToolResult(body=run_answer(await self._sandbox.run(program, Limits(wall_s=2.0))))


@pytest_asyncio.fixture
async def tools() -> AsyncIterator[InSandbox]:
    sandbox = choose_sandbox("auto", workers=1)
    yield InSandbox(sandbox)
    sandbox.close()


SUM = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("print(sum(map(int, input().split())))", Outcome.PASSED),
        ("```python\nprint(sum(map(int, input().split())))\n```", Outcome.PASSED),
        ("print(sum(map(int input().split())))", Outcome.COMPILE_ERROR),
        ("def f():\n\tif 1:\n        pass", Outcome.COMPILE_ERROR),
        ("x = 'a\0'", Outcome.COMPILE_ERROR),
        ("exec('1+')", Outcome.RUNTIME_ERROR),
        ("raise SyntaxError('made up')", Outcome.RUNTIME_ERROR),
        ("1/0", Outcome.RUNTIME_ERROR),
        ("import sys; sys.exit(3)", Outcome.RUNTIME_ERROR),
        ("x = bytearray(10**11)", Outcome.RUNTIME_ERROR),
        ("while True: pass", Outcome.TIMEOUT),
        ("print(0)", Outcome.WRONG_OUTPUT),
    ],
)
async def test_failures_are_told_apart(tools, program, outcome):
    parts = await judged(program, SUM, tools)
    assert {name: parts[name] for name in Outcome if parts[name]} == {outcome: 1.0}
    assert parts["score"] == float(outcome is Outcome.PASSED)
    assert tools.calls == (1 if outcome is Outcome.COMPILE_ERROR else 2)


CALLS = {
    "fn_name": "pairs",
    "inputs": [[[1, 2], 1], [[], 0]],
    "outputs": [[[2, 1], 0.5], [[], 0.0]],
}
FUNCTION = "def pairs(values, k):\n    return (tuple(reversed(values)), k / 2)"
METHOD = (
    "class Solution:\n    def pairs(self, values: List[int], k):\n        return values[::-1], k/2"
)


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        (FUNCTION, Outcome.PASSED),
        (METHOD, Outcome.PASSED),
        (f"{FUNCTION}\nprint('noise')\nif __name__ == '__main__': input()", Outcome.PASSED),
        ("def pairs(values, k):\n    return values", Outcome.WRONG_OUTPUT),
        ("def pairs(values, k):\n    return {1: object()}", Outcome.RUNTIME_ERROR),
        ("def other(values, k):\n    return values", Outcome.RUNTIME_ERROR),
        ("def pairs(values, k) return", Outcome.COMPILE_ERROR),
        ("def pairs(values, k):\n    return exec('1+')", Outcome.RUNTIME_ERROR),
        ("import sys\ndef pairs(values, k):\n    sys.exit(0)", Outcome.WRONG_OUTPUT),
        ("def pairs(values, k):\n    while True: pass", Outcome.TIMEOUT),
    ],
)
async def test_functions_are_called_and_their_results_compared(tools, program, outcome):
    parts = await judged(program, CALLS, tools)
    assert {name: parts[name] for name in Outcome if parts[name]} == {outcome: 1.0}


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("program", "score"),
    [
        ("pass", 0.0),
        ("from math import gcd", 1.0),
        ("def gcd(a, b):\n    return a if not b else gcd(b, a % b)", 1.0),
        ("class Solution:\n    def gcd(self, a, b): return gcd(a, b)", 1.0),
    ],
)
async def test_a_function_that_is_there_for_all_is_nobody_s_answer(tools, program, score):
    truth = {"fn_name": "gcd", "inputs": [[12, 18]], "outputs": [6]}
    assert (await judged(program, truth, tools))["score"] == score


@pytest.mark.sandbox
async def test_a_result_that_may_stand_in_a_list_of_its_own_is_taken_either_way(tools):
    truth = {"fn_name": "f", "inputs": [[3]], "outputs": [6]}
    bare, listed = "def f(x): return 2 * x", "def f(x): return [2 * x]"
    assert [(await judged(p, truth, tools))["score"] for p in (bare, listed)] == [1.0, 0.0]
    truth["outputs_wrapped"] = True
    assert [(await judged(p, truth, tools))["score"] for p in (bare, listed)] == [1.0, 1.0]


@pytest.mark.sandbox
async def test_whole_numbers_are_keys_again_in_a_function_s_arguments(tools):
    truth = {"fn_name": "f", "inputs": [[{"1": 2, "-3": 4}]], "outputs": [-2]}
    assert (await judged("def f(d): return sum(d)", truth, tools))["score"] == 1.0


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("programs", "score"),
    [(PASS_STDIN, 1.0), (FAIL_STDIN, 0.0), (PASS_CALLS, 1.0), (FAIL_CALLS, 0.0)],
    ids=["right programs", "wrong programs", "right functions", "wrong functions"],
)
async def test_programs_are_judged_however_they_read_write_and_define(tools, programs, score):
    judged_wrong: list[str] = []
    for name, program, read, expected in programs:
        truth = {"inputs": [read], "outputs": [expected]}
        truth |= {} if isinstance(read, str) else {"fn_name": "f"}
        if (await judged(program, truth, tools))["score"] != score:
            judged_wrong.append(name)
    assert judged_wrong == []
    assert len(PASS_STDIN) + len(PASS_CALLS) >= 200
