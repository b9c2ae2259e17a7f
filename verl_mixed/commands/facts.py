"""Prints folder or facts of a run for shell scripts: `python -m verl_mixed.commands.facts`.

Takes the KEY=VALUE of `verl-mixed train`. Prints `runs/<experiment>`; with `--facts` it prints
assignments for a shell, RUN_<FACT>.
"""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from io import StringIO

from verl_mixed.commands.arguments import Parser, add_config_arguments, config_overrides
from verl_mixed.exit_codes import GOOD, USAGE
from verl_mixed.run.name import facts
from verl_mixed.run.text import print_error


def main(argv: Sequence[str] | None = None) -> int:
    """Print the run's folder or facts; exit 2 if the config is wrong."""
    parser = Parser(prog="python -m verl_mixed.commands.facts")
    parser.add_argument("--facts", action="store_true", help="shell assignments, RUN_<FACT>")
    add_config_arguments(parser)
    arguments = parser.parse_args(argv)
    try:
        found = facts(config_overrides(arguments, StringIO()), os.environ)
    except ValueError as error:  # config.schema.ConfigError is a ValueError
        print_error(error)
        return USAGE
    if not arguments.facts:
        print(found.folder)
        return GOOD
    for name, value in asdict(found).items():
        print(f"RUN_{name.upper()}={shlex.quote(str(value))}")
    return GOOD


if __name__ == "__main__":
    sys.exit(main())
