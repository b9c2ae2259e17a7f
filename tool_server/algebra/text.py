"""Text of sympy objects: the exact form, and twelve digits if that is not a short decimal.

`log` is the natural logarithm and is printed as `ln`; `i` is the imaginary unit, `e` Euler's
number.
"""

from decimal import Context
from fractions import Fraction
from typing import Any, NoReturn

import sympy
from sympy.core.relational import Relational
from sympy.printing.str import StrPrinter

from tool_server.calculator import CalculationError, show

MAX_ANSWER = 2000
"""Characters of an answer."""

LONG = 60
"""Longest exact form in characters. A longer solution, or another number twice as long, is shown as
digits only."""


class Solutions(str):
    """The text of solutions; no further calculation with it is possible."""


class _Printer(StrPrinter):
    """Prints sympy objects in the syntax that `syntax` parses."""

    def _print_log(self, expr: Any) -> str:
        return f"ln({self._print(expr.args[0])})"

    def _print_ImaginaryUnit(self, expr: Any) -> Any:
        return "i"

    def _print_Exp1(self, expr: Any) -> Any:
        return "e"

    def _print_exp(self, expr: Any) -> str:
        (power,) = expr.args
        return f"e**({self._print(power)})" if power.args else f"e**{self._print(power)}"

    def _print_Abs(self, expr: Any) -> str:
        return f"abs({self._print(expr.args[0])})"

    def _print_Relational(self, expr: Any) -> str:
        sign = "=" if isinstance(expr, sympy.Eq) else expr.rel_op
        return f"{self._print(expr.lhs)} {sign} {self._print(expr.rhs)}"

    def _print_MatrixBase(self, expr: Any) -> str:
        return self._print(list(expr) if expr.cols == 1 else expr.tolist())

    _print_ImmutableDenseMatrix = _print_MutableDenseMatrix = _print_MatrixBase


def plain(value: Any) -> str:
    """The exact form."""
    if getattr(value, "is_Rational", False) and 10**12 % value.q == 0:
        return show(Fraction(int(value.p), int(value.q)))
    return _Printer().doprint(value)


def text_of(value: Any) -> str:
    """An answer as text: the exact form, and digits if they say more."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple, sympy.Tuple)):
        return ", ".join(map(text_of, value))
    if isinstance(value, (Relational, sympy.MatrixBase)):
        return plain(value)
    if value.has(sympy.zoo):
        raise ZeroDivisionError
    if value.has(sympy.nan):
        fail("this has no value")
    digits = digits_of(value)
    if isinstance(value, sympy.Float) and digits is not None:
        return digits
    if value.is_Integer and int(value).bit_length() > MAX_ANSWER * 3:
        return f"≈ {digits}"
    exact = plain(value)
    if digits is None or digits == exact or value.is_Integer:
        return exact
    return f"≈ {digits}" if len(exact) > 2 * LONG else f"{exact} ≈ {digits}"


def digits_of(value: Any) -> str | None:
    """Twelve significant digits of a number; None if the value is not a finite number."""
    if not isinstance(value, sympy.Expr) or not value.is_number or value.is_infinite:
        return None
    if isinstance(value, sympy.Rational) and int(value.p).bit_length() <= MAX_ANSWER * 3:
        return show(Fraction(int(value.p), int(value.q)))
    real, imaginary = (part.evalf(15, chop=True) for part in sympy.N(value, 20).as_real_imag())
    if not all(part.is_Float or part.is_Rational for part in (real, imaginary)):
        return None
    if abs(imaginary) <= abs(real) * 1e-14:  # the imaginary part of a real root is a rounding error
        return _rounded(real)
    size = _rounded(abs(imaginary)) + "*"
    size = "" if size == "1*" else size
    if abs(real) <= abs(imaginary) * 1e-14:
        return f"{'-' if imaginary < 0 else ''}{size}i"
    return f"{_rounded(real)} {'-' if imaginary < 0 else '+'} {size}i"


def _rounded(value: Any) -> str:
    return f"{Context(12).create_decimal(str(value)).normalize():g}"


def fail(why: str) -> NoReturn:
    raise CalculationError(why)
