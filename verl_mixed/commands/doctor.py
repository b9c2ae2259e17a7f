"""`verl-mixed doctor`: check everything that a run needs on this machine and on its cluster."""

import argparse
from pathlib import Path

from verl_mixed.commands.arguments import (
    Help,
    add_config_arguments,
    add_flag,
    add_option,
    config_overrides,
)
from verl_mixed.exit_codes import GOOD, NOT_GOOD

HELP = Help(
    """\
Prints a line for each finding: its status (ok, warning, bad), what was found, and what to do. Looks
at Python and packages, GPUs, Ray and its nodes, whether the run can be placed, sandbox or tool
server, search, limiter and locks, data, model, disks, memory, ports and W&B. Takes the arguments of
`train`.""",
    """\
PROFILE=laptop verl-mixed doctor
verl-mixed doctor --json
verl-mixed doctor --ray 10.0.0.2:6379 --locks /shared/runs
verl-mixed doctor --fabric""",
    "0 nothing is bad, 1 something is (a config with a mistake, too), 2 usage error",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    add_flag(parser, "--json", "one JSON object instead of lines")
    locks = "test locks on a shared folder between all nodes of the Ray cluster"
    add_option(parser, "--locks", "FOLDER", locks, Path)
    add_flag(
        parser,
        "--fabric",
        "measure the network between all nodes of the Ray cluster: ports, latency, bandwidth, a "
        "short all-reduce (NCCL on free GPUs, else gloo)",
    )
    add_option(
        parser,
        "--ray",
        "ADDRESS",
        "cluster to look at: ip:port, or auto for the one that runs on this machine (default: the "
        "cluster of MASTER_IP or RAY_ADDRESS, if any)",
        _ray_address,
    )


def _ray_address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if text != "auto" and not (host and port.isdigit() and "/" not in host):
        raise argparse.ArgumentTypeError(f"{text!r}: want ip:port, or auto")
    return text


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; exit 1 if one is bad."""
    from config.schema import ConfigError
    from verl_mixed.checks.finding import as_json, report
    from verl_mixed.commands.doctor_checks import examine

    try:
        overrides = config_overrides(arguments)
    except ConfigError as error:  # a finding among the others
        overrides = error
    findings = examine(
        overrides, ray_address=arguments.ray, locks=arguments.locks, fabric=arguments.fabric
    )
    if arguments.json:
        print(as_json(findings))
    else:
        report(findings)
    return NOT_GOOD if any(finding.status == "bad" for finding in findings) else GOOD
