"""`python -m verl_mixed`: the command `verl-mixed`."""

import sys

from verl_mixed.cli import main

if __name__ == "__main__":
    sys.exit(main())
