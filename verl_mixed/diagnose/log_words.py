"""Regular expressions for the lines of logs: exceptions, levels, retries, crashes. Standard library
only."""

import re

TRACE = re.compile(
    r"(?P<inner>Original )?Traceback \(most recent call last\):(?P<rank> \(RANK \d+\))?$"
)
EXCEPTION = re.compile(
    r"[A-Za-z_][\w.]*"
    r"(?:Error|Exception|Interrupt|Killed|Died|Timeout|Unavailable|Starved|Faults|Exit)\b"
)
CHAIN = re.compile(r"(?:During handling of the above|The above exception was the direct cause)")
LOG_LINE = re.compile(
    r"\d{4}-\d\d-\d\d[ T]|\[|\(|(?:[A-Z]+:\d{4}-)|(?:INFO|WARNING|ERROR|DEBUG)\b|[EWIF]\d{4} "
    r"|step:\d|stuck source=|[\w ]{1,40}:\s+\d+%\||\*\*\*|slurmstepd:"
)
ERROR_LINE = re.compile(
    r"\b(?:ERROR|FATAL|CRITICAL)\b|^[A-Za-z_][\w.]*(?:Error|Exception)\b|[Ee]rror: "
    r"|\b[EC] \d+ \d+\]|^\S*(?:\[rank\d+\]:)?\[?E\d{4} |[Kk]illed$|dumped\)"
    r"|[Ss]egmentation fault|Bus error"
)


def _of_level(levels: str, letters: str) -> re.Pattern[str]:
    """Finds lines that their writers give one of these levels."""
    return re.compile(
        rf"(?:\[rank\d+\]:)?\[?[{letters}]\d{{3,4}} "
        rf"|(?:{levels})\b(?!: UNPROT)|.{{0,80}}? - (?:{levels}) - "
        rf"|\d{{4}}-\d\d-\d\d[ T][\d:,.]+Z?\s+(?:{levels})\b"
        rf"|\[[^\]]{{1,60}}\]\s?\[(?:{levels})|\S*Warning: |.{{1,200}}\.py:\d+: \w*Warning"
    )


MILD = _of_level("WARNING|INFO|DEBUG", "WI")
WARNING = _of_level("WARNING", "W")
TRIED_AGAIN = re.compile(r"\bwill (?:be )?retr(?:y|ied)|\bretrying\b", re.IGNORECASE)
RETRIED = re.compile(
    rf"{TRIED_AGAIN.pattern}|\battempt \d+ ?(?:of|/) ?\d+|\bretry (?:attempt\b|\d+/\d+)"
    r"|\btrying again\b|\bignor(?:ed|ing)\b|\bfalling back\b|\bskipp(?:ed|ing)\b"
    r"|Exception ignored in",
    re.IGNORECASE,
)
PREFIX = re.compile(
    r"(?!.*(?:WARN|ERROR|INFO|DEBUG|CRITICAL|FATAL))"
    r"(?:\d{4}-\d\d-\d\dT\S+(?: \w+){0,3}|\S{1,40} ?[\]:|>]) ?"
)
"""What a launcher or a container engine writes before each line of a process, as `[worker-0] `."""

CRASH_LINE = re.compile(
    r"[Ss]egmentation fault|\((?:core )?dumped\)|^Killed$|: line \d+: +\d+ Killed|terminate called"
    r"|^(?:error|Error|ERROR|FATAL|fatal)\b:? |^panic: "
    r"|^(?:ssh|scp|tmux|srun|sbatch|salloc|slurmstepd|docker|kubectl|ray|conda|rsync|torchrun|mpirun)"
    r"\b[^ ]*:? (?:.*\b)?(?:[Ee]rror|[Ff]atal|FATAL|ERROR|[Ff]ailed)\b"
    r"|^\S+\.(?:py|sh): error: |\[[^\]]{1,60}\bC \d+ \d+\]"
    r"|\[[^\]]{1,60}\bE \d+ \d+\].*\b(?:[Dd]ied|[Cc]rash|[Ff]atal|[Ee]xiting|[Tt]erminating"
    r"|[Ss]hutting down)"
)

BOX = "╰".encode()  # the last line of a traceback of the package rich
WARNED = re.compile(rb"\b(?:WARNING|INFO|DEBUG) \d\d-\d\d \d\d:\d\d:\d\d ")  # vLLM's prefix
STEP_ENDED = re.compile(r"\*\*\* STEP .+ CANCELLED AT \S+ \*\*\*")
"""Slurm's line for a step that a job ended, also at the good end of its work."""

OF_DRIVER = re.compile(r"\sWARNING worker\.py:\d")  # Ray's, about processes that died
