"""Reads logs of any size as bytes and names the known failures in them. Standard library only.

Most lines cost next to nothing: a block of lines is searched for the signatures' cues, and only
lines that hold one are taken apart. A Python traceback is one event: the first cause in it counts,
its frames and what follows from the cause do not.
"""

import calendar
import re
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from verl_mixed.diagnose.signatures import BY_ID, IN_LINES, Signature
from verl_mixed.diagnose.step_checks import StepChecks, of_console, of_record

CHUNK_BYTES = 1 << 20

LINE_BYTES = 1 << 20
"""What is looked at of one line; the rest of a longer one is passed over."""

_TRACE = b"Traceback (most recent call last)"
_START = b"ray init kwargs:"
_STEP, _RECORD = b"step:", b'{"step"'
_OTHERS = (_TRACE, _START, _STEP, _RECORD, b"Error", b"ERROR", b"Exception", b"FATAL")

_OF_CUE: dict[bytes, list[int]] = {}
for _index, _signature in enumerate(IN_LINES):
    for _cue in _signature.cues:
        _OF_CUE.setdefault(_cue.encode(), []).append(_index)
_CUES = tuple({*_OF_CUE, *_OTHERS})


def _any_of(words: Iterable[bytes]) -> re.Pattern[bytes]:
    """One alternation, grouped by first byte: a byte that begins none is passed over fast."""
    rests: dict[bytes, list[bytes]] = {}
    for word in words:
        rests.setdefault(word[:1], []).append(re.escape(word[1:]))
    return re.compile(
        b"|".join(re.escape(first) + b"(?:" + b"|".join(own) + b")" for first, own in rests.items())
    )


# In logs, capitals are rare and small letters are not: an alternation is fast where few bytes begin
# a word of it, else one search for each word is faster.
_CAPITALS = _any_of(cue for cue in _CUES if cue[:1].isupper())
_SMALL = tuple(cue for cue in _CUES if not cue[:1].isupper())

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_SPEAKER = re.compile(r"\((?:[^()]*\bpid=\d+[^()]*|(?:raylet|autoscaler|gcs_server)[^()]*)\) ?")
_VLLM = re.compile(r"(?:ERROR|WARNING|INFO|DEBUG) \d\d-\d\d \d\d:\d\d:\d\d \[?[\w./-]+:\d+\] ?")
_REPEATED = re.compile(r"\s*\[repeated (\d{1,9})x across cluster\].*$", re.DOTALL)
_TIME = re.compile(
    r"(?P<date>\d{4}-\d\d-\d\d)[T ](?P<clock>\d\d:\d\d:\d\d)"
    r"|(?P<web>\d\d/[A-Z][a-z]{2}/\d{4}):(?P<web_clock>\d\d:\d\d:\d\d)"
    r"|\b[EWIF](?P<day>\d{3,4}) (?P<day_clock>\d\d:\d\d:\d\d)"
    r"|\b(?P<month>\d\d-\d\d) (?P<month_clock>\d\d:\d\d:\d\d)"
)
_EXCEPTION = re.compile(
    r"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Killed|Died|Timeout|Unavailable|Starved|Exit)\b"
)
_CHAIN = re.compile(r"(?:During handling of the above|The above exception was the direct cause)")
_LOG_LINE = re.compile(
    r"\d{4}-\d\d-\d\d[ T]|\[|\(|(?:[A-Z]+:\d{4}-)|(?:INFO|WARNING|ERROR|DEBUG)\b|[EWIF]\d{4} "
    r"|step:\d|stuck source=|[\w ]{1,40}:\s+\d+%\||\*\*\*|slurmstepd:"
)
_ERROR_LINE = re.compile(r"\b(?:ERROR|FATAL|CRITICAL)\b|^[A-Za-z_][\w.]*(?:Error|Exception)\b")

_TRACE_LINES = 400
_TRACE_SILENCE = 500
"""A traceback that its speaker left unfinished ends after so many lines of others."""

_OF_LIMIT = 50


@dataclass(frozen=True, slots=True)
class Place:
    """Where a line stands."""

    file: str
    line: int
    """From 1, by newlines."""

    offset: int
    """In bytes, of the text; of a compressed file, after unpacking."""

    time: str | None
    text: str


@dataclass(slots=True)
class Finding:
    """One signature's events."""

    signature: Signature
    count: int = 0
    first: Place | None = None
    of: Counter[str] = field(default_factory=Counter)
    last_start: int = 0
    """Which start of the run the last event is of."""

    file_index: int = 0
    recent: deque[tuple[float | None, int, int]] = field(default_factory=deque)
    is_storm: bool = False


