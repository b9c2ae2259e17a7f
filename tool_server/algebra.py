"""Algebra for `POST /calculate`, with sympy: `2x+3=7`, `5!`, `|x-1|`, `30°`, `limit(1/x, x->0)`.

`tool_server.calculate` runs this module in the sandbox, because sympy can take any time and memory.
LaTeX is not accepted. `i` is the imaginary unit unless a function binds it, as in `sum(i, i, 1,
10)`; `e` is Euler's number; `log` is the natural logarithm and is printed as `ln`.
"""

import ast
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from decimal import Context
from fractions import Fraction
from functools import reduce
from itertools import pairwise
from typing import Any, NoReturn

import sympy
from sympy.core.relational import Relational
from sympy.functions.elementary.trigonometric import TrigonometricFunction
from sympy.logic.boolalg import BooleanAtom
from sympy.parsing import sympy_parser

from tool_server.calculator import CalculationError, show

MAX_CHARS = 2000
"""Characters of an expression, and of an answer."""

LONG = 60
"""Characters of a number's exact form; if it is longer, only the digits are shown."""

_SPELLED = str.maketrans(
    {
        "\u00d7": "*", "\u00b7": "*", "\u22c5": "*", "\u2217": "*", "\u00f7": "/",
        "\u2212": "-", "\u2013": "-", "≤": "<=", "≥": ">=", "→": ",", "π": " pi ", "∞": " oo ",
        "°": "*pi/180", "{": "(", "}": ")",
    }
)  # fmt: skip
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_REWRITTEN = (
    (  # words of Python, which are products like other short names
        r"(?<![^\W\d])(as|if|in|is|or|def|del|for|not|try)(?!\w)",
        lambda match: " ".join(match[0]),
    ),
    (r"(?<=[-+*/^%=<>(])\s*\band\b", ""),  # it separates nothing
    (r"\s*(?:->|\band\b|[,;\n])[\s,;]*", ","),
    (r"(?<=[\w)!])\s*\bmod\b", "%"),
    (r"\|([^|]+)\|", r"abs(\1)"),
    (r"(?<![<>=])=(?!=)", "=="),
)
_PARSER = (
    *sympy_parser.standard_transformations,
    sympy_parser.convert_xor,
    sympy_parser.rationalize,
    # A longer unknown name is one variable.
    sympy_parser.split_symbols_custom(lambda name: len(name) < 4 and name.isalpha()),
    sympy_parser.implicit_multiplication,
)


def answer(expression: str) -> dict[str, str]:
    """`{"result": text}` or `{"error": one line}` of arithmetic, an expression to simplify,
    equations or inequalities to solve, or one of the functions in `NAMES`."""
    try:
        text = _result(expression)
        if len(text) > MAX_CHARS:
            fail(f"the answer has {len(text)} characters, more than {MAX_CHARS}")
        return {"result": text}
    except CalculationError as error:
        return {"error": str(error)}
    except Exception as error:  # sympy raises many types of errors
        why = " ".join(f"{type(error).__name__} {error}".split())[:200]
        return {"error": f"cannot calculate {expression.strip()[:100]!r}: {why}"}


def _result(expression: str) -> str:
    tree = parse(expression)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) > 1]
    binds_i = any(
        ast.unparse(call.func) in _BINDERS and re.match(r"\(?i\b", ast.unparse(call.args[1]))
        for call in calls
    )
    names = NAMES | ({"i": sympy.Symbol("i")} if binds_i else {})
    is_call = isinstance(tree, ast.Call)  # whose answer has the form that was asked for
    program = ast.fix_missing_locations(ast.Expression(_WithSympy().visit(tree)))
    value = eval(compile(program, "expression", "eval"), {"__builtins__": {}}, names)
    relations = value if isinstance(value, tuple) else (value,)
    if all(isinstance(one, (Relational, BooleanAtom, bool)) for one in relations):
        value = solve(*relations)
    elif isinstance(value, sympy.Expr) and not is_call and 0 < sympy.count_ops(value) <= 300:
        value = min(value, sympy.simplify(value), key=sympy.count_ops)
    return text_of(value)


