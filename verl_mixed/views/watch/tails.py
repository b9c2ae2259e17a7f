"""`metrics.jsonl` and `train.log` of a run, read while they grow.

Each `read` reads the bytes that were added since the last one. A file that shrank or was replaced
is read again from its beginning: a resumed trainer removes the steps after its checkpoint.
"""

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from agent_loop.records.run_folder import metrics_line
from config.disk import open_plain
from verl_mixed.diagnose.log_line import clean_line
from verl_mixed.run.text import clock, printable
from verl_mixed.views.progress import Line

BLOCK_BYTES = 1 << 22

LOG_TAIL_BYTES = 200_000
"""Bytes that the first `read` reads from the end of a log."""

WHOLE_LINES = 100
"""Newest lines of `metrics.jsonl` whose metrics are all kept."""

MOST_LINE_BYTES = 1 << 24
"""Of a longer line of `metrics.jsonl` only the beginning is kept, so it is passed over."""

_MARK_BYTES = 256
_LINE_BYTES = 4096
_MOST_WARNINGS = 30


class FileTail:
    """The bytes that are added to a file.

    Args:
        path: the file, which need not exist.
        last_bytes: bytes that the first read takes from the end of the file; None: all.
        begin: byte where the first read begins; 0: `last_bytes` decides.
    """

    def __init__(self, path: Path, last_bytes: int | None = None, begin: int = 0) -> None:
        self._path, self._last_bytes = path, last_bytes
        self._offset = begin
        self._mark = b""
        """The bytes before the offset; if the file has others there, it was replaced."""

    def blocks(self) -> Iterator[tuple[bool, bytes]]:
        """(is_new, bytes added), in order; is_new: earlier bytes are no longer in the file."""
        try:
            file = open_plain(self._path)
        except FileNotFoundError:
            if self._offset:
                self._offset, self._mark = 0, b""
                yield True, b""
            return
        with file:
            before = self._offset
            file.seek(before - len(self._mark))
            is_new = before == 0 or file.read(len(self._mark)) != self._mark
            if is_new:
                size = file.seek(0, 2)
                last = size if self._last_bytes is None else self._last_bytes
                self._offset, self._mark = max(0, size - last), b""
            file.seek(self._offset)
            while block := file.read(BLOCK_BYTES):
                self._offset += len(block)
                self._mark = (self._mark + block)[-_MARK_BYTES:]
                yield is_new, block
                is_new = False
            if is_new and before:
                yield True, b""


class MetricsTail:
    """The lines of a `metrics.jsonl`, kept up to date.

    Lines before the newest `WHOLE_LINES` keep only the metrics of curves. An unfinished last line
    is read once it is finished. A finished line that is not a line of metrics is passed over. The
    file need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._tail = FileTail(path)
        self._begin()

    def _begin(self) -> None:
        self.lines: list[Line] = []
        """In the order of the file."""

        self.passed_over = 0
        """How many finished lines cannot be read."""

        self._thinned = 0
        self._torn = b""

    def read(self) -> bool:
        """Read what was added; returns whether `lines` or `passed_over` changed."""
        changed = False
        for is_new, block in self._tail.blocks():
            if is_new:
                changed = changed or bool(self.lines or self.passed_over)
                self._begin()
            *finished, self._torn = (self._torn + block).split(b"\n")
            self._torn = self._torn[:MOST_LINE_BYTES]
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
            kept = {n: value for n, value in old["metrics"].items() if _is_drawn(n)}
            self.lines[self._thinned] = {**old, "metrics": kept}
            self._thinned += 1


# The metrics that curves and changes are computed from. A source's name may have a slash.
_DRAWN = re.compile(
    r"mixed/.+?/(?:val/)?(?:reward/mean|infra_error_rate)|mixed/.+?/reward/ci95"
    r"|mixed/.+?/val/(?:count|pass_rate)|critic/score/(?:min|max)",
    re.S,
)


@lru_cache(maxsize=1 << 14)
def _is_drawn(name: str) -> bool:
    return _DRAWN.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogWarning:
    """A warning or an error of the log."""

    level: str
    text: str
    count: int
    """How often the log has it, apart from the numbers in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StuckTrajectory:
    """A trajectory that the watchdog named because it waits too long."""

    source: str
    row_id: str
    turn: int
    waits_for: str
    waited_s: float
    """How long it had waited at `named_at`."""

    named_at: float
    """Seconds since 1970."""

    def may_still_wait(self, now: float) -> bool:
        """Whether the trajectory may still wait.

        The watchdog names a trajectory again when its wait has doubled, and looks four times in the
        shortest wait that it names. A trajectory that was not named again by 1.5 times its wait
        after `named_at` no longer waits.
        """
        return now <= self.named_at + 1.5 * self.waited_s

    def describe(self, now: float) -> str:
        """One line of text."""
        waited = clock(self.waited_s + max(0.0, now - self.named_at))
        place = f"{self.source} {self.row_id} turn {self.turn}"
        return f"{place} waits for {self.waits_for}, {waited}"


