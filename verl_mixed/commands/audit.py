"""`verl-mixed audit`: prove from a run's files that it trained what was planned."""

import argparse

from verl_mixed.commands.arguments import Help, add_run_dir
from verl_mixed.exit_codes import GOOD, NOT_GOOD

HELP = Help(
    """\
Compares the ledger with the plan: every batch has the planned ratios, no prompt was skipped, none
was trained twice, and the rows are those of the training files. Compares every mask bit of the
trajectories with the tokens that the engine returned. Prints the first violation.""",
    "verl-mixed audit runs/mixed_demo",
    "0 all holds, 1 something does not, 2 no such run",
)

add_arguments = add_run_dir


def run(arguments: argparse.Namespace) -> int:
    """Audit the run and print the result."""
    from verl_mixed.run.audit import audit_run, describe
    from verl_mixed.run.compose import load_config
    from verl_mixed.run.state import RunFolder

    folder = RunFolder(arguments.run_dir)
    report = audit_run(folder, load_config(folder.config))
    print("\n".join(describe(report)))
    return GOOD if report.ok else NOT_GOOD
