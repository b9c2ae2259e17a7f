"""The functions that an expression may call, with bounds on the size of results."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import sympy

from tool_server.algebra.equations import solve
from tool_server.algebra.text import Solutions, fail, text_of
from tool_server.calculator import CalculationError

MAX_BITS = 1 << 16
"""Bits of the result of a power; a larger power is not computed."""


def divided(left: Any, right: Any) -> Any:
    if right == 0:
        raise ZeroDivisionError
    return left / right


def power(base: Any, exponent: Any) -> Any:
    if base.is_zero and exponent.is_negative:
        raise ZeroDivisionError
    if base.is_Rational and exponent.is_Rational:
        size = max(abs(base.p), base.q).bit_length()
        if abs(exponent) * (size - 1) > MAX_BITS:
            fail("number too large")
    return base**exponent


def _factorial(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def bounded(value: Any) -> Any:
        if value.is_number and abs(value) > 5000:
            fail("number too large")
        return function(value)

    return bounded


def _variable(value: Any, given: Sequence[Any]) -> sympy.Symbol:
    """The given variable, or the only variable of the expression."""
    if given:
        if not isinstance(given[0], sympy.Symbol):
            fail(f"{text_of(given[0])} is no variable")
        return given[0]
    names = sorted(value.free_symbols, key=str)
    if len(names) != 1:
        fail(f"say which variable: there are {', '.join(map(str, names)) or 'none'}")
    return names[0]


def _span(name: str, value: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """(variable,) or (variable, from, to), given as `x, a, b` or as `(x, a, b)`."""
    if len(given) == 1 and isinstance(given[0], tuple):
        given = tuple(given[0])
    if len(given) not in (0, 1, 3):
        fail(f"{name} takes (expression, variable) or (expression, variable, from, to)")
    return (_variable(value, given), *given[1:])


def _diff(value: Any, *given: Any) -> Any:
    order = given[1] if len(given) > 1 else 1
    if not (order == int(order) and 0 <= order <= 100):
        fail("the order of a derivative is 0 to 100")
    return sympy.diff(value, _variable(value, given), int(order))


_UNDONE = (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit)


def _closed(value: Any, what: str) -> Any:
    """The closed form of a sum or integral; without one, its digits if it is a number."""
    value = value.doit()
    if not value.has(*_UNDONE):
        return value
    if value.is_number and not (digits := sympy.N(value, 15)).has(*_UNDONE):
        return digits
    fail(f"no closed form of this {what} is known")


def _integrate(value: Any, *given: Any) -> Any:
    span = _span("integrate", value, given)
    return _closed(sympy.integrate(value, span), "integral")


def _over(make: Callable[..., Any], what: str) -> Callable[..., Any]:
    def work(value: Any, *given: Any) -> Any:
        span = _span(what, value, given)
        if len(span) != 3:
            fail(f"{what} takes (expression, variable, from, to)")
        return _closed(make(value, span), what)

    return work


def _limit(value: Any, *given: Any) -> Any:
    if len(given) == 1:
        given = (_variable(value, ()), *given)
    side = "+-"
    if len(given) == 3:
        side = {"1": "+", "-1": "-"}.get(str(given[2])) or fail("the side of a limit is 1 or -1")
    if sympy.sympify(given[1]).is_infinite:
        side = "-" if given[1] == sympy.oo else "+"
    try:
        result = sympy.limit(value, _variable(value, given), given[1], side)
    except ValueError as error:
        raise CalculationError(f"there is no limit: {' '.join(str(error).split())}") from error
    if result.has(sympy.zoo):
        fail("there is no limit: the two sides differ; give 1 or -1 as the side")
    return _closed(result, "limit")


def _series(value: Any, *given: Any) -> Any:
    point: Any = given[1] if len(given) > 1 else 0
    terms = given[2] if len(given) > 2 else sympy.Integer(6)
    if not (terms.is_Integer and 1 <= terms <= 30):
        fail("a series has 1 to 30 terms")
    return sympy.series(value, _variable(value, given), point, int(terms)).removeO()


def _subs(value: Any, *given: Any) -> Any:
    pairs = [(one.lhs, one.rhs) if isinstance(one, sympy.Eq) else one for one in given]
    if len(pairs) == 2 and not any(isinstance(pair, tuple) for pair in pairs):
        pairs = [tuple(pairs)]
    if not all(isinstance(p, tuple) and len(p) == 2 for p in pairs):
        fail("subs takes an expression and what to put in, as in subs(x^2, x, 3)")
    return value.subs(pairs, simultaneous=True)


def _factor(value: Any) -> Any:
    if not value.is_Integer:
        return sympy.factor(value)
    result = sympy.factorint(value)
    return Solutions(
        " * ".join(
            f"{prime}^{power}" if power > 1 else str(prime) for prime, power in result.items()
        )
    )


def _round(value: Any, places: Any = sympy.S.Zero) -> Any:
    if not (value.is_real and value.is_number and places.is_Integer and abs(places) <= 100):
        fail("round takes a real number and a number of places")
    scale = sympy.Integer(10) ** places
    return sympy.floor(value * scale + sympy.Rational(1, 2)) / scale  # halves up, as at school


def _each(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda *values: reduce(function, values)


def _whole(function: Callable[..., Any]) -> Callable[..., Any]:
    def work(*values: Any) -> Any:
        if not all(value.is_Integer for value in values):
            fail("whole numbers are needed")
        result = function(*map(int, values))
        return Solutions(str(result).lower()) if isinstance(result, bool) else sympy.sympify(result)

    return work


def _binomial(n: Any, k: Any) -> Any:
    if n.is_number and abs(n) > 20_000 and k.is_number and k > 20:
        fail("number too large")
    return sympy.binomial(n, k)


def _arrangements(n: Any, k: Any) -> Any:
    return _binomial(n, k) * _factorial(sympy.factorial)(k)


def _eigenvalues(matrix: Any) -> Any:
    result = matrix.eigenvals(multiple=True)
    return Solutions(", ".join(map(text_of, sorted(result, key=sympy.default_sort_key))))


def _vector(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: function(sympy.Matrix(list(a)), sympy.Matrix(list(b)))


_ANY = 1000
_OF_SYMPY = (
    "sqrt", "cbrt", "exp", "sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan",
    "asec", "acsc", "acot", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "floor", "sign",
    "gamma", "re", "im", "arg", "conjugate", "erf", "expand", "simplify", "cancel", "apart",
    "together", "trigsimp",
)  # fmt: skip
FUNCTIONS: dict[str, tuple[Callable[..., Any], int, int]] = {
    **{name: (getattr(sympy, name), 1, 1) for name in _OF_SYMPY},
    **{f"arc{name}": (getattr(sympy, f"a{name}"), 1, 1) for name in ("sin", "cos", "tan")},
    **dict.fromkeys(("ceil", "ceiling"), (sympy.ceiling, 1, 1)),
    "abs": (sympy.Abs, 1, 1),
    "atan2": (sympy.atan2, 2, 2),
    "ln": (sympy.log, 1, 1),
    "log": (sympy.log, 1, 2),
    "log2": (lambda value: sympy.log(value, 2), 1, 1),
    "log10": (lambda value: sympy.log(value, 10), 1, 1),
    "root": (sympy.root, 2, 2),
    "rad": (sympy.rad, 1, 1),
    "deg": (sympy.deg, 1, 1),
    "round": (_round, 1, 2),
    "N": (lambda value: sympy.N(value, 15), 1, 1),
    "max": (sympy.Max, 1, _ANY),
    "min": (sympy.Min, 1, _ANY),
    "mod": (sympy.Mod, 2, 2),
    "gcd": (_each(sympy.gcd), 2, _ANY),
    "lcm": (_each(sympy.lcm), 2, _ANY),
    "factorial": (_factorial(sympy.factorial), 1, 1),
    "factorial2": (_factorial(sympy.factorial2), 1, 1),
    **dict.fromkeys(("binomial", "comb", "nCr"), (_binomial, 2, 2)),
    **dict.fromkeys(("perm", "nPr"), (_arrangements, 2, 2)),
    "isprime": (_whole(sympy.isprime), 1, 1),
    "nextprime": (_whole(sympy.nextprime), 1, 1),
    "totient": (_whole(sympy.totient), 1, 1),
    "divisors": (_whole(lambda n: sympy.Tuple(*sympy.divisors(n))), 1, 1),
    "factor": (_factor, 1, 1),
    **dict.fromkeys(("diff", "derivative"), (_diff, 1, 3)),
    **dict.fromkeys(("integrate", "integral"), (_integrate, 1, 4)),
    **dict.fromkeys(("sum", "summation"), (_over(sympy.Sum, "sum"), 2, 4)),
    "product": (_over(sympy.Product, "product"), 2, 4),
    "limit": (_limit, 2, 4),
    "series": (_series, 1, 4),
    "subs": (_subs, 2, _ANY),
    "solve": (solve, 1, _ANY),
    "det": (lambda m: m.det(), 1, 1),
    "inv": (lambda m: m.inv(), 1, 1),
    "transpose": (lambda m: m.T, 1, 1),
    "trace": (lambda m: m.trace(), 1, 1),
    "rank": (lambda m: sympy.Integer(m.rank()), 1, 1),
    "rref": (lambda m: m.rref()[0], 1, 1),
    "eigenvalues": (_eigenvalues, 1, 1),
    "dot": (_vector(lambda a, b: a.dot(b)), 2, 2),
    "cross": (_vector(lambda a, b: a.cross(b)), 2, 2),
}  # fmt: skip
"""Name -> (function, fewest arguments, most arguments)."""

MATRIX_FUNCTIONS = frozenset(
    ("det", "inv", "transpose", "trace", "rank", "rref", "eigenvalues", "dot", "cross")
)
ANY_ARGUMENTS = frozenset(("solve", "subs", "integrate", "integral", "sum", "summation", "product"))
NOT_SIMPLIFIED = frozenset(
    ("expand", "factor", "apart", "together", "cancel", "simplify", "trigsimp", "series", "diff",
     "derivative", "integrate", "integral")
)  # fmt: skip
"""Functions whose answer is not simplified, because its form was asked for."""
