"""What the commands and the launcher end with."""

GOOD = 0
NOT_GOOD = 1
"""The thing checked, or the run, is not good."""

USAGE = 2
"""A word of the command line or a setting is wrong; nothing was started."""

INTERRUPTED = 130
"""By Ctrl-C, as shells have it: 128 + SIGINT."""
