"""`verl-mixed watch`: show the progress of a run, from any shell that can read its folder."""

import argparse
import math
import signal
import time
from pathlib import Path

from rich.console import Console

from verl_mixed.commands.arguments import Help, add_flag, add_option, add_run_dir
from verl_mixed.exit_codes import GOOD
from verl_mixed.run.state import RunFolder
from verl_mixed.run.text import printable
from verl_mixed.views.watch.live import PlainView, TableView, drawing, is_redrawn
from verl_mixed.views.watch.run_reader import RunReader

HELP = Help(
    """\
Shows step and remaining time, each source's reward, the ratio error, how the time of the last step
was spent, the limiter, the tools, trajectories that are stuck, and the newest warnings. A terminal
shows a screen that is redrawn until the run ends; a file or a pipe gets a line per step. A run that
is not running is shown once. Ctrl-C ends the command and does not affect the run.""",
    """\
verl-mixed watch runs/mixed_demo
verl-mixed watch runs/mixed_demo --once
verl-mixed watch runs/mixed_demo --follow --interval 5""",
    "0 it was shown, however the run ended, 2 no such run",
)

LEAST_INTERVAL_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)
    add_flag(parser, "--once", "show the run once, even while it is running")
    follow = "wait for a run that has not begun; go on after it ends, since it may be resumed"
    add_flag(parser, "--follow", follow)
    add_option(parser, "--interval", "SECONDS", "time between two updates", _interval, 1.0)


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not LEAST_INTERVAL_S <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: want seconds, {LEAST_INTERVAL_S} at least")
    return seconds


def run(arguments: argparse.Namespace) -> int:
    """Show a run until it ends.

    Raises:
        ValueError: there is no such run, and --follow is not given.
    """
    run_dir: Path = arguments.run_dir
    folder = RunFolder(run_dir)
    known = (folder.config, folder.metrics, folder.log)
    if not arguments.follow and not any(path.is_file() for path in known):
        raise ValueError(
            f"no run in {run_dir}: it has no config.yaml, metrics.jsonl or train.log; name "
            "runs/<experiment>, or say --follow to wait for it"
        )
    before = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP)  # so that the screen is restored
    }
    try:
        _watch(RunReader(folder), arguments)
    except KeyboardInterrupt:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return GOOD


def _watch(reader: RunReader, arguments: argparse.Namespace) -> None:
    console = Console(highlight=False)
    once, follow = arguments.once, arguments.follow
    reader.read()
    state = reader.state()
    is_drawn = is_redrawn(console)
    if is_drawn and (once or not (state.is_running or follow)):
        console.print(drawing(reader, state, console))
        return
    ascii_only = console.options.ascii_only

    def write(line: str) -> None:
        print(printable(line, ascii_only=ascii_only), file=console.file, flush=True)

    view = (
        TableView(reader, console, whole=True)
        if is_drawn
        else PlainView(reader, write, with_state=True)
    )
    with view:
        view.update(state)
        while not once and (follow or state.is_running):
            time.sleep(arguments.interval)
            reader.read()
            state = reader.state()
            view.update(state)
    if is_drawn:
        console.print(drawing(reader, state, console))
