"""Runs `python main.py` or a session's cells in this interpreter, without starting another one."""

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

MAX_SHOWN = 8192
"""Characters of a value in a session's reply; the rest is cut."""

NULL_BYTE = "source code string cannot contain null bytes"
"""Python's words for this syntax error, which is a `ValueError` before Python 3.11.4."""

TRACEBACK_FOLDER = "/box"
"""Folder of a program in its tracebacks, the same in every sandbox."""


def run_main(code: str, home: str, source: str) -> int:
    """Run a program as the main module; returns its exit code."""
    module = _main_module(home, source)
    return _execute(code, module.__dict__, f"{TRACEBACK_FOLDER}/{source}")[0]


def end(status: int) -> None:
    """End the process like an interpreter: threads, exit handlers, streams. Does not return."""
    try:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        status = _flush() or status
    finally:
        os._exit(status)


def run_cells(channel: socket.socket, home: str) -> None:
    """Run cells in one module as they arrive, with their own streams. Does not return."""
    names = _main_module(home, "cell").__dict__
    try:
        devnull = os.open(os.devnull, os.O_RDWR)
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
            path = f"<cell {number.decode()}>"
            linecache.cache[path] = len(text), None, text.splitlines(True), path
            code, shown = _execute(text, names, path, is_cell=True)
            reply = {"cell": int(number), "code": _flush() or code, "shown": shown}
            for own in range(3):
                os.dup2(devnull, own)
            channel.send(json.dumps(reply).encode())
    finally:
        os._exit(0)


def _main_module(home: str, source: str) -> types.ModuleType:
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=f"{home}/{source}", __builtins__=builtins)
    sys.modules["__main__"] = module
    for own_module in ("confine", "interpreter", "run", "fork_server", "parts"):
        sys.modules.pop(own_module, None)
    sys.argv[:] = [source]
    sys.orig_argv[:] = ["python", source]
    sys.path[0] = home
    site.setquit()
    linecache.clearcache()
    return module


def _execute(
    code: str, names: dict, path: str, *, is_cell: bool = False
) -> "tuple[int, str | None]":
    """Run a program or a cell. An exception goes to stderr.

    Returns:
        The exit code; and `repr` of the value of a cell's last expression, cut if it is long.
    """
    try:
        if "\0" in code:
            raise SyntaxError(NULL_BYTE)
        if not is_cell:
            exec(compile(code, path, "exec", dont_inherit=True), names)
            return 0, None
        tree = ast.parse(code, path)
        last = None
        if tree.body and isinstance(end := tree.body[-1], ast.Expr):
            last = ast.Expression(end.value)
            del tree.body[-1]
        exec(compile(tree, path, "exec", dont_inherit=True), names)
        value = None if last is None else eval(compile(last, path, "eval"), names)
        return 0, None if value is None else repr(value)[:MAX_SHOWN]
    except SystemExit as end:
        return _exit_code(end.code), None
    except BaseException as error:
        own_frame = error.__traceback__
        is_parsing = is_cell and isinstance(error, SyntaxError) and error.filename == path
        error.__traceback__ = None if is_parsing or own_frame is None else own_frame.tb_next
        if is_cell:
            traceback.print_exception(error)
        else:
            sys.excepthook(type(error), error, error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1, None


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _flush() -> int:
    """Flush the streams; returns an exit code if that fails."""
    status = 0
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            status = 120  # the exit code of Python in this case
    return status
