"""`verl-mixed profile`: how often each training row is solved, by a run's ledger or by a model."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from verl_mixed.commands import evaluate
from verl_mixed.commands.arguments import Help, add_config_arguments
from verl_mixed.exit_codes import GOOD
from verl_mixed.run.text import printable

HELP = Help(
    """\
Writes the pass rate of each training row, with its 95 % interval, beside the rows: train.parquet
has train.profile.jsonl. mixed.sources.<name>.difficulty and curriculum read it. The first word is
one of:
  RUN     runs/<experiment>: from its ledger, at no cost. It has the rows that the run trained, at
          all its steps. With --step N, that checkpoint tries all rows instead.
  MODEL   a Hugging Face folder or name: it tries all rows
Instead of it, with --base-url URL the model of an OpenAI-compatible server tries them. A row is
tried --samples times (default rollout.n), by the run's own loops, tools and rewards. If it is
interrupted or killed, the same command goes on. A row that has a profile gets the new one; the
profiles of other rows stay.""",
    """\
verl-mixed profile runs/mixed_demo
verl-mixed profile runs/mixed_demo --step 16 --samples 16
PROFILE=gpu verl-mixed profile models/mine --source math --limit 1000""",
    "0 good, 1 it failed, or more trajectories were lost than mixed.infra_error_limit, 2 usage or "
    "config error, 130 interrupted",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    evaluate.add_weights(parser)
    evaluate.add_rows(parser, "trajectories of each row (default rollout.n)")
    parser.set_defaults(of_training=True, pass_at=None)


def run(arguments: argparse.Namespace) -> int:
    """Profile the training rows."""
    from config.lookup import files_at
    from verl_mixed.run.compose import load_config
    from verl_mixed.run.profiles import described, of_ledger, of_records, write
    from verl_mixed.run.state import RunFolder

    if len(arguments.step) > 1:
        raise ValueError(f"--step {arguments.step[1]}: a profile is of one step; name one")
    names, code = evaluate.names_in(arguments), GOOD
    folder = RunFolder(Path(names[0])) if names else None
    of_run = folder is not None and folder.config.is_file()
    if folder is not None and of_run and not arguments.step and not arguments.base_url:
        _refuse_choices(arguments, names)
        config, profiles = load_config(folder.config), of_ledger(folder)
    else:
        done = evaluate.evaluated(arguments, names, _say)
        if isinstance(done, int):
            return done
        (evaluation,), (target,) = done
        config, profiles = target.plan.config, of_records(evaluation.records, target.weights)
        code = evaluate.verdict(*done, _say)
    written = write(config, profiles)
    for source, own in described(files_at(config, "data.train_files"), profiles).items():
        mean = "" if own.mean is None else f", mean {own.mean:.2f}"
        _say(
            f"{source}: {own.profiled} of {own.rows} rows{mean}, never solved {own.never}, always "
            f"solved {own.always}"
        )
    for path in written:
        _say(f"wrote {path}")
    return code


def _refuse_choices(arguments: argparse.Namespace, names: Sequence[str]) -> None:
    """Refuse what a ledger cannot follow."""
    options = {
        "--samples": arguments.samples,
        "--source": arguments.source,
        "--limit": arguments.limit,
        "--sample": arguments.sample,
        "--label": arguments.label,
        "--retry-lost": arguments.retry_lost,
        "--run": arguments.config_of,
        "--model": arguments.model,
        "--tokenizer": arguments.tokenizer,
    }
    given = [option for option, value in options.items() if value]
    if given := [*given, *names[1:], *arguments.overrides]:
        raise ValueError(
            f"{given[0]}: without --step, the profile is that of the prompts that {names[0]} has "
            "trained, and nothing can be chosen; leave it out, or name a --step"
        )


def _say(text: str) -> None:
    for line in text.split("\n"):
        print(printable(line))
