"""The reward for programs: hidden tests in the same sandbox as the model's own runs.

A test has a text for stdin and the expected stdout; or, if the ground truth has `fn_name`,
arguments and the expected result, as in TACO (Li et al. 2023). Expected values never enter the
sandbox.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from hashlib import sha256
from typing import Any, Literal

from pydantic import Field

from agent_loop.rewards.attempt import Attempt, no_answer, verdict
from config.compat import StrEnum, gather_all
from config.schema import Section
from tool_server.wire.fenced import extract_code
from tool_server.wire.protocol import ToolBackend, ToolRejected, run_code_call

LEAST_TIME_LIMIT_S = 5.0
"""Shortest time limit of a test, because the limits of public problems are for compiled languages.
"""

MOST_TIME_LIMIT_S = 10.0

RELATIVE, ABSOLUTE = 1e-5, 1e-8
"""Tolerances for expected numbers that are not whole, as in numpy's `allclose`. TACO's evaluation
uses them for all numbers, so there 123456000.0 equals 123456789."""

OF_WHOLE = 1e-5
"""Largest difference of a decimal from an expected whole number: 4.9999999 counts as 5."""

_AT_ONCE = 16
"""Tests that run together if the first failure decides."""


class CodeOptions(Section):
    """`mixed.sources.<source>.reward_options` of `code`."""

    judge: Literal["fraction", "all"] = "fraction"
    """fraction: the share of passed tests. all: 1 if every test passes, else 0; it stops at the
    first failure."""

    max_tests: int | None = Field(default=None, ge=1)
    """Most tests that run, spread evenly over the row's tests, with the first and the last (with 1:
    the last), because problems begin with examples and end with the largest inputs. None: all."""


class Outcome(StrEnum):
    """The result of a program in one test; these are the names of the reward's parts."""

    PASSED = "passed"
    COMPILE_ERROR = "compile_error"
    TIMEOUT = "timeout"
    RUNTIME_ERROR = "runtime_error"
    WRONG_OUTPUT = "wrong_output"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeReward:
    """The share of hidden tests that a program passes. Its parts are the shares of tests with each
    `Outcome`; tests that did not run, because an earlier one decided, have the outcome of that
    one."""

    name: str
    options: CodeOptions = field(default_factory=CodeOptions)

    async def judge(self, attempt: Attempt, tools: ToolBackend) -> dict[str, float]:
        truth = attempt.ground_truth
        if problem := self.truth_problem(truth):
            raise ValueError(f"cannot judge a program: {problem}; prepare the data again")
        program = extract_code(attempt.answer or "", "python")
        if attempt.answer is None or not program.strip():
            return no_answer() | dict.fromkeys(Outcome, 0.0)
        extras = attempt.extra_info.get("extras")
        asked = extras.get("time_limit_s") if isinstance(extras, Mapping) else None
        limit_s = time_limit_s(asked)
        tests = chosen(len(truth["inputs"]), self.options.max_tests)

        async def run(some: Sequence[int]) -> list[Outcome]:
            return await gather_all([_outcome(program, truth, i, limit_s, tools) for i in some])

        outcomes = await run(tests[:1])
        size = _AT_ONCE if self.options.judge == "all" else len(tests)
        while len(outcomes) < len(tests):
            if (end := self._end(outcomes)) is not None:
                outcomes += [end] * (len(tests) - len(outcomes))
            else:
                outcomes += await run(tests[len(outcomes) :][:size])
        shares = {str(each): outcomes.count(each) / len(outcomes) for each in Outcome}
        solved = float(shares["passed"] == 1)
        score = solved if self.options.judge == "all" else shares["passed"]
        return verdict(score, acc=solved) | shares

    def _end(self, outcomes: Sequence[Outcome]) -> Outcome | None:
        """The deciding outcome, if any: a program that does not compile fails every test."""
        failed = [each for each in outcomes if each is not Outcome.PASSED]
        if Outcome.COMPILE_ERROR in failed:
            return Outcome.COMPILE_ERROR
        return failed[0] if failed and self.options.judge == "all" else None

    def truth_problem(self, ground_truth: Any) -> str | None:
        if not isinstance(ground_truth, Mapping):
            return "ground_truth is no object with `inputs` and `outputs`"
        inputs, outputs = ground_truth.get("inputs"), ground_truth.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list):
            return "ground_truth needs the lists `inputs` and `outputs`"
        if not inputs or len(inputs) != len(outputs):
            return (
                f"ground_truth has {len(inputs)} inputs and {len(outputs)} outputs: as many of one "
                "as of the other are needed, and at least one"
            )
        fn_name = ground_truth.get("fn_name")
        if fn_name is None:
            texts = all(isinstance(text, str) for text in [*inputs, *outputs])
            return None if texts else "ground_truth: inputs and outputs must be texts"
        if not isinstance(fn_name, str) or not fn_name.isidentifier():
            return f"ground_truth.fn_name={fn_name!r} is no name of a function"
        lists = all(isinstance(arguments, list) for arguments in inputs)
        return (
            None if lists else "ground_truth.inputs: with fn_name each must be a list of arguments"
        )