def parse(text: str) -> ast.expr:
    """The Python syntax tree of an expression, with the products that people leave out.

    `,`, `;`, `and` or a line break separates equations. Two or three letters that are no known name
    are a product, as in `2xy`; a name before a bracket is a factor unless it is in `NAMES`.

    Raises:
        CalculationError: the text is not an expression.
    """
    if len(text) > MAX_CHARS:
        fail(f"expression longer than {MAX_CHARS} characters")
    if "\\" in text or "$" in text:
        fail("LaTeX is not understood: write it as in (x^2+1)/sqrt(2)")
    typed = text.strip().translate(_SPELLED).rstrip("=?. ")
    typed = re.sub("[⁰¹²³⁴-⁹⁻]+", lambda raised: f"**({raised[0].translate(_RAISED)})", typed)
    strange = re.search(r"[^\w\s.,;+\-*/^%=<>()\[\]|!]|!=|\.\s*[^\W\d]|__", typed)
    _check_order(typed[: strange.start()] if strange else typed, is_whole=strange is None)
    if strange:
        fail(f"not understood: {typed[strange.start() :][:20]!r}")
    if re.search(r"(?<![\w.,])0\d|\.\d*\.|\d[eE]\d+\.\d", typed):
        fail(f"not an expression: {text.strip()[:100]!r}")
    if not re.search(r"[^\W\d]\(|\[", typed):  # there, a comma separates arguments
        typed = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", typed)
    for pattern, replacement in _REWRITTEN:
        typed = re.sub(pattern, replacement, typed)
    if "|" in typed:
        fail("a '|' is missing")
    try:
        program = sympy_parser.stringify_expr(typed.strip(","), NAMES, {}, _PARSER)
        return ast.parse(program, mode="eval").body
    except Exception as error:  # sympy's tokenizer has errors of its own
        raise CalculationError(f"not an expression: {text.strip()[:100]!r}") from error


def _check_order(typed: str, is_whole: bool) -> None:
    """Refuse brackets that do not match, and a number after an operand, whichever comes first."""
    closing, opened = {"(": ")", "[": "]"}, list[str]()
    for match in re.finditer(r"[()\[\]]|(\w+)\s+([.\d][\d.]*)", typed):
        if match[1]:
            word = match[1].lstrip("0123456789") or match[1]
            is_product = len(word) < 4 and word.isalpha() and word not in NAMES
            if word not in ("and", "mod"):
                last = word[-1] if is_product else word
                fail(f"{last} {match[2]}: an operator is missing")
        elif match[0] in closing:
            opened.append(closing[match[0]])
        elif not opened or opened.pop() != match[0]:
            fail(f"{match[0]!r} closes nothing")
    if opened and is_whole:
        fail(f"a {opened[-1]!r} is missing")


_EVALUATED = (
    *(ast.BinOp, ast.UnaryOp, ast.Compare, ast.Call, ast.List, ast.Tuple, ast.Name, ast.Constant),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow),
    *(ast.unaryop, ast.cmpop, ast.expr_context),
)


class _WithSympy(ast.NodeTransformer):
    """Replaces what Python would evaluate without sympy by calls of sympy, and refuses what is no
    expression of maths: a comprehension could give names of `NAMES` another meaning."""

    def visit(self, node: ast.AST) -> Any:
        if not isinstance(node, _EVALUATED):
            fail("not understood: write one expression, or equations with commas between them")
        return super().visit(node)

    def visit_List(self, node: ast.List) -> ast.expr:
        return _call("List", *map(self.visit, node.elts))

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        sides = pairwise([self.visit(side) for side in (node.left, *node.comparators)])
        made = [_call(type(op).__name__, *pair) for op, pair in zip(node.ops, sides, strict=True)]
        return made[0] if len(made) == 1 else ast.Tuple([*made], ast.Load())

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        if isinstance(node.left, ast.Tuple) or isinstance(node.right, ast.Tuple):
            fail("vectors are written as in [1, 2]")
        return ast.BinOp(self.visit(node.left), self.visit(node.op), self.visit(node.right))


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), [*arguments], [])


def _listed(*items: Any) -> Any:
    """A matrix, a vector, or a list of equations."""
    if not all(isinstance(item, (sympy.Expr, sympy.MatrixBase)) for item in items):
        return [*items]
    rows = [[*item] if isinstance(item, sympy.MatrixBase) else item for item in items]
    return sympy.ImmutableMatrix(rows)


@dataclass(frozen=True)
class Solutions:
    """Solutions as text, with which nothing further can be calculated."""

    text: str


