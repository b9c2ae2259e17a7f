"""Every section of a report, in the order of the page."""

from cluster.report.learning import facts, lengths, optimizer, reward_parts, rewards
from cluster.report.machinery import limiter, times, tools
from cluster.report.mixture import given_up, mixture
from cluster.report.panels import Section
from cluster.report.runs import Run

_MAKERS = (
    rewards,
    reward_parts,
    mixture,
    lengths,
    tools,
    limiter,
    times,
    optimizer,
    given_up,
    facts,
)


def sections_of(run: Run) -> list[Section]:
    """The sections of one run; a section without metrics is among them and says so."""
    return [make(run) for make in _MAKERS]
