"""The section with the results of `verl-mixed evaluate`."""

from verl_mixed.views.evaluation import cells_of, fewer_prompts_note, head_of
from verl_mixed.views.report.panels import Section, Table
from verl_mixed.views.report.runs import Run


def evaluations(run: Run) -> Section:
    """A table with a row for each source and evaluation."""
    tables = []
    if run.evaluations:
        tables = [Table(head=head_of(run.evaluations), rows=cells_of(run.evaluations))]
    return Section(
        title="Evaluations",
        tables=tables,
        notes=(
            "Means with 95 % intervals over prompts; tokens, calls and turns are those of a "
            "trajectory. `verl-mixed evaluate` prints paired differences.",
            *filter(None, [fewer_prompts_note(run.evaluations)]),
        ),
        missing="No checkpoint was evaluated: `verl-mixed evaluate` does that.",
    )
