"""`verl-mixed evaluate`: run the validation rows with a checkpoint, a model or a server."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_mixed.commands.arguments import (
    Help,
    add_config_arguments,
    add_flag,
    add_option,
    at_least_one,
    config_overrides,
)
from verl_mixed.exit_codes import GOOD, INTERRUPTED, NOT_GOOD, USAGE
from verl_mixed.run.text import printable

if TYPE_CHECKING:
    from rich.console import Console

    from verl_mixed.launch.evaluation import Target
    from verl_mixed.run.evaluations import Evaluation

HELP = Help(
    """\
Runs the validation rows with the run's own agent loops, tools, limits, deadlines and rewards, and
prints for each source: mean reward, pass@1, pass@k, their 95 % intervals over prompts, and the
tokens and tool calls used. Nothing is trained. The first word is one of:
  RUN     runs/<experiment>: its config, and a checkpoint (--step; the last one by default).
          --step 0 is the model that the run began with.
  MODEL   a Hugging Face folder or name, with the config that `train` would compose, or with the
          config of --run RUN
Instead of it, --base-url URL evaluates an OpenAI-compatible server (`POST URL/completions`);
OPENAI_API_KEY is its key.

Several steps are shown side by side, with paired differences of the same prompts. The results are
in runs/<experiment>/evaluations/<label>/. If an evaluation is interrupted or killed, the same
command goes on; if it is complete, the command only prints. --limit, --sample and --samples may
change between two calls: what is there is not made again.""",
    """\
verl-mixed evaluate runs/mixed_demo --step 8 16
verl-mixed evaluate runs/mixed_demo --samples 8 --pass-at 1 4 8 --json results.json
PROFILE=laptop verl-mixed evaluate models/mine --limit 50
verl-mixed evaluate --base-url http://10.0.0.4:8000/v1 --model mine --run runs/mixed_demo
verl-mixed evaluate --compare runs/mixed_demo@0 runs/mixed_demo@16""",
    "0 good, 1 it failed, or more trajectories were lost than mixed.infra_error_limit, 2 usage or "
    "config error, 130 interrupted",
)


WIDTH = 160
"""Characters of a line, so that no cell of a table is broken on a narrow screen."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    add_weights(parser)
    ks = "print pass@K too (default 1 and the number of samples)"
    parser.add_argument("--pass-at", metavar="K", nargs="+", type=at_least_one, help=ks)
    add_rows(parser, "trajectories of each row (default rollout.val_kwargs.n)")
    parser.set_defaults(of_training=False)
    add_option(parser, "--json", "FILE", "write the results as JSON", Path)
    add_option(parser, "--csv", "FILE", "write the results as CSV", Path)
    two = "start nothing; print which rows changed from A to B: RUN@STEP, a folder of evaluations/ "
    two += "or a file validation/<step>.jsonl"
    parser.add_argument("--compare", metavar=("A", "B"), nargs=2, help=two)


