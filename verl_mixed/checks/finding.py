"""One line of the doctor, and checks that run side by side, each with a deadline."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["ok", "warning", "bad"]

DEADLINE_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check saw."""

    status: Status
    """`bad`: a run will not start, or will fail; `warning`: it may, or it costs time."""

    check: str
    words: str
    remedy: str = ""
    """What to do; empty where nothing is to be done."""


def ok(check: str, words: str) -> Finding:
    """All is well."""
    return Finding(status="ok", check=check, words=words)


def warning(check: str, words: str, remedy: str) -> Finding:
    """It works, and should be known."""
    return Finding(status="warning", check=check, words=words, remedy=remedy)


def bad(check: str, words: str, remedy: str) -> Finding:
    """A run will not start, or fail."""
    return Finding(status="bad", check=check, words=words, remedy=remedy)


@dataclass(slots=True, kw_only=True)
class Check:
    """Something to look at, and how long it may take."""

    name: str
    look: Callable[[], Sequence[Finding]]
    deadline_s: float = DEADLINE_S
    _found: list[Finding] | None = None
    _started_at_s: float = 0.0
    _done: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Begin, in a thread that nobody waits for: a dead file server may hold it for ever."""
        self._started_at_s = time.monotonic()
        threading.Thread(target=self._run, name=f"check-{self.name}", daemon=True).start()

    def findings(self) -> list[Finding]:
        """What it saw; waits until its deadline at most."""
        self._done.wait(max(0.0, self._started_at_s + self.deadline_s - time.monotonic()))
        if self._found is None:
            return [
                bad(
                    self.name,
                    f"no answer within {self.deadline_s:g} s",
                    "look for a folder on a dead file server, or a machine out of memory",
                )
            ]
        return self._found

    def _run(self) -> None:
        try:
            self._found = list(self.look())
        except Exception as error:  # a check that fails is a finding; the others go on
            words = f"the check itself failed: {type(error).__name__}: {error}"
            self._found = [bad(self.name, words, "report it, with this line")]
        self._done.set()
