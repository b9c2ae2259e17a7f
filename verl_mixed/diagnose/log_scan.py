"""Finds the known failures in logs of any size, read as bytes. Standard library only.

Most lines cost little: a block of lines is searched for the cues of all signatures, and only a line
that holds a cue is taken apart. A Python traceback is one event, named after its first cause: its
frames, and the exceptions that follow from that cause, do not count. Text that a model wrote does
not count. An error that no signature knows is a finding too, if it plainly ended the run.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from verl_mixed.diagnose.cues import Cues, end_of_line
from verl_mixed.diagnose.findings import Event, Finding, Kind, Moment, Place, Progress, Unknown
from verl_mixed.diagnose.log_line import as_seconds, clean_line, time_in
from verl_mixed.diagnose.log_words import (
    BOX,
    CHAIN,
    CRASH_LINE,
    ERROR_LINE,
    EXCEPTION,
    LOG_LINE,
    MILD,
    OF_DRIVER,
    PREFIX,
    RETRIED,
    STEP_ENDED,
    TRACE,
    TRIED_AGAIN,
    WARNED,
    WARNING,
)
from verl_mixed.diagnose.model_text import OPENERS, ModelText, frame_of_run, is_quoted
from verl_mixed.diagnose.signatures import BY_ID, IN_LINES, Signature, Storm
from verl_mixed.diagnose.step_checks import StepChecks, step_of_console, step_of_record

LINE_BYTES = 1 << 20
"""Bytes that are read of one line; the rest of a longer line is ignored."""

_TRACE = b"traceback (most recent call last)"
_START = b"ray init kwargs:"
_STEP, _RECORD = b"step:", b'{"step"'

_OWNERS = tuple((signature, pattern) for signature in IN_LINES for pattern in signature.patterns)
_COMMON_WORDS = ("connection-refused", "timeout")
"""Signatures of words that many components print; alone they say little."""

_BY_HAND = "interrupted"
"""The signature of an end that somebody wanted: no failure of the run."""

_COMPLETE = b"final validation metrics:"
_ENDED_WELL = (
    *(b"'train_runtime':", b"exits successfully", b"`trainer.fit` stopped: `max_"),
    *(b"worker group successfully finished", b"job completed successfully"),
    b"successfully installed",
)
"""What transformers' Trainer, DeepSpeed's launcher, Lightning, torchrun, submitit and pip print
when all went well."""

_WORDS = (
    *("error", "exception", "fatal", "killed", " dumped)", " fault", "step:"),
    *(
        " (most recent call last)",
        " init kwargs:",
        " validation metrics:",
        "successfully installed",
        " exits successfully",
        " group successfully finished",
        " completed successfully",
        "'train_runtime':",
        " stopped: `max_",
    ),
    *(" e ", " c "),  # Ray's levels, as in [2026-11-22 08:51:58,244 E 81 99]
    *OPENERS,
)
_CUES = Cues([pattern.pattern for _, pattern in _OWNERS], _WORDS)

_LOWER = {upper: upper + 32 for upper in range(65, 91)}
_MOST_PREFIXES = 8  # of launchers, in one log
_SURVIVED = 2  # steps after a failure that show that it did not end the run

_TRACE_LINES = 400  # of a traceback at most, without its frames
_MESSAGE_LINES = 5
"""Lines after a traceback, at the end of a log, that may be the rest of its exception's message."""

_LED_LINES = 40
"""Lines between two tracebacks of a driver, of which the first probably led to the second."""

_TRACE_SILENCE = 500
"""A traceback ends when its process has written none of so many segments."""

_MOST_BEFORE = 2000  # bytes of the line before a traceback
_MOST_KINDS = 50  # values of a pattern's group `of` that a finding counts separately
_MOST_TEXT = 400  # characters of a place's text


@dataclass(frozen=True, slots=True)
class _Segment:
    """A line, or a part of a line that carriage returns divide, taken apart."""

    offset: int
    raw: bytes
    text: str
    speaker: str
    count: int
    lowered: bytes | None
    """In small letters; None if the line has no cue."""


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
    first: Place | None = None
    """Of the first exception that no signature knows."""

    last: Place | None = None
    """Of the last exception."""

    is_mild: bool = False
    """Whether the line before or after it says that the error is handled."""

    is_warned: bool = False
    """Whether the line before it is a warning; so is the error, if its process goes on."""

    is_told: bool = False
    """Whether the line before it is a known warning, which tells of this traceback."""

    frames: bool | None = None
    """Whether a frame is of the run's own code; None without frames."""

    source: str = ""
    """Its last line of code."""


