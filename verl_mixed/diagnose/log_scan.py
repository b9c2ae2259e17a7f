"""Finds the known failures in logs of any size, read as bytes. Standard library only.

Most lines cost little: a block of lines is searched for the cues of all signatures, and only a line
that holds a cue is taken apart. A Python traceback is one event, named after its first cause: its
frames, and the exceptions that follow from that cause, do not count.
"""

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from verl_mixed.diagnose.log_line import as_seconds, clean_line, time_in
from verl_mixed.diagnose.signatures import BY_ID, IN_LINES, Signature, Storm
from verl_mixed.diagnose.step_checks import StepChecks, step_of_console, step_of_record

CHUNK_BYTES = 1 << 20

LINE_BYTES = 1 << 20
"""Bytes that are read of one line; the rest of a longer line is ignored."""

_TRACE = b"Traceback (most recent call last)"
_START = b"ray init kwargs:"
_STEP, _RECORD = b"step:", b'{"step"'
_OTHER_CUES = (_TRACE, _START, _STEP, _RECORD, b"Error", b"ERROR", b"Exception", b"FATAL")

_SIGNATURES_OF_CUE: dict[bytes, list[int]] = {}
for _index, _signature in enumerate(IN_LINES):
    for _cue in _signature.cues:
        _SIGNATURES_OF_CUE.setdefault(_cue.encode(), []).append(_index)
_CUES = tuple({*_SIGNATURES_OF_CUE, *_OTHER_CUES})


def _any_of(words: Iterable[bytes]) -> re.Pattern[bytes]:
    """One alternation, grouped by first byte: bytes that begin no word are passed over fast."""
    rests: dict[bytes, list[bytes]] = {}
    for word in words:
        rests.setdefault(word[:1], []).append(re.escape(word[1:]))
    return re.compile(
        b"|".join(re.escape(first) + b"(?:" + b"|".join(own) + b")" for first, own in rests.items())
    )


# Logs have few capital letters, so one alternation is faster for cues that begin with a capital
# letter; for the other cues one search for each cue is faster.
_CAPITAL_CUES = _any_of(cue for cue in _CUES if cue[:1].isupper())
_SMALL_CUES = tuple(cue for cue in _CUES if not cue[:1].isupper())

_EXCEPTION = re.compile(
    r"[A-Za-z_][\w.]*"
    r"(?:Error|Exception|Interrupt|Killed|Died|Timeout|Unavailable|Starved|Faults|Exit)\b"
)
_CHAIN = re.compile(r"(?:During handling of the above|The above exception was the direct cause)")
_LOG_LINE = re.compile(
    r"\d{4}-\d\d-\d\d[ T]|\[|\(|(?:[A-Z]+:\d{4}-)|(?:INFO|WARNING|ERROR|DEBUG)\b|[EWIF]\d{4} "
    r"|step:\d|stuck source=|[\w ]{1,40}:\s+\d+%\||\*\*\*|slurmstepd:"
)
_ERROR_LINE = re.compile(r"\b(?:ERROR|FATAL|CRITICAL)\b|^[A-Za-z_][\w.]*(?:Error|Exception)\b")

_TRACE_LINES = 400  # of a traceback at most, without its frames
_TRACE_SILENCE = 500
"""A traceback ends when its process has written none of so many segments."""

_MOST_KINDS = 50  # values of a pattern's group `of` that a finding counts separately
_MOST_TEXT = 400  # characters of a place's text


@dataclass(frozen=True, slots=True)
class Place:
    """A line's place in a file, and its text."""

    file: str
    line: int
    """From 1; newlines end lines."""

    offset: int
    """Bytes from the beginning; for a compressed file, of the unpacked text."""

    time: str | None
    text: str


_Moment = tuple[float | None, int, int]  # (seconds, line, count) of an event


@dataclass(slots=True)
class Finding:
    """All events of one signature."""

    signature: Signature
    first: Place
    file_index: int
    """Of the first event."""

    count: int = 0
    of: Counter[str] = field(default_factory=Counter)
    """Events by what the pattern's group `of` matched."""

    last_start: int = 0
    """Number, within the file, of the run's start that the last event followed."""

    recent: deque[_Moment] = field(default_factory=deque)
    """The events that may be one storm."""

    is_storm: bool = False


