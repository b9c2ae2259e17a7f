"""`python -m verl_mixed`: the command `verl-mixed`."""

import os
import sys

from verl_mixed.shadowed import ROOT

# `python -m` puts the current folder first, where a user's config.py would hide ours
if sys.path[0] in ("", os.getcwd()) and os.path.realpath(os.getcwd()) != os.path.realpath(ROOT):
    del sys.path[0]

from verl_mixed.cli import main

if __name__ == "__main__":
    sys.exit(main())
