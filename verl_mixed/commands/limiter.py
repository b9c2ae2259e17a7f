"""`verl-mixed limiter`: show, watch or reset the rate limiter of a run."""

import argparse
from pathlib import Path

from verl_mixed.commands.arguments import Help, add_flag, add_option
from verl_mixed.exit_codes import GOOD

HELP = Help(
    """\
Shows for each source the calls that were granted, that wait and that were refused, how long they
waited, and how much of the rate the last minute used. On several nodes a Ray actor keeps the
limit; name its cluster with --ray.""",
    """\
verl-mixed limiter runs/mixed_demo --watch
verl-mixed limiter runs/mixed_demo --json
verl-mixed limiter runs/mixed_demo --ray auto""",
    "0 it was shown, 1 its cluster or its file cannot be used, 2 there is none",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="PATH", help="runs/<experiment> or state file")
    add_flag(parser, "--json", "one JSON object instead of the table")
    add_flag(parser, "--watch", "show it every second, until interrupted")
    add_flag(parser, "--reset", "first reset the limiter: empty bucket, full rate, counts of 0")
    ray = "cluster whose actor keeps the limit (auto: the cluster that runs on this machine)"
    add_option(parser, "--ray", "ADDRESS", ray)


def run(arguments: argparse.Namespace) -> int:
    """Show the limiter."""
    from verl_mixed.views.limiter import show

    show(
        arguments.path,
        as_json=arguments.json,
        watch=arguments.watch,
        anew=arguments.reset,
        ray_address=arguments.ray,
    )
    return GOOD
