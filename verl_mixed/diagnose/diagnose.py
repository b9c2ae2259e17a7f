"""`verl-mixed diagnose LOG...`: known failures in a run's logs, their causes and remedies.

Standard library only: on a jumphost `python3 -m verl_mixed.diagnose LOG...` does the same.
"""

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_mixed.diagnose.findings import Finding, Place
from verl_mixed.diagnose.log_file import PACKED, log_chunks
from verl_mixed.diagnose.log_scan import Scan
from verl_mixed.diagnose.signatures import SIGNATURES
from verl_mixed.exit_codes import GOOD, INTERRUPTED, NOT_GOOD, USAGE
from verl_mixed.run.text import printable

EXIT_CODES = (
    "0 no failure was found (or only warnings), 1 one was found, "
    "2 no log could be read, or one could not and the others have no failure"
)

_RUN_FILES = ("train.log", "tool_server.log", "metrics.jsonl")
_LOG_SUFFIXES = tuple(
    f"{end}{packed}" for end in (".log", ".out", ".err") for packed in ("", *PACKED)
)
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
        help="log files, also gzip, xz or zstd; folders of runs or of Ray's sessions; - for stdin",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument(
        "--list", action="store_true", help="print the known failures as a Markdown table"
    )


def run(arguments: argparse.Namespace) -> int:
    """`verl-mixed diagnose`.

    Returns:
        0 no failure was found (or only warnings), 1 one was found, 2 no log could be read, or one
        could not be read and the others have no failure.
    """
    if arguments.list:
        print(known())
        return GOOD
    scan = Scan()
    problems = read_all(arguments.logs, scan)
    for problem in problems:
        print(f"error: {printable(problem)}", file=sys.stderr)
    if not scan.bytes_read:
        if not problems:
            print("error: every log is empty; name another log", file=sys.stderr)
        return USAGE
    print(json.dumps(as_json(scan)) if arguments.json else "\n".join(describe(scan)))
    if any(one.severity == "fatal" and not scan.is_stale(one) for one in scan.ordered()):
        return NOT_GOOD
    return USAGE if problems else GOOD


def read_all(logs: Sequence[str], scan: Scan) -> list[str]:
    """Read logs, in order, into `scan`; returns a message for each that cannot be read.

    A log that is empty is only noted on stderr.
    """
    if not logs:
        return ["no log is named; name runs/<experiment>, a log file, or - for stdin"]
    problems: list[str] = []
    for argument in logs:
        try:
            files = _files_of(argument)
        except OSError as error:
            problems.append(f"cannot read {argument}: {error.strerror or error}; correct the name")
            continue
        for log in files:
            try:
                chunks = log_chunks(log.path, log.name)
                if not scan.read(chunks, log.name, finite_only=log.finite_only):
                    print(f"note: {printable(log.name)} is empty", file=sys.stderr)
            except OSError as error:
                problems.append(f"cannot read {log.name}: {error.strerror or error}")
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


# --- output -------------------------------------------------------------------------------------


def describe(scan: Scan) -> list[str]:
    """The findings as lines of text."""
    findings = scan.ordered()
    if not findings:
        return _describe_errors(scan)
    fatal = sum(finding.severity == "fatal" for finding in findings)
    lines = [f"{fatal} fatal, {len(findings) - fatal} warnings; the likely root cause first"]
    for number, finding in enumerate(findings, start=1):
        lines += ["", *_describe_one(number, finding, scan.is_stale(finding))]
    if scan.last_errors and not any(_is_cause(finding) for finding in findings):
        lines += ["", *_last_errors(scan)]
    return lines


def _is_cause(finding: Finding) -> bool:
    return finding.severity == "fatal" and not finding.signature.follows


def _describe_one(number: int, finding: Finding, is_stale: bool) -> list[str]:
    signature, first = finding.signature, finding.first
    notes = ["follows from another failure"] * signature.follows
    notes += ["before the last start of the run"] * is_stale
    notes += ["the run went on"] * (finding.severity != signature.severity)
    note = f" ({', '.join(notes)})" if notes else ""
    times = "once" if finding.count == 1 else f"{finding.count} times, first"
    when = f", {first.time}" if first.time else ""
    lines = [
        f"{number}. {finding.severity.upper()} {signature.title}{note} [{signature.id}]",
        f"   {times} at {_where(first)}{when}",
    ]
    if finding.of:
        shown = [f"{name} {count}" for name, count in finding.of.most_common(_MOST_KINDS)]
        more = len(finding.of) - len(shown)
        lines.append(f"   of:     {', '.join(shown)}{f' and {more} more' if more else ''}")
    lines.append(f"   line:   {printable(first.text)}")
    if finding.then is not None:
        lines.append(f"   then:   {printable(finding.then.text)}")
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
    return printable(f"{place.file}:{place.line} (byte {place.offset})")


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
                "severity": finding.severity,
                "follows": finding.signature.follows,
                "before_last_start": scan.is_stale(finding),
                "count": finding.count,
                "of": dict(finding.of),
                "first": asdict(finding.first),
                "then": finding.then and asdict(finding.then),
                "cause": finding.signature.cause,
                "remedy": finding.signature.remedy,
                "source": finding.signature.source,
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
        epilog=f"exit codes: {EXIT_CODES}",
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
