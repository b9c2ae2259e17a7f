"""Evaluation of a typed expression: builds sympy objects from its tree and returns the answer.

`i` is the imaginary unit unless a function binds it, as in `sum(i, i, 1, 10)`; `e` is Euler's
number.
"""

import ast
import math
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from typing import Any

import sympy
from sympy.logic.boolalg import BooleanAtom

from tool_server.algebra.equations import is_relation, solve
from tool_server.algebra.functions import (
    ANY_ARGUMENTS,
    FUNCTIONS,
    MATRIX_FUNCTIONS,
    NOT_SIMPLIFIED,
    divided,
    power,
)
from tool_server.algebra.syntax import parse
from tool_server.algebra.text import MAX_ANSWER, fail, text_of
from tool_server.calculator import CalculationError, NotArithmetic, calculate


def solve_text(expression: str) -> str:
    """The answer to an expression.

    Args:
        expression: arithmetic, an expression to simplify, equations or inequalities to solve, or
            one of `FUNCTIONS`.

    Raises:
        CalculationError: the text is not an expression, or has no answer; one line says why.
        RecursionError, MemoryError: the expression is too deep or too large.
    """
    tree = parse(expression, FUNCTIONS, CONSTANTS)
    try:
        return calculate(ast.unparse(tree))  # `2(3+4)` and `15*21=` need no algebra
    except NotArithmetic:
        pass
    try:
        text = _answer(tree)
    except (CalculationError, RecursionError, MemoryError):
        raise
    except ZeroDivisionError as error:
        raise CalculationError("division by zero") from error
    except Exception as error:  # sympy raises many types of errors
        reason = " ".join(f"{type(error).__name__} {error}".split())[:200]
        raise CalculationError(
            f"cannot calculate {expression.strip()[:100]!r}: {reason}"
        ) from error
    if len(text) > MAX_ANSWER:
        raise CalculationError(f"the answer has {len(text)} characters, more than {MAX_ANSWER}")
    return text


def _answer(tree: ast.expr) -> str:
    built = _Builder(tree).build(tree)
    relations = built if isinstance(built, tuple) else (built,)
    if relations and all(map(is_relation, relations)):
        return solve(*relations)
    match tree:
        case ast.Call(func=ast.Name(id=name)) if name in NOT_SIMPLIFIED:
            return text_of(built)
    return text_of(_simpler(built) if isinstance(built, sympy.Expr) else built)


def _simpler(value: sympy.Expr) -> sympy.Expr:
    if value.is_Rational or sympy.count_ops(value) > 300:
        return value
    return min(value, sympy.simplify(value), key=sympy.count_ops)


def _number(value: object) -> sympy.Expr:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        fail(f"cannot calculate {value!r}")
    if not math.isfinite(value):
        fail("number too large")
    exact = Fraction(repr(value))
    return sympy.Rational(exact.numerator, exact.denominator)


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: divided,
    ast.FloorDiv: lambda a, b: sympy.floor(divided(a, b)),
    ast.Mod: sympy.Mod,
    ast.Pow: power,
}
_RELATIONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: lambda a, b: sympy.Eq(a, b, evaluate=False),
    ast.Lt: sympy.Lt,
    ast.LtE: sympy.Le,
    ast.Gt: sympy.Gt,
    ast.GtE: sympy.Ge,
}
CONSTANTS: dict[str, sympy.Expr] = {
    "pi": sympy.pi,
    "e": sympy.E,
    "E": sympy.E,
    "I": sympy.I,
    "oo": sympy.oo,
    "inf": sympy.oo,
    "infinity": sympy.oo,
    **{
        name: sympy.Symbol(name)
        for name in ("mu", "nu", "xi", "rho", "tau", "eta", "phi", "chi", "psi")
    },
}
_BINDERS = frozenset(
    ("diff", "derivative", "integrate", "integral", "limit", "sum", "summation", "product", "solve",
     "series", "subs")
)  # fmt: skip


class _Builder:
    """Builds sympy objects from a tree, which decides whether `i` is the imaginary unit."""

    def __init__(self, tree: ast.expr) -> None:
        binds_i = any(
            _bound_name(call) == "i" for call in ast.walk(tree) if isinstance(call, ast.Call)
        )
        self.names = CONSTANTS | ({} if binds_i else {"i": sympy.I})

    def build(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return _number(value)
            case ast.Name(id=name) if name not in FUNCTIONS:
                return self.names.get(name) or sympy.Symbol(name)
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self._value(operand)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._value(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return self._binary(_BINARY[type(op)], self._value(left), self._value(right))
            case ast.Compare(left=left, ops=ops, comparators=others) if all(
                type(op) in _RELATIONS for op in ops
            ):
                sides = [self._value(side) for side in (left, *others)]
                made = [
                    _RELATIONS[type(op)](*pair)
                    for op, pair in zip(ops, pairwise(sides), strict=True)
                ]
                made = [bool(one) if isinstance(one, BooleanAtom) else one for one in made]
                return made[0] if len(made) == 1 else tuple(made)
            case ast.Tuple(elts=items) if items:
                return tuple(self.build(item) for item in items)
            case ast.List(elts=items) if items:
                built = [self.build(item) for item in items]
                rows = built if any(isinstance(row, list) for row in built) else None
                return sympy.ImmutableMatrix(rows) if rows else built
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
                return self._call(name, [self.build(argument) for argument in arguments])
        fail(f"cannot calculate {ast.unparse(node)[:100]!r}")

    def _value(self, node: ast.expr) -> Any:
        value = self.build(node)
        if isinstance(value, list) and value:
            value = sympy.ImmutableMatrix(value)
        if not isinstance(value, (sympy.Expr, sympy.MatrixBase)):
            fail(f"{ast.unparse(node)[:100]!r} is no number or expression here")
        return value

    def _binary(self, work: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
        if isinstance(right, sympy.MatrixBase) and work is divided:
            fail("cannot divide by a matrix: multiply with inv(...)")
        if isinstance(left, sympy.MatrixBase) and work is power:
            return left**right
        return work(left, right)

    def _call(self, name: str, arguments: list[Any]) -> Any:
        function, least, most = FUNCTIONS[name]
        if not least <= len(arguments) <= most:
            count = str(least) if least == most else f"{least} to {most}"
            plural = "" if count == "1" else "s"
            fail(f"{name} takes {count} argument{plural}, not {len(arguments)}")
        if name not in ANY_ARGUMENTS:
            wanted = sympy.MatrixBase if name in MATRIX_FUNCTIONS else sympy.Expr
            arguments = [
                sympy.ImmutableMatrix(argument)
                if wanted is sympy.MatrixBase and isinstance(argument, list)
                else argument
                for argument in arguments
            ]
            if not all(isinstance(argument, wanted) for argument in arguments):
                fail(
                    f"{name} takes {'matrices' if name in MATRIX_FUNCTIONS else 'expressions'} only"
                )
        return function(*arguments)


def _bound_name(call: ast.Call) -> str:
    """The variable of a call, such as `x` in `diff(f, x)`, `sum(f, (x, 1, 9))` and `subs(f,
    x=1)`."""
    if not (isinstance(call.func, ast.Name) and call.func.id in _BINDERS and len(call.args) > 1):
        return ""
    match call.args[1]:
        case (
            ast.Name(id=name)
            | ast.Tuple(elts=[ast.Name(id=name), *_])
            | ast.List(elts=[ast.Name(id=name), *_])
            | ast.Compare(left=ast.Name(id=name))
        ):
            return name
    return ""
