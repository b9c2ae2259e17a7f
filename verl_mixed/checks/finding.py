"""The framework of every check: a finding, and checks that run side by side with deadlines.

Imports only the standard library, because hosts are checked on a jumphost without packages.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from config.text_table import text_table

Status = Literal["ok", "warning", "bad"]

DEADLINE_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    status: Status
    """`bad`: a run will not start, or will fail. `warning`: it may fail, or it costs time."""

    check: str
    """What was checked, in a word or two: `memory`, `packages`, `ray`."""

    words: str
    """What was found, with its place: a config key with its value, a folder, a host."""

    remedy: str = ""
    """What to do; empty if nothing is to be done."""


def ok(check: str, words: str = "") -> Finding:
    """The check found no fault."""
    return Finding(status="ok", check=check, words=words)


def warning(check: str, words: str, remedy: str) -> Finding:
    """The run can start, and the user should know this."""
    return Finding(status="warning", check=check, words=words, remedy=remedy)


def bad(check: str, words: str, remedy: str) -> Finding:
    """The run will not start, or will fail."""
    return Finding(status="bad", check=check, words=words, remedy=remedy)


def from_problem(
    check: str, problem: str, made: Callable[[str, str, str], Finding] = bad
) -> Finding:
    """A finding from a sentence `<what, where>: <rule>; <remedy>` of a config check."""
    words, separator, remedy = problem.rpartition("; ")
    return made(check, words if separator else problem, remedy if separator else "")


def problems(findings: Iterable[Finding]) -> list[str]:
    """One sentence `<what, where>: <rule>; <remedy>` for each bad finding."""
    return [
        f"{finding.words}; {finding.remedy}" if finding.remedy else finding.words
        for finding in findings
        if finding.status == "bad"
    ]


@dataclass(slots=True)
class Check:
    """A function that returns findings, and its deadline; it starts when the check is made.

    It runs in a daemon thread, because a dead file server may block it for ever.
    """

    name: str
    look: Callable[[], Iterable[Finding]]
    deadline_s: float = DEADLINE_S
    _ends_at_s: float = 0.0
    _found: list[Finding] | None = None
    _done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._ends_at_s = time.monotonic() + self.deadline_s
        threading.Thread(target=self._run, name=f"check-{self.name}", daemon=True).start()

    def findings(self) -> list[Finding]:
        """What the function found; waits until the deadline at most."""
        self._done.wait(max(0.0, self._ends_at_s - time.monotonic()))
        if self._found is None:
            words = f"no answer within {self.deadline_s:g} s"
            remedy = "look for a folder on a dead file server, or a machine out of memory"
            return [bad(self.name, words, remedy)]
        return self._found

    def _run(self) -> None:
        try:
            self._found = list(self.look())
        except Exception as error:  # a check that fails is a finding, and the others continue
            words = f"the check itself failed: {type(error).__name__}: {error}"
            self._found = [bad(self.name, words, "report it, with this line")]
        self._done.set()


def totals(findings: Iterable[Finding]) -> dict[str, int]:
    """Status -> number of findings."""
    counts = Counter(finding.status for finding in findings)
    return {status: counts[status] for status in ("ok", "warning", "bad")}


def as_json(findings: Sequence[Finding]) -> str:
    """One JSON object: the findings, and the number of each status."""
    return json.dumps({"findings": list(map(asdict, findings)), "totals": totals(findings)})


def report(findings: Sequence[Finding], write: Callable[[str], object] = print) -> None:
    """Write a line for each finding, and the number of each status."""
    rows = [
        [each.status, each.check, f"{each.words}; {each.remedy}" if each.remedy else each.words]
        for each in findings
    ]
    for line in text_table(rows, least=(7, 0)):
        write(line)
    counts = totals(findings)
    write(f"{counts['ok']} ok, {counts['warning']} warnings, {counts['bad']} bad")