class Scan:
    """The findings in one or more logs; of each line, `line_bytes` bytes are read."""

    def __init__(self, line_bytes: int = LINE_BYTES) -> None:
        self.findings: dict[str, Finding] = {}
        self.last_errors: deque[Place] = deque(maxlen=3)
        """The last errors that match no signature."""

        self.last_line: Place | None = None
        """Of the first log that has one."""

        self.bytes_read = 0
        self.progress: dict[int, Progress] = {}
        """File index -> how far its run came."""

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

    def note(self, event: Event, file_index: int) -> None:
        """Count one event of a file, which is numbered from 1."""
        if event.is_mild and event.signature.id in _COMMON_WORDS:
            return  # the component that prints it handles it
        new = Finding(event.signature, event.place, file_index, shows_mild=event.is_mild)
        finding = self.findings.setdefault(event.signature.id, new)
        finding.count += event.count
        progress = self.progress[file_index]
        finding.last_start, finding.last_step = progress.starts, progress.steps
        if not event.is_mild:
            if finding.shows_mild and finding.file_index == file_index:
                finding.first, finding.shows_mild = event.place, False
            finding.is_mild = finding.is_mild and progress.is_complete
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
        there was no storm. Without a fatal failure that is known, and with only failures that
        follow from another, the unknown error that ended the run is a finding too.
        """
        shown = [f for f in self.findings.values() if f.signature.storm is None or f.is_storm]
        for finding in shown:
            is_fatal = finding.signature.severity == "fatal" and not self._is_survived(finding)
            finding.severity = "fatal" if is_fatal else "warning"
        fatal = [f for f in shown if f.severity == "fatal" and not self.is_stale(f)]
        if all(finding.signature.follows for finding in fatal):
            ending = self._ending_error(is_failed=bool(fatal))
            if ending is not None:
                shown = [f for f in shown if f.signature is not ending.signature] + [ending]
        return sorted(shown, key=self._rank)

    def is_stale(self, finding: Finding) -> bool:
        """Whether the run started again after the finding's last event."""
        return finding.last_start < self.progress[finding.file_index].starts

    def _is_survived(self, finding: Finding) -> bool:
        """Whether the run evidently went on after the finding's last event."""
        steps = self.progress[finding.file_index].steps
        return finding.is_mild or (finding.count > 0 and steps >= finding.last_step + _SURVIVED)

    def _ending_error(self, *, is_failed: bool) -> Finding | None:
        """The error that plainly ended the run, unknown or else no more than a warning.

        `is_failed`: another finding shows that the run failed. So does the end of a script.
        """
        is_failed = is_failed or any(
            (line := progress.unknown.get("line")) and _is_last(line, progress, is_failed)
            for progress in self.progress.values()
        )
        kinds: tuple[Kind, ...] = ("driver", "worker", "line")
        for kind in (*kinds, "warned") if is_failed else kinds:
            for index, progress in sorted(self.progress.items()):
                error = progress.unknown.get(kind)
                if error is None or not _is_last(error, progress, is_failed):
                    continue
                finding = Finding(error.signature, error.place, index, count=1)
                finding.last_start, finding.last_step = error.start, error.step
                finding.severity = "fatal"
                finding.then = error.last if error.last != error.place else None
                return finding
        return None

    def _rank(self, finding: Finding) -> tuple[bool, bool, bool, int, int]:
        return (
            self.is_stale(finding),
            finding.severity != "fatal",
            finding.signature.follows,
            finding.file_index,
            finding.first.offset,
        )


