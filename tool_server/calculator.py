"""Exact arithmetic for `POST /calculate`: takes an expression and returns its value as text.

The expression is parsed into a tree and never evaluated as Python. Numbers are fractions, so `0.1 +
0.2` is 0.3. A result with more than 12 decimal places is rounded. `tool_server.algebra` does
everything beyond arithmetic.
"""

import ast
import math
import operator
import re
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction

MAX_LENGTH = 400
"""Characters of an expression."""

MAX_BITS = 4096
"""Bits of a numerator or denominator; a larger power is refused before it is computed."""

_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}
_FUNCTIONS: dict[str, Callable[[Fraction], Fraction]] = {
    "abs": abs,
    "sqrt": lambda value: _root(value),
    "floor": lambda value: Fraction(math.floor(value)),
    "ceil": lambda value: Fraction(math.ceil(value)),
}


class CalculationError(ValueError):
    """The expression has no value; the message is one line that says why."""


class NotArithmetic(CalculationError):
    """The expression is not arithmetic; `tool_server.algebra` may be able to answer it."""


def calculate(expression: str) -> str:
    """The value of an arithmetic expression.

    Args:
        expression: numbers, `+ - * / // % **` (or `^`), parentheses and
            `abs sqrt floor ceil`; commas between thousands are dropped.

    Returns:
        An integer, an exact decimal, or 12 significant digits.

    Raises:
        NotArithmetic: the expression has another form, or a number is too large for this module.
        CalculationError: a division by zero, or the expression is nested too deep.
    """
    if len(expression) > MAX_LENGTH:
        raise NotArithmetic(f"expression longer than {MAX_LENGTH} characters")
    text = _THOUSANDS.sub("", expression.strip().replace("^", "**"))
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise NotArithmetic(f"not an arithmetic expression: {expression.strip()!r}") from error
    try:
        return show(_value(tree.body))
    except ZeroDivisionError as error:
        raise CalculationError("division by zero") from error
    except RecursionError as error:
        raise CalculationError("expression nested too deep") from error


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() as number):
            return _bounded(Fraction(number))
        case ast.Constant(value=float() as number) if math.isfinite(number):
            return _bounded(Fraction(repr(number)))
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](_value(argument)))
    raise NotArithmetic(f"cannot calculate {ast.unparse(node)!r}")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        if exponent == Fraction(1, 2):
            return _root(base)
        raise NotArithmetic(f"exponent {show(exponent)} is no whole number")
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if size * abs(exponent.numerator) > MAX_BITS and abs(base) != 1:
        raise NotArithmetic("number too large")
    return base**exponent.numerator


def _root(value: Fraction) -> Fraction:
    if value < 0:
        raise NotArithmetic("square root of a negative number")
    exact = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
    return exact if exact * exact == value else Fraction(_decimal(value, 30).sqrt(Context(30)))


def _decimal(value: Fraction, digits: int) -> Decimal:
    """The value rounded to some digits; a float could overflow."""
    return Context(digits).divide(Decimal(value.numerator), Decimal(value.denominator))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise NotArithmetic("number too large")
    return value


def show(value: Fraction) -> str:
    """An integer, an exact decimal of at most 12 places, or 12 significant digits."""
    if value.denominator == 1:
        return str(value.numerator)
    if 10**12 % value.denominator == 0:
        return f"{_decimal(value, len(str(value.numerator)) + 12):f}"
    # The division gives at least 12 digits, so `g` only drops zeros.
    return f"{_decimal(value, 12).normalize():g}"