def solve(*given: Any) -> Solutions:
    """Solve equations over the complex numbers; inequalities, and equations with trigonometric
    functions or absolute values, over the real numbers.

    Args:
        given: equations or inequalities, or expressions that must equal 0; then the variables to
            solve for (without them all variables). Each may be a list.

    Raises:
        CalculationError: there are more unknowns than equations, or no method is known.
    """
    many = (list, tuple, sympy.MatrixBase)
    first, *rest = [x for group in given for x in (group if isinstance(group, many) else [group])]
    unknowns = [one for one in rest if isinstance(one, sympy.Symbol)]
    relations: list[Any] = [
        sympy.Eq(one, 0, evaluate=False) if isinstance(one, sympy.Expr) else sympy.sympify(one)
        for one in [first, *(one for one in rest if one not in unknowns)]
    ]
    relations = [one for one in relations if one is not sympy.true]
    free = sorted(set[Any]().union(*(one.free_symbols for one in relations)), key=str)
    if not free:
        holds = all(sympy.simplify(one) is sympy.true for one in relations)
        return Solutions("true" if holds else "false")
    if sympy.false in relations:
        return Solutions("no solution")
    if not all(isinstance(one, sympy.Eq) for one in relations):
        return Solutions(_solve_inequalities(relations, *(unknowns or free)))
    if not unknowns and len(free) > len(relations):
        fail(
            f"more unknowns ({', '.join(map(str, free))}) than equations: say which to solve for, "
            f"as in solve({text_of(relations[0])}, {free[0]})"
        )
    unknowns = unknowns or free
    differences = [sympy.expand(one.lhs - one.rhs) for one in relations]
    differences = [
        one for one in differences if one != 0 and (one.is_polynomial() or sympy.simplify(one) != 0)
    ]
    if not differences:
        return Solutions(f"true for every {', '.join(map(str, unknowns))}")
    if len(differences) == len(unknowns) == 1:
        return Solutions(_solve_one(differences[0], unknowns[0]))
    cases = [
        ", ".join(_assigned(name, case[name]) for name in unknowns if name in case)
        for case in sympy.solve(differences, unknowns, dict=True)
    ]
    return Solutions(" or ".join(cases) or "no solution")


_OF_REALS = (sympy.Abs, sympy.sign, sympy.floor, sympy.ceiling, sympy.Max, sympy.Min)
"""Functions for which sympy solves equations of a real unknown only."""


def _solve_one(difference: Any, unknown: Any) -> str:
    """The values of the unknown for which the difference is 0."""
    real, n = sympy.Symbol(str(unknown), real=True), sympy.Symbol("n", integer=True)
    if difference.has(TrigonometricFunction):
        found = sympy.solveset(difference.subs(unknown, real), real, sympy.S.Reals)
        if found is sympy.S.EmptySet:
            return "no real solution"
        parts: Any = found.args if isinstance(found, sympy.Union) else (found,)
        if all(isinstance(part, sympy.ImageSet) for part in parts):
            cases = [_assigned(unknown, sympy.expand(part.lamda(n))) for part in parts]
            return f"{' or '.join(cases)} for every whole n"
    symbol = real if difference.has(*_OF_REALS) else unknown
    with suppress(NotImplementedError):
        roots = sympy.solve(difference.subs(unknown, symbol), symbol)
        if any(root.has(sympy.CRootOf) for root in roots):
            roots = sympy.Poly(difference, unknown).nroots(n=15)
        if not any(root.has(sympy.Subs, sympy.Derivative) for root in roots):
            return " or ".join(_assigned(unknown, root) for root in roots) or "no solution"
    for start in (0.1, 1, -1, 3, -3, 10, -10, 100):
        with suppress(ValueError, ZeroDivisionError, TypeError):
            root = digits_of(sympy.nsolve(difference, unknown, start))
            return f"{unknown} ≈ {root} (found by search; there may be others)"
    fail("no way to solve this is known")


def _assigned(unknown: Any, value: Any) -> str:
    text = text_of(value)
    return f"{unknown} {text}" if text.startswith("≈") else f"{unknown} = {text}"


def _solve_inequalities(relations: list[Any], unknown: sympy.Symbol, *others: Any) -> str:
    if others:
        fail("inequalities are solved for one variable only")
    real = sympy.Symbol(str(unknown), real=True)
    sets = [sympy.solveset(one.subs(unknown, real), real, sympy.S.Reals) for one in relations]
    solutions = reduce(lambda a, b: a.intersect(b), sets)
    if solutions is sympy.S.EmptySet:
        return "no solution"
    if solutions is sympy.S.Reals:
        return f"true for every real {unknown}"
    parts = solutions.args if isinstance(solutions, sympy.Union) else (solutions,)
    return " or ".join(_range(unknown, part) for part in parts)


