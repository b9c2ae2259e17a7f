"""Files of a run that grow, read as they grow: `metrics.jsonl` and `train.log`.

Each look reads what was added since the one before. A file that shrank or was replaced (a resumed
trainer takes the steps after its checkpoint back) is read anew.
"""

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from agent_loop.training.run_folder import metrics_line
from verl_mixed.diagnose.log_scan import clean_line
from verl_mixed.run.text import clock, printable
from verl_mixed.views.progress import Line

BLOCK_BYTES = 1 << 22

LOG_TAIL_BYTES = 200_000
"""What is looked at of a log that was there before."""

WHOLE_LINES = 100
"""Newest lines of `metrics.jsonl` of which every metric is kept."""

_MARK_BYTES = 256
_LINE_BYTES = 4096
_MOST_WARNINGS = 30


class Growth:
    """What is added to a file.

    Args:
        path: the file, there or not.
        last_bytes: where more is there at the first look, this much of its end is read; None reads
            all.
        begin: byte where the first look begins; 0 leaves it to `last_bytes`.
    """

    def __init__(self, path: Path, last_bytes: int | None = None, begin: int = 0) -> None:
        self._path, self._last_bytes = path, last_bytes
        self._offset = begin
        self._mark = b""
        """What stood before the offset: a file where it does not is another."""

    def blocks(self) -> Iterator[tuple[bool, bytes]]:
        """(whether what was read before counts no more, bytes added), in order."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            if self._offset:
                self._offset, self._mark = 0, b""
                yield True, b""
            return
        with file:
            before = self._offset
            file.seek(before - len(self._mark))
            anew = before == 0 or file.read(len(self._mark)) != self._mark
            if anew:
                self._begin(file.seek(0, 2))
            file.seek(self._offset)
            while block := file.read(BLOCK_BYTES):
                self._offset += len(block)
                self._mark = (self._mark + block)[-_MARK_BYTES:]
                yield anew, block
                anew = False
            if anew and before:
                yield True, b""

    def _begin(self, size: int) -> None:
        last = size if self._last_bytes is None else self._last_bytes
        self._offset, self._mark = max(0, size - last), b""


class MetricsTail:
    """The lines of a `metrics.jsonl`, kept up to date.

    Of lines before the newest `WHOLE_LINES`, only what curves are drawn of is kept. A last line
    that is not finished waits; a finished one that is no line of metrics is passed over.

    Args:
        path: the file, there or not.
    """

    def __init__(self, path: Path) -> None:
        self._growth = Growth(path)
        self._begin()

    def _begin(self) -> None:
        self.lines: list[Line] = []
        """In the order of the file."""

        self.passed_over = 0
        """Finished lines that are none."""

        self._thinned = 0
        self._torn = b""

    def read(self) -> bool:
        """Read what was added.

        Returns:
            Whether anything changed.
        """
        changed = False
        for anew, block in self._growth.blocks():
            if anew:
                changed = changed or bool(self.lines)
                self._begin()
            *finished, self._torn = (self._torn + block).split(b"\n")
            changed = changed or bool(finished)
            for raw in finished:
                self._take(raw)
        return changed

    def _take(self, raw: bytes) -> None:
        if not raw.strip():
            return
        line = metrics_line(raw)
        if line is None:
            self.passed_over += 1
            return
        self.lines.append(line)
        if self._thinned < len(self.lines) - WHOLE_LINES:
            old = self.lines[self._thinned]
            kept = {n: value for n, value in old["metrics"].items() if _is_of_a_curve(n)}
            self.lines[self._thinned] = {**old, "metrics": kept}
            self._thinned += 1


# A source may have a slash in its name.
_OF_A_CURVE = re.compile(
    r"mixed/.+?/(?:val/)?(?:reward/mean|infra_error_rate)|mixed/.+?/reward/ci95"
    r"|mixed/.+?/val/(?:count|pass_rate)|critic/score/(?:min|max)",
    re.S,
)


@lru_cache(maxsize=1 << 14)
def _is_of_a_curve(name: str) -> bool:
    return _OF_A_CURVE.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned:
    """A warning or an error of the log."""

    level: str
    text: str
    count: int
    """How often it was said, with other numbers in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """A trajectory that the watchdog has named."""

    source: str
    row_id: str
    turn: int
    waits_for: str
    waited_s: float
    """Until it was named."""

    named_at: float
    """Seconds since 1970."""

    def may_still_wait(self, now: float) -> bool:
        """Whether its end is not known: the watchdog names it again once its wait has doubled.

        It looks four times in the shortest wait that it names.
        """
        return now <= self.named_at + 1.5 * self.waited_s

    def words(self, now: float) -> str:
        """One line of text."""
        waited = clock(self.waited_s + max(0.0, now - self.named_at))
        place = f"{self.source} {self.row_id} turn {self.turn}"
        return f"{place} waits for {self.waits_for}, {waited}"


