"""`verl-mixed train`: start or resume a run."""

import argparse
import os
import sys
from pathlib import Path

from verl_mixed.commands import check
from verl_mixed.commands.arguments import (
    Help,
    add_config_arguments,
    add_flag,
    add_option,
    config_overrides,
)
from verl_mixed.run.text import printable

HELP = Help(
    """\
Starts the run that the config describes. If the run has a checkpoint, the same command resumes it
from there. Config and data are checked first, and all mistakes are printed together.

The config has six layers; a later layer wins:
  1. config/mixed_dataset_grpo.yaml
  2. the profile
  3. the files of prompts and mixture (their sources and templates come before the profile)
  4. the settings of run_mixed_training.sh, from the environment (PROFILE, EXPERIMENT_NAME,
     MODEL_PATH, TACO_RATIO, ...)
  5. the files of --config
  6. KEY=VALUE

--config takes AgentFly's agent_config.yaml and training_config.yaml: the sections agent, data,
algorithm, training, hardware and monitoring, and the sections of the run config. The command
prints what each key sets. An unknown key is an error that names the nearest known key.
docs/configuration.md lists the keys. The run's folder keeps copies of the files in config/.

The run's folder is runs/<experiment>. Ctrl-C ends the run; `verl-mixed stop` saves a checkpoint
first.""",
    """\
PROFILE=laptop verl-mixed train
verl-mixed train mixed.experiment=more_search mixed.sources.nq.ratio=0.5
verl-mixed train --config agent_config.yaml --config training_config.yaml --dry-run
verl-mixed train --config my.yaml --log-file train.txt trainer.total_training_steps=50
verl-mixed train --config-dir my_config mixture=mine""",
    "0 the run is complete (--dry-run, --validate-only: no problems), 1 it failed, 2 usage or "
    "config error (there are problems), 130 interrupted",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    instead = parser.add_mutually_exclusive_group()
    add_flag(
        instead,
        "--dry-run",
        "print what would happen and everything that would keep a start from beginning; start and "
        "write nothing",
    )
    only = "do what `verl-mixed check` does, and look at this machine as a start does"
    add_flag(instead, "--validate-only", only)
    log_file = "append what is printed to this file too; the run then prints a line a step"
    add_option(parser, "--log-file", "FILE", log_file, Path)
    again = "start a run that failed again, up to N times, where a resume may mend it; it waits "
    again += "for the cluster's nodes, and gives up if a failure comes twice at a step ($RETRIES)"
    add_option(parser, "--retries", "N", again, _count)


def _count(text: str) -> int:
    if not text.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: want a whole number, 0 at least")
    return int(text)


def _retries(arguments: argparse.Namespace) -> int:
    if arguments.retries is not None:
        return arguments.retries
    try:
        return _count(os.environ.get("RETRIES") or "0")
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"RETRIES={error}") from error


def run(arguments: argparse.Namespace) -> int:
    """Train, or say what a start would do."""
    from verl_mixed.run.stock_recipe import NOT_OURS, is_stock

    retries = _retries(arguments)
    if is_stock(arguments.overrides):
        raise ValueError(NOT_OURS)
    if arguments.validate_only:
        return check.run(arguments, machine=True)
    overrides = config_overrides(arguments, sys.stdout)
    if arguments.dry_run:
        from verl_mixed.launch.dry_run import dry_run

        lines, problems, missing = dry_run(overrides, os.environ, arguments.config)
        for line in lines:
            print(printable(line))
        return check.print_problems(problems, unseen=missing)
    from verl_mixed.launch.launcher import train

    return train(overrides, os.environ, config_files=arguments.config, retries=retries)