def _is_last(error: Unknown, progress: Progress, is_failed: bool) -> bool:
    """Whether nothing of the run came after the error."""
    if error.start < progress.starts or error.step < progress.steps or progress.is_complete:
        return False
    many = 1000
    most = {"driver": many, "worker": many if is_failed else 30, "line": 100, "warned": many}
    return progress.lines - error.line <= most[error.kind]


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
        self._progress = scan.progress[index] = Progress()
        self._steps = StepChecks()
        self._model_text = ModelText()
        self._traces: dict[str, _Trace] = {}
        self._line = 1
        self._segments = 0
        self._before = b""
        self._prefixes: dict[str, re.Pattern[str]] = {}
        self._tail: tuple[int, bytes, int] = (0, b"", 1)

    def read_block(self, offset: int, block: bytes) -> None:
        """Read whole lines: those with a cue, and every line while a traceback is unfinished."""
        lowered = block.lower()
        hits, limit = _CUES.lines(lowered), self._scan.line_bytes
        at = 0 if block.startswith(_RECORD) else block.find(b"\n" + _RECORD) + 1
        while block.startswith(_RECORD, at):
            hits[at] = end_of_line(block, at)
            at = block.find(b"\n" + _RECORD, hits[at]) + 1 or len(block)
        position, counted = 0, 0

        def read(start: int, end: int, is_hit: bool) -> int:
            nonlocal counted
            self._line += block.count(b"\n", counted, start)
            counted = start
            end_of_read = min(end, start + limit)
            raw = block[start:end_of_read]
            self._read(offset + start, raw, lowered[start:end_of_read] if is_hit else None)
            if raw:
                self._before = raw[:_MOST_BEFORE]
            return end + 1

        for start in [*sorted(hits), len(block)]:
            while (self._traces or self._model_text) and position < start:
                position = read(position, end_of_line(block, position), False)
            if start < len(block):
                if start > position or not self._before:
                    self._before = _line_before(block, start)
                position = read(start, hits[start], True)
        self._line += block.count(b"\n", counted)
        self._progress.lines = self._line
        if block.strip():
            tail = block[-4096:]
            self._tail = (offset + len(block) - len(tail), tail, self._line)
            if position < len(block):
                self._before = _line_before(block, len(block))

    def end(self) -> None:
        """Note unfinished tracebacks and the last line."""
        for speaker, trace in list(self._traces.items()):
            goes_on = self._segments - trace.newest > _MESSAGE_LINES
            trace.is_warned = trace.is_warned and (goes_on or self._progress.is_complete)
            self._close(speaker)
        offset, tail, line = self._tail
        lines = [text for text in re.split(rb"[\r\n]+", tail) if text.strip()]
        if lines and self._scan.last_line is None and not lines[-1].startswith(_RECORD):
            last = tail.rfind(lines[-1])
            self._line = line - tail.count(b"\n", last)
            self._scan.last_line = self._place(offset + last, clean_line(lines[-1])[0], None)

    def _read(self, offset: int, raw: bytes, lowered: bytes | None) -> None:
        """Read a segment; `lowered` is None if it has no cue."""
        if not raw:
            return
        self._segments += 1
        if (step := _step_in(raw, lowered)) is not None:
            self._check_step(*step, offset)
            return
        if lowered is None and not self._traces and not self._model_text:
            return
        segment = self._taken_apart(offset, raw, lowered)
        text, speaker = segment.text, segment.speaker
        self._close_silent()
        if self._model_text.holds(speaker, text):
            return
        lowered = lowered or b""
        if _START in lowered and text.startswith("ray init kwargs:"):
            self._progress.starts += 1
            self._progress.unknown.clear()
            self._progress.is_complete = False
        if _COMPLETE in lowered:
            self._progress.is_complete = True
        if any(mark in lowered for mark in _ENDED_WELL):
            self._close_complete()
            self._progress.steps += _SURVIVED
        trace = self._traces.get(speaker)
        if _TRACE in lowered and (start := TRACE.search(text)):
            if (start["inner"] or start["rank"]) and trace is not None:
                trace.first = trace.last = None  # a wrapper, which carries the traceback
                trace.is_complete = False
            if trace is None or (trace.is_complete and not trace.is_chained):
                self._close(speaker)
                trace = self._traces[speaker] = _Trace(self._segments)
                before = text if not text.startswith("Traceback") else self._text_before(speaker)
                trace.is_mild = RETRIED.search(before) is not None
                trace.is_warned = WARNING.match(before) is not None
                found = _find(before, before.translate(_LOWER).encode())
                trace.is_told = found is not None and found[0].severity == "warning"
            trace.newest, trace.is_complete, trace.is_chained = self._segments, False, False
            if not text.startswith("Traceback"):
                self._read_plain(segment)
        elif trace is None or not self._read_in_trace(trace, segment):
            self._read_plain(segment)

    def _taken_apart(self, offset: int, raw: bytes, lowered: bytes | None) -> _Segment:
        """A segment without what a launcher writes before it, which a traceback's line shows."""
        text, speaker, count = clean_line(raw)
        start = text.find("Traceback (most recent call last):") if lowered else -1
        if start > 0 and PREFIX.fullmatch(text, 0, start):
            form = re.sub(r"\d+", r"\\d+", re.escape(text[:start]))
            if len(self._prefixes) < _MOST_PREFIXES:
                self._prefixes.setdefault(form, re.compile(form))
        for prefix in self._prefixes.values():
            if match := prefix.match(text):
                name = re.sub(r"\d{4}-\d\d-\d\dT\S+", "", match[0]).strip()
                return _Segment(offset, raw, text[match.end() :], speaker + name, count, lowered)
        return _Segment(offset, raw, text, speaker, count, lowered)

    def _text_before(self, speaker: str) -> str:
        """The line before the current one; empty if another process wrote it."""
        text, other, _ = clean_line(self._before)
        return text if other == speaker else ""

    def _read_in_trace(self, trace: _Trace, segment: _Segment) -> bool:
        """Read a segment as part of its speaker's traceback; False if it is not part of it."""
        text = segment.text
        is_exception = EXCEPTION.match(text) is not None
        if not text.strip() or text[0] in " \t":
            trace.newest = self._segments
            frame = frame_of_run(text)
            if frame is not None:
                trace.frames = trace.frames or frame
            elif text.strip(" \t^~"):
                trace.source = text.strip()
            return True
        if CHAIN.match(text):
            trace.newest, trace.is_chained = self._segments, True
            return True
        if text.startswith("ray::") or "RayTaskError(" in text[:80]:
            trace.newest, trace.is_complete, trace.is_chained = self._segments, False, False
            return True
        if trace.is_complete and not is_exception and TRIED_AGAIN.search(text):
            trace.is_mild = True
            self._close(segment.speaker)
            return False
        if LOG_LINE.match(text) and not is_exception:
            if trace.is_complete:
                self._close(segment.speaker)
            return False
        trace.lines += 1
        if trace.lines > _TRACE_LINES:
            self._close(segment.speaker)
            return False
        event = self._event(segment)
        if trace.is_complete and not trace.is_chained and not is_exception and event is None:
            # a line after the exception: its message goes on, or something else was printed
            return not CRASH_LINE.search(text)
        trace.newest, trace.is_complete = self._segments, True
        if is_exception or trace.last is None:
            trace.last = self._place_of(segment)
            if trace.source and re.fullmatch(r"[\w.]+", trace.last.text):
                words = f"{trace.last.text}, raised by `{trace.source}`"
                trace.last = replace(trace.last, text=words)
            if event is None:
                trace.first = trace.first or trace.last
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

    def _close_complete(self) -> None:
        for speaker, trace in list(self._traces.items()):
            if trace.is_complete and not trace.is_chained:
                self._close(speaker)

    def _close(self, speaker: str) -> None:
        trace = self._traces.pop(speaker, None)
        if trace is None or trace.frames is False:
            return  # frames only of a program that a model wrote
        event, last = trace.event, trace.last
        is_mild = trace.is_mild or trace.is_warned
        if event is not None:
            self._scan.note(replace(event, is_mild=is_mild), self._index)
        elif last is not None:
            self._scan.last_errors.append(last)
        is_warning = event is None or event.signature.severity == "warning"
        place = trace.first or (last if is_warning else None)
        known = event.signature if event is not None else None
        is_cause = not is_warning and known is not None and not known.follows
        is_by_hand = known is not None and known.id == _BY_HAND
        if last is None or trace.is_mild or trace.is_told or is_by_hand:
            return
        if known is not None and (trace.first is not None or known.id in _COMMON_WORDS):
            known = None  # it does not say what happened
        if trace.is_warned:
            self._note_unknown("warned", place or last, last, known)
        elif place is not None and not is_cause:
            self._note_unknown("worker" if speaker else "driver", place, last, known)

    def _note_unknown(
        self,
        kind: Kind,
        place: Place,
        last: Place,
        signature: Signature | None = None,
    ) -> None:
        progress = self._progress
        first = progress.unknown.get(kind)
        if first is not None and first.step == progress.steps:
            if kind == "worker":
                place, last, signature = first.place, first.last, first.signature
            elif kind == "driver" and place.line - first.line <= _LED_LINES:
                place, signature = first.place, first.signature
        progress.unknown[kind] = Unknown(
            place=place,
            last=last,
            kind=kind,
            start=progress.starts,
            step=progress.steps,
            line=self._line,
            signature=signature or BY_ID["unknown-error"],
        )

    def _read_plain(self, segment: _Segment) -> None:
        """Read a segment that is in no traceback."""
        event = self._event(segment)
        if event is not None:
            self._scan.note(event, self._index)
        elif segment.lowered is not None:
            match = CRASH_LINE.search(segment.text)
            if match is None and self._before.startswith(BOX):
                match = EXCEPTION.match(segment.text)
            if not match and not ERROR_LINE.search(segment.text):
                return
            if is_quoted(segment.text, match.start() if match else len(segment.text)):
                return
            place = self._place_of(segment)
            self._scan.last_errors.append(place)
            if match and not MILD.match(segment.text) and not RETRIED.search(segment.text):
                self._note_unknown("line", place, place)

    def _event(self, segment: _Segment) -> Event | None:
        """The event of the first signature that matches."""
        if segment.lowered is None:
            return None
        found = _find(segment.text, segment.lowered)
        if found is None:
            return None
        signature, match = found
        if is_quoted(segment.text, match.start()):
            return None
        start, end = match.span("of") if "of" in match.re.groupindex else (0, 0)
        of = segment.text[max(start, 0) : max(end, 0)].strip()[:80]
        place = self._place_of(segment, around=match.start())
        return Event(signature, of, segment.count, place, _is_mild(segment, match.start()))

    def _check_step(
        self, step: int, metrics: dict[str, float], moment: str | None, offset: int
    ) -> None:
        self._close_complete()
        self._progress.steps += 1
        for identity, of, text in self._steps.check(metrics, finite_only=self._finite_only):
            place = self._place(offset, f"step {step}: {text}", moment)
            self._scan.note(Event(BY_ID[identity], of, 1, place), self._index)

    def _place_of(self, segment: _Segment, around: int = 0) -> Place:
        return self._place(segment.offset, segment.text, time_in(segment.raw), around)

    def _place(self, offset: int, text: str, moment: str | None, around: int = 0) -> Place:
        """A place in the current line; a long text is cut around its character `around`."""
        text = text.strip()
        if len(text) > _MOST_TEXT:
            start = max(0, around - 100) if around > 250 else 0
            text = "…" * bool(start) + text[start : start + _MOST_TEXT - 20] + "…"
        return Place(self._name, self._line, offset, moment, text)