_CUES = (b"WARNING", b"ERROR", b"CRITICAL", b"FATAL", b"stuck source=")
_LEVEL = re.compile(r"\b(WARNING|ERROR|CRITICAL|FATAL)\b")
_MOMENT = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d")
_BEFORE_THE_WORDS = re.compile(
    rf"(?:[\s:|-]|(?:WARNING|ERROR|CRITICAL|FATAL)\b|{_MOMENT.pattern}(?:[.,]\d+)?)+"
)
_STUCK = re.compile(
    r"\bstuck source=(?P<source>\S*) row_id=(?P<row_id>.*) turn=(?P<turn>\d{1,6}) "
    r"waits_for=(?P<waits_for>\w+) for_s=(?P<waited_s>\d{1,9})"
)
_START = b"ray init kwargs:"


class LogTail:
    """What the end of a `train.log` warns of, of the run's last start, kept up to date.

    Args:
        path: the log, there or not.
        now: seconds since 1970.
        begin: byte where this start's part begins; 0 where that is not known.
    """

    def __init__(self, path: Path, now: Callable[[], float] = time.time, begin: int = 0) -> None:
        self._growth = Growth(path, LOG_TAIL_BYTES, begin)
        self._path, self._now = path, now
        self._torn = b""
        self._end = b""
        self._begin()

    def _begin(self) -> None:
        self._warned: OrderedDict[str, Warned] = OrderedDict()
        self._stuck: OrderedDict[tuple[str, str], Stuck] = OrderedDict()

    @property
    def warnings(self) -> list[Warned]:
        """Each once, the newest last."""
        return list(self._warned.values())

    @property
    def text(self) -> str:
        """The end of the log, of the last start only."""
        end = self._end
        return end[max(0, end.rfind(_START)) :].decode("utf-8", "replace")

    def stuck(self) -> list[Stuck]:
        """Trajectories that were named and may still wait, the newest last."""
        now = self._now()
        return [each for each in self._stuck.values() if each.may_still_wait(now)]

    def read(self) -> bool:
        """Read what was added.

        Returns:
            Whether anything was.
        """
        changed = False
        for anew, block in self._growth.blocks():
            changed = True
            if anew:
                self._torn, self._end = b"", b""
                self._begin()
            self._end = (self._end + block)[-LOG_TAIL_BYTES:]
            whole = self._torn + block.replace(b"\r", b"\n")  # a progress bar draws over itself
            *finished, torn = whole.split(b"\n")
            self._torn = torn[:_LINE_BYTES]
            written_at = self._written_at() if anew else None
            for raw in finished:
                self._take(raw[:_LINE_BYTES], written_at)
        return changed

    def _written_at(self) -> float:
        try:
            return self._path.stat().st_mtime
        except OSError:
            return self._now()

    def _take(self, raw: bytes, written_at: float | None) -> None:
        """Note what a line says.

        Args:
            raw: the line.
            written_at: latest moment that it can be of; None: it came just now.
        """
        if raw.startswith(_START):
            self._begin()
        if not any(cue in raw for cue in _CUES):
            return
        text, _, count = clean_line(raw)
        text = printable(text)
        if found := _STUCK.search(text):
            self._note_stuck(found, text, written_at)
        elif level := _LEVEL.search(raw[:300].decode("utf-8", "replace")):
            before = _BEFORE_THE_WORDS.match(text)
            self._note_warning(level[0], text[before.end() if before else 0 :], count)

    def _note_stuck(self, found: re.Match[str], text: str, written_at: float | None) -> None:
        # A worker's clock and zone may be others: of a line that came just now, ours is right.
        named_at = self._now()
        if written_at is not None:
            named_at = min(named_at, written_at, _moment_of(text) or written_at)
        key = found["source"], found["row_id"]
        self._stuck.pop(key, None)
        self._stuck[key] = Stuck(
            source=found["source"],
            row_id=found["row_id"],
            turn=int(found["turn"]),
            waits_for=found["waits_for"],
            waited_s=float(found["waited_s"]),
            named_at=named_at,
        )
        if len(self._stuck) > 1000:
            self._stuck.popitem(last=False)

    def _note_warning(self, level: str, text: str, count: int) -> None:
        key = re.sub(r"\d+", "#", text)
        before = self._warned.pop(key, None)
        count += before.count if before else 0
        self._warned[key] = Warned(level=level, text=text, count=count)
        if len(self._warned) > _MOST_WARNINGS:
            self._warned.popitem(last=False)


def _moment_of(text: str) -> float | None:
    """When a line was written, if it says so, on this machine's clock."""
    found = _MOMENT.search(text)
    if found is None:
        return None
    try:
        return time.mktime(time.strptime(found[0].replace("T", " "), "%Y-%m-%d %H:%M:%S"))
    except (ValueError, OverflowError):
        return None
