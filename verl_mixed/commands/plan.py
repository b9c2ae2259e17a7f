"""`verl-mixed plan`: what the mixture of a run will do, before the run."""

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from verl_mixed.commands.arguments import (
    Help,
    add_config_arguments,
    add_flag,
    add_option,
    add_recipe_arguments,
    at_least_one,
    config_overrides,
)
from verl_mixed.exit_codes import GOOD

if TYPE_CHECKING:
    from verl_mixed.run.stock_recipe import StockRecipe

HELP = Help(
    """\
Prints what a run would train, and starts nothing: the prompts of each source in the first batches,
how often each row is used, the step from which a source repeats rows, and whether the rate limit
suffices for the tool calls. Takes the arguments of `train`, or the overrides of a recipe of verl's
that sets +data.mixture.""",
    """\
PROFILE=laptop verl-mixed plan --batches 3
PROFILE=laptop verl-mixed plan 'mixed.sources.nq.ratio={0: 0.5, 8: 0.1}'
PROFILE=laptop verl-mixed plan mixed.sources.math.ratio=0.2 --diff runs/mixed_demo/config.yaml""",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    add_recipe_arguments(parser)
    add_option(parser, "--batches", "N", "how many batches to list", at_least_one, 10)
    add_flag(parser, "--json", "one JSON object instead of the tables")
    diff = "compare with this file: the config.yaml of a run, or a mixture"
    add_option(parser, "--diff", "OTHER", diff, Path)


def _plan_recipe(recipe: "StockRecipe", arguments: argparse.Namespace) -> int:
    from config.schema import ConfigError
    from verl_mixed.views.plan.report import recipe_report
    from verl_mixed.views.plan.text import as_json, describe

    if arguments.diff is not None:
        raise ValueError("--diff compares runs of `verl-mixed train`: leave it out")
    if recipe.problems:
        raise ConfigError(recipe.problems)
    report = recipe_report(recipe, batches=arguments.batches)
    if arguments.json:
        print(json.dumps(as_json(report)))
    else:
        print("\n".join([*describe(report), *recipe.notes()]))
    return GOOD


def run(arguments: argparse.Namespace) -> int:
    """Print the plan, and the difference to another if one is named."""
    from verl_mixed.run.stock_recipe import stock_recipe

    if (recipe := stock_recipe(arguments)) is not None:
        return _plan_recipe(recipe, arguments)  # needs the core only
    from config.lookup import files_at
    from config.schema import ConfigError
    from samplers.ledger import read_ledger
    from verl_mixed.checks.preflight import mixture_problems
    from verl_mixed.launch.plan import make_plan
    from verl_mixed.run.audit import rows_of
    from verl_mixed.views.plan.diff import compare, other_report
    from verl_mixed.views.plan.report import make_report
    from verl_mixed.views.plan.text import as_json, describe, describe_decisions, describe_diff

    plan = make_plan(config_overrides(arguments), os.environ)
    unknown = None if plan.has_rows() else "; ".join(plan.still_to_make())
    if problems := mixture_problems(plan.config, data=unknown is None):
        raise ConfigError(problems)
    rows = None if unknown else rows_of(files_at(plan.config, "data.train_files"))
    report = make_report(plan.config, rows, batches=arguments.batches, rows_unknown=unknown)
    diff = None
    if arguments.diff is not None:
        other = other_report(
            arguments.diff, plan.config, batches=arguments.batches, rows_unknown=unknown
        )
        diff = compare(str(arguments.diff), report, other)
    if arguments.json:
        print(json.dumps(as_json(report, diff)))
        return GOOD
    if plan.epochs:
        print(f"{plan.length}\n")
    print("\n".join(describe(report)))
    if diff is not None:
        ledger = read_ledger(Path(diff.name).with_name("ledger.jsonl"))
        print("\n".join(["", *describe_diff(diff), *describe_decisions(ledger)]))
    return GOOD
