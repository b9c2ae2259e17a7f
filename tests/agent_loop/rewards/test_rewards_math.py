"""Mathematics: what is equal, and that no expression keeps the others from their verdict."""

import asyncio
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.rewards import math_forms, math_pool
from agent_loop.rewards.attempt import Attempt
from agent_loop.rewards.math import is_equal, last_values
from agent_loop.rewards.math_forms import (
    MAX_LENGTH,
    clean,
    compare,
    exact,
    is_endless,
    normalise,
)
from agent_loop.rewards.registry import reward_for
from agent_loop.rewards.scoring import PROCESSES
from tests.agent_loop.rewards.math_pairs import DIFFERENT, EQUAL, PAIRS, SAME_TEXT, UNITS
from tool_server.wire.protocol import ToolTimeout

TOOLS: Any = None
OPEN = (r"\frac{\sqrt{11}}{2}", r"0.5\sqrt{11}")
"""An equal pair that only math-verify can tell."""

ENDLESS = [
    r"9^{387420489}",
    r"9^{9^{9^{9}}}",
    r"((100000!)!)!",
    r"\binom{10^{9}}{5\cdot10^8}",
    r"(x+1)^{100000}-x^{99999}",
    r"(x+1)^{9999}(x+2)^{9999}",
    r"\int_0^1 \frac{\sin(x^{x^{x}})}{x^x+\ln(x)}dx",
    r"\sum_{n=1}^{10^{12}} \frac{1}{n^7+n!}",
    r"\begin{pmatrix}"
    + r"\\".join("&".join(["x^{99}+1"] * 9) for _ in range(9))
    + r"\end{pmatrix}^{9999}",
    "\\sqrt{1+" * 200 + "x" + "}" * 200,
    "\\frac{1}{1+" * 25 + "x" + "}" * 25,
    r"(7^{7^{7}})^{7^{8}}",
    r"2^{(10^{9})}",
]


async def all_of(*pairs: tuple[str, str]) -> list[bool]:
    found = await asyncio.gather(*(is_equal(*pair) for pair in pairs))
    return [each is True for each in found]


async def wrong_of(pairs: Iterable[tuple[str, str, bool]]) -> list[tuple[str, str, bool]]:
    some = list(pairs)
    found = await all_of(*((answer, target) for answer, target, _ in some))
    return [pair for pair, equal in zip(some, found, strict=True) if pair[2] != equal]


@pytest.mark.slow
async def test_no_pair_is_judged_wrong():
    assert await wrong_of(PAIRS) == []
    assert [pair for pair in SAME_TEXT if normalise(pair[0]) != normalise(pair[1])] == []
    assert len(EQUAL) >= 60 and len(DIFFERENT) >= len(EQUAL)


NOTHING = re.compile(r"(?!)")

RULES: dict[str, tuple[str, Any]] = {
    "boxes": ("boxed_answer", lambda text: None),
    "digits in groups": ("_THOUSANDS", NOTHING),
    "repeating decimals": ("_REPEATING", NOTHING),
    "units": ("_UNIT", NOTHING),
    "amounts": ("_AMOUNTS", ""),
    "two numbers in a row": ("_UNREADABLE", NOTHING),
    "exact numbers": ("exact", lambda text: None),
    "words": ("_compare_words", lambda ours, theirs: None),
    "percent": ("_compare_percent", lambda ours, theirs: [(theirs, ours)]),
    "bases": ("_compare_bases", lambda ours, theirs: None),
    "ratios": ("_compare_ratios", lambda ours, theirs: None),
    "times": ("_TIME", NOTHING),
    "matrices": ("_matrix", lambda text: None),
    "tuples": ("_brackets", lambda text: None),
    "values with names": ("_named", lambda text: None),
    "plus-minus": ("_signs", lambda item: [item]),
    "sets": ("_distinct", list),
    "equations": ("_equation", lambda text: ("", [text])),
    "brackets around a number": ("_GROUPED", NOTHING),
    "what is left to do": ("is_unfinished", lambda answer, target: False),
    "numbers": ("_OF_NUMBERS", NOTHING),
    **{
        f"left to do: {kind.pattern}": (
            "_LEFT_TO_DO",
            [other for other in math_forms._LEFT_TO_DO if other is not kind],
        )
        for kind in math_forms._LEFT_TO_DO
    },
}
"""Rule beyond math-verify -> the name in `math_forms` and the value that switch it off."""
SPELLINGS = math_forms._SPELLINGS


