"""`verl-mixed diagnose`: known failures in a run's logs."""

from verl_mixed.commands.arguments import Help
from verl_mixed.diagnose.diagnose import EXIT_CODES, run
from verl_mixed.diagnose.diagnose import add_options as add_arguments

__all__ = ["HELP", "add_arguments", "run"]

HELP = Help(
    """\
Reads logs of any size and names the failures that it knows, the likely root cause first: how often
the failure occurred, the place and line of the first occurrence, the cause, and what to do. If it
finds no known cause, it shows the exception that ended the run, and the last lines with errors.""",
    """\
verl-mixed diagnose runs/mixed_demo
verl-mixed diagnose train.log /tmp/ray/session_latest/logs
verl-mixed diagnose --list""",
    EXIT_CODES,
)
