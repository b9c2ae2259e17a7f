"""`python -m verl_mixed`: the command `verl-mixed`."""

import os
import sys

from verl_mixed.shadowed import ROOT

# `python -m` puts the current folder first, where a user's config.py would hide ours. It comes last
# then, behind this project, because users' modules are found there.
if sys.path[0] in ("", os.getcwd()) and os.path.realpath(os.getcwd()) != os.path.realpath(ROOT):
    sys.path[:] = [*sys.path[1:], ROOT, os.getcwd()]

from verl_mixed.cli import main

if __name__ == "__main__":
    sys.exit(main())