@dataclass(frozen=True, slots=True)
class Event:
    """One line, or one traceback, that a signature matches."""

    signature: Signature
    of: str
    count: int
    place: Place


@dataclass(frozen=True, slots=True)
class _Segment:
    """A line, or a part of a line that carriage returns divide, taken apart."""

    offset: int
    raw: bytes
    text: str
    speaker: str
    count: int
    cues: list[bytes]


@dataclass(slots=True)
class _Trace:
    """The unfinished traceback of one speaker."""

    newest: int
    """Number of its last segment."""

    is_complete: bool = False
    """Whether the line that names the exception was read."""

    is_chained: bool = False
    lines: int = 0
    event: Event | None = None
    exception: Place | None = None


class Scan:
    """The findings in one or more logs; of each line, `line_bytes` bytes are read."""

    def __init__(self, line_bytes: int = LINE_BYTES) -> None:
        self.findings: dict[str, Finding] = {}
        self.last_errors: deque[Place] = deque(maxlen=3)
        """The last errors that match no signature."""

        self.last_line: Place | None = None
        """Of the first log that has one."""

        self.bytes_read = 0
        self.starts: dict[int, int] = {}
        """File index -> how often the run started in that file."""

        self.line_bytes = line_bytes
        self._files = 0

    def read(self, chunks: Iterable[bytes], name: str, *, finite_only: bool = False) -> int:
        """Read one log, cut anywhere into chunks; returns its size in bytes.

        Args:
            finite_only: of the numbers of steps, report only those that are not finite.
        """
        self._files += 1
        reader = _Reader(self, name, self._files, finite_only)
        for offset, block in _blocks(chunks, self.line_bytes, reader):
            reader.read_block(offset, block)
        reader.end()
        self.bytes_read += reader.size
        return reader.size

    def note(self, event: Event, start: int, file_index: int) -> None:
        """Count one event of a file, which is numbered from 1.

        `start` is the number, within the file, of the run's last start before the event.
        """
        new = Finding(event.signature, event.place, file_index)
        finding = self.findings.setdefault(event.signature.id, new)
        finding.count += event.count
        finding.last_start = start
        if finding.file_index == file_index and event.place.offset < finding.first.offset:
            finding.first = event.place  # a traceback is noted when it ends
        if event.of and (event.of in finding.of or len(finding.of) < _MOST_KINDS):
            finding.of[event.of] += event.count
        storm = finding.signature.storm
        if storm is not None and not finding.is_storm:
            recent = finding.recent
            recent.append((as_seconds(event.place.time), event.place.line, event.count))
            while not _are_close(recent[0], recent[-1], storm):
                recent.popleft()
            finding.is_storm = sum(count for _, _, count in recent) >= storm.events

    def ordered(self) -> list[Finding]:
        """The findings, the most probable root cause first.

        Findings of the last start come first; then fatal ones; then those that do not follow from
        another failure; then by place. A signature that counts only as a storm is left out where
        there was no storm.
        """
        shown = [f for f in self.findings.values() if f.signature.storm is None or f.is_storm]
        return sorted(shown, key=self._rank)

    def is_stale(self, finding: Finding) -> bool:
        """Whether the run started again after the finding's last event."""
        return finding.last_start < self.starts.get(finding.file_index, 0)

    def _rank(self, finding: Finding) -> tuple[bool, bool, bool, int, int]:
        return (
            self.is_stale(finding),
            finding.signature.severity != "fatal",
            finding.signature.follows,
            finding.file_index,
            finding.first.offset,
        )


def _blocks(
    chunks: Iterable[bytes], line_bytes: int, reader: "_Reader"
) -> Iterator[tuple[int, bytes]]:
    """(offset, whole lines); the rest of a line longer than `line_bytes` is left out."""
    rest, offset, is_skipping = b"", 0, False
    for chunk in chunks:
        reader.size += len(chunk)
        if is_skipping:
            ends = [end for end in (chunk.find(b"\n"), chunk.find(b"\r")) if end >= 0]
            if not ends:
                offset += len(chunk)
                continue
            offset, chunk, is_skipping = offset + min(ends), chunk[min(ends) :], False
        rest = rest + chunk if rest else chunk
        end = max(rest.rfind(b"\n"), rest.rfind(b"\r")) + 1
        if end:
            yield offset, rest[:end]
            offset, rest = offset + end, rest[end:]
        if len(rest) > line_bytes:
            yield offset, rest[:line_bytes]
            offset, rest, is_skipping = offset + len(rest), b"", True
    if rest:
        yield offset, rest


