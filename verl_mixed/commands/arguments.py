"""Help text of a command, and the arguments that several commands have in common."""

import argparse
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from verl_mixed.run.text import printable


@dataclass(frozen=True, slots=True)
class Help:
    """What `verl-mixed COMMAND --help` prints before and after the options."""

    description: str
    examples: str
    """Commands, one a line."""

    exit_codes: str = "0 good, 1 not good, 2 usage or config error"

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Set description and epilog of a parser; line breaks are kept."""
        examples = "\n".join(f"  {line}" for line in self.examples.splitlines())
        parser.description = self.description
        parser.epilog = f"examples:\n{examples}\n\nexit codes: {self.exit_codes}"
        parser.formatter_class = argparse.RawDescriptionHelpFormatter


class TakesArguments(Protocol):
    """A parser, or a group of its arguments."""

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action: ...


def add_option(
    parser: TakesArguments,
    name: str,
    metavar: str,
    help: str,
    type: Callable[[str], Any] = str,
    default: Any = None,
    **settings: Any,
) -> None:
    """Add an option with a value; its default is added to the help text."""
    if default is not None:
        help += f" (default {default:g})" if isinstance(default, float) else f" (default {default})"
    parser.add_argument(name, metavar=metavar, help=help, type=type, default=default, **settings)


def add_flag(parser: TakesArguments, name: str, help: str) -> None:
    """Add an option without a value."""
    parser.add_argument(name, help=help, action="store_true")


def add_run_dir(parser: TakesArguments) -> None:
    """Add RUN, the folder of a run, as `run_dir`."""
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="runs/<experiment>")


class Parser(argparse.ArgumentParser):
    """Takes KEY=VALUE anywhere among the options, where argparse takes such words in one place."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As of argparse; `overrides` are all words that are no option and no value of one."""
        if all(action.dest != "overrides" for action in self._actions):
            return super().parse_known_args(args, namespace)
        known = self._option_string_actions
        options, overrides = list[str](), list[str]()
        takes: Any = 0  # values that the last option still takes
        words = iter(sys.argv[1:] if args is None else args)
        for word in words:
            if word == "--":
                overrides += words
            elif word.startswith("-"):
                options.append(word)
                name, _, value = word.partition("=")
                names = (
                    [name] if name in known else [each for each in known if each.startswith(name)]
                )
                nargs = known[names[0]].nargs if names and not value else 0
                takes = {None: 1, "?": 1, "+": math.inf, "*": math.inf}.get(nargs, nargs)
            elif takes < 1 or (takes == math.inf and "=" in word):
                overrides.append(word)
                takes = 0
            else:
                options.append(word)
                takes -= 1
        arguments, unknown = super().parse_known_args(options, namespace)
        arguments.overrides = overrides
        return arguments, unknown


def add_config_arguments(parser: TakesArguments) -> None:
    """Add the arguments that choose the run config: KEY=VALUE, --config, --config-dir."""
    overrides = "Hydra overrides of the run config, or AgentFly's keys; a .yaml file is --config"
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=overrides)
    files = "agent_config.yaml or training_config.yaml in AgentFly's style; may be given twice"
    parser.add_argument(
        "--config", type=Path, action="append", default=[], metavar="FILE", help=files
    )
    folder = "folder of your own config files, such as mixture/mine.yaml for mixture=mine"
    add_option(parser, "--config-dir", "FOLDER", folder, Path)


def add_recipe_arguments(parser: TakesArguments) -> None:
    """Add the arguments that choose a Hydra config for verl's own `main_ppo`."""
    what = "of a recipe of verl's with data.mixture: as in `python3 -m verl.trainer.main_ppo`"
    add_option(parser, "--config-path", "FOLDER", what)
    add_option(parser, "--config-name", "NAME", what)


def config_overrides(arguments: argparse.Namespace, screen: IO[str] | None = None) -> list[str]:
    """Hydra overrides from the arguments of `add_config_arguments`; KEY=VALUE win over files.

    The translation of AgentFly's keys is printed on `screen`; None is stderr, for commands that
    print the config or JSON on stdout. Files among the words move to `arguments.config`.

    Raises:
        ValueError: a folder or a config file is missing or wrong.
    """
    words = list(arguments.overrides)
    files = [word for word in words if "=" not in word and word.endswith((".yaml", ".yml"))]
    arguments.config = [*arguments.config, *map(Path, files)]
    overrides = arguments.overrides = [word for word in words if word not in files]
    if wrong := [word for word in overrides if "=" not in word and not word.startswith("~")]:
        raise ValueError(f"{wrong[0]!r} is no override: write KEY=VALUE, or name a .yaml file")
    if (folder := arguments.config_dir) is not None:
        if not folder.is_dir():
            raise ValueError(f"--config-dir {folder}: no such folder; correct the name")
        overrides = [f"hydra.searchpath=['file://{folder.absolute()}']", *overrides]
    from verl_mixed.agentfly.files import is_agentflys, translate_files

    if not arguments.config and not any(map(is_agentflys, overrides)):
        return overrides
    translation = translate_files(arguments.config, overrides, os.environ)
    for line in translation.lines:
        print(printable(line), file=screen or sys.stderr)
    return translation.overrides


def at_least_one(text: str) -> int:
    """A whole number from 1; argparse's `type`."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: want a whole number, 1 at least")
    return number