@dataclass(slots=True)
class Match:
    signature: Signature
    of: str
    count: int
    place: Place


@dataclass(slots=True)
class _Trace:
    """A traceback under way, of one speaker."""

    began: int
    spoke: int
    """Segment number of its last line."""

    after: bool = False
    """The exception's line has been seen."""

    chained: bool = False
    lines: int = 0
    match: Match | None = None
    last: Place | None = None


class Scan:
    """What was found in one or more logs.

    Args:
        line_bytes: what is looked at of one line.
    """

    def __init__(self, line_bytes: int = LINE_BYTES) -> None:
        self.findings: dict[str, Finding] = {}
        self.last_errors: deque[Place] = deque(maxlen=3)
        """The last lines that tell of an error nothing is known of."""

        self.last_line: Place | None = None
        """Of the first log that has one."""

        self.bytes_read = 0
        self.starts: dict[int, int] = {}
        self.line_bytes = line_bytes
        self._files = 0

    def read(self, chunks: Iterable[bytes], name: str, *, finite_only: bool = False) -> int:
        """Read one log.

        Args:
            chunks: its bytes in order, cut anywhere.
            name: as shown.
            finite_only: of the steps in it, look only for numbers that are none.

        Returns:
            How many bytes there were.
        """
        self._files += 1
        reader = _Reader(self, name, self._files, finite_only)
        for offset, block in _blocks(chunks, self.line_bytes, reader):
            reader.block(offset, block)
        reader.end()
        self.bytes_read += reader.size
        return reader.size

    def note(self, match: Match, start: int, file_index: int) -> None:
        """Count one event.

        Args:
            match: what was found.
            start: of which start of the run, by its number in the file.
            file_index: of which file, from 1.
        """
        finding = self.findings.setdefault(match.signature.id, Finding(match.signature))
        finding.count += match.count
        finding.last_start = start
        if finding.first is None:
            finding.first, finding.file_index = match.place, file_index
        elif finding.file_index == file_index and match.place.offset < finding.first.offset:
            finding.first = match.place  # a traceback is told when it ends
        if match.of and (match.of in finding.of or len(finding.of) < _OF_LIMIT):
            finding.of[match.of] += match.count
        storm = finding.signature.storm
        if storm is not None and not finding.is_storm:
            recent = finding.recent
            recent.append((_seconds(match.place.time), match.place.line, match.count))
            while not _together(recent, storm.seconds, storm.lines):
                recent.popleft()
            finding.is_storm = sum(count for _, _, count in recent) >= storm.events

    def ordered(self) -> list[Finding]:
        """The findings, what most probably is the root cause first.

        Those of the last start, then fatal ones, then those that do not follow from others, then by
        place.
        """
        told = [f for f in self.findings.values() if f.signature.storm is None or f.is_storm]
        return sorted(told, key=self._rank)

    def is_stale(self, finding: Finding) -> bool:
        """Whether it was last seen before the log's last start of the run."""
        return finding.last_start < self.starts.get(finding.file_index, 0)

    def _rank(self, finding: Finding) -> tuple[bool, bool, bool, int, int]:
        assert finding.first is not None, "a finding is made with its first event"
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
    """(offset, whole lines); the middle of a line that is too long is left out."""
    rest, offset, skipping = b"", 0, False
    for chunk in chunks:
        reader.size += len(chunk)
        if skipping:
            end = _first_separator(chunk)
            if end < 0:
                offset += len(chunk)
                continue
            offset, chunk, skipping = offset + end, chunk[end:], False
        rest = rest + chunk if rest else chunk
        end = max(rest.rfind(b"\n"), rest.rfind(b"\r")) + 1
        if end:
            yield offset, rest[:end]
            offset, rest = offset + end, rest[end:]
        if len(rest) > line_bytes:
            yield offset, rest[:line_bytes]
            offset, rest, skipping = offset + len(rest), b"", True
    if rest:
        yield offset, rest


def _first_separator(chunk: bytes) -> int:
    ends = [end for end in (chunk.find(b"\n"), chunk.find(b"\r")) if end >= 0]
    return min(ends, default=-1)


