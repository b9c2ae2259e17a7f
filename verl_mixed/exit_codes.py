"""Exit codes of the commands and the launcher."""

GOOD = 0
NOT_GOOD = 1
"""The run, or the thing that was checked, is not good."""

USAGE = 2
"""The command line or a setting is wrong; nothing was started."""

INTERRUPTED = 130
"""Ended by Ctrl-C: 128 + SIGINT, as in shells."""
