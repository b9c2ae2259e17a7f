"""`verl-mixed diagnose`: known failures in a run's logs."""

from verl_mixed.commands.arguments import Help
from verl_mixed.diagnose.diagnose import add_options as add_arguments
from verl_mixed.diagnose.diagnose import run

__all__ = ["HELP", "add_arguments", "run"]

HELP = Help(
    """\
Reads logs of any size and names the failures that it knows, the likely root cause first: how often
the failure occurred, the place and line of the first occurrence, the cause, and what to do. If it
finds no known failure, it shows the last lines that mention an error.""",
    """\
verl-mixed diagnose runs/mixed_demo
verl-mixed diagnose train.log /tmp/ray/session_latest/logs
verl-mixed diagnose --list""",
    "0 no known failure was found, 1 one was found, 2 a log cannot be read",
)
