"""Starting and ending programs of a user: their path, their environment, and work that a
cancellation must not interrupt."""

import asyncio
import os
import shutil
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def find_program(word: str, *, cwd: str | None, path: str | None) -> str:
    """Path of the program that the first word of a command names.

    Args:
        cwd: folder in which it is to run; a word with a slash is relative to it.
        path: value of PATH, on which a word without a slash is looked for.

    Raises:
        FileNotFoundError: there is no such folder, or no such program.
    """
    if cwd is not None and not Path(cwd).is_dir():
        raise FileNotFoundError(f"this node has no folder {cwd}, in which it is to run")
    if "/" in word and cwd is not None:
        word = str(Path(cwd) / word)
    program = shutil.which(word, path=path)
    if program is None:
        raise FileNotFoundError(f"there is no program {word!r} on PATH")
    return program


INHERITED = ("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER")
"""Variables that the MCP SDK gives to a server (mcp/client/stdio.py at 2.3)."""


def inherited_environment() -> dict[str, str]:
    """PATH, HOME, USER and the like of this process, without functions of a shell."""
    given = {name: os.environ[name] for name in INHERITED if name in os.environ}
    return {name: value for name, value in given.items() if not value.startswith("()")}


async def uninterrupted(work: Coroutine[Any, Any, T]) -> T:
    """Finish this work even if the caller is cancelled; then raise the cancellation."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # nobody hears of it
        raise cancelled
    return task.result()
