"""`verl-mixed diagnose LOG...`: known failures in a run's logs, their causes and remedies.

Standard library only: on a jumphost `python3 -m verl_mixed.diagnose LOG...` does the same.
"""

import argparse
import json
import os
import sys
import textwrap
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from gzip import BadGzipFile, GzipFile
from pathlib import Path
from typing import Any

from verl_mixed.diagnose.log_scan import CHUNK_BYTES, Finding, Place, Scan
from verl_mixed.diagnose.signatures import SIGNATURES
from verl_mixed.exit_codes import GOOD, INTERRUPTED, NOT_GOOD, USAGE
from verl_mixed.run.text import printable

_RUN_FILES = ("train.log", "tool_server.log", "metrics.jsonl")
_LOG_SUFFIXES = (".log", ".out", ".err", ".log.gz", ".out.gz", ".err.gz")
_MOST_KINDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Log:
    path: Path | None
    """None: standard input."""

    name: str
    finite_only: bool = False
    """metrics.jsonl of the same run has the finite numbers of its steps."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "logs",
        nargs="*",
        metavar="LOG",
        help="log files, plain or gzip; folders of runs or of Ray's sessions; - for stdin",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument(
        "--list", action="store_true", help="print the known failures as a Markdown table"
    )


def run(arguments: argparse.Namespace) -> int:
    """`verl-mixed diagnose`.

    Returns:
        0 no known failure was found, 1 one was found, 2 a log is missing, empty or unreadable.
    """
    if arguments.list:
        print(known())
        return GOOD
    scan = Scan()
    problems = read_all(arguments.logs, scan)
    if problems:
        for problem in problems:
            print(f"error: {problem}", file=sys.stderr)
        return USAGE
    print(json.dumps(as_json(scan)) if arguments.json else "\n".join(describe(scan)))
    return NOT_GOOD if scan.ordered() else GOOD


def diagnose_tail(text: str) -> Finding | None:
    """The failure that most probably ended a run, from the end of its log: the first fatal one."""
    scan = Scan()
    scan.read([text.encode("utf-8", "replace")], "log")
    fatal = [finding for finding in scan.ordered() if finding.signature.severity == "fatal"]
    return fatal[0] if fatal and not scan.is_stale(fatal[0]) else None


def read_all(logs: Sequence[str], scan: Scan) -> list[str]:
    """Read logs, in order, into `scan`; returns a message for each that cannot be read."""
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
        return problems  # before any log is read, because reading may take minutes
    for log in files:
        try:
            size = scan.read(_chunks(log), log.name, finite_only=log.finite_only)
        except (OSError, EOFError, zlib.error) as error:
            problems.append(
                f"cannot read {log.name}: {error}; the bytes before the error were read"
            )
            continue
        if not size:
            problems.append(f"{log.name} is empty; name another log")
    return problems


def _files_of(log: str) -> list[_Log]:
    """The files that one argument names; files that most probably show the cause come first."""
    if log == "-":
        return [_Log(path=None, name="stdin")]
    path = Path(log)
    if not path.is_dir():
        path.stat()  # raises where the file does not exist
        return [_Log(path=path, name=log)]
    own = [path / name for name in _RUN_FILES if _has_content(path / name)]
    others = [
        other
        for other in sorted(path.glob("*") if own else path.rglob("*"))
        if other not in own and other.name.endswith(_LOG_SUFFIXES) and _has_content(other)
    ]
    if not own and not others:
        raise FileNotFoundError(None, "the folder has no log with any text")
    has_metrics = path / "metrics.jsonl" in own
    return [
        _Log(path=file, name=str(file), finite_only=has_metrics and file.name == "train.log")
        for file in [*own, *others]
    ]


def _has_content(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _chunks(log: _Log) -> Iterator[bytes]:
    """The bytes of a file, unpacked if it is gzip."""
    if log.path is None:
        yield from _read(sys.stdin.buffer.read)
        return
    with log.path.open("rb") as file:
        if not file.seekable() or file.peek(2)[:2] != b"\x1f\x8b":
            yield from _read(file.read)
            return
        try:
            with GzipFile(fileobj=file) as packed:
                yield from _read(packed.read1)  # gives the bytes before a damage, then raises
        except (BadGzipFile, EOFError, zlib.error) as error:
            # the log is still written, or a full disk cut it off
            print(f"note: {log.name} ends in its middle: {error}", file=sys.stderr)


def _read(read: Callable[[int], bytes | None]) -> Iterator[bytes]:
    while chunk := read(CHUNK_BYTES):  # None: stdin does not block, and has nothing now
        yield chunk


# --- output -------------------------------------------------------------------------------------


def describe(scan: Scan) -> list[str]:
    """The findings as lines of text."""
    findings = scan.ordered()
    if not findings:
        return _describe_errors(scan)
    fatal = sum(finding.signature.severity == "fatal" for finding in findings)
    lines = [f"{fatal} fatal, {len(findings) - fatal} warnings; the likely root cause first"]
    for number, finding in enumerate(findings, start=1):
        lines += ["", *_describe_one(number, finding, scan.is_stale(finding))]
    if not fatal and scan.last_errors:
        lines += ["", *_last_errors(scan)]
    return lines


def _describe_one(number: int, finding: Finding, is_stale: bool) -> list[str]:
    signature, first = finding.signature, finding.first
    notes = ["follows from another failure"] * signature.follows
    notes += ["before the last start of the run"] * is_stale
    note = f" ({', '.join(notes)})" if notes else ""
    times = "once" if finding.count == 1 else f"{finding.count} times, first"
    when = f", {first.time}" if first.time else ""
    lines = [
        f"{number}. {signature.severity.upper()} {signature.title}{note} [{signature.id}]",
        f"   {times} at {_where(first)}{when}",
    ]
    if finding.of:
        shown = [f"{name} {count}" for name, count in finding.of.most_common(_MOST_KINDS)]
        more = len(finding.of) - len(shown)
        lines.append(f"   of:     {', '.join(shown)}{f' and {more} more' if more else ''}")
    lines.append(f"   line:   {printable(first.text)}")
    lines += _wrapped("cause", signature.cause) + _wrapped("remedy", signature.remedy)
    return lines


def _describe_errors(scan: Scan) -> list[str]:
    """What there is to say of logs in which no known failure was found."""
    lines = ["no known failure was found"]
    if scan.last_errors:
        lines += _last_errors(scan)
    elif scan.last_line is not None:
        lines.append("no line has an error; the last line is")
        lines.append(f"   {_where(scan.last_line)}: {printable(scan.last_line.text)}")
    return lines


def _last_errors(scan: Scan) -> list[str]:
    shown = [f"   {_where(place)}: {printable(place.text)}" for place in scan.last_errors]
    return ["the last lines with an error:", *shown]


def _where(place: Place) -> str:
    return f"{place.file}:{place.line} (byte {place.offset})"


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
    return {
        "bytes": scan.bytes_read,
        "findings": [
            {
                "id": finding.signature.id,
                "title": finding.signature.title,
                "severity": finding.signature.severity,
                "follows": finding.signature.follows,
                "before_last_start": scan.is_stale(finding),
                "count": finding.count,
                "of": dict(finding.of),
                "first": asdict(finding.first),
                "cause": finding.signature.cause,
                "remedy": finding.signature.remedy,
            }
            for finding in scan.ordered()
        ],
        "last_errors": [asdict(place) for place in scan.last_errors],
        "last_line": scan.last_line and asdict(scan.last_line),
    }


def known() -> str:
    """The known failures as a Markdown table."""
    rows = []
    for signature in SIGNATURES:
        title = signature.title + ", warning" * (signature.severity == "warning")
        remedy = signature.remedy.replace("|", "\\|")
        rows.append(f"| `{signature.id}` | {title} | {remedy} |")
    return "\n".join(["| id | what | remedy |", "| --- | --- | --- |", *rows])


def main(argv: Sequence[str] | None = None) -> int:
    """`python3 -m verl_mixed.diagnose`: the command alone, without any package."""
    parser = argparse.ArgumentParser(
        prog="diagnose",
        description="Known failures in a run's logs, their causes and remedies.",
        epilog="exit codes: 0 no known failure was found, 1 one was found, 2 a log cannot be read",
    )
    add_options(parser)
    try:
        code = run(parser.parse_args(argv))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:  # of the output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"error: {error}", file=sys.stderr)
        return NOT_GOOD
    return code