def alternatives_switched_off(pattern: str) -> dict[str, str]:
    """Each alternative of a pattern -> the pattern in which this alternative matches nothing."""
    found: dict[str, str] = {}
    stack: list[list[int]] = [[0]]  # for each open group, where its alternatives start
    for token in re.finditer(
        r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?(?:[:=!]|<[=!]|P<\w+>))?|[|)]|$", pattern
    ):
        if token[0].startswith("("):
            stack.append([token.end()])
        elif token[0] == "|":
            stack[-1].append(token.end())
        elif token[0] in (")", ""):
            starts = stack.pop() if token[0] else stack[0]
            for start, end in zip(
                starts, [*(each - 1 for each in starts[1:]), token.start()], strict=True
            ):
                if len(starts) > 1:
                    text = f"{pattern[start:end]} of {pattern}"
                    found[text] = pattern[:start] + "(?!)" + pattern[start:]
    return found


ALTERNATIVES: dict[str, tuple[str, Any]] = {}
for at, (pattern, spelling) in enumerate(SPELLINGS):
    RULES[pattern.pattern] = "_SPELLINGS", SPELLINGS[:at] + SPELLINGS[at + 1 :]
    for text, without in alternatives_switched_off(pattern.pattern).items():
        changed = (re.compile(without), spelling)
        ALTERNATIVES[text] = "_SPELLINGS", [*SPELLINGS[:at], changed, *SPELLINGS[at + 1 :]]
for name in ("_UNIT", "_NAME", "_UNREADABLE", "_IN_BASE"):  # those of _NUMBER only save time
    for text, without in alternatives_switched_off(getattr(math_forms, name).pattern).items():
        ALTERNATIVES[f"{name}: {text}"] = name, re.compile(without)
for sign in math_forms._CHARACTERS:
    others = {key: value for key, value in math_forms._CHARACTERS.items() if key != sign}
    ALTERNATIVES[chr(sign)] = "_CHARACTERS", others

FOUND = {pair: compare(pair[0], pair[1]) for pair in PAIRS}


class Recorder:
    """A pattern that notes whether it was found in anything."""

    def __init__(self, pattern: re.Pattern[str]):
        self.pattern = pattern
        self.was_found = False

    def __getattr__(self, method: str) -> Any:
        def called(*args: str) -> Any:
            self.was_found |= self.pattern.search(args[-1]) is not None
            return getattr(self.pattern, method)(*args)

        return called


