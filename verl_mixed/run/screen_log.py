"""What is printed, in a file as well: this process's words and those of its children."""

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
"""For the last words to be written; a child that outlives us may hold the pipe open."""


@contextmanager
def copied_to(path: Path) -> Generator[None]:
    """Add everything that is printed in the block to a file, and print it too.

    It passes through pipes, so what asks for a terminal finds none: a run prints a line a step.
    An error that ends the block ends the process with 1, after its traceback is in the file too.

    Args:
        path: made where it is not there; its folder must be.

    Raises:
        ValueError: it cannot be written.
    """
    try:
        path.open("ab").close()
    except OSError as error:
        raise ValueError(f"cannot write --log-file {path}: {error.strerror}") from error
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
        start_new_session=True,  # Ctrl-C is not for it: our last words come after
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
