"""Why a run ended before it was complete: two exceptions, and the reason in a child's log."""

import os
import signal
from pathlib import Path

from verl_mixed.views.progress import last_error

LOG_TAIL_BYTES = 200_000
"""How much of a log is searched for the reason."""


class RunFailed(RuntimeError):
    """The run ended before it was complete; the message is for the user.

    Args:
        message: what is printed.
        cause: the failure in one line.
        step: the last step with metrics.
        mends: whether a resume may mend it.
    """

    def __init__(self, message: str, *, cause: str = "", step: int = 0, mends: bool = True) -> None:
        super().__init__(message)
        self.cause, self.step, self.mends = cause or message.splitlines()[0], step, mends


class RunStopped(RuntimeError):
    """The run saved a checkpoint and ended, because `verl-mixed stop` asked for it."""


def reason_of_end(log: Path, start: int, code: int | None) -> str:
    """Why a child process ended: the last error in its log, else its signal or exit code.

    Args:
        log: its log.
        start: size of the log in bytes when the child was started.
        code: its exit code; negative for a signal, None if it still runs.
    """
    text = log_tail(log, start)
    if error := last_error(text):
        return error
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"
    lines = [line for line in text.splitlines() if line.strip()]
    return f"exit {code}: {lines[-1].strip()}" if lines else f"exit {code}, and its log is empty"


def log_tail(log: Path, start: int) -> str:
    """The last `LOG_TAIL_BYTES` of a log, without its first `start` bytes."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - LOG_TAIL_BYTES))
        return file.read().decode(errors="replace")
