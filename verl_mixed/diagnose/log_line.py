"""One line of a log taken apart: its text, the process that wrote it, its time.

Standard library only.
"""

import calendar
import re
import time

from verl_mixed.run.text import ANSI

_SPEAKER = re.compile(r"\((?:[^()]*\bpid=\d+[^()]*|(?:raylet|autoscaler|gcs_server)[^()]*)\) ?")
_OUTER = re.compile(
    r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S+ \S+\[\d+\]: "  # journald
    r"|\[\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d\] (?=\()"  # a time before Ray's prefix
)
_LABEL = re.compile(r" {0,3}\d{1,4}: ")  # srun --label
_VLLM = re.compile(r"(?:ERROR|WARNING|INFO|DEBUG) \d\d-\d\d \d\d:\d\d:\d\d \[?[\w./-]+:\d+\] ?")
_REPEATED = re.compile(r"\s*\[repeated (\d{1,9})x across cluster\].*$", re.DOTALL)
_TIME = re.compile(
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d"  # Python's logging, Ray
    r"|\d\d/[A-Z][a-z]{2}/\d{4}:\d\d:\d\d:\d\d"  # web servers
    r"|\b[EWIF]\d{3,4} \d\d:\d\d:\d\d"  # glog: torch, NCCL
    r"|\b\d\d-\d\d \d\d:\d\d:\d\d"  # vLLM
)


def clean_line(raw: bytes) -> tuple[str, str, int]:
    """Take a line of a log apart.

    Returns:
        (text, speaker, count): the text without colours, prefixes and Ray's repeat mark; the
        prefix of Ray or srun, which names the process that wrote the line; how often Ray saw the
        line. For example
        `(W pid=3) no space [repeated 12x across cluster]` gives ("no space", "(W pid=3)", 12).
    """
    text = raw.decode("utf-8", "replace")
    if "\x1b" in text:
        text = ANSI.sub("", text)
    speaker = ""
    if outer := _OUTER.match(text):
        text = text[outer.end() :]
    elif label := _LABEL.match(text):
        speaker, text = label[0].strip(), text[label.end() :]
    while prefix := _SPEAKER.match(text):
        speaker, text = speaker + prefix[0].rstrip(), text[prefix.end() :]
    if prefix := _VLLM.match(text):
        text = text[prefix.end() :]
    count = 1
    if "x across cluster]" in text and (repeated := _REPEATED.search(text)):
        count, text = max(1, int(repeated[1])), text[: repeated.start()]
    return text.rstrip(), speaker, count


def time_in(raw: bytes) -> str | None:
    """The time near the beginning of a line, as the line has it; None without one."""
    match = _TIME.search(raw[:200].decode("utf-8", "replace"))
    return match[0].lstrip("EWIF") if match else None


def as_seconds(moment: str | None) -> float | None:
    """A result of `time_in` as a number whose differences are seconds.

    A time without a year counts as one of the year 2000, a leap year.
    """
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
