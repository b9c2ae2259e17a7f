"""Copy everything that this process and its children print into a file."""

import os
import subprocess
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from verl_mixed.exit_codes import NOT_GOOD

_END_S = 10.0
"""Time to write the last output; a child that outlives this process may hold the pipe open."""


@contextmanager
def copied_to(path: Path) -> Generator[None]:
    """Append everything that is printed in the block to a file, and print it too.

    The file is made if it does not exist; its folder must exist.
    The output passes through a pipe, so a run sees no terminal and prints a line a step. If an
    error ends the block, its traceback goes to the file too, and the process exits with 1.

    Raises:
        OSError: the file cannot be written.
    """
    path.open("ab").close()
    with _through_tee(sys.stdout, 1, path), _through_tee(sys.stderr, 2, path):
        try:
            yield
        except Exception:
            traceback.print_exc()
            raise SystemExit(NOT_GOOD) from None


@contextmanager
def _through_tee(stream: IO[str], number: int, path: Path) -> Generator[None]:
    stream.flush()
    screen = os.dup(number)
    tee = subprocess.Popen(
        ["tee", "-a", str(path)],
        stdin=subprocess.PIPE,
        stdout=screen,
        start_new_session=True,  # so that Ctrl-C does not end it before our last output
    )
    assert tee.stdin is not None
    os.dup2(tee.stdin.fileno(), number)
    tee.stdin.close()
    try:
        yield
    finally:
        stream.flush()
        os.dup2(screen, number)
        os.close(screen)
        try:
            tee.wait(_END_S)
        except subprocess.TimeoutExpired:
            tee.terminate()
            tee.wait()