_CUES = (b"WARNING", b"ERROR", b"CRITICAL", b"FATAL", b"stuck source=")
_LEVEL = re.compile(r"\b(WARNING|ERROR|CRITICAL|FATAL)\b")
_MOMENT = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d")
_PREFIX = re.compile(
    rf"(?:[\s:|-]|(?:WARNING|ERROR|CRITICAL|FATAL)\b|{_MOMENT.pattern}(?:[.,]\d+)?)+"
)
_STUCK = re.compile(
    r"\bstuck source=(?P<source>\S*) row_id=(?P<row_id>.*) turn=(?P<turn>\d{1,6}) "
    r"waits_for=(?P<waits_for>\w+) for_s=(?P<waited_s>\d{1,9})"
)
_START = b"ray init kwargs:"


class LogTail:
    """The warnings at the end of a `train.log`, of the run's last start, kept up to date.

    The log need not exist. `now` gives seconds since 1970. `begin` is the byte where this start's
    part begins; 0: not known.
    """

    def __init__(self, path: Path, now: Callable[[], float] = time.time, begin: int = 0) -> None:
        self._tail = FileTail(path, LOG_TAIL_BYTES, begin)
        self._path, self._now = path, now
        self._torn, self._end = b"", b""
        self._begin()

    def _begin(self) -> None:
        self._warnings: OrderedDict[str, LogWarning] = OrderedDict()
        self._stuck: OrderedDict[tuple[str, str], StuckTrajectory] = OrderedDict()

    @property
    def warnings(self) -> list[LogWarning]:
        """Each warning once, the newest last."""
        return list(self._warnings.values())

    @property
    def text(self) -> str:
        """The end of the log, from the last start of the run."""
        end = self._end
        return end[max(0, end.rfind(_START)) :].decode("utf-8", "replace")

    def stuck(self) -> list[StuckTrajectory]:
        """Trajectories that may still wait, the newest last."""
        now = self._now()
        return [each for each in self._stuck.values() if each.may_still_wait(now)]

    def read(self) -> bool:
        """Read what was added; returns whether anything was."""
        changed = False
        for is_new, block in self._tail.blocks():
            changed = True
            if is_new:
                self._torn, self._end = b"", b""
                self._begin()
            self._end = (self._end + block)[-LOG_TAIL_BYTES:]
            whole = self._torn + block.replace(b"\r", b"\n")  # of progress bars
            *finished, torn = whole.split(b"\n")
            self._torn = torn[:_LINE_BYTES]
            written_at = self._written_at() if is_new else None
            for raw in finished:
                self._take(raw[:_LINE_BYTES], written_at)
        return changed

    def _written_at(self) -> float:
        try:
            return self._path.stat().st_mtime
        except OSError:
            return self._now()

    def _take(self, raw: bytes, written_at: float | None) -> None:
        """Note a warning or a stuck trajectory; it came by `written_at`, or just now (None)."""
        if raw.startswith(_START):
            self._begin()
        if not any(cue in raw for cue in _CUES):
            return
        text, _, count = clean_line(raw)
        text = printable(text)
        if stuck := _STUCK.search(text):
            self._note_stuck(stuck, text, written_at)
        elif level := _LEVEL.search(raw[:300].decode("utf-8", "replace")):
            prefix = _PREFIX.match(text)
            self._note_warning(level[0], text[prefix.end() if prefix else 0 :], count)

    def _note_stuck(self, match: re.Match[str], text: str, written_at: float | None) -> None:
        # A worker may have another clock or time zone, so a line that came just now is dated by
        # this machine's clock.
        named_at = self._now()
        if written_at is not None:
            named_at = min(named_at, written_at, _moment_of(text) or written_at)
        key = match["source"], match["row_id"]
        self._stuck.pop(key, None)
        self._stuck[key] = StuckTrajectory(
            source=match["source"],
            row_id=match["row_id"],
            turn=int(match["turn"]),
            waits_for=match["waits_for"],
            waited_s=float(match["waited_s"]),
            named_at=named_at,
        )
        if len(self._stuck) > 1000:
            self._stuck.popitem(last=False)

    def _note_warning(self, level: str, text: str, count: int) -> None:
        key = re.sub(r"\d+", "#", text)
        before = self._warnings.pop(key, None)
        count += before.count if before else 0
        self._warnings[key] = LogWarning(level=level, text=text, count=count)
        if len(self._warnings) > _MOST_WARNINGS:
            self._warnings.popitem(last=False)


def _moment_of(text: str) -> float | None:
    """The time in a line, as a time of this machine's zone; None without one."""
    match = _MOMENT.search(text)
    if match is None:
        return None
    try:
        return time.mktime(time.strptime(match[0].replace("T", " "), "%Y-%m-%d %H:%M:%S"))
    except (ValueError, OverflowError):
        return None
