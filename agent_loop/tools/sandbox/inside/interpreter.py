"""Becomes `python main.py`, or a session's interpreter, without starting another one."""

import ast
import atexit
import builtins
import io
import json
import linecache
import os
import site
import socket
import sys
import threading
import traceback
import types

MOST_SHOWN = 8192
"""Characters of a value or an error that a session's answer holds."""

SHOWN = "/box"
"""Where a program is, in its tracebacks: the same in every sandbox."""


def run_main(code: str, home: str, source: str) -> int:
    """Run a program as the main module; its exit code."""
    module = _main_module(home, source)
    return _execute(code, module.__dict__, f"{SHOWN}/{source}")


def end(status: int) -> None:
    """End as an interpreter does. Does not return."""
    try:
        status = _finish() or status
    finally:
        os._exit(status)


def run_cells(channel: socket.socket, home: str) -> None:
    """Run cells in one module, as they come, with their streams. Does not return."""
    names = _main_module(home, "cell").__dict__
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        while True:
            number, fds, _, _ = socket.recv_fds(channel, 32, 4)
            if not number:
                break
            payload, *streams = fds
            for own, fd in enumerate(streams):
                os.dup2(fd, own)
                os.close(fd)
            sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), errors="surrogateescape")
            with open(payload, encoding="utf-8", errors="replace") as file:
                text = file.read()
            done = execute_cell(text, names, f"<cell {number.decode()}>")
            done["cell"] = int(number)
            done["code"] = _flush() or done["code"]
            for own in range(3):
                os.dup2(nothing, own)
            channel.send(json.dumps(done).encode())
    finally:
        os._exit(0)


def _main_module(home: str, source: str) -> types.ModuleType:
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=f"{home}/{source}", __builtins__=builtins)
    sys.modules["__main__"] = module
    for ours in ("confine", "interpreter", "run", "fork_server"):
        sys.modules.pop(ours, None)
    sys.argv[:] = [source]
    sys.orig_argv[:] = ["python", source]
    sys.path[0] = home
    site.setquit()
    linecache.clearcache()
    return module


def _execute(code: str, names: dict, path: str) -> int:
    """The exit code of a program; what it raised goes to stderr."""
    try:
        exec(compile(code, path, "exec", dont_inherit=True), names)
    except SystemExit as end:
        return _exit_code(end.code)
    except BaseException as error:
        ours = error.__traceback__
        error.__traceback__ = ours.tb_next if ours else None
        sys.excepthook(type(error), error, error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def execute_cell(code: str, names: dict, path: str) -> dict:
    """Run a cell.

    Returns:
        `code`, as an exit code; `shown`, the value of a last expression; `error`, the name and the
        text of what was raised. What a notebook knows of a cell, cut to fit a message.
    """
    linecache.cache[path] = len(code), None, code.splitlines(True), path
    done: dict = {"code": 0, "shown": None, "error": None}
    try:
        tree = ast.parse(code, path)
        last = None
        if tree.body and isinstance(end := tree.body[-1], ast.Expr):
            last = ast.Expression(end.value)
            del tree.body[-1]
        exec(compile(tree, path, "exec", dont_inherit=True), names)
        if last is not None:
            value = eval(compile(last, path, "eval"), names)
            done["shown"] = None if value is None else repr(value)[:MOST_SHOWN]
    except SystemExit as end:
        done["code"] = _exit_code(end.code)
    except BaseException as error:
        ours = error.__traceback__
        is_parsing = isinstance(error, SyntaxError) and error.filename == path
        error.__traceback__ = None if is_parsing or ours is None else ours.tb_next
        traceback.print_exception(error)
        done["error"] = type(error).__name__, str(error)[:MOST_SHOWN]
        done["code"] = 130 if isinstance(error, KeyboardInterrupt) else 1
    return done


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _finish() -> int:
    """What an interpreter does at its end; its exit code where that fails."""
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    return _flush()


def _flush() -> int:
    status = 0
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            status = 120  # as Python itself
    return status