class _Reader:
    """One file's lines. A line is cut at carriage returns too: progress bars end parts by them."""

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

    def block(self, offset: int, block: bytes) -> None:
        """Take whole lines."""
        hits, limit = self._hits(block), self._scan.line_bytes
        position, counted = 0, 0
        for start in [*sorted(hits), None]:
            while self._traces and position < len(block) and (start is None or position < start):
                end = _end_of(block, position)
                self._line += block.count(b"\n", counted, position)
                counted = position
                self._take(offset + position, block[position : min(end, position + limit)], False)
                position = end + 1
            if start is None:
                break
            end = hits[start]
            self._line += block.count(b"\n", counted, start)
            counted = start
            self._take(offset + start, block[start : min(end, start + limit)], True)
            position = end + 1
        self._line += block.count(b"\n", counted)
        if block.strip():
            tail = block[-4096:]
            self._tail = (offset + len(block) - len(tail), tail, self._line)

    def end(self) -> None:
        """Tell what is unfinished."""
        for speaker in list(self._traces):
            self._close(speaker)
        offset, tail, line = self._tail
        lines = [text for text in re.split(rb"[\r\n]+", tail) if text.strip()]
        if lines and self._scan.last_line is None and not lines[-1].startswith(_RECORD):
            last = tail.rfind(lines[-1])
            line -= tail.count(b"\n", last)
            text, _, _ = clean_line(lines[-1])
            self._scan.last_line = self._place(offset + last, text, None, line)
        if self._starts:
            self._scan.starts[self._index] = self._starts

    def _hits(self, block: bytes) -> dict[int, int]:
        """Start -> end of the parts that hold a cue."""
        hits: dict[int, int] = {}
        passed = -1
        for found in _CAPITALS.finditer(block):
            if found.start() > passed:
                passed = self._hit(block, found.start(), hits)
        for cue in _SMALL:
            at = block.find(cue)
            while at >= 0:
                at = block.find(cue, self._hit(block, at, hits))
        return hits

    @staticmethod
    def _hit(block: bytes, at: int, hits: dict[int, int]) -> int:
        start = block.rfind(b"\n", 0, at) + 1
        start = max(start, block.rfind(b"\r", start, at) + 1)
        end = hits.get(start)
        if end is None:
            end = hits[start] = _end_of(block, at)
        return end

    def _take(self, offset: int, raw: bytes, is_hit: bool) -> None:
        """One part of a line."""
        if not raw:
            return
        self._segments += 1
        if raw.startswith(_RECORD) and self._record(offset, raw):
            return
        if is_hit and _STEP in raw and self._console(offset, raw):
            return
        cues = [cue for cue in _CUES if cue in raw] if is_hit else []
        if not cues and not self._traces:
            return
        text, speaker, count = clean_line(raw)
        if _START in cues and text.startswith("ray init kwargs:"):
            self._starts += 1
        opens = _TRACE in cues and text.endswith("Traceback (most recent call last):")
        for other in [
            s for s, t in self._traces.items() if self._segments - t.spoke > _TRACE_SILENCE
        ]:
            self._close(other)
        trace = self._traces.get(speaker)
        if opens:
            if trace is None or (trace.after and not trace.chained):
                self._close(speaker)
                trace = self._traces[speaker] = _Trace(self._segments, self._segments)
            trace.spoke, trace.after, trace.chained = self._segments, False, False
            if not text.startswith("Traceback"):
                self._plain(offset, raw, text, count, cues)
            return
        if trace is None or not self._in_trace(trace, offset, raw, text, speaker, count, cues):
            self._plain(offset, raw, text, count, cues)

    def _close_silent(self) -> None:
        for speaker, trace in list(self._traces.items()):
            if self._segments - trace.spoke > _TRACE_SILENCE:
                self._close(speaker)

    def _in_trace(
        self,
        trace: _Trace,
        offset: int,
        raw: bytes,
        text: str,
        speaker: str,
        count: int,
        cues: list[bytes],
    ) -> bool:
        """Take a line as part of its speaker's traceback; False where it is none."""
        is_exception = _EXCEPTION.match(text) is not None
        if not text.strip() or text[0] in " \t":
            trace.spoke = self._segments
            return True
        if _CHAIN.match(text):
            trace.spoke, trace.chained = self._segments, True
            return True
        if text.startswith("ray::") or "RayTaskError(" in text[:80]:
            trace.spoke, trace.after, trace.chained = self._segments, False, False
            return True
        if _LOG_LINE.match(text) and not is_exception:
            if trace.after:
                self._close(speaker)
            return False
        trace.lines += 1
        if trace.lines > _TRACE_LINES:
            self._close(speaker)
            return False
        trace.spoke, trace.after = self._segments, True
        match = self._match(offset, raw, text, count, cues)
        if is_exception:
            trace.last = self._place(offset, text, _time_in(raw))
        if match is None:
            return True
        known = trace.match
        if known is None or (known.signature.follows and not match.signature.follows):
            trace.match = match
        elif not is_exception and match.signature is not known.signature:
            return False  # another's line, which has no mark of its own
        return True

    def _close(self, speaker: str) -> None:
        trace = self._traces.pop(speaker, None)
        if trace is None:
            return
        if trace.match is not None:
            self._scan.note(trace.match, self._starts, self._index)
        elif trace.last is not None:
            self._scan.last_errors.append(trace.last)

    def _plain(self, offset: int, raw: bytes, text: str, count: int, cues: list[bytes]) -> None:
        """A line that is in no traceback."""
        match = self._match(offset, raw, text, count, cues)
        if match is not None:
            self._scan.note(match, self._starts, self._index)
        elif cues and _ERROR_LINE.search(text):
            self._scan.last_errors.append(self._place(offset, text, _time_in(raw)))

    def _match(
        self, offset: int, raw: bytes, text: str, count: int, cues: list[bytes]
    ) -> Match | None:
        for index in sorted({index for cue in cues for index in _OF_CUE.get(cue, ())}):
            signature = IN_LINES[index]
            found = signature.compiled.search(text)
            if found is not None:
                of = found.groupdict().get("of") or ""
                place = self._place(offset, text, _time_in(raw), around=found.start())
                return Match(signature, of.strip()[:80], count, place)
        return None

    def _record(self, offset: int, raw: bytes) -> bool:
        """A line of metrics.jsonl."""
        step = of_record(raw)
        if step is None:
            return False
        number, time_s, metrics = step
        try:
            moment = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(time_s)) if time_s else None
        except (ValueError, OverflowError, OSError):
            moment = None
        self._judge(number, metrics, offset, moment)
        return True

    def _console(self, offset: int, raw: bytes) -> bool:
        """A line of verl's console logger."""
        step = of_console(clean_line(raw)[0])
        if step is None:
            return False
        self._judge(step[0], step[1], offset, _time_in(raw))
        return True

    def _judge(self, step: int, metrics: dict[str, float], offset: int, moment: str | None) -> None:
        for name, of, words in self._steps.check(metrics, finite_only=self._finite_only):
            place = self._place(offset, f"step {step}: {words}", moment)
            self._scan.note(Match(BY_ID[name], of, 1, place), self._starts, self._index)

    def _place(
        self,
        offset: int,
        text: str,
        moment: str | None,
        line: int | None = None,
        around: int = 0,
    ) -> Place:
        text = text.strip()
        if len(text) > 400:
            start = max(0, around - 100) if around > 250 else 0
            text = "…" * bool(start) + text[start : start + 380] + "…"
        return Place(self._name, self._line if line is None else line, offset, moment, text)


