"""`verl-mixed audit`: prove from a run's files that it trained what was planned."""

import argparse

from verl_mixed.commands.arguments import Help, add_run_dir
from verl_mixed.exit_codes import GOOD, NOT_GOOD

HELP = Help(
    """\
Compares the ledger with the plan: every batch has the planned ratios, no prompt was skipped, none
was trained twice, and the rows are those of the training files. Compares every mask bit of the
trajectories with the tokens that the engine returned. Prints the first violation.

RUN may also be trainer.default_local_dir of a recipe of verl's that sets +data.mixture: its
ledger holds the plan, and there are no masks to check.""",
    """\
verl-mixed audit runs/mixed_demo
verl-mixed audit checkpoints/my_project/my_experiment""",
    "0 all holds, 1 something does not, 2 no such run",
)

add_arguments = add_run_dir


def run(arguments: argparse.Namespace) -> int:
    """Audit the run and print the result."""
    from verl_mixed.run.audit import audit_recipe, audit_run, describe, describe_mixture
    from verl_mixed.run.compose import load_config
    from verl_mixed.run.state import RunFolder

    folder = RunFolder(arguments.run_dir)
    if folder.ledger.exists() and not folder.config.exists():
        report = audit_recipe(folder)
        lines = describe_mixture(report)
    else:
        report = audit_run(folder, load_config(folder.config))
        lines = describe(report)
    print("\n".join(lines))
    return GOOD if report.ok else NOT_GOOD
