"""The signature of a function in a file, read without running the file (`where: sandbox`).

A function object is made of the function's arguments, type hints and docstring alone. Type hints
may use built-in types and names of `typing`; a default is kept if it is a literal.
"""

import ast
import typing
from pathlib import Path
from typing import Any

_KINDS = (
    *(ast.Name, ast.Attribute, ast.Subscript, ast.Tuple, ast.List, ast.Constant, ast.BinOp),
    *(ast.BitOr, ast.Load),
)
_BUILTINS: dict[str, Any] = {
    kind.__name__: kind for kind in (str, int, float, bool, list, dict, tuple, set)
}


def function_of(path: Path, name: str) -> Any:
    """A function with the signature, the hints and the docstring of the one in the file; None if
    the file has no such function at its top level.

    Raises:
        ValueError: the file is not Python, or a hint is not of the kinds above.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"it is not Python: {error}") from error
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return _made(node)
    return None


def _made(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Any:
    arguments = node.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        if argument.annotation is not None:
            _check(argument.annotation)
    arguments.defaults = [_literal(default) for default in arguments.defaults]
    arguments.kw_defaults = [
        None if default is None else _literal(default) for default in arguments.kw_defaults
    ]
    plain = ast.FunctionDef(
        name=node.name,
        args=arguments,
        body=[ast.Expr(ast.Constant(ast.get_docstring(node) or "")), ast.Pass()],
        decorator_list=[],
        returns=None,
    )
    module = ast.fix_missing_locations(ast.Module(body=[plain], type_ignores=[]))
    names = {name: getattr(typing, name) for name in typing.__all__}
    scope: dict[str, Any] = {"__builtins__": _BUILTINS, **names, "typing": typing}
    exec(compile(module, "<signature>", "exec"), scope)
    return scope[node.name]


def _check(annotation: ast.expr) -> None:
    """Refuse a type hint that could do more than name a type."""
    allowed = {*_BUILTINS, *typing.__all__, "typing", "None"}
    for part in ast.walk(annotation):
        is_name = not isinstance(part, ast.Name) or part.id in allowed
        is_typing = not isinstance(part, ast.Attribute) or (
            isinstance(part.value, ast.Name)
            and part.value.id == "typing"
            and part.attr in typing.__all__
        )
        if not isinstance(part, _KINDS) or not is_name or not is_typing:
            raise ValueError(
                f"the type hint {ast.unparse(annotation)!r} is not made of built-in types and "
                "typing's, and the file is not run to read it; write another hint"
            )


def _literal(default: ast.expr) -> ast.expr:
    try:
        ast.literal_eval(default)
    except ValueError:
        return ast.Constant(None)
    return default
