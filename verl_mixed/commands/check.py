"""`verl-mixed check`: the resolved config, the first prompt of each source, every problem."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from verl_mixed.commands.arguments import Help, add_config_arguments, config_overrides
from verl_mixed.exit_codes import GOOD, USAGE
from verl_mixed.run.text import printable

HELP = Help(
    """\
Checks config and data, and starts nothing. The problems that it finds are:
  - wrong settings, also those that verl's own config classes refuse
  - rows without a source
  - prompts that are too long, measured with the model's tokenizer
  - prompts that name none of the tags and forms of their agent
  - sources that search without a search engine
  - ground truths that the reward cannot use
  - rows that occur twice, or both in training and in validation

Takes the arguments of `train`. The config, an estimate of a step's tokens, memory and traffic, and
the prompts go to stdout, the problems to stderr.""",
    """\
PROFILE=laptop verl-mixed check
verl-mixed check --config agent_config.yaml --config training_config.yaml
verl-mixed check --config-dir my_config mixture=mine""",
    "0 no problems, 2 there are",
)

add_arguments = add_config_arguments


def run(arguments: argparse.Namespace) -> int:
    """Print config and prompts; exit 2 if there are problems."""
    from omegaconf import OmegaConf

    from verl_mixed.checks.config.load import step_load
    from verl_mixed.checks.config.prompts import first_prompts
    from verl_mixed.launch.plan import make_plan
    from verl_mixed.views.pace import pace_words

    plan = make_plan(config_overrides(arguments), os.environ)
    missing = plan.still_to_make()
    problems = plan.problems(data=not missing, machine=False) or _verls_problems(plan.config)
    print(OmegaConf.to_yaml(OmegaConf.create(plan.config)))
    if (load := step_load(plan.config)) is not None:
        print("--- estimate of a step")
        for line in load.lines():
            print(line)
        print("---\n")
    if pace := pace_words(plan.folder.lines()):
        print(f"note: so far, {pace}")
    if missing:
        print(f"note: {'; '.join(missing)}; data and model were not looked at")
    else:
        for source, prompt in first_prompts(plan.config).items():
            print(f"--- first prompt of source={source}\n{prompt}\n---\n")
    return print_problems(problems, plan.warnings())


def _verls_problems(config: Mapping[str, Any]) -> list[str]:
    """What verl refuses of a resolved config; a process of its own imports verl."""
    done = subprocess.run(
        [sys.executable, "-m", "agent_loop.training.verl_config"],
        input=json.dumps(config),
        capture_output=True,
        check=False,
        text=True,
    )
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])  # verl prints too
    (last,) = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
    return [f"verl cannot build its config: {last}; `verl-mixed doctor` looks at the packages"]


def print_problems(problems: Sequence[str], warnings: Sequence[str] = ()) -> int:
    """Print warnings, problems and their number to stderr; returns the exit code."""
    for warning in warnings:
        print(f"warning: {printable(warning)}", file=sys.stderr)
    for problem in problems:
        print(f"problem: {printable(problem)}", file=sys.stderr)
    print(f"{len(problems)} problems" if problems else "no problems", file=sys.stderr)
    return USAGE if problems else GOOD