def _range(unknown: sympy.Symbol, part: Any) -> str:
    if isinstance(part, sympy.FiniteSet):
        return " or ".join(f"{unknown} = {plain(value)}" for value in part)
    if not isinstance(part, sympy.Interval):
        return f"{unknown} in {plain(part)}"
    start, end = plain(part.start), plain(part.end)
    if end == "oo":
        return f"{unknown} {'>' if part.left_open else '>='} {start}"
    low = "" if start == "-oo" else f"{start} {'<' if part.left_open else '<='} "
    return f"{low}{unknown} {'<' if part.right_open else '<='} {end}"


def text_of(value: Any) -> str:
    """An answer as text: the exact form, and digits if they say more."""
    if isinstance(value, (list, tuple, sympy.Tuple)):
        return ", ".join(map(text_of, value))
    if isinstance(value, Solutions):
        return value.text
    if isinstance(value, str):  # sympify would evaluate it
        fail("this has no value")
    value = sympy.sympify(value)
    if not isinstance(value, (sympy.Basic, sympy.MatrixBase)):  # the name of a function
        fail("this has no value")
    if not isinstance(value, sympy.Expr):
        return plain(value)
    if value.has(sympy.zoo, sympy.nan):
        fail("division by zero" if value.has(sympy.zoo) else "this has no value")
    digits = digits_of(value)
    if isinstance(value, sympy.Integer) and value.p.bit_length() > 3 * MAX_CHARS:
        return f"≈ {digits}"
    exact = plain(value)
    if digits is None or digits == exact or value.is_Integer:
        return exact
    is_shown = len(exact) <= LONG and not value.has(sympy.CRootOf, sympy.Float)
    return f"{exact} ≈ {digits}" if is_shown else f"≈ {digits}"


def plain(value: Any) -> str:
    """The exact form, in the syntax that `parse` reads."""
    if isinstance(value, sympy.Rational) and 10**12 % value.q == 0:
        return show(Fraction(value.p, value.q))
    if isinstance(value, sympy.Eq):
        return f"{plain(value.lhs)} = {plain(value.rhs)}"
    if isinstance(value, sympy.MatrixBase):
        value = value.flat() if value.cols == 1 else value.tolist()
    names = {"log": "ln", "I": "i", "E": "e", "Abs": "abs"}
    return re.sub(r"\b(?:log|I|E|Abs)\b", lambda match: names[match.group()], str(value))


def digits_of(value: Any) -> str | None:
    """Twelve significant digits of a number; None if the value is not a finite number."""
    if not value.is_number or value.is_infinite:
        return None
    if isinstance(value, sympy.Rational) and value.p.bit_length() <= 3 * MAX_CHARS:
        return show(Fraction(value.p, value.q))
    digits = sympy.N(value, 20, chop=True)
    if digits.atoms(sympy.Function, sympy.Symbol):
        return None
    text = re.sub(r"[\d.]+(?:e[+-]\d+)?", _rounded, sympy.sstr(digits, full_prec=False))
    return re.sub(r"\b1\*I", "I", text).replace("I", "i")


def _rounded(number: re.Match[str]) -> str:
    return f"{Context(12).create_decimal(number.group()).normalize():g}"


def fail(why: str) -> NoReturn:
    raise CalculationError(why)


def _closed(value: Any) -> Any:
    """The closed form of a sum, integral or limit; without one, its digits if it is a number."""
    undone = (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit)
    value = value.doit()
    if value.has(*undone) and value.is_number:
        value = sympy.N(value, 15)
    if value.has(*undone):
        fail("no closed form of this is known")
    return value


def _over(work: Callable[..., Any]) -> Callable[..., Any]:
    """`work` over a range, given as `x, a, b` or as `(x, a, b)`."""
    return lambda value, *given: _closed(work(value, *([given] if len(given) == 3 else given)))


def _limit(value: Any, name: Any, at: Any, side: Any = 0) -> Any:
    result = _closed(sympy.limit(value, name, at, {0: "+-", 1: "+", -1: "-"}[side]))
    if result.has(sympy.zoo):
        fail("there is no limit: the two sides differ; give 1 or -1 as the side")
    return result