def pairs_in_which_it_is_found(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Pattern -> the pairs that it can change; all others need not be judged without it."""
    names = ["_UNIT", "_NAME", "_UNREADABLE", "_IN_BASE"]
    recorders = [Recorder(pattern) for pattern, _ in SPELLINGS]
    found: dict[str, list[Any]] = {}
    with monkeypatch.context() as changes:
        rules = zip(recorders, (spelling for _, spelling in SPELLINGS), strict=True)
        changes.setattr(math_forms, "_SPELLINGS", list(rules))
        for name in names:
            recorders.append(Recorder(getattr(math_forms, name)))
            changes.setattr(math_forms, name, recorders[-1])
        for pair in PAIRS:
            for each in recorders:
                each.was_found = False
            compare(pair[0], pair[1])
            for each in recorders:
                found.setdefault(each.pattern.pattern, []).extend([pair] * each.was_found)
    return found


async def some_pair_is_judged_wrong(pairs: Iterable[Any] = PAIRS) -> bool:
    undecided: list[tuple[str, str, bool]] = []
    for pair in pairs:
        found = compare(pair[0], pair[1])
        if isinstance(found, bool):
            if found != pair[2]:
                return True
        elif found != FOUND[pair]:
            undecided.append(pair)
    if any(normalise(answer) != normalise(target) for answer, target in SAME_TEXT):
        return True
    return await wrong_of(undecided) != []


@pytest.mark.parametrize("rule", RULES)
async def test_without_a_rule_some_pair_is_judged_wrong(rule, monkeypatch):
    monkeypatch.setattr(math_forms, *RULES[rule])
    assert await some_pair_is_judged_wrong()


@pytest.mark.slow
async def test_without_an_alternative_of_a_rule_some_pair_is_judged_wrong(monkeypatch):
    unproven: list[str] = []
    found = pairs_in_which_it_is_found(monkeypatch)
    for text, switched_off in ALTERNATIVES.items():
        with monkeypatch.context() as changes:
            changes.setattr(math_forms, *switched_off)
            if not await some_pair_is_judged_wrong(found.get(text.split(" of ", 1)[-1], PAIRS)):
                unproven.append(text)
    assert unproven == []


def test_every_unit_has_a_pair():
    words = {word for unit in UNITS for word in re.findall("[a-z]+", unit.lower())}
    stems = words | {word.removesuffix("s") for word in words}
    assert set(math_forms._UNITS) <= stems | {"inch", "2", "3"}


FORMS = [
    *("5", "5=5", "1e400", "x", "E", r"\infty", "x=5", "x=y=z", "2x+3y=6", "y=2x+1", r"y=\pm 1"),
    *(
        "y=1,2",
        "y=[1,2]",
        r"y=\emptyset",
        r"x=\{1\}",
        "(x,y)=(1,2)",
        r"x\in(1,2)",
        r"x\ne 3",
        "3:2",
    ),
    *(r"A=\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", "1,2", "[1,2)"),
    *(r"\{1,x\}", r"x>3", r"1<x\le 2", r"x<1 \text{ or } x>2", r"\{1\}\cup\{2\}", r"\mathbb{R}"),
    *(r"\emptyset", r"\frac{1}{0}", r"\frac{dy}{dx}", "f(x)=x^2", "f(x)", r"\text{even}", "11_2"),
    *(r"25\%", r"12\text{ cm}", "x=1, y=2", r"\{\}"),
]


@pytest.mark.slow
def test_no_two_forms_raise_an_error_when_compared():
    for answer in FORMS:
        for target in FORMS:
            found = compare(answer, target)
            if not isinstance(found, bool):
                assert isinstance(math_pool.holds(found), bool)


@pytest.mark.parametrize(
    ("name", "answer", "score"),
    [
        ("math", "0.5", 1.0),
        ("math_reward", "0.6", 0.0),
        ("math_reward_format", "0.5", 1.0),
        ("math_reward_format", "0.6", 0.1),
        ("math_reward_string_equal", "0.5", 0.0),
        ("math_reward_string_equal", r"\boxed{ \dfrac12 }", 1.0),
        ("math_reward_string_equal", r"\tfrac{1}{2}\%", 1.0),
    ],
)
async def test_a_right_answer_earns_what_its_reward_promises(name, answer, score):
    parts = await reward_for(name).judge(
        Attempt(answer=answer, ground_truth={"answer": r"\frac{1}{2}"}), TOOLS
    )
    assert parts["score"] == pytest.approx(score)
    assert parts["timeout"] == 0.0


@pytest.mark.parametrize(
    ("answer", "calls", "score", "acc"),
    [
        ("0.5", 2, 1.0, 1.0),
        ("0.5", 0, 0.0, 1.0),
        ("0.6", 1, 0.1, 0.0),
        ("0.6", 0, 0.0, 0.0),
        (None, 1, 0.0, 0.0),
    ],
)
async def test_an_answer_without_a_tool_call_earns_nothing_where_one_is_asked_for(
    answer, calls, score, acc
):
    truth = {"answer": r"\frac{1}{2}"}
    attempt = Attempt(answer=answer, ground_truth=truth, tool_calls=calls)
    parts = await reward_for("math_reward_tool").judge(attempt, TOOLS)
    assert (parts["score"], parts["acc"]) == (pytest.approx(score), acc)
    assert parts["called"] == (calls > 0)


# --- text and numbers -----------------------------------------------------------------------------

INTEGERS = st.integers(-(10**6), 10**6)
LATEX = st.text(alphabet="0123456789xyi+-*/^_{}()[]\\,.=%! <>&frasqtlepmdob", max_size=60)


@given(LATEX)
def test_cleaning_and_comparing_never_fail(text):
    assert compare(text, text) is True
    normalise(text)
    compare(text, "1")
    compare("(1,2)", text)


@given(INTEGERS, st.integers(1, 10**6))
def test_a_fraction_is_exact_however_it_is_spelled(n, d):
    spellings = [f"{n}/{d}", rf"\frac{{{n}}}{{{d}}}", rf"-\dfrac{{{-n}}}{{{d}}}"]
    for text in spellings:
        assert exact(clean(text).replace(" ", "")) == Fraction(n, d)
    assert all(compare(a, b) is True for a in spellings for b in spellings)
    assert compare(spellings[0], rf"\frac{{{n + 1}}}{{{d}}}") is False


@given(st.integers(1, 999), st.integers(1, 99), st.integers(2, 100))
def test_a_mixed_number_is_a_sum(whole, part, of):
    value = whole + Fraction(part, of)
    improper = rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    assert compare(rf"{whole}\frac{{{part}}}{{{of}}}", improper) is True
    assert compare(rf"-{whole} {part}/{of}", f"-{improper}") is True


@given(st.integers(1000, 10**12))
def test_commas_of_thousands_do_not_count(n):
    assert compare(f"{n:,}", str(n)) is True
    assert compare(f"{n:,}".replace(",", ",\\!"), str(n)) is True
    assert compare(f"{n:,}", str(n + 1)) is False


@given(st.lists(INTEGERS, min_size=2, max_size=5), st.randoms())
def test_order_counts_in_tuples_and_not_in_sets(items, rng):
    shuffled = rng.sample(items, len(items))
    text, other = (", ".join(map(str, some)) for some in (items, shuffled))
    assert compare(f"({text})", f"({other})") is (items == shuffled)
    assert compare(rf"\{{{text}\}}", rf"\{{{other}\}}") is True
    assert compare(rf"\{{{text}, 7000000\}}", rf"\{{{other}\}}") is False


@given(INTEGERS, INTEGERS, st.sampled_from(["()", "[)", "(]", "[]"]), st.sampled_from(["()", "[)"]))
def test_brackets_of_intervals_count(a, b, ours, theirs):
    assert compare(rf"\left{ours[0]}{a}, {b}\right{ours[1]}", f"{theirs[0]}{a},{b}{theirs[1]}") is (
        ours == theirs
    )


def test_a_comma_within_an_interval_is_no_comma_of_thousands():
    assert compare("(1,234)", "1234") is not True
    assert compare("(1,234)", "(1, 234)") is True


def test_what_is_too_long_is_wrong():
    long = "1+" * MAX_LENGTH + "1"
    assert compare(long, "2001") is False
    assert compare("1" + " " * 100_000 + "x", "2001") is False  # minutes for a pattern


@pytest.mark.parametrize(
    "bomb",
    [
        "3" + "%" * 1999,
        "3" + r"\%" * 900,
        "(1," * 600,
        r"\boxed{" * 300,
        r"\frac" * 400,
        "\\text{" + " " * 1900,
        "=" * 2000,
        r"\overline{3}" * 150,
        "$" * 2000,
        "a " * 1000,
        "0" + " a" * 999 + "!",
        "x=" * 1000,
        r"\pm1," * 330,
        r"<1 or " * 330,
        r"\le or " * 280,
        r"1\text{a" * 280,
        r"f(" * 999,
        r"\sin" * 499,
        r"\{(x," * 330,
    ],
)
def test_no_text_is_too_strange_to_be_compared(bomb):
    for target in ("2001", "(1,2)", r"\{1,2\}", r"25\%", "x=4"):
        assert compare(bomb, target) is not True


@pytest.mark.parametrize("answer", ["", "%", "$$", r"\boxed{}"])
async def test_a_ground_truth_without_an_answer_is_named_and_matched_by_none(answer):
    for truth in ("$", r"\%", " . "):
        assert reward_for("math").truth_problem({"answer": truth})
        assert not await is_equal(answer, truth)


def test_what_can_be_judged_here_asks_no_other_process():
    hard = [pair for pair in PAIRS if not isinstance(compare(*pair[:2]), bool)]
    assert len(hard) <= len(PAIRS) // 2


@pytest.mark.parametrize("text", [r"2^{2005}", r"10^{100}", "20!", r"\binom{100}{50}", r"x^{99}"])
def test_large_numbers_as_people_write_them_are_not_endless(text):
    assert not is_endless(text)


# --- the processes --------------------------------------------------------------------------------


@pytest.mark.slow
async def test_expressions_that_never_end_keep_no_other_from_its_verdict():
    others = [(rf"\frac{{\sqrt{{{i}}}}}{{2}}", rf"0.5\sqrt{{{i}}}") for i in (11, 13, 17, 19, 23)]
    pairs = [(text, r"\sqrt{2}+x" if "x" in text else r"2\sqrt{3}") for text in ENDLESS]
    found = await all_of(*pairs, *others)
    assert found == [False] * len(pairs) + [True] * len(others)
    assert await is_equal(*OPEN)


@pytest.mark.slow
async def test_what_takes_too_long_says_so_and_its_process_goes_on():
    assert await is_equal(*OPEN)
    before = {each.pid for each in workers()}
    parts = await reward_for("math").judge(
        Attempt(answer=r"(x+1)^{9999}(x+2)^{9999}", ground_truth={"answer": "x+1"}), TOOLS
    )
    assert (parts["score"], parts["timeout"]) == (0.0, 1.0)
    assert await all_of(*[OPEN] * 20) == [True] * 20
    assert before == {each.pid for each in workers()}


@pytest.mark.slow
async def test_what_hangs_in_c_is_killed_by_the_kernel():
    # straight to the processes: the text alone would have been refused
    assert await math_pool.SCORER.run(math_pool.holds, [("1", r"9^{9^{9}}")]) is None
    assert await is_equal(*OPEN)


@pytest.mark.slow
async def test_what_fills_the_memory_is_no_verdict_and_the_machine_survives():
    assert await math_pool.SCORER.run(math_pool.holds, [("1", r"(10^{9999999})^{999}")]) is not True
    assert await is_equal(*OPEN)


def workers() -> list[psutil.Process]:
    alive = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    return [each for each in alive if "spawn_main" in " ".join(each.cmdline())]


async def test_a_check_that_is_cancelled_ends_and_the_next_one_is_made():
    task = asyncio.ensure_future(
        math_pool.SCORER.run(math_pool.holds, [("x+1", r"(x+1)^{9999}(x+2)^{9999}")])
    )
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await is_equal(*OPEN)


async def test_the_same_many_at_once():
    assert await all_of(*[OPEN] * 500) == [True] * 500


def judged_in_a_loop_of_its_own(number: int) -> bool:
    target = rf"0.5\sqrt{{{number}}}"
    right = asyncio.run(is_equal(rf"\frac{{\sqrt{{{number}}}}}{{2}}", target))
    return bool(right) and not asyncio.run(is_equal(rf"\sqrt{{{number}}}", target))


def test_threads_share_the_processes():
    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(judged_in_a_loop_of_its_own, range(29, 61)))
    assert len(workers()) == PROCESSES


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_have_their_own(method):
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(2, mp_context=context) as processes:
        assert all(processes.map(judged_in_a_loop_of_its_own, [61, 62, 63]))


FORKS = """
import asyncio, os, sys, warnings
from agent_loop.rewards.math import is_equal
warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads, which is the point
right = lambda: asyncio.run(is_equal(r"\\frac{\\sqrt{11}}{2}", r"0.5\\sqrt{11}"))
assert right()
pid = os.fork()
if not pid:
    sys.exit(0 if right() else 1)
assert os.waitpid(pid, 0)[1] == 0
assert right()
print("fine")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        "module",
        *(pytest.param(how, marks=pytest.mark.nightly) for how in ("file", "stdin", "text")),
    ],
)
def test_a_program_without_a_guard_that_forks_is_judged_for_too(tmp_path, how):
    """As a file it would be run again by each process, if those imported it."""
    (tmp_path / "forks.py").write_text(FORKS)
    words = {"module": ["-m", "forks"], "file": ["forks.py"], "stdin": ["-"], "text": ["-c", FORKS]}
    done = subprocess.run(
        [sys.executable, *words[how]],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), str(tmp_path)])},
        input=FORKS if how == "stdin" else "",
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