class _Reader:
    """Reads one file. Carriage returns divide a line too, because progress bars end with them."""

    def __init__(self, scan: Scan, name: str, index: int, finite_only: bool) -> None:
        self.size = 0
        self._scan, self._name, self._index = scan, name, index
        self._finite_only = finite_only
        self._steps = StepChecks()
        self._traces: dict[str, _Trace] = {}
        self._line = 1
        self._segments = 0
        self._starts = 0
        self._tail: tuple[int, bytes, int] = (0, b"", 1)

    def read_block(self, offset: int, block: bytes) -> None:
        """Read whole lines: those with a cue, and every line while a traceback is unfinished."""
        hits, limit = self._hits(block), self._scan.line_bytes
        position, counted = 0, 0

        def read(start: int, end: int, is_hit: bool) -> int:
            nonlocal counted
            self._line += block.count(b"\n", counted, start)
            counted = start
            self._read(offset + start, block[start : min(end, start + limit)], is_hit)
            return end + 1

        for start in [*sorted(hits), len(block)]:
            while self._traces and position < start:
                position = read(position, _end_of(block, position), False)
            if start < len(block):
                position = read(start, hits[start], True)
        self._line += block.count(b"\n", counted)
        if block.strip():
            tail = block[-4096:]
            self._tail = (offset + len(block) - len(tail), tail, self._line)

    def end(self) -> None:
        """Note unfinished tracebacks and the last line."""
        for speaker in list(self._traces):
            self._close(speaker)
        offset, tail, line = self._tail
        lines = [text for text in re.split(rb"[\r\n]+", tail) if text.strip()]
        if lines and self._scan.last_line is None and not lines[-1].startswith(_RECORD):
            last = tail.rfind(lines[-1])
            self._line = line - tail.count(b"\n", last)
            self._scan.last_line = self._place(offset + last, clean_line(lines[-1])[0], None)
        if self._starts:
            self._scan.starts[self._index] = self._starts

    def _hits(self, block: bytes) -> dict[int, int]:
        """Start -> end of the segments that hold a cue."""
        hits: dict[int, int] = {}
        passed = -1
        for match in _CAPITAL_CUES.finditer(block):
            if match.start() > passed:
                passed = self._hit(block, match.start(), hits)
        for cue in _SMALL_CUES:
            at = block.find(cue)
            while at >= 0:
                at = block.find(cue, self._hit(block, at, hits))
        return hits

    @staticmethod
    def _hit(block: bytes, at: int, hits: dict[int, int]) -> int:
        """Add the segment that holds `at`; returns its end."""
        start = block.rfind(b"\n", 0, at) + 1
        start = max(start, block.rfind(b"\r", start, at) + 1)
        end = hits.get(start)
        if end is None:
            end = hits[start] = _end_of(block, at)
        return end

    def _read(self, offset: int, raw: bytes, is_hit: bool) -> None:
        if not raw:
            return
        self._segments += 1
        if (step := _step_in(raw, is_hit)) is not None:
            self._check_step(*step, offset)
            return
        cues = [cue for cue in _CUES if cue in raw] if is_hit else []
        if not cues and not self._traces:
            return
        segment = _Segment(offset, raw, *clean_line(raw), cues)
        text, speaker = segment.text, segment.speaker
        if _START in cues and text.startswith("ray init kwargs:"):
            self._starts += 1
        self._close_silent()
        trace = self._traces.get(speaker)
        if _TRACE in cues and text.endswith("Traceback (most recent call last):"):
            if trace is None or (trace.is_complete and not trace.is_chained):
                self._close(speaker)
                trace = self._traces[speaker] = _Trace(self._segments)
            trace.newest, trace.is_complete, trace.is_chained = self._segments, False, False
            if not text.startswith("Traceback"):
                self._read_plain(segment)
        elif trace is None or not self._read_in_trace(trace, segment):
            self._read_plain(segment)

    def _read_in_trace(self, trace: _Trace, segment: _Segment) -> bool:
        """Read a segment as part of its speaker's traceback; False if it is not part of it."""
        text = segment.text
        is_exception = _EXCEPTION.match(text) is not None
        if not text.strip() or text[0] in " \t":
            trace.newest = self._segments
            return True
        if _CHAIN.match(text):
            trace.newest, trace.is_chained = self._segments, True
            return True
        if text.startswith("ray::") or "RayTaskError(" in text[:80]:
            trace.newest, trace.is_complete, trace.is_chained = self._segments, False, False
            return True
        if _LOG_LINE.match(text) and not is_exception:
            if trace.is_complete:
                self._close(segment.speaker)
            return False
        trace.lines += 1
        if trace.lines > _TRACE_LINES:
            self._close(segment.speaker)
            return False
        trace.newest, trace.is_complete = self._segments, True
        event = self._event(segment)
        if is_exception:
            trace.exception = self._place_of(segment)
        if event is None:
            return True
        known = trace.event
        if known is None or (known.signature.follows and not event.signature.follows):
            trace.event = event
        elif not is_exception and event.signature is not known.signature:
            return False  # another process wrote this line, without a prefix
        return True

    def _close_silent(self) -> None:
        for speaker, trace in list(self._traces.items()):
            if self._segments - trace.newest > _TRACE_SILENCE:
                self._close(speaker)

    def _close(self, speaker: str) -> None:
        trace = self._traces.pop(speaker, None)
        if trace is None:
            return
        if trace.event is not None:
            self._scan.note(trace.event, self._starts, self._index)
        elif trace.exception is not None:
            self._scan.last_errors.append(trace.exception)

    def _read_plain(self, segment: _Segment) -> None:
        """Read a segment that is in no traceback."""
        event = self._event(segment)
        if event is not None:
            self._scan.note(event, self._starts, self._index)
        elif segment.cues and _ERROR_LINE.search(segment.text):
            self._scan.last_errors.append(self._place_of(segment))

    def _event(self, segment: _Segment) -> Event | None:
        """The event of the first signature that matches."""
        numbers = {n for cue in segment.cues for n in _SIGNATURES_OF_CUE.get(cue, ())}
        for signature in (IN_LINES[number] for number in sorted(numbers)):
            assert signature.pattern is not None, "IN_LINES has signatures with a pattern"
            if match := signature.pattern.search(segment.text):
                of = (match.groupdict().get("of") or "").strip()[:80]
                place = self._place_of(segment, around=match.start())
                return Event(signature, of, segment.count, place)
        return None

    def _check_step(
        self, step: int, metrics: dict[str, float], moment: str | None, offset: int
    ) -> None:
        for identity, of, text in self._steps.check(metrics, finite_only=self._finite_only):
            place = self._place(offset, f"step {step}: {text}", moment)
            self._scan.note(Event(BY_ID[identity], of, 1, place), self._starts, self._index)

    def _place_of(self, segment: _Segment, around: int = 0) -> Place:
        return self._place(segment.offset, segment.text, time_in(segment.raw), around)

    def _place(self, offset: int, text: str, moment: str | None, around: int = 0) -> Place:
        """A place in the current line; a long text is cut around its character `around`."""
        text = text.strip()
        if len(text) > _MOST_TEXT:
            start = max(0, around - 100) if around > 250 else 0
            text = "…" * bool(start) + text[start : start + _MOST_TEXT - 20] + "…"
        return Place(self._name, self._line, offset, moment, text)


def _step_in(raw: bytes, is_hit: bool) -> tuple[int, dict[str, float], str | None] | None:
    """(step, metrics, time) of a line of metrics.jsonl or of verl's console logger."""
    if raw.startswith(_RECORD) and (record := step_of_record(raw)) is not None:
        return record
    if is_hit and _STEP in raw and (step := step_of_console(clean_line(raw)[0])) is not None:
        return *step, time_in(raw)
    return None


def _end_of(block: bytes, start: int) -> int:
    """The end of the segment that holds `start`."""
    end = block.find(b"\n", start)
    end = len(block) if end < 0 else end
    cut = block.find(b"\r", start, end)
    return end if cut < 0 else cut


def _are_close(first: _Moment, last: _Moment, storm: Storm) -> bool:
    """Whether two events are close: by their times, or by their lines if one has no time."""
    if first[0] is not None and last[0] is not None:
        return abs(last[0] - first[0]) <= storm.seconds
    return abs(last[1] - first[1]) <= storm.lines
