r"""math-verify in two processes that can be killed, shared by all that judge in this process.

math-verify (Kydlicek 2025) parses with ANTLR and compares with sympy, either of which can run for
ever or fill the memory; its own alarms work in a main thread only. Here each check has a limit of
CPU time, which does not depend on who else is busy, so that a verdict is the same every time:
Python code is interrupted and the process goes on; what hangs in C is killed by the kernel, which
works without us too, and pebble starts another. A wall clock limit stands behind both.

The processes begin when first needed and end with ours. They know nothing of our `__main__`: in a
Ray worker they would import Ray, and a script without a guard would run again.
"""

import asyncio
import logging
import math
import multiprocessing.context
import os
import resource
import signal
import sys
import threading
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from types import FrameType, ModuleType
from typing import Any

from pebble import ProcessExpired, ProcessPool

from agent_loop.rewards.math_forms import Expressions

WORKERS = 2
CPU_S = 2.0
"""Of one answer; later in Python code."""

KILLED_AFTER_CPU_S = 3
"""Of one answer; whole seconds, for the kernel."""

WALL_S = 20.0
"""Of one answer, from when a process took it; only a machine that is overrun gets there."""

MEMORY_BYTES = 2 << 30
"""Address space of a process."""

MOST_CHECKS = 5000
"""Then a process is replaced: sympy never forgets."""


async def are_equal(expressions: Expressions) -> bool | None:
    """Whether each pair is of two equal expressions.

    Args:
        expressions: pairs, the target's first.

    Returns:
        None where that was not found out within the limits.

    Raises:
        RuntimeError: the processes do not start, or break twice for reasons of their own.
    """
    fault = None
    for _ in range(2):
        pool = _pool()
        try:
            task = pool.schedule(check, args=[expressions], timeout=WALL_S)
            return await asyncio.wrap_future(task)
        except FutureTimeoutError:
            return None
        except ProcessExpired as error:
            if error.exitcode == -signal.SIGXCPU:
                return None
            fault = error
        except (BrokenProcessPool, RuntimeError) as error:
            fault = error
            _forget(pool)
    raise RuntimeError(
        f"cannot check answers by math-verify: its processes ended twice ({fault!r}); see whether "
        "`python -c 'import math_verify'` works and how much memory is left"
    ) from fault


# --- in our process -------------------------------------------------------------------------------

_lock = threading.Lock()
_pools: list[ProcessPool] = []
"""The one in use, if any."""


def _pool() -> ProcessPool:
    with _lock:
        if not _pools:
            context: Any = _WithoutMain()
            _pools.append(ProcessPool(WORKERS, MOST_CHECKS, initializer=_begin, context=context))
        return _pools[0]


def _forget(pool: ProcessPool) -> None:
    """Of a pool that broke; whoever comes first makes another."""
    with _lock:
        if pool in _pools:
            _pools.remove(pool)
            pool.stop()


def _after_fork() -> None:
    """The pool's threads stayed with the parent; its processes are the parent's."""
    global _lock
    _lock = threading.Lock()
    _pools.clear()


os.register_at_fork(after_in_child=_after_fork)