def _end_of(block: bytes, start: int) -> int:
    """Where the part of a line ends that holds `start`."""
    end = block.find(b"\n", start)
    end = len(block) if end < 0 else end
    cut = block.find(b"\r", start, end)
    return end if cut < 0 else cut


def clean_line(raw: bytes) -> tuple[str, str, int]:
    """Take a line of a log apart.

    Args:
        raw: the line, its newline or none.

    Returns:
        (text, speaker, how often): without colours, Ray's prefix and its count.
    """
    text = raw.decode("utf-8", "replace")
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    speaker = ""
    while found := _SPEAKER.match(text):
        speaker, text = speaker + found[0].rstrip(), text[found.end() :]
    if found := _VLLM.match(text):
        text = text[found.end() :]
    count = 1
    if "x across cluster]" in text and (found := _REPEATED.search(text)):
        count, text = max(1, int(found[1])), text[: found.start()]
    return text.rstrip(), speaker, count


def _time_in(raw: bytes) -> str | None:
    found = _TIME.search(raw[:200].decode("utf-8", "replace"))
    return found[0].lstrip("EWIF") if found else None


def _seconds(moment: str | None) -> float | None:
    """A time of a line as a number; of formats without a year, of a leap year's."""
    for layout in ("%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S", "%d/%b/%Y:%H:%M:%S"):
        try:
            return float(calendar.timegm(time.strptime(moment or "", layout)))
        except ValueError:
            continue
    digits = "".join(c for c in moment or "" if c.isdigit())
    try:
        return float(calendar.timegm(time.strptime(f"2000{digits:0>10}", "%Y%m%d%H%M%S")))
    except ValueError:
        return None


def _together(recent: deque[tuple[float | None, int, int]], seconds: float, lines: int) -> bool:
    """Whether the first and last of some events are close, by time or else by lines."""
    first, last = recent[0], recent[-1]
    if first[0] is not None and last[0] is not None:
        return abs(last[0] - first[0]) <= seconds
    return abs(last[1] - first[1]) <= lines