@pytest.mark.slow
def test_its_processes_end_with_a_process_that_is_killed():
    program = (
        "import asyncio, sys, time\nfrom agent_loop.rewards.math import is_equal\n"
        "asyncio.run(is_equal('x+x', '2x'))\nprint('ready', flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(children, timeout=30)
    assert len(children) >= PROCESSES and not alive


@given(
    INTEGERS, INTEGERS.filter(bool), st.integers(1, 300), st.sampled_from(["", "x", r"\pi", "i"])
)
def test_no_difference_is_too_small(n, m, places, factor):
    text = rf"\frac{{{n}}}{{{10**places}}}{factor}"
    other = rf"\frac{{{n + m}}}{{{10**places}}}{factor}"
    assert asyncio.run(is_equal(text, text + " ")) is True
    assert asyncio.run(is_equal(text, other)) is False


@given(INTEGERS, INTEGERS, st.sampled_from(["+", "-", "*", r"\cdot ", r"\times "]))
def test_an_operation_that_is_left_is_no_answer_unless_the_truth_has_it(a, b, sign):
    value = {"+": a + b, "-": a - b}.get(sign, a * b)
    text = f"{a}{sign}({b})" if b < 0 else f"{a}{sign}{b}"
    assert compare(text, str(value)) is False
    assert compare(text, text) is True
    assert compare(f"{text}={value}", str(value)) is not False  # math-verify decides


@given(INTEGERS, INTEGERS)
def test_a_square_is_what_it_multiplies_out_to(a, b):
    text, other = f"(x+({a}))^2", f"x^2+({2 * a})x+({a * a})"
    assert asyncio.run(is_equal(text, other))
    assert asyncio.run(is_equal(text, other.replace(f"({a * a})", f"({b})"))) is (b == a * a)


async def test_what_cancels_out_is_0():
    root = r"\sqrt{2}+\sqrt{3}-\sqrt{5+2\sqrt{6}}"
    assert (
        await all_of(("3397-3397=0", "0"), ("0", r"\sqrt{2}-\sqrt{2}"), (f"{root}=0", "0"))
        == [True] * 3
    )
    assert await all_of(("3397-3396=0", "0"), (r"10^{-200}", "0")) == [False] * 2


async def test_a_check_that_an_overloaded_machine_delays_is_no_verdict(monkeypatch):
    late: Future[bool] = Future()
    late.set_exception(FutureTimeoutError())
    pool = SimpleNamespace(schedule=lambda *_, **__: late)
    monkeypatch.setattr(math_pool.SCORER.pool, "_started", (pool, None))
    with pytest.raises(ToolTimeout, match=r"no verdict .* within 240 s, .* overloaded"):
        await math_pool.SCORER.run(math_pool.holds, [("x", "y")])


# --- answers in messages -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "values"),
    [
        ("Altogether she sold 48+24 = 72 clips.", ["72"]),
        ("The answer is 72.", ["72"]),
        ("72", ["72"]),
        ("It costs $1,234.50.", ["1,234.50"]),
        ("She pays $5 and gets $3 off", ["3"]),
        ("It is 10-3", ["3"]),
        ("so x=-3", ["-3"]),
        ("x = \u22125", ["\u22125"]),
        ("about 3/4 of it", ["3/4"]),
        (r"It is $\frac{1}{2}$.", [r"\frac{1}{2}"]),
        (r"12 times \(x^2+1\), that is it", ["x^2+1"]),
        ("So $x=72$, where $x$ is the number of clips.", ["x", "72"]),
        ("She sold 72 clips, which we call $N$.", ["N", "72"]),
        ("She pays $72.\n\nAll prices in US$.", ["72"]),
        ("The answer is (1,2).", ["(1,2)", "2"]),
        ("**Answer:** Monday", ["Monday"]),
        ("no number", []),
        ("", []),
        ("5 " + "word " * MAX_LENGTH, []),
    ],
)
def test_what_may_be_the_answer_of_a_message(message: str, values: list[str]):
    assert last_values(message) == values