def add_weights(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say which weights try the rows."""
    steps = "steps of checkpoints of RUN; 0 is the model it began with"
    parser.add_argument("--step", metavar="N", nargs="+", type=_step, default=[], help=steps)
    config = "take the config of this run, with MODEL or --base-url"
    add_option(parser, "--run", "RUN", config, Path, dest="config_of")
    add_option(parser, "--base-url", "URL", "an OpenAI-compatible server, as http://host:8000/v1")
    add_option(parser, "--model", "NAME", "name of the model at --base-url (default its only one)")
    folder = "folder or name of the model at --base-url, for tokenizer and chat template (default "
    add_option(parser, "--tokenizer", "MODEL", folder + "the config's model)")
    label = "name of the evaluation's folder (default step_<N>, or the model's name)"
    add_option(parser, "--label", "NAME", label)
    add_flag(parser, "--retry-lost", "run trajectories again that a fault or a deadline ended")


def add_rows(parser: argparse.ArgumentParser, samples: str) -> None:
    """Add the arguments that say which rows are tried, and how often."""
    add_option(parser, "--samples", "N", samples, at_least_one)
    sources = "only these sources"
    parser.add_argument("--source", metavar="NAME", nargs="+", default=[], help=sources)
    add_option(parser, "--limit", "N", "only the first N rows of each source", at_least_one)
    drawn = "only N rows of each source, drawn by mixed.seed, the same each time"
    add_option(parser, "--sample", "N", drawn, at_least_one)


def _step(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: want a whole number, 0 at least")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate, or compare two evaluations."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, width=WIDTH)
    if arguments.compare:
        return _compare(arguments, console)

    done = evaluated(arguments, names_in(arguments), partial(_say, console))
    if isinstance(done, int):
        return done
    _show(arguments, console, *done)
    return verdict(*done, partial(_say, console))


def names_in(arguments: argparse.Namespace) -> list[str]:
    """Take RUN or MODEL out of the overrides."""
    words = [word for word in arguments.overrides if "=" not in word and word[:1] != "~"]
    names = [word for word in words if not word.endswith((".yaml", ".yml"))]
    arguments.overrides = [word for word in arguments.overrides if word not in names]
    return names


def evaluated(
    arguments: argparse.Namespace, names: Sequence[str], say: Callable[[str], None]
) -> tuple[list["Evaluation"], list["Target"]] | int:
    """What the arguments of `add_weights` and `add_rows` ask for, or the exit code of a failure.

    Args:
        names: RUN or MODEL, if one is given.
    """
    from config.schema import ConfigError
    from verl_mixed.commands.evaluate_targets import targets_of
    from verl_mixed.launch.evaluation import evaluate
    from verl_mixed.launch.failure import RunFailed
    from verl_mixed.run.state import RunHeld

    try:
        targets = targets_of(arguments, names, config_overrides(arguments), os.environ, say)
        return evaluate(targets, os.environ, say, retry_lost=arguments.retry_lost), targets
    except ConfigError as error:
        say(f"cannot evaluate, {len(error.problems)} problem{'s' * (len(error.problems) > 1)}:")
        for problem in error.problems:
            say(f"  - {problem}")
        return USAGE
    except RunHeld as error:
        say(f"error: {error}")
        return USAGE
    except RunFailed as error:
        say(f"\nfailed: {error}")
        return NOT_GOOD
    except KeyboardInterrupt:
        say("\ninterrupted; the same command goes on")
        return INTERRUPTED


def _say(console: "Console", text: str) -> None:
    from rich.text import Text

    for line in text.split("\n"):
        console.print(Text(printable(line)))


def _show(
    arguments: argparse.Namespace,
    console: "Console",
    done: Sequence["Evaluation"],
    targets: Sequence["Target"],
) -> None:
    from verl_mixed.views import evaluation as view

    summaries = [view.summary_of(one, targets[0].ks) for one in done]
    console.print(view.results_table(summaries))
    differences = view.compared(done)
    if differences:
        console.print(view.differences_table(differences))
    _write(
        arguments.json,
        {"evaluations": summaries, "differences": view.differences_json(differences)},
    )
    if arguments.csv is not None:
        view.write_csv(summaries, arguments.csv)


def verdict(
    done: Sequence["Evaluation"], targets: Sequence["Target"], say: Callable[[str], None]
) -> int:
    """Exit code 1 if a source lost too many trajectories for its numbers to count."""
    code, limit = GOOD, targets[0].infra_error_limit
    for one in done:
        for source in sorted({record.source for record in one.records}):
            own = [record for record in one.records if record.source == source]
            lost = [record for record in own if record.lost]
            if len(lost) > limit * len(own):
                code = NOT_GOOD
                say(
                    f"WARNING {one.label}: {source} lost {len(lost)} of {len(own)} trajectories, "
                    f"more than mixed.infra_error_limit={limit:g}; the first: {lost[0].fault}; "
                    "correct it, then run the same command with --retry-lost"
                )
    return code


def _write(path: Path | None, content: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(content, indent=1) + "\n")


def _compare(arguments: argparse.Namespace, console: "Console") -> int:
    """Print which rows changed from one evaluation to another."""
    from dataclasses import asdict

    from verl_mixed.run.evaluations import named_evaluation
    from verl_mixed.views import evaluation as view

    if arguments.overrides or arguments.step or arguments.base_url:
        raise ValueError("--compare takes two evaluations and starts none: leave the others out")
    first, last = (named_evaluation(name) for name in arguments.compare)
    if not (differences := view.compared([first, last])):
        raise ValueError(
            f"nothing to compare: {first.label} and {last.label} have no judged row in common"
        )
    for one in (first, last):
        if not one.is_finished:
            _say(
                console,
                f"WARNING {one.label}: this evaluation is not finished, so {len(one.records)} "
                "records are compared; run its `verl-mixed evaluate` again, which goes on",
            )
    rows = view.changed_rows(first.records, last.records)
    console.print(view.differences_table(differences))
    for line in view.changed_lines(rows) if rows else ["no row is solved more or less often"]:
        _say(console, line)
    _write(
        arguments.json,
        {
            "differences": view.differences_json(differences),
            "changed": [asdict(row) for row in rows],
        },
    )
    if arguments.csv is not None:
        import csv

        with arguments.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["source", "row_id", "question", "first", "last"])
            for row in rows:
                writer.writerow([row.source, row.row_id, row.question, row.first, row.last])
    sys.stdout.flush()
    return GOOD