def time_limit_s(asked: Any) -> float | None:
    """Time limit of a test; None takes the server's."""
    if not isinstance(asked, int | float) or isinstance(asked, bool) or not asked > 0:
        return None
    return min(MOST_TIME_LIMIT_S, max(LEAST_TIME_LIMIT_S, float(asked)))


def chosen(count: int, most: int | None) -> list[int]:
    """The indices of the tests that run; see `CodeOptions.max_tests`."""
    if most is None or most >= count:
        return list(range(count))
    if most == 1:
        return [count - 1]
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


async def _outcome(
    program: str, truth: Mapping[str, Any], test: int, limit_s: float | None, tools: ToolBackend
) -> Outcome:
    marker = ""
    code, stdin, expected = program, truth["inputs"][test], truth["outputs"][test]
    fn_name = truth.get("fn_name")
    if fn_name is None:
        stdin, expected = _text(stdin), _text(expected)
    else:
        stdin = json.dumps(stdin)
        marker = sha256(f"{program}\0{stdin}".encode(errors="replace")).hexdigest()
        code = calling_program(program, fn_name, marker)
    try:
        call = run_code_call(code, stdin, run_timeout_s=limit_s)
        body = (await tools.call(call)).body
    except ToolRejected:
        return Outcome.RUNTIME_ERROR  # the server refused the program
    run = body.get("run_result") or {}
    if body.get("status") != "Success":
        return _failure(body.get("compile_result") or {}, run)
    printed = run["stdout"]
    if fn_name is None:
        is_right = same_output(printed, expected)
    else:
        # Either the public data had each result in a list of one, or the results are such lists.
        is_wrapped = truth.get("outputs_wrapped")
        found, result = returned(printed, marker)
        is_right = found and (
            same_value(result, expected) or (is_wrapped and same_value(result, [expected]))
        )
    return Outcome.PASSED if is_right else Outcome.WRONG_OUTPUT


def _text(text: str) -> str:
    """A text of public data, maybe of another system, with line feeds and no byte order mark."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _failure(compiled: Mapping[str, Any], run: Mapping[str, Any]) -> Outcome:
    """The outcome of a failed run. Without a traceback, Python could not compile the program; a
    `SyntaxError` with a traceback comes from the program's own `exec`."""
    if run.get("status") == "TimeLimitExceeded":
        return Outcome.TIMEOUT
    error = str(run.get("stderr") or "")
    last = error.rstrip().rpartition("\n")[2]
    kinds = ("SyntaxError", "IndentationError", "TabError")
    if compiled.get("return_code") or (last.startswith(kinds) and "Traceback (most" not in error):
        return Outcome.COMPILE_ERROR
    return Outcome.RUNTIME_ERROR


# --- functions ------------------------------------------------------------------------------------

