"""The command line `verl-mixed`: its list of commands, how errors are shown, exit codes.

Each command is a module `verl_mixed.commands.<command>` with its help text `HELP`,
`add_arguments(parser)`, and `run(arguments)`, which returns the exit code. Only the module of the
named command is imported, because otherwise `verl-mixed --help` would wait for Hydra and pydantic.
"""

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from json import JSONDecodeError
from types import ModuleType

from verl_mixed.exit_codes import INTERRUPTED, NOT_GOOD, USAGE
from verl_mixed.shadowed import shadows

OVERVIEW = """\
Train one policy on several agentic sources at once, in exact ratios.

  before a run   prepare, profile, check, plan, tools, doctor
  during a run   train, watch, stop, serve-tools, limiter
  after a run    report, evaluate, export, view, audit, diagnose"""

OVERVIEW_END = """\
`verl-mixed COMMAND --help` describes a command. The pages in docs/ give the reasons.

exit codes: 0 good, 1 the thing checked is not good, 2 usage or config error"""

COMMANDS = {
    "train": "start or resume a run",
    "check": "print the resolved config, the first prompt of each source, and every problem",
    "plan": "print what the mixture will do: batches, passes, tool calls",
    "prepare": "write the parquet files of a source",
    "profile": "write how often each training row is solved, by a run's ledger or by a model",
    "serve-tools": "run the tool server until it is stopped",
    "audit": "prove ratios, accounts and masks of a run from its files",
    "evaluate": "run the validation rows with the weights of a checkpoint, a model or a server",
    "export": "write a checkpoint as a Hugging Face folder",
    "watch": "show the progress of a run until it ends",
    "report": "write the results of one or several runs: a page, an image, a table",
    "view": "read trajectories: who wrote each token, its mask, tool calls, advantages",
    "stop": "end a run on this machine, after a checkpoint if possible",
    "tools": "list the tools that the models of a run can call, and call one",
    "limiter": "show what the rate limiter of a run does",
    "doctor": "check this machine and its cluster for everything that a run needs",
    "diagnose": "find known failures in a run's logs, with causes and remedies",
}
"""Command -> its line in `verl-mixed --help`."""

EXTRAS = {
    **dict.fromkeys(("train", "check", "plan", "evaluate"), ("train", "tools", "server")),
    **dict.fromkeys(("export", "profile"), ("train",)),
    **{"prepare": ("train", "server"), "tools": ("train", "tools"), "serve-tools": ("server",)},
    **dict.fromkeys(("watch", "report", "view", "limiter"), ("view",)),
    "stop": ("train",),
    "doctor": ("train", "server"),
}
"""Command -> extras of pyproject.toml that it needs; without them it needs the core only."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    `argv` are the words after the program's name; None takes them from the process.
    """
    words = sys.argv[1:] if argv is None else argv
    if _command_of(words) != "diagnose" and (hidden := shadows()):  # it needs none of them
        print("\n".join(f"error: {sentence}" for sentence in hidden), file=sys.stderr)
        return USAGE
    return _with_errors_shown(lambda: _main(words))


def _main(words: Sequence[str]) -> int:
    try:
        return _parse_and_run(words)
    except ModuleNotFoundError:
        from verl_mixed.run.requirements import refuse_without

        for extra in EXTRAS.get(_command_of(words) or "", ()):
            refuse_without(extra, f"verl-mixed {_command_of(words)}")
        raise


def _parse_and_run(words: Sequence[str]) -> int:
    arguments = parser_for(words).parse_args(words)
    if (log_file := getattr(arguments, "log_file", None)) is None:
        return arguments.run(arguments)

    from verl_mixed.run.screen_log import copied_to

    with copied_to(log_file):
        return _with_errors_shown(lambda: arguments.run(arguments))


def _with_errors_shown(act: Callable[[], int]) -> int:
    """Run `act`; of an error that is no fault of the program, show the message and no trace."""
    from verl_mixed.run.text import os_error_words, print_error

    try:
        try:
            return act()
        finally:
            sys.stdout.flush()  # an output that cannot be written is an error of the command
    except (UnicodeError, JSONDecodeError, RecursionError) as error:
        print_error(f"cannot read a file or an argument: {error}; correct it")
        return NOT_GOOD
    except ValueError as error:  # config.schema.ConfigError is a ValueError
        print_error(error)
        return USAGE
    except OSError as error:
        _give_up_output()
        print_error(os_error_words(error))
        return NOT_GOOD
    except KeyboardInterrupt:
        return INTERRUPTED


def _give_up_output() -> None:
    """If stdout cannot be written, send it nowhere; Python would raise again at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError, ValueError):  # a stdout without a file
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parser_for(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser for a command line; only the command that it names has arguments."""
    parser = argparse.ArgumentParser(
        prog="verl-mixed",
        description=OVERVIEW,
        epilog=OVERVIEW_END,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # a file of the user's may hide what it imports
    from verl_mixed.commands.arguments import Parser

    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    named = _command_of(words)
    if named is not None and named not in COMMANDS:
        near = difflib.get_close_matches(named, COMMANDS, n=1)
        meant = f"did you mean {near[0]}?" if near else f"one of {', '.join(COMMANDS)}"
        raise ValueError(f"no command {named!r}: {meant}")
    for name, summary in COMMANDS.items():
        if name != named:
            commands.add_parser(name, help=summary)
            continue
        command = command_module(name)
        own = commands.add_parser(name, help=summary)
        command.HELP.add_to(own)
        if name == "prepare":
            command.add_arguments(own, words)  # they depend on the kind of data that is named
        else:
            command.add_arguments(own)
            own.set_defaults(run=command.run)
    return parser


def _command_of(words: Sequence[str]) -> str | None:
    return next((word for word in words if not word.startswith("-")), None)


def command_module(name: str) -> ModuleType:
    """The module of a command."""
    return import_module(f"verl_mixed.commands.{name.replace('-', '_')}")
