"""`verl-mixed stop`: end a run on this machine."""

import argparse
import math

from verl_mixed.commands.arguments import Help, add_option, add_run_dir
from verl_mixed.exit_codes import GOOD, NOT_GOOD
from verl_mixed.run.text import print_error

HELP = Help(
    """\
Asks the run to finish the current step, save a checkpoint and end. If the run has not ended after
--grace seconds, its processes are ended by signals. `verl-mixed train` with the same settings
resumes the run.""",
    """\
verl-mixed stop runs/mixed_demo
verl-mixed stop runs/mixed_demo --grace 0""",
    "0 no process of the run is left, 1 some are, 2 no such run or usage error",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)
    grace = "time for the current step and its checkpoint, 0: do not ask"
    add_option(parser, "--grace", "SECONDS", grace, _seconds, 900.0)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: want seconds, 0 at least")
    return seconds


def run(arguments: argparse.Namespace) -> int:
    """Stop the run."""
    from verl_mixed.launch.stop import stop
    from verl_mixed.run.state import RunFolder, RunHeld

    try:
        is_stopped = stop(RunFolder(arguments.run_dir), arguments.grace)
    except RunHeld as error:
        print_error(error)
        return NOT_GOOD
    return GOOD if is_stopped else NOT_GOOD
