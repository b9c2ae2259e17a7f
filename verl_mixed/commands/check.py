"""`verl-mixed check`: the resolved config, the first prompt of each source, every problem."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from config.text_table import text_table
from verl_mixed.commands.arguments import (
    Help,
    TakesArguments,
    add_config_arguments,
    add_flag,
    add_recipe_arguments,
    config_overrides,
)
from verl_mixed.exit_codes import GOOD, USAGE
from verl_mixed.run.text import printable

if TYPE_CHECKING:
    from verl_mixed.run.stock_recipe import StockRecipe

HELP = Help(
    """\
Checks config and data, and starts nothing. The problems that it finds are:
  - wrong settings, also those that verl's own config classes refuse
  - agent loops, rewards, tools and other code of your own that cannot be imported
  - rows without a source
  - prompts that are too long, measured with the model's tokenizer
  - prompts whose right answers do not earn the reward
  - sources that search without a search engine
  - ground truths that the reward cannot use
  - rows that occur twice, or both in training and in validation

Takes the arguments of `train`. The config, an estimate of a step's tokens, memory and traffic, and
the prompts go to stdout, the problems to stderr.

With the overrides of a recipe of verl's that sets +data.mixture, checks what the mixture needs of
the recipe and of its training files; verl checks the rest when the recipe starts.""",
    """\
PROFILE=laptop verl-mixed check
verl-mixed check --config agent_config.yaml --config training_config.yaml
verl-mixed check --config-dir my_config mixture=mine
verl-mixed check --reward-examples
verl-mixed check data.train_files=train.parquet '+data.mixture={gsm8k: 0.7, search: 0.3}'""",
    "0 no problems, 2 there are",
)


def add_arguments(parser: TakesArguments) -> None:
    add_config_arguments(parser)
    add_recipe_arguments(parser)
    add_flag(
        parser,
        "--reward-examples",
        "print what right and wrong answers of some rows earn; asks judges too",
    )


def run(arguments: argparse.Namespace, *, machine: bool = False) -> int:
    """Print config and prompts; exit 2 if there are problems.

    `machine` looks at this machine too, as a start does.
    """
    from verl_mixed.run.stock_recipe import stock_recipe

    if not machine and (recipe := stock_recipe(arguments)) is not None:
        return _check_recipe(recipe)  # needs the core only
    from omegaconf import OmegaConf

    from verl_mixed.checks.config.load import step_load
    from verl_mixed.checks.config.prompts import first_prompts
    from verl_mixed.checks.config.reward_examples import Example, untried
    from verl_mixed.launch.plan import make_plan
    from verl_mixed.views.pace import pace_words

    plan = make_plan(config_overrides(arguments), os.environ)
    missing = plan.still_to_make()
    problems = plan.every_problem(machine=machine)
    print(OmegaConf.to_yaml(OmegaConf.create(plan.config)))
    if (load := step_load(plan.config)) is not None:
        print("--- estimate of a step")
        for line in load.lines():
            print(line)
        print("---\n")
    if (start := plan.next_start()).seen or start.checkpoint:
        print(f"note: {start.words(plan.length)}")
    elif plan.epochs:
        print(f"note: {plan.length}")
    if pace := pace_words(plan.folder.lines()):
        print(f"note: so far, {pace}")
    if getattr(arguments, "reward_examples", False):
        rows = [each.columns() for each in plan.reward_examples(asks_judges=True)]
        print("\n".join(["--- reward examples", *text_table([Example.NAMES, *rows]), "---\n"]))
    for note in untried(plan.reward_examples()):
        print(f"note: {note}")
    if missing:
        print(f"note: {'; '.join(missing)}; data and model were not looked at")
    else:
        for source, prompt in first_prompts(plan.config).items():
            print(f"--- first prompt of source={source}\n{prompt}\n---\n")
    unseen = [*missing, *([] if machine else ["this machine (`verl-mixed train --validate-only`)"])]
    return print_problems(problems, plan.warnings(), unseen)


def _check_recipe(recipe: "StockRecipe") -> int:
    if not recipe.problems:
        rows = [["source", "share", "rows"]]
        for name, share in recipe.mixture.items():
            share = share if recipe.shares is None else recipe.shares[name]
            size = "?" if recipe.sizes is None else recipe.sizes.get(name, 0)
            rows.append([name, "null" if share is None else f"{share:.4g}", str(size)])
        print("\n".join(text_table(rows, numbers=True)))
        for note in recipe.notes():
            print(f"note: {printable(note)}")
    unseen = [f"the rows ({recipe.unknown})"] if recipe.unknown else []
    unseen.append("verl's other settings")
    return print_problems(recipe.problems, recipe.warnings, unseen)


def print_problems(
    problems: Sequence[str], warnings: Sequence[str] = (), unseen: Sequence[str] = ()
) -> int:
    """Print warnings, problems and their number to stderr; returns the exit code.

    `unseen` is what was not looked at and a start looks at: without it, no problem is found.
    """
    for warning in warnings:
        print(f"warning: {printable(warning)}", file=sys.stderr)
    for problem in problems:
        print(f"problem: {printable(problem)}", file=sys.stderr)
    last = f"{len(problems)} problems" if problems else "no problems"
    if unseen and not problems:
        last += f" in what was looked at; not looked at: {'; '.join(unseen)}"
    print(last, file=sys.stderr)
    return USAGE if problems else GOOD
