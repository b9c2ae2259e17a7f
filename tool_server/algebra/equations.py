"""Solver of equations and inequalities; the solutions are text.

Equations are solved over the complex numbers. Inequalities, and equations with trigonometric
functions or absolute values, are solved over the real numbers.
"""

from collections.abc import Sequence
from typing import Any

import sympy
from sympy.core.relational import Relational
from sympy.functions.elementary.trigonometric import TrigonometricFunction
from sympy.logic.boolalg import BooleanAtom

from tool_server.algebra.text import LONG, Solutions, digits_of, fail, plain, text_of


def solve(equations: Any, *given: Any) -> Solutions:
    """Solve for the given variables, or for all variables.

    Args:
        equations: a relation, an expression that must equal 0, or several of both.
        given: further relations, then variables.

    Raises:
        CalculationError: the arguments are no equations, or no solution method is known.
    """
    relations: list[Any] = list(equations) if isinstance(equations, (list, tuple)) else [equations]
    unknowns = [one for item in given for one in (item if _is_many(item) else (item,))]
    while unknowns and is_relation(unknowns[0]):  # solve(x+y=3, x-y=1)
        relations.append(unknowns.pop(0))
    relations = [
        sympy.Eq(one, 0, evaluate=False) if isinstance(one, sympy.Expr) else one
        for one in relations
    ]
    relations = [one for one in relations if one is not True]
    if any(one is False for one in relations):
        return Solutions("false" if len(relations) == 1 else "no solution")
    if not all(isinstance(one, Relational) for one in relations):
        fail("solve takes equations and variables, as in solve(x^2=2, x)")
    if not all(isinstance(one, sympy.Symbol) for one in unknowns):
        fail(f"solve for variables, not for {', '.join(map(text_of, unknowns))}")
    free: set[Any] = set().union(*(one.free_symbols for one in relations))
    if not free:
        holds = all(bool(sympy.simplify(one)) for one in relations)
        return Solutions("true" if holds else "false")
    if not all(isinstance(one, sympy.Eq) for one in relations):
        return _solve_inequalities(relations, unknowns or sorted(free, key=str))
    if not unknowns:
        unknowns = sorted(free, key=str)
        if len(relations) < len(unknowns):
            fail(
                f"more unknowns ({', '.join(map(str, unknowns))}) than equations: say which to "
                f"solve for, as in solve({plain(relations[0])}, {unknowns[0]})"
            )
    return _solve_equations([one.lhs - one.rhs for one in relations], unknowns)


def is_relation(value: object) -> bool:
    """Whether a value is an equation or inequality; sympy turns a trivial one into a bool."""
    return isinstance(value, (Relational, bool))


def _solve_equations(differences: Sequence[Any], unknowns: Sequence[Any]) -> Solutions:
    """Values of the unknowns for which all differences are 0."""
    differences = [one for one in differences if sympy.simplify(one) != 0]
    if not differences:
        return Solutions(f"true for every {', '.join(map(str, unknowns))}")
    if len(differences) == len(unknowns) == 1:
        if differences[0].has(TrigonometricFunction):
            periodic = _solve_periodic(differences[0], unknowns[0])
            if periodic:
                return periodic
        try:
            solutions = _solve_one(differences[0], unknowns[0])
        except NotImplementedError:
            return _solve_numerically(differences[0], unknowns[0])
    else:
        solutions = sympy.solve(differences, unknowns, dict=True)
    cases = [
        ", ".join(_assigned(name, case[name]) for name in unknowns if name in case)
        for case in solutions
    ]
    return Solutions(" or ".join(cases) if any(cases) else "no solution")


def _solve_one(difference: Any, unknown: Any) -> list[dict[Any, Any]]:
    if difference.has(sympy.Abs, sympy.sign, sympy.floor, sympy.ceiling, sympy.Max, sympy.Min):
        real = sympy.Symbol(str(unknown), real=True)
        return [{unknown: root} for root in sympy.solve(difference.subs(unknown, real), real)]
    solutions = sympy.solve(difference, unknown, dict=True)
    if any(case[unknown].has(sympy.CRootOf) for case in solutions):
        return [{unknown: root} for root in sympy.Poly(difference, unknown).nroots(n=15)]
    return solutions


def _is_many(value: object) -> bool:
    return isinstance(value, (list, tuple, sympy.MatrixBase))


def _assigned(name: Any, value: Any) -> str:
    exact, digits = plain(value), digits_of(value)
    if value.has(sympy.Float):
        return f"{name} ≈ {digits or exact}"
    if digits is None or digits == exact:
        return f"{name} = {exact}"
    if len(exact) > LONG:
        return f"{name} ≈ {digits}"
    return f"{name} = {exact} ≈ {digits}"


def _solve_numerically(difference: Any, unknown: Any) -> Solutions:
    for start in (0.1, 1, -1, 3, -3, 10, -10, 100):
        try:
            root = sympy.nsolve(difference, unknown, start)
        except (ValueError, ZeroDivisionError, TypeError):
            continue
        return Solutions(f"{unknown} ≈ {digits_of(root)} (found by search; there may be others)")
    fail("no way to solve this is known")


def _solve_periodic(difference: Any, unknown: Any) -> Solutions | None:
    """Periodic real solutions; None if sympy gives them in another form."""
    real, n = sympy.Symbol(str(unknown), real=True), sympy.Symbol("n", integer=True)
    solutions = sympy.solveset(difference.subs(unknown, real), real, sympy.S.Reals)
    if solutions is sympy.S.EmptySet:
        return Solutions("no real solution")
    cases = []
    for part in solutions.args if isinstance(solutions, sympy.Union) else (solutions,):
        if not isinstance(part, sympy.ImageSet) or part.base_sets != (sympy.S.Integers,):
            return None
        cases.append(f"{unknown} = {plain(sympy.expand(part.lamda(n)))}")
    return Solutions(" or ".join(cases) + " for every whole n")


def _solve_inequalities(relations: Sequence[Any], unknowns: Sequence[Any]) -> Solutions:
    if len(unknowns) != 1:
        fail("inequalities are solved for one variable only")
    real = sympy.Symbol(str(unknowns[0]), real=True)
    solutions = sympy.S.Reals
    for one in relations:
        one = one.subs(unknowns[0], real)
        if isinstance(one, BooleanAtom):
            part = sympy.S.Reals if one else sympy.S.EmptySet
        elif isinstance(one, sympy.Eq):
            part = sympy.solveset(one, real, sympy.S.Reals)
        else:
            part = sympy.solve_univariate_inequality(one, real, relational=False)
        solutions = solutions.intersect(part)
    if solutions is sympy.S.EmptySet:
        return Solutions("no solution")
    if solutions is sympy.S.Reals:
        return Solutions(f"true for every real {real}")
    parts = solutions.args if isinstance(solutions, sympy.Union) else (solutions,)
    return Solutions(" or ".join(_range(str(real), part) for part in parts))


def _range(name: str, part: Any) -> str:
    if isinstance(part, sympy.FiniteSet):
        return " or ".join(f"{name} = {plain(value)}" for value in part)
    if not isinstance(part, sympy.Interval):
        return f"{name} in {plain(part)}"
    if part.end.is_infinite and not part.start.is_infinite:
        return f"{name} {'>' if part.left_open else '>='} {plain(part.start)}"
    low = high = ""
    if not part.start.is_infinite:
        low = f"{plain(part.start)} {'<' if part.left_open else '<='} "
    if not part.end.is_infinite:
        high = f" {'<' if part.right_open else '<='} {plain(part.end)}"
    return f"{low}{name}{high}"