_CALL = """\
import json, linecache, sys, types
sys.setrecursionlimit(50_000)  # as sites do
if hasattr(sys, "set_int_max_str_digits"):
    sys.set_int_max_str_digits(0)
arguments = json.load(sys.stdin)
for at, value in enumerate(arguments):  # JSON has no whole numbers as keys
    if isinstance(value, dict) and value and all(k.lstrip("-").isdigit() for k in value):
        arguments[at] = {{int(k): v for k, v in value.items()}}
module = sys.modules["solution"] = types.ModuleType("solution")  # dataclasses and pickle ask for it
module.__file__ = "solution.py"
linecache.cache["solution.py"] = 0, None, {program!r}.splitlines(True), "solution.py"
names = vars(module)
exec({preamble!r}, names)
imported = names.get({fn_name!r})
try:
    compiled = compile({program!r}, "solution.py", "exec")
except (SyntaxError, ValueError) as error:
    sys.exit(f"SyntaxError: {{error}}")
exec(compiled, names)
solution = names.get("Solution")
if hasattr(solution, {fn_name!r}):
    function = getattr(solution(), {fn_name!r})
else:
    function = names[{fn_name!r}]
    if function is imported and {fn_name!r} not in compiled.co_names:  # `gcd` of an empty program
        sys.exit("NameError: the program has no such function")
result = function(*arguments)
def plain(value):
    return value.tolist() if hasattr(value, "tolist") else list(value)
text = json.dumps(result, default=plain)
sys.stdout.flush()
print("\\n" + {marker!r} + text, file=sys.__stdout__, flush=True)
"""

_PREAMBLE = """\
from string import *
from re import *
from datetime import *
from collections import *
from heapq import *
from bisect import *
from copy import *
from math import *
from random import *
from statistics import *
from itertools import *
from functools import *
from operator import *
from io import *
from sys import *
from json import *
from typing import *
from builtins import *
import bisect, collections, copy, datetime, functools, heapq, io, itertools, json, math, operator
import random, re, statistics, string, sys
"""
"""Imports that sites with such problems, and the checkers of TACO and LiveCodeBench, make for every
solution. Builtins come last, because `math` has another `pow`."""


def calling_program(program: str, fn_name: str, marker: str) -> str:
    """A program that calls a function of another, or a method of its class `Solution`.

    Its input is a JSON list of arguments; the result is JSON on a line that begins with `marker`. A
    program that finds the marker could print a result without the function; this gains nothing,
    because the program does not know the right result.
    """
    return _CALL.format(preamble=_PREAMBLE, program=program, fn_name=fn_name, marker=marker)


def returned(printed: str, marker: str) -> tuple[bool, Any]:
    """(whether the output has a result, the result)."""
    _, found, text = printed.rpartition(f"\n{marker}")
    if not found:
        return False, None
    try:
        return True, json.loads(text)
    except (ValueError, RecursionError):
        return False, None


def same_value(got: Any, expected: Any) -> bool:
    """Whether two JSON values are equal; decimals within a tolerance."""
    if isinstance(got, float) or isinstance(expected, float):
        are_numbers = isinstance(got, int | float) and isinstance(expected, int | float)
        return are_numbers and _is_close(got, expected)
    if isinstance(got, list) and isinstance(expected, list):
        return len(got) == len(expected) and all(map(same_value, got, expected))
    if isinstance(got, dict) and isinstance(expected, dict):
        return got.keys() == expected.keys() and all(same_value(got[k], expected[k]) for k in got)
    return got == expected


def _is_close(got: float, expected: float) -> bool:
    """Whether two numbers, not both `int`, are equal within the tolerance."""
    if got == expected:
        return True
    if isinstance(expected, int):
        return math.isfinite(got) and abs(Fraction(got) - expected) <= OF_WHOLE
    try:
        return math.isclose(got, expected, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    except OverflowError:  # a whole number beyond all floats
        return False


# --- outputs --------------------------------------------------------------------------------------


def same_output(got: str, expected: str) -> bool:
    """Whether two outputs have the same words on the same lines.

    White space between words and empty lines are ignored; case is not. Numbers are equal within a
    tolerance if one of them has a point or an exponent; otherwise they must be the same text.
    """
    if got == expected:
        return True
    ours, theirs = ([line.split() for line in text.splitlines()] for text in (got, expected))
    ours, theirs = [line for line in ours if line], [line for line in theirs if line]
    return ours == theirs or (
        len(ours) == len(theirs)
        and all(
            len(a) == len(b) and all(map(_same_word, a, b))
            for a, b in zip(ours, theirs, strict=True)
        )
    )


def _same_word(got: str, expected: str) -> bool:
    if got == expected:
        return True
    if not any(mark in word for word in (got, expected) for mark in ".eE"):
        return False
    is_whole = re.fullmatch(r"[+-]?[0-9]{1,4000}", expected) is not None
    try:
        ours, theirs = float(got), int(expected) if is_whole else float(expected)
    except ValueError:
        return False
    return math.isfinite(ours) and _is_close(ours, theirs)  # 1e400 is not 1e500
