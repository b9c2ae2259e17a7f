r"""math-verify in two killable processes, shared by all rewards of this process.

math-verify (Kydlicek 2025) parses with ANTLR and compares with sympy. Both can run for ever or fill
the memory, and math-verify's own alarms work only in a main thread. `scoring` has the limits.
"""

import logging
import re
from functools import lru_cache
from typing import Any

from agent_loop.rewards.math_forms import INEQUALITY, Matching, Verdict
from agent_loop.rewards.scoring import Scorer


def _no_warnings() -> None:
    logging.disable(logging.CRITICAL)  # math-verify would warn that it has no alarms


SCORER = Scorer("math_verify", _no_warnings)


# --- in the processes -----------------------------------------------------------------------------


def holds(verdict: Verdict) -> bool:
    """Whether all pairs are equal and all lists match; pairs are compared until one differs."""
    if isinstance(verdict, bool):
        return verdict
    return all(_is_equal(*each) if isinstance(each, tuple) else _match(each) for each in verdict)


def _match(rows: Matching) -> bool:
    """Whether the items can be paired. Any equal item will do, because equality is transitive."""
    free = list(range(len(rows)))
    for row in rows:
        equal = next((at for at in free if holds(row[at])), None)
        if equal is None:
            return False
        free.remove(equal)
    return True


_PLACES = 2000
"""Digits of numbers that are not rational."""


@lru_cache(4096)
def _is_equal(target: str, answer: str) -> bool:
    """Whether two expressions are equal; an error of math-verify counts as not equal."""
    from math_verify import verify
    from math_verify.grader import should_treat_as_complex
    from sympy import Eq, Symbol

    is_real = not any(map(should_treat_as_complex, (answer, target)))
    ours, theirs = _parsed(answer, is_real), _parsed(target, is_real)
    if ours is None or theirs is None:
        return False
    if (equal := _same_value(ours, theirs)) is not None:
        return equal
    pair = [ours, theirs]
    if all(isinstance(each, Eq) for each in pair):
        return _is_same_equation(ours, theirs)  # verify takes equations without solution for equal
    if any(isinstance(each, Symbol) for each in pair):
        return False  # verify does not distinguish X_1 from x_1
    return verify(
        theirs,
        ours,
        numeric_precision=_PLACES,  # a smaller difference would count as none
        timeout_seconds=None,
        allow_set_relation_comp=True,
    )


_DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d+)(?![\d.])")


def _as_fraction(decimal: re.Match[str]) -> str:
    whole, places = decimal.groups()
    return rf"\frac{{{int(whole + places)}}}{{{10 ** len(places)}}}"


@lru_cache(1024)
def _parsed(text: str, is_real: bool) -> Any:
    """The complete text as one expression, None if it is none; `i` is the imaginary unit, `I` a
    name, and a decimal is a fraction, because math-verify would round it to six places.

    math-verify's own `parse` takes an expression from any place in the text, and drops a possible
    unit, such as m in `2m`.
    """
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from sympy import Basic, I, Set, Symbol, Union

    try:
        if re.search(INEQUALITY, text) and "\\cup" in text:
            parts = [_parsed(part, is_real) for part in text.split("\\cup")]
            return Union(*(part if isinstance(part, Set) else part.as_set() for part in parts))
        found: Any = latex2sympy(
            _DECIMAL.sub(_as_fraction, text),
            is_real=is_real,
            conversion_config=ConversionConfig(lowercase_symbols=False),
            normalization_config=NormalizationConfig(boxed="none", malformed_operators=True),
        )
    except Exception:  # sympy raises anything, the parser bare Exception
        return None
    if not isinstance(found, Basic):
        return found
    names = {symbol: I for symbol in found.free_symbols if str(symbol) == "i"}
    return found.xreplace({I: Symbol("I", real=is_real), **names})


def _same_value(ours: Any, theirs: Any) -> bool | None:
    """Whether two expressions have the same value, if that can be said without `simplify`.

    Rational numbers are compared exactly, and others by `_PLACES` digits, however small they are.
    Expressions with names differ if their values at some point do.
    """
    from sympy import Expr, Rational

    if not (isinstance(ours, Expr) and isinstance(theirs, Expr)):
        return None
    symbols = sorted(ours.free_symbols | theirs.free_symbols, key=str)
    point = {symbol: Rational(1361 + 542 * i, 997) for i, symbol in enumerate(symbols)}
    expressions: list[Any] = [ours, theirs]
    try:
        a, b = (complex(each.xreplace(point).evalf(15, strict=True)) for each in expressions)
        if abs(a - b) > 1e-3 * max(abs(a), abs(b)):  # at once, before what may take long
            return False
    except Exception:  # no value, no digit that is sure, too large: sympy raises anything
        pass
    try:
        difference = (expressions[0] - expressions[1]).doit().expand()
        if difference.is_Rational:
            return bool(difference == 0)
        value = difference.xreplace(point).evalf(15, maxn=_PLACES)
        if not value.is_finite:
            return None
        if any(part._prec > 1 for part in value.as_real_imag() if part != 0):  # 1: no digit is sure
            return False
        return None if symbols else True
    except Exception:
        return None


def _is_same_equation(ours: Any, theirs: Any) -> bool:
    """Whether one equation is a multiple of the other."""
    from sympy import simplify

    try:
        a, b = (each.lhs - each.rhs for each in (ours, theirs))
        ratio = simplify(a / b)
        return bool(ratio.is_number and ratio.is_finite and not ratio.is_zero)
    except Exception:  # the sides of `y=\{1\}` have no difference; sympy raises anything
        return False