@pytest.mark.parametrize(
    ("reward", "message", "truth", "score"),
    [
        ("math_reward_string_equal", "Altogether she sold 48+24 = 72 clips.", "72", 1.0),
        ("math_reward_string_equal", "She sold 72 of 96.", "72", 0.0),
        ("math_reward_string_equal", "It costs $1,200.", "1200", 1.0),
        ("math_reward_string_equal", "word " * MAX_LENGTH + "72", "72", 1.0),
        ("math_reward_string_equal", "n = 4", "n = 4", 1.0),  # the message itself
        ("math", "The answer is 0.5", r"\frac{1}{2}", 1.0),
        ("math", "2,3", "3,2", 1.0),
        ("math", "The answer is $[2,3)$.", "[2,3)", 1.0),
        ("math", "It is $x^2+1$.", "1", 0.0),
        ("math_reward_format", "Hence it is 7.", "8", 0.1),
        ("math_reward_tool", "The answer is 72.", "72", 1.0),
    ],
)
async def test_a_message_is_right_by_its_last_number_and_tags_hold_the_answer_alone(
    reward: str, message: str, truth: str, score: float
):
    for is_message in (True, False):
        attempt = Attempt(
            answer=message,
            answer_is_message=is_message,
            ground_truth={"answer": truth},
            tool_calls=1,
        )
        parts = await reward_for(reward).judge(attempt, TOOLS)
        if is_message or message in ("n = 4", "2,3"):
            assert parts["score"] == score
        else:
            assert parts["acc"] == 0.0
