"""The signature of a function in a file, read without running the file (`where: sandbox`).

A function object is made of the function's arguments, type hints and docstring alone. Type hints
may use built-in types and names of `typing`.
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
_TYPING = {name: getattr(typing, name) for name in typing.__all__}


def function_of(path: Path, name: str) -> Any:
    """A function with the signature, the hints and the docstring of the one in the file.

    Raises:
        ValueError: there is no such file, it is not Python, it has no such function at its top
            level, or a hint is not of the kinds above.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"no file {path.absolute()}; correct the path") from error
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"it is not Python: {error}") from error
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return _made(node)
    raise ValueError(f"the file has no function or class {name!r}; correct the name")


def _made(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Any:
    arguments = node.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        if argument.annotation is not None:
            argument.annotation = _hint(argument.annotation)
    none = ast.Constant(None)  # a schema has no defaults; it says which arguments have one
    arguments.defaults = [none for _ in arguments.defaults]
    arguments.kw_defaults = [default and none for default in arguments.kw_defaults]
    docstring = ast.Expr(ast.Constant(ast.get_docstring(node) or ""))
    plain = ast.FunctionDef(name=node.name, args=arguments, body=[docstring], decorator_list=[])
    module = ast.fix_missing_locations(ast.Module(body=[plain], type_ignores=[]))
    scope: dict[str, Any] = {"__builtins__": _BUILTINS, **_TYPING, "typing": typing}
    exec(compile(module, "<signature>", "exec"), scope)
    return scope[node.name]


class _WithoutTexts(ast.NodeTransformer):
    """Puts expressions in the place of texts, because typing would evaluate these as code."""

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if isinstance(node.value, str):
            return self.visit(ast.parse(node.value, mode="eval").body)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        match ast.unparse(node.value).removeprefix("typing."), node.slice:
            case "Literal", _:
                return node
            case "Annotated", ast.Tuple(elts=[kind, *notes]):  # whose notes are texts of their own
                node.slice = ast.Tuple([self.visit(kind), *notes], ast.Load())
                return node
        return self.generic_visit(node)  # type: ignore[return-value]


def _hint(annotation: ast.expr) -> ast.expr:
    """The type hint without texts. One that could do more than name a type is refused."""
    shown = ast.unparse(annotation)
    try:
        hint: Any = _WithoutTexts().visit(annotation)
    except (SyntaxError, ValueError):
        hint = ast.Pass()
    for part in ast.walk(hint):
        name = part.id if isinstance(part, ast.Name) else "int"
        if isinstance(part, ast.Attribute):
            is_of_typing = ast.unparse(part.value) == "typing" and part.attr in _TYPING
            name = part.attr if is_of_typing else ""
        if not isinstance(part, _KINDS) or name not in {*_BUILTINS, *_TYPING, "typing"}:
            raise ValueError(
                f"the type hint {shown!r} is not made of built-in types and typing's, and the file "
                "is not run to read it; write another hint"
            )
    return hint
