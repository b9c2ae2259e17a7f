"""Every section of a report, in the order of the page."""

from verl_mixed.views.report.learning import facts, lengths, optimizer, reward_parts, rewards
from verl_mixed.views.report.machinery import limiter, times, tools
from verl_mixed.views.report.mixture import given_up, mixture
from verl_mixed.views.report.panels import Section
from verl_mixed.views.report.runs import Run

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