def _subs(value: Any, *given: Any) -> Any:
    """`subs(f, x, 3)`, `subs(f, (x, 3))` or `subs(f, x=3, y=1)`."""
    pairs = [one.args if isinstance(one, sympy.Eq) else one for one in given]
    return value.subs([given] if isinstance(given[0], sympy.Symbol) else pairs, simultaneous=True)


def _factor(value: Any) -> Any:
    if not value.is_Integer:
        return sympy.factor(value)
    powers = sympy.factorint(value).items()
    return Solutions(" * ".join(f"{prime}^{n}" if n > 1 else str(prime) for prime, n in powers))


def _round(value: Any, places: Any = sympy.S.Zero) -> Any:
    scale = sympy.Integer(10) ** places
    return sympy.floor(value * scale + sympy.Rational(1, 2)) / scale  # halves up, as at school


def _of_matrix(name: str) -> Callable[[Any], Any]:
    return lambda value: getattr(sympy.Matrix(value), name)()


_BINDERS = (
    *("sum", "summation", "product", "integrate", "integral", "limit", "series"),
    *("diff", "derivative", "subs", "solve"),
)
"""Functions whose second argument is a variable."""

_OF_SYMPY = (
    "sqrt", "cbrt", "root", "exp", "ln", "log", "sin", "cos", "tan", "sec", "csc", "cot", "asin",
    "acos", "atan", "asec", "acsc", "acot", "atan2", "sinh", "cosh", "tanh", "asinh", "acosh",
    "atanh", "floor", "ceiling", "sign", "gamma", "re", "im", "arg", "conjugate", "erf", "rad",
    "deg", "expand", "simplify", "cancel", "apart", "together", "trigsimp", "factorial",
    "factorial2", "binomial", "isprime", "nextprime", "totient", "diff", "pi", "E", "I", "oo",
    "Symbol", "Integer", "Rational", "Function",
)  # fmt: skip
NAMES: dict[str, Any] = {
    **{name: getattr(sympy, name) for name in _OF_SYMPY},
    **{f"arc{name}": getattr(sympy, f"a{name}") for name in ("sin", "cos", "tan")},
    **{name: _of_matrix(name) for name in ("det", "inv", "transpose", "trace", "rank")},
    **{name: sympy.Symbol(name) for name in ("mu", "nu", "xi", "rho", "tau", "eta", "phi", "psi")},
    **{"e": sympy.E, "i": sympy.I, "inf": sympy.oo, "infinity": sympy.oo},
    **{"abs": sympy.Abs, "ceil": sympy.ceiling, "max": sympy.Max, "min": sympy.Min},
    **{"mod": sympy.Mod, "round": _round, "factor": _factor, "limit": _limit, "subs": _subs},
    **{"solve": solve, "derivative": sympy.diff, "product": _over(sympy.Product)},
    **dict.fromkeys(("integrate", "integral"), _over(sympy.integrate)),
    **dict.fromkeys(("sum", "summation"), _over(sympy.Sum)),
    **dict.fromkeys(("comb", "nCr"), sympy.binomial),
    **dict.fromkeys(("perm", "nPr"), sympy.ff),
    "N": lambda value: sympy.N(value, 15),
    "log2": lambda value: sympy.log(value, 2),
    "log10": lambda value: sympy.log(value, 10),
    "gcd": lambda *values: reduce(sympy.gcd, values),
    "lcm": lambda *values: reduce(sympy.lcm, values),
    "divisors": lambda value: sympy.Tuple(*sympy.divisors(value)),
    "series": lambda *given: sympy.series(*given).removeO(),
    "rref": lambda value: sympy.Matrix(value).rref()[0],
    "eigenvalues": lambda value: sorted(
        sympy.Matrix(value).eigenvals(multiple=True), key=sympy.default_sort_key
    ),
    "dot": lambda a, b: sympy.Matrix(a).dot(sympy.Matrix(b)),
    "cross": lambda a, b: sympy.Matrix(a).cross(sympy.Matrix(b)),
    "List": _listed,
    "Eq": lambda left, right: sympy.Eq(left, right, evaluate=False),
    **{"Lt": sympy.Lt, "LtE": sympy.Le, "Gt": sympy.Gt, "GtE": sympy.Ge},
}