def _find(text: str, lowered: bytes) -> tuple[Signature, re.Match[str]] | None:
    """The first signature that finds a line, which is given as text and in small letters."""
    small = text.translate(_LOWER)
    for number in _CUES.patterns_for(lowered):
        signature, pattern = _OWNERS[number]
        if match := pattern.search(small):
            return signature, match
    return None


def _is_mild(segment: _Segment, at: int) -> bool:
    """Whether the writer of a line calls it a warning, or says that it tries again."""
    if "NCCL WARN" in segment.text or OF_DRIVER.search(segment.text[:60]):
        return False  # NCCL has no other word for its errors; Ray's driver tells deaths so
    return bool(
        MILD.match(segment.text)
        or WARNED.search(segment.raw[:200])
        or RETRIED.search(segment.text, at)
        or STEP_ENDED.search(segment.text)
    )


def _line_before(block: bytes, start: int) -> bytes:
    """The end of the line before the one that begins at `start`."""
    end = max(0, start - 1)
    return block[max(block.rfind(b"\n", 0, end) + 1, end - _MOST_BEFORE) : end]


def _step_in(raw: bytes, lowered: bytes | None) -> tuple[int, dict[str, float], str | None] | None:
    """(step, metrics, time) of a line of metrics.jsonl or of verl's console logger."""
    if raw.startswith(_RECORD) and (record := step_of_record(raw)) is not None:
        return record
    if lowered is not None and _STEP in raw:
        step = step_of_console(clean_line(raw)[0])
        return None if step is None else (*step, time_in(raw))
    return None


def _are_close(first: Moment, last: Moment, storm: Storm) -> bool:
    """Whether two events are close: by their times, or by their lines if one has no time."""
    if first[0] is not None and last[0] is not None:
        return abs(last[0] - first[0]) <= storm.seconds
    return abs(last[1] - first[1]) <= storm.lines
