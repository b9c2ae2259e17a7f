"""`verl-mixed diagnose LOG...`: known failures in a run's logs, their causes and remedies.

Standard library only: on a jumphost `python3 -m verl_mixed.diagnose.diagnose LOG...` does the same.
Finding is `verl_mixed.diagnose.log_scan`'s, what is known is in `verl_mixed.diagnose.signatures`;
here are files, order and words.
"""

import argparse
import json
import os
import sys
import textwrap
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from gzip import BadGzipFile, GzipFile
from pathlib import Path
from typing import Any, BinaryIO

from verl_mixed.diagnose.log_scan import CHUNK_BYTES, Finding, Place, Scan
from verl_mixed.diagnose.signatures import SIGNATURES
from verl_mixed.exit_codes import GOOD, INTERRUPTED, NOT_GOOD, USAGE

_OF_RUN = ("train.log", "tool_server.log", "metrics.jsonl")
_LOGS = (".log", ".out", ".err", ".log.gz", ".out.gz", ".err.gz")
_MOST_SHOWN_OF = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Log:
    """One file to read."""

    path: Path | None
    """None: standard input."""

    name: str
    finite_only: bool = False
    """Steps are told better by another file of the same run."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The words of the command line."""
    parser.add_argument(
        "logs",
        nargs="*",
        metavar="LOG",
        help="log files, plain or gzip; folders of runs or of Ray's sessions; - for stdin",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--list", action="store_true", help="print what is known, as Markdown")


def run(arguments: argparse.Namespace) -> int:
    """`verl-mixed diagnose`.

    Returns:
        0 nothing known was found, 1 something was, 2 a log is missing, empty or unreadable.
    """
    if arguments.list:
        _print(known())
        return GOOD
    scan = Scan()
    problems = read_all(arguments.logs, scan)
    if problems:
        for problem in problems:
            print(f"error: {problem}", file=sys.stderr)
        return USAGE
    _print(json.dumps(as_json(scan)) if arguments.json else "\n".join(describe(scan)))
    return NOT_GOOD if scan.ordered() else GOOD


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader, as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def diagnose_tail(text: str) -> Finding | None:
    """The failure that most probably ended a run.

    Args:
        text: the end of its log, of its last start.

    Returns:
        The first fatal finding, or None when nothing known is in it.
    """
    scan = Scan()
    scan.read([text.encode("utf-8", "replace")], "log")
    fatal = [found for found in scan.ordered() if found.signature.severity == "fatal"]
    return fatal[0] if fatal and not scan.is_stale(fatal[0]) else None


def read_all(logs: Sequence[str], scan: Scan) -> list[str]:
    """Read logs, in order, into `scan`; what could not be read is returned in words."""
    problems: list[str] = []
    files: list[_Log] = []
    for log in logs:
        try:
            files += _files_of(log)
        except OSError as error:
            problems.append(f"cannot read {log}: {error.strerror or error}; correct the name")
    if not logs:
        problems.append("no log is named; name runs/<experiment>, a log file, or - for stdin")
    if problems:
        return problems  # nothing is read for minutes before a wrong name is said
    for log in files:
        try:
            size = scan.read(_chunks(log), log.name, finite_only=log.finite_only)
        except (OSError, EOFError, zlib.error) as error:
            problems.append(f"cannot read {log.name}: {error}; what came before it was read")
            continue
        if not size:
            problems.append(f"{log.name} is empty: nothing was logged; name another log")
    return problems


def _files_of(log: str) -> list[_Log]:
    """The files that one word names, those that most probably tell the cause first."""
    if log == "-":
        return [_Log(path=None, name="stdin")]
    path = Path(log)
    if not path.is_dir():
        path.stat()  # raises for what is not there
        return [_Log(path=path, name=log)]
    own = [path / name for name in _OF_RUN if _has_content(path / name)]
    found = path.glob("*") if own else path.rglob("*")
    others = [
        other
        for other in sorted(found)
        if other not in own and other.name.endswith(_LOGS) and _has_content(other)
    ]
    if not own and not others:
        raise FileNotFoundError(None, "a folder without a log that says anything")
    has_metrics = path / "metrics.jsonl" in own
    return [
        _Log(path=file, name=str(file), finite_only=has_metrics and file.name == "train.log")
        for file in [*own, *others]
    ]


def _has_content(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _chunks(log: _Log) -> Iterator[bytes]:
    """A file's bytes, unpacked where they are gzip."""
    if log.path is None:
        yield from _read(sys.stdin.buffer)
        return
    with log.path.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b" if file.seekable() else False
        if file.seekable():
            file.seek(0)
        if not is_gzip:
            yield from _read(file)
            return
        try:
            with GzipFile(fileobj=file) as packed:
                while chunk := packed.read1(CHUNK_BYTES):  # gives what there is before it raises
                    yield chunk
        except (BadGzipFile, EOFError, zlib.error) as error:
            # a log under way, or one that was cut by a full disk
            print(f"note: {log.name} ends in its middle: {error}", file=sys.stderr)


def _read(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


# --- words --------------------------------------------------------------------------------------


def describe(scan: Scan) -> list[str]:
    """What was found, for people."""
    findings = scan.ordered()
    if not findings:
        return _nothing_known(scan)
    fatal = sum(found.signature.severity == "fatal" for found in findings)
    lines = [f"{fatal} fatal, {len(findings) - fatal} warnings; the likely root cause first"]
    for number, found in enumerate(findings, start=1):
        lines += ["", *_describe_one(number, found, scan.is_stale(found))]
    return lines


def _describe_one(number: int, found: Finding, stale: bool) -> list[str]:
    signature, first = found.signature, found.first
    assert first is not None, "a finding is made with its first event"
    notes = ["follows from another failure"] * signature.follows
    notes += ["before the last start of the run"] * stale
    note = f" ({', '.join(notes)})" if notes else ""
    times = "once" if found.count == 1 else f"{found.count} times, first"
    when = f", {first.time}" if first.time else ""
    lines = [
        f"{number}. {signature.severity.upper()} {signature.title}{note} [{signature.id}]",
        f"   {times} at {_where(first)}{when}",
    ]
    if found.of:
        shown = [f"{name} {count}" for name, count in found.of.most_common(_MOST_SHOWN_OF)]
        more = len(found.of) - len(shown)
        lines.append(f"   of:     {', '.join(shown)}{f' and {more} more' if more else ''}")
    lines.append(f"   line:   {_printable(first.text)}")
    lines += _wrapped("cause", signature.cause) + _wrapped("remedy", signature.remedy)
    return lines


def _nothing_known(scan: Scan) -> list[str]:
    lines = ["nothing known was found"]
    if scan.last_errors:
        lines.append("the last lines that tell of an error:")
        lines += [f"   {_where(p)}: {_printable(p.text)}" for p in scan.last_errors]
    elif scan.last_line is not None:
        lines.append("no line tells of an error; the last line is")
        lines.append(f"   {_where(scan.last_line)}: {_printable(scan.last_line.text)}")
    return lines


def _where(place: Place) -> str:
    return f"{place.file}:{place.line} (byte {place.offset})"


def _printable(text: str) -> str:
    """Text for a terminal: a log may hold anything."""
    return "".join(c if c.isprintable() else " " for c in text)


def _wrapped(name: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        width=100,
        initial_indent=f"   {name + ':':<8}",
        subsequent_indent=" " * 11,
        break_long_words=False,
        break_on_hyphens=False,
    )


def as_json(scan: Scan) -> dict[str, Any]:
    """What was found, for programs."""
    return {
        "bytes": scan.bytes_read,
        "findings": [
            {
                "id": found.signature.id,
                "title": found.signature.title,
                "severity": found.signature.severity,
                "follows": found.signature.follows,
                "before_last_start": scan.is_stale(found),
                "count": found.count,
                "of": dict(found.of),
                "first": _place_json(found.first),
                "cause": found.signature.cause,
                "remedy": found.signature.remedy,
            }
            for found in scan.ordered()
        ],
        "last_errors": [_place_json(place) for place in scan.last_errors],
        "last_line": _place_json(scan.last_line),
    }


def _place_json(place: Place | None) -> dict[str, Any] | None:
    if place is None:
        return None
    return {
        "file": place.file,
        "line": place.line,
        "offset": place.offset,
        "time": place.time,
        "text": place.text,
    }


def known() -> str:
    """Every signature as a Markdown table."""
    rows = []
    for signature in SIGNATURES:
        title = signature.title + ", warning" * (signature.severity == "warning")
        remedy = signature.remedy.replace("|", "\\|")
        rows.append(f"| `{signature.id}` | {title} | {remedy} |")
    return "\n".join(["| id | what | remedy |", "| --- | --- | --- |", *rows])


def main(argv: Sequence[str] | None = None) -> int:
    """`python3 -m verl_mixed.diagnose.diagnose`."""
    parser = argparse.ArgumentParser(
        prog="diagnose",
        description="Known failures in a run's logs, their causes and remedies.",
        epilog="exit codes: 0 nothing known was found, 1 something was, 2 a log cannot be read",
    )
    add_options(parser)
    try:
        return run(parser.parse_args(argv))
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
