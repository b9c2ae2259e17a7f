"""What ended a run, in the words of `verl-mixed diagnose`, for the launcher. Standard library only.

A run on one machine gets no advice about a cluster.
"""

import re
from dataclasses import dataclass

from verl_mixed.diagnose.findings import Finding
from verl_mixed.diagnose.log_scan import Scan

_OF_CLUSTERS = re.compile(r"setup_cluster\.sh|WORKER_NODES|MASTER_IP")
_BRACKETS = re.compile(r" ?\([^()]*\)")
_CLAUSES = re.compile(r"(; |, (?:then|or|and) )")
_NOTHING_LEFT = "start the same command again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The failure that most probably ended a run."""

    cause: str
    """In one line."""

    lines: tuple[str, ...]
    """What is printed: the title, the line of the log, the cause, the remedy."""

    mends: bool
    """Whether a resume may mend it."""

    is_known: bool
    """Whether a signature has it; else it is the error that the log ends with."""


def verdict_on(text: str, *, has_cluster: bool) -> Verdict | None:
    """The first fatal finding at the end of a run's log; None if there is none.

    Args:
        text: the end of the log.
        has_cluster: whether the run is on a cluster that setup_cluster.sh may have set up.
    """
    finding = first_fatal(text)
    if finding is None:
        return None
    signature = finding.signature
    then = [f"  then:   {finding.then.text}"] if finding.then is not None else []
    remedy = signature.remedy if has_cluster else remedy_of_one_machine(signature.remedy)
    is_unknown = signature.id == "unknown-error"
    return Verdict(
        cause=finding.first.text if is_unknown else signature.title,
        lines=(
            f"{signature.title} [{signature.id}]",
            f"  line:   {finding.first.text}",
            *then,
            f"  cause:  {signature.cause}",
            f"  remedy: {remedy}",
        ),
        mends=signature.mends,
        is_known=not is_unknown,
    )


def first_fatal(text: str) -> Finding | None:
    """The failure that most probably ended a run, from the end of its log."""
    scan = Scan()
    scan.read([text.encode("utf-8", "replace")], "log")
    fatal = [finding for finding in scan.ordered() if finding.severity == "fatal"]
    return fatal[0] if fatal and not scan.is_stale(fatal[0]) else None


def remedy_of_one_machine(remedy: str) -> str:
    """A remedy without its clauses about the hosts of a cluster."""
    remedy = _BRACKETS.sub(lambda m: "" if _OF_CLUSTERS.search(m[0]) else m[0], remedy)
    parts = _CLAUSES.split(remedy)
    kept = ""
    for joint, clause in zip(["", *parts[1::2]], parts[::2], strict=True):
        if not _OF_CLUSTERS.search(clause):
            kept += (joint if kept else "") + clause
    return kept or _NOTHING_LEFT
