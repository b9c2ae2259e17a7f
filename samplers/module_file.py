"""Imports a user's Python file, or what `path/to/file.py:name` names. Standard library only."""

import importlib.util
import re
import sys
import traceback
from collections.abc import Callable
from hashlib import sha1
from pathlib import Path
from types import ModuleType
from typing import Any


def module_of(path: Path, prefix: str) -> ModuleType:
    """Import a file once per process; the file can import the files beside it.

    Args:
        path: a file that ends in `.py`.
        prefix: start of the module's name; a digest of the path follows.

    Raises:
        ImportError: the file raises or exits; the message contains the error.
    """
    path = path.resolve()
    name = f"{prefix}_{path.stem}_{sha1(str(path).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None, path
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # before it runs, because dataclasses look up their module
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))  # last, so that it hides no other module
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[name]
            if not isinstance(error, Exception | SystemExit):
                raise
            # a SyntaxError names its line itself
            line = "" if isinstance(error, SyntaxError) else line_in(trace_of(error), str(path))
            raise ImportError(f"{type(error).__name__}: {error}{line}") from error
    return sys.modules[name]


def named_in(
    text: str, what: str, is_wanted: Callable[[Any], bool] = callable, kind: str = "function"
) -> Any:
    """What `path/to/file.py:name` names.

    Args:
        what: it is for, as `reward`: in messages, and the start of the module's name.
        kind: of what `is_wanted`, in messages.

    Raises:
        ValueError: there is no such file, it raises, or it has nothing of that kind and name.
    """
    file, _, name = text.rpartition(":")
    path, failed = Path(file), f"cannot load {what}={text}"
    if not path.is_file():
        raise ValueError(f"{failed}: no file {path.absolute()}; correct the path")
    try:
        module = module_of(path, what)
    except ImportError as error:
        did = "is not Python:" if isinstance(error.__cause__, SyntaxError) else "raised"
        raise ValueError(f"{failed}: the file {did} {error}; correct it") from error
    if not is_wanted(found := getattr(module, name, None)):
        names = [
            other
            for other, value in vars(module).items()
            if is_wanted(value) and other[0] != "_" and value.__module__ == module.__name__
        ]
        there = ", ".join(names) or "none"
        raise ValueError(
            f"{failed}: the file has no {kind} {name!r}, but {there}; correct the name"
        )
    return found


def trace_of(error: BaseException) -> str:
    """A traceback with its causes, also that of another process."""
    return "".join(traceback.format_exception(error))


def line_in(trace: str, file: str) -> str:
    """The innermost line of a file in a traceback, as ` (line 7)`; empty if there is none."""
    lines = re.findall(rf'File "{re.escape(file)}", line (\d+)', trace)
    return f" (line {lines[-1]})" if lines else ""
