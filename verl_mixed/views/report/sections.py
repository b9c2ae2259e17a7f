"""Every section of a report, in the order of the page."""

from verl_mixed.views.report.evaluations import evaluations
from verl_mixed.views.report.learning import facts, lengths, optimizer, reward_parts, rewards
from verl_mixed.views.report.machinery import limiter, times, tools
from verl_mixed.views.report.mixture import decisions, given_up, mixture
from verl_mixed.views.report.panels import Section
from verl_mixed.views.report.runs import Run


def sections_of(run: Run) -> list[Section]:
    """The sections of one run; a section without metrics is among them and says so."""
    makers = (rewards, evaluations, reward_parts, mixture, decisions, lengths, tools, limiter)
    return [make(run) for make in (*makers, times, optimizer, given_up, facts)]