class _Process(multiprocessing.context.SpawnProcess):
    @property
    def daemon(self) -> bool:
        """True whatever pebble says: a child of multiprocessing, as which we may run, waits at its
        end for the processes that are not, and they for it."""
        return True

    @daemon.setter
    def daemon(self, value: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        pass

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")  # spawn has no other way to say so
        try:
            return multiprocessing.context.SpawnProcess._Popen(process_obj)  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            sys.modules["__main__"] = main


class _WithoutMain(multiprocessing.context.SpawnContext):
    """Processes that are spawned and not forked, since ours has threads, and that do not import
    what ours was started with."""

    Process = _Process


# --- in theirs ------------------------------------------------------------------------------------


class TooSlow(BaseException):
    """The CPU time is up. No `Exception`, which math-verify would catch and go on."""


def _begin() -> None:
    """Pay for the imports, which would else count against the first answer, and set the limits."""
    import math_verify  # noqa: F401

    logging.disable(logging.CRITICAL)  # math-verify warns that it has no alarms
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # pebble's own handler waits for C code
    signal.signal(signal.SIGPROF, _interrupt)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise TooSlow


def check(expressions: Expressions) -> bool | None:
    """Runs in a process of the pool: compares pairs until one differs; None: too slow."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    kill_at = math.ceil(used.ru_utime + used.ru_stime) + KILLED_AFTER_CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (kill_at, resource.RLIM_INFINITY))
    try:
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        try:
            return all(_is_equal(target, answer) for target, answer in expressions)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
    except TooSlow:
        return None


@lru_cache(4096)
def _is_equal(target: str, answer: str) -> bool:
    """Whatever math-verify trips over is wrong."""
    from math_verify import verify

    ours, theirs = _parsed(answer), _parsed(target)
    if ours is None or theirs is None or _differ_at_a_point(ours, theirs):
        return False
    if _expand_to_the_same(ours, theirs):
        return True
    if verify(theirs, ours, timeout_seconds=None, allow_set_relation_comp=True):
        return True
    return _is_same_equation(ours, theirs)


@lru_cache(1024)
def _parsed(text: str) -> Any:
    """All of a text as one expression, None where it is none; `i` is the imaginary unit.

    math-verify's own `parse` would take an expression from somewhere in the text, and leave off
    what may be a unit: `2m`.
    """
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
    from math_verify.grader import should_treat_as_complex
    from sympy import Basic, I

    try:
        found: Any = latex2sympy(
            text,
            is_real=not should_treat_as_complex(text),
            normalization_config=NormalizationConfig(boxed="none", malformed_operators=True),
        )
    except Exception:  # sympy raises anything, the parser bare Exception
        return None
    if not isinstance(found, Basic):
        return found
    units = {symbol: I for symbol in found.free_symbols if str(symbol) == "i"}
    return found.xreplace(units) if units else found


def _differ_at_a_point(ours: Any, theirs: Any) -> bool:
    """Whether two expressions have clearly different values somewhere: sooner known than by
    `simplify`, which would transform them until it gives up. False says nothing."""
    from sympy import E, Expr, Rational, Symbol

    if not (isinstance(ours, Expr) and isinstance(theirs, Expr)):
        return False
    if isinstance(ours, Symbol) or isinstance(theirs, Symbol):
        return False  # a word may be read as one symbol or as one for each letter
    symbols = sorted(ours.free_symbols | theirs.free_symbols, key=str)
    point = {
        symbol: E if str(symbol) == "e" else Rational(1361 + 542 * i, 997)
        for i, symbol in enumerate(symbols)
    }
    expressions: list[Any] = [ours, theirs]
    try:
        a, b = (complex(each.xreplace(point).evalf(15)) for each in expressions)
    except Exception:  # a function without a value, one that needs integers: sympy raises anything
        return False
    return abs(a - b) > 1e-3 * max(1.0, abs(a), abs(b))


def _expand_to_the_same(ours: Any, theirs: Any) -> bool:
    """Whether two expressions are multiplied out to the same: ten times as fast as `simplify`."""
    from sympy import Expr

    expressions: list[Any] = [ours, theirs]
    if not all(isinstance(each, Expr) for each in expressions):
        return False
    try:
        return bool((expressions[0] - expressions[1]).expand() == 0)
    except Exception:  # sympy raises anything
        return False


def _is_same_equation(ours: Any, theirs: Any) -> bool:
    """Whether one equation is a multiple of the other."""
    from sympy import Eq, simplify

    equations: list[Any] = [ours, theirs]
    if not all(isinstance(each, Eq) for each in equations):
        return False
    a, b = (each.lhs - each.rhs for each in equations)
    ratio = simplify(a / b)
    return bool(ratio.is_number and ratio.is_finite and not ratio.is_zero)
