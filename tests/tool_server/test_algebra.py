"""Algebra: what is typed is understood, answered in processes, and never the server's undoing."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from fractions import Fraction

import psutil
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tool_server.algebra import pool as pool_module
from tool_server.algebra.build import CONSTANTS, solve_text
from tool_server.algebra.functions import FUNCTIONS
from tool_server.algebra.pool import AlgebraPool, Overloaded, WorkerLost
from tool_server.algebra.syntax import parse
from tool_server.calculator import CalculationError, NotArithmetic, calculate, show


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        # arithmetic that is typed more freely
        ("15*21=", "315"),
        ("2(3+4)", "14"),
        ("2 \u00d7 3 \u00f7 4 = ?", "1.5"),
        ("5!", "120"),
        ("2^3!", "64"),
        ("10!!", "3840"),
        ("|-7.5| + |2|", "9.5"),
        ("2^0.5", "1.41421356237"),
        ("17 mod 5", "2"),
        ("2^5000 % 7", "4"),
        ("1,000x - 999x", "x"),
        # functions and constants
        ("sin(pi/4)", "sqrt(2)/2 ≈ 0.707106781187"),
        ("sin(30°)", "0.5"),
        ("log(100)", "ln(100) ≈ 4.60517018599"),
        ("log(8, 2)", "3"),
        ("gcd(12, 180)", "12"),
        ("comb(10, 3)", "120"),
        ("round(2.675, 2)", "2.68"),
        ("factor(360)", "2^3 * 3^2 * 5"),
        ("isprime(97)", "true"),
        ("max(1, 2, sqrt(5))", "sqrt(5) ≈ 2.2360679775"),
        ("5000!", "≈ 4.22857792661e+16325"),
        # complex numbers
        ("sqrt(-4)", "2*i"),
        ("(2+3i)(1-i)", "5 + i"),
        ("e^(i*pi)", "-1"),
        # symbols
        ("2x+3x", "5*x"),
        ("(x+1)^2 - (x^2+2x)", "1"),
        ("expand((x+1)^3)", "x**3 + 3*x**2 + 3*x + 1"),
        ("factor(x^2-1)", "(x - 1)*(x + 1)"),
        ("simplify(sin(x)^2+cos(x)^2)", "1"),
        ("subs(x^2+y, x=3, y=1)", "10"),
        # equations
        ("2x+3=7", "x = 2"),
        ("3x = 1", "x = 1/3 ≈ 0.333333333333"),
        ("2.5x = 7", "x = 2.8"),
        ("x^2=2", "x = -sqrt(2) ≈ -1.41421356237 or x = sqrt(2) ≈ 1.41421356237"),
        ("x^2+1=0", "x = -i or x = i"),
        ("x^3-3x+1=0", "x ≈ 0.347296355334 or x ≈ 1.53208888624 or x ≈ -1.87938524157"),
        ("|x-3|=5", "x = -2 or x = 8"),
        ("x+y=3, x-y=1", "x = 2, y = 1"),
        ("x+y=3 and x-y=1", "x = 2, y = 1"),
        ("x+y=3\nx-y=1", "x = 2, y = 1"),
        ("solve(x^2+y=3, y)", "y = 3 - x**2"),
        ("solve([x+y=3, x-y=1], [x, y])", "x = 2, y = 1"),
        ("e^x=5", "x = ln(5) ≈ 1.60943791243"),
        ("cos(x)=x", "x ≈ 0.739085133215 (found by search; there may be others)"),
        ("sin(x)=1/2", "x = 2*pi*n + pi/6 or x = 2*pi*n + 5*pi/6 for every whole n"),
        ("sin(x)=2", "no real solution"),
        ("x+1=x+2", "no solution"),
        ("2(x+1)=2x+2", "true for every x"),
        ("1+1=3", "false"),
        # inequalities
        ("2x+3<7", "x < 2"),
        ("x^2>=4", "x <= -2 or x >= 2"),
        ("1<2x<6", "0.5 < x < 3"),
        ("2^10 > 1000", "true"),
        # calculus
        ("diff(x^3, x)", "3*x**2"),
        ("diff(x^5, x, 2)", "20*x**3"),
        ("integrate(x^2, x)", "x**3/3"),
        ("integrate(x^2, x, 0, 1)", "1/3 ≈ 0.333333333333"),
        ("limit(sin(x)/x, x->0)", "1"),
        ("limit(1/x, x, 0, 1)", "oo"),
        ("sum(i^2, i, 1, 10)", "385"),
        ("sum(1/k^2, (k, 1, oo))", "pi**2/6 ≈ 1.64493406685"),
        ("series(e^x, x, 0, 3)", "x**2/2 + x + 1"),
        # matrices
        ("det([[1,2],[3,4]])", "-2"),
        ("inv([[1,2],[3,4]]) * [[1,2],[3,4]]", "[[1, 0], [0, 1]]"),
        ("eigenvalues([[2,1],[1,2]])", "1, 3"),
        ("dot([1,2,3], [4,5,6])", "32"),
    ],
)
def test_what_is_asked_is_answered(expression, answer):
    assert solve_text(expression) == answer


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("1/0 + x", "division by zero"),
        ("tan(pi/2)", "division by zero"),
        ("oo - oo", "no value"),
        ("9**9**9**9", "too large"),
        ("factorial(10**9)", "too large"),
        ("x^2+y=3", r"more unknowns \(x, y\) than equations: say which"),
        ("limit(1/x, x, 0)", "no limit"),
        ("integrate(x^x, x)", "no closed form"),
        ("diff(x*y)", "say which variable"),
        ("sin(x, y)", "sin takes 1 argument, not 2"),
        ("sin x", r"sin needs brackets, as in sin\(x\)"),
        ("det(5)", "matrices only"),
        ("sin([1])", "expressions only"),
        ("solve(x=1) + 1", "no number or expression"),
        ("x 2", "operator is missing"),
        ("(x+1", "missing"),
        ("x+1)", "closes nothing"),
        ("!", "nothing stands before"),
        ("x+*2", "not an expression"),
        (r"\frac{1}{2}", "LaTeX"),
        ("__import__('os')", "not understood"),
        ("x.__class__", "not understood"),
        ("lambda x: x", "not understood"),
        ("f'{x}'", "not understood"),
        ("x if y else z", "not an expression"),
        ("(x)(y=1)(z:=2)", "not understood"),
        ("x" * 2001, "longer than"),
        ("(" * 100_000, "longer than"),
        ("(" * 101 + "x" + ")" * 101, "nested deeper"),
        ("divisors(10^60)", "characters, more than"),
        ("", "not an expression"),
    ],
)
def test_what_has_no_answer_is_refused_in_one_line(expression, why):
    with pytest.raises(CalculationError, match=why) as caught:
        solve_text(expression)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@st.composite
def arithmetic(draw, depth: int = 3) -> tuple[str, Fraction]:
    """(typed expression, its value)."""
    if depth == 0 or draw(st.booleans()):
        number = draw(st.integers(0, 9999))
        return (str(number), Fraction(number)) if draw(st.booleans()) else (
            f"{number / 100:.2f}", Fraction(number, 100))  # fmt: skip
    (left, a), (right, b) = draw(arithmetic(depth=depth - 1)), draw(arithmetic(depth=depth - 1))
    work = draw(st.sampled_from("+-*/()"))
    match work:
        case "+":
            return f"({left})+({right})", a + b
        case "-":
            return f"({left}-{right})" if right.isdigit() else f"({left})-({right})", a - b
        case "*":
            return f"({left})*({right})", a * b
        case "/" if b:
            return f"({left})/({right})", a / b
        case _:
            return f"({left})({right})", a * b


@given(arithmetic())
def test_arithmetic_agrees_with_fractions(case):
    typed, value = case
    assert solve_text(typed) == show(value)
    assert solve_text(f"x - x + {typed}").split(" ≈ ")[-1] == show(value)


@given(arithmetic())
def test_the_calculator_and_algebra_say_the_same(case):
    typed, _ = case
    with contextlib.suppress(NotArithmetic):  # a product without its sign
        assert calculate(typed) == solve_text(typed)


TYPED = st.text(st.sampled_from("x yi2.3e,;=<>!|°()[]+-*/^'\"\\\n_π∞ ")) | st.lists(
    st.sampled_from([*FUNCTIONS, *CONSTANTS, "x", "2", "(", ")", ",", "=", "|", "!", "->", "^"])
).map(" ".join)


@given(TYPED | st.text())
def test_no_text_does_anything_but_parse_or_be_refused(text):
    with contextlib.suppress(CalculationError):
        parse(text, FUNCTIONS, CONSTANTS)


@given(st.lists(st.sampled_from(["x", "2", "(", ")", "+", "=", ",", "i", "|", "-"]), max_size=12))
@example(["(", ")"])
def test_no_short_expression_does_anything_but_be_answered_or_refused(tokens):
    with contextlib.suppress(CalculationError):
        assert solve_text("".join(tokens))


@pytest.fixture
async def pool() -> AsyncIterator[AlgebraPool]:
    pool = AlgebraPool(timeout_s=60.0)
    yield pool
    await pool.close()
    assert pool.workers == 0


def processes() -> list[psutil.Process]:
    """Workers that live."""
    return [child for child in psutil.Process().children() if "algebra.worker" in words(child)]


def words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


async def test_the_pool_answers_and_keeps_its_process(pool):
    assert await pool.answer("x^2=4") == {"result": "x = -2 or x = 2"}
    (first,) = processes()
    assert await pool.answer("x +* 2") == {"error": "not an expression: 'x +* 2'"}
    assert await pool.answer("-" * 1900 + "x!") == {"error": "expression nested too deep"}
    assert processes() == [first]


HOSTILE = [
    "expand((a+b)**100000)",
    "sum(9^k, k, 1, 10^9)",
    "[[1,2],[3,4]]^(10^9)",
]


async def test_hostile_expressions_end_at_the_time_limit_and_leave_nothing():
    pool = AlgebraPool(timeout_s=0.2)
    try:
        for expression in HOSTILE:
            answer = await pool.answer(expression)
            assert answer == {"error": "time limit: the calculation took longer than 0.2 s"}
            assert processes() == []
    finally:
        await pool.close()


@pytest.mark.slow
async def test_an_expression_that_gets_no_processor_is_no_mistake_of_the_model(monkeypatch):
    monkeypatch.setattr(pool_module, "WALL_FACTOR", 0.1)
    pool = AlgebraPool(timeout_s=60.0)
    try:
        assert await pool.answer("x=1") == {"result": "x = 1"}
        call, worker = await until_at_work("expand((a+b)^100000)", pool)
        worker.send_signal(signal.SIGSTOP)
        with pytest.raises(Overloaded, match="the machine is overloaded"):
            await call
        assert processes() == []
    finally:
        await pool.close()


@pytest.mark.slow
async def test_what_needs_too_much_memory_is_told_so():
    pool = AlgebraPool(timeout_s=60.0, memory_mb=300)
    try:
        answer = await pool.answer("expand((a+b+c+d)^1000)")
        assert answer == {"error": "the calculation needs too much memory"}
        assert processes() == []
        assert await pool.answer("x=1") == {"result": "x = 1"}
    finally:
        await pool.close()


async def until_at_work(
    expression: str, pool: AlgebraPool
) -> "tuple[asyncio.Task, psutil.Process]":
    """A call under way, and the process that has worked on it for a while."""
    before = {child.pid: child.cpu_times().user for child in processes()}
    call = asyncio.create_task(pool.answer(expression))
    while True:
        for child in processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if pool.workers and child.cpu_times().user > before.get(child.pid, 99) + 0.05:
                    return call, child
        await asyncio.sleep(0)


@pytest.mark.slow
async def test_a_call_whose_worker_dies_is_asked_once_more(pool, monkeypatch):
    deaths: list[signal.Signals] = []

    async def ask(worker, expression):
        if deaths:
            os.kill(worker._process.pid, deaths.pop(0))
        return await asked(worker, expression)

    asked = pool_module._Worker.ask
    monkeypatch.setattr(pool_module._Worker, "ask", ask)
    deaths += [signal.SIGKILL]
    assert await pool.answer("x=1") == {"result": "x = 1"}
    deaths += [signal.SIGSEGV] * 2
    assert await pool.answer("x=1") == {"error": "the calculation crashed twice"}
    deaths += [signal.SIGKILL] * 2  # as the kernel does without memory
    with pytest.raises(WorkerLost, match="killed twice"):
        await pool.answer("x=1")
    assert await pool.answer("x=2") == {"result": "x = 2"}


async def test_a_worker_that_does_not_start_is_no_mistake_of_the_model(pool, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("sys.executable", "/bin/false")
        with pytest.raises(WorkerLost, match="does not start"):
            await pool.answer("x=1")
    assert await pool.answer("x=2") == {"result": "x = 2"}


async def test_a_worker_that_dies_while_idle_is_not_noticed_by_anybody(pool):
    assert await pool.answer("x=1") == {"result": "x = 1"}
    (worker,) = processes()
    worker.send_signal(signal.SIGKILL)
    assert await pool.answer("x=2") == {"result": "x = 2"}
    assert worker not in processes()


async def test_a_cancelled_call_kills_its_worker(pool):
    assert await pool.answer("x=1") == {"result": "x = 1"}
    call, worker = await until_at_work("expand((a+b)^100000)", pool)
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled() and not worker.is_running()
    assert await pool.answer("x=2") == {"result": "x = 2"}


async def test_a_worker_has_none_of_the_servers_environment(pool, monkeypatch):
    monkeypatch.setenv("TOOL_SERVER_TOKEN", "secret")
    assert await pool.answer("x=1") == {"result": "x = 1"}
    (worker,) = processes()
    assert "TOOL_SERVER_TOKEN" not in worker.environ()
    assert os.getsid(worker.pid) == worker.pid
