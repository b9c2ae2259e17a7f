"""`verl-mixed view`: a run's trajectories, on a page that this machine serves or in one file."""

import argparse
import asyncio
import getpass
import socket
import sqlite3
import sys
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from aiohttp import web

from agent_loop.records.run_folder import write_text
from agent_loop.records.trajectory_record import StopReason
from verl_mixed.commands.arguments import Help, add_option, add_run_dir, at_least_one
from verl_mixed.exit_codes import GOOD, NOT_GOOD
from verl_mixed.run.compose import load_config
from verl_mixed.run.text import print_error, printable, retention_words
from verl_mixed.views.viewer.export import page_of
from verl_mixed.views.viewer.filters import Filter, parse_rewards, parse_steps
from verl_mixed.views.viewer.index import OUTCOMES, Index
from verl_mixed.views.viewer.server import create_app
from verl_mixed.views.viewer.tokens import tokenizer_of

HELP = Help(
    """\
Shows every trajectory of a run: each token in the colour of its writer (model or tool), its loss
mask below it and its log-prob on hover; each tool call with arguments, time and status; and each
group with the reward and advantage of all its members.

Without --html the command serves a page on 127.0.0.1 until Ctrl-C, which every user of this machine
can open. To open it from another machine, use the ssh command that is printed. With --html it
writes one file that needs no server.""",
    """\
verl-mixed view runs/mixed_demo
verl-mixed view runs/mixed_demo --html lost.html --outcome lost
verl-mixed view runs/mixed_demo --html math.html --source math --step 10-16 --reward 0:0.5""",
    "0 good, 1 it cannot listen or write, 2 no such run or usage error",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)
    add_option(parser, "--port", "PORT", "port of the page, 0: a free one", _port, 0)
    add_option(parser, "--html", "FILE", "write this file instead of serving", Path)
    only = parser.add_argument_group("trajectories that --html writes (default: the first ones)")
    add_option(only, "--source", "SOURCE", "trajectories of one source")
    add_option(only, "--step", "STEPS", "a step (3) or a range of steps (3-7)", _steps)
    outcome = "solved, unsolved, lost, 'tool error', or a stop reason such as max_turns"
    add_option(only, "--outcome", "OUTCOME", outcome)
    add_option(only, "--reward", "MIN:MAX", "MIN or MAX may be left out", _rewards)
    add_option(only, "--text", "TEXT", "words that the response must contain, all of them")
    add_option(only, "--most", "N", "at most N", at_least_one, 100)


def run(arguments: argparse.Namespace) -> int:
    """Serve a page or write a file."""
    run_dir: Path = arguments.run_dir
    config = load_config(run_dir / "config.yaml")
    try:
        index = Index(run_dir, _progress)
    except (OSError, sqlite3.DatabaseError) as error:
        print_error(
            f"cannot make an index in {run_dir} or in the cache: {error}; set $XDG_CACHE_HOME to a "
            "folder that can be written"
        )
        return NOT_GOOD
    with closing(index):
        try:
            return _run(arguments, config, index)
        except sqlite3.DatabaseError as error:
            print_error(f"cannot use {index.path}: {error}; delete it, it is made again")
            return NOT_GOOD


def _run(arguments: argparse.Namespace, config: Mapping[str, Any], index: Index) -> int:
    name = arguments.run_dir.absolute().name
    index.refresh()
    _progress("")
    if not index.count(Filter()):
        print(f"note: no trajectory in {index.folder} yet", file=sys.stderr)
    sources, reasons = index.counts("source"), [*StopReason, *index.counts("stop_reason")]
    _refuse_unknown("--source", arguments.source, sources)
    _refuse_unknown("--outcome", arguments.outcome, dict.fromkeys([*OUTCOMES, *reasons]))
    decode, note = tokenizer_of(config)
    if words := retention_words(config):
        note = "; ".join(
            [*([note] if note else []), f"some trajectories may have no file: {words}"]
        )
    if note:
        print(f"note: {printable(note)}", file=sys.stderr)
    if arguments.html is None:
        return _serve(create_app(name, index, decode, note), arguments.port)
    reward_min, reward_max = arguments.reward or (None, None)
    chosen = Filter(
        source=arguments.source or "",
        steps=arguments.step,
        outcome=arguments.outcome or "",
        reward_min=reward_min,
        reward_max=reward_max,
        text=arguments.text or "",
    )
    page, shown, total = page_of(name, index, decode, note, chosen, arguments.most)
    try:
        write_text(arguments.html, page)
    except OSError as error:
        print_error(f"cannot write {arguments.html}: {error.strerror}")
        return NOT_GOOD
    left = f"; --most {total} takes all" if shown < total else ""
    print(f"{arguments.html}: {shown} of {total} trajectories, {len(page) / 1e6:.1f} MB{left}")
    return GOOD


def _refuse_unknown(option: str, word: str | None, known: Iterable[str]) -> None:
    if word and word not in known:
        raise ValueError(
            f"{option} {word}: not in this run; it has {', '.join(known) or 'none yet'}"
        )


def _serve(app: web.Application, port: int) -> int:
    try:
        # bound here, because the port is printed before the first request
        listener = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        print_error(f"cannot listen on 127.0.0.1:{port}: {error.strerror}")
        return NOT_GOOD
    port = listener.getsockname()[1]
    print(f"http://127.0.0.1:{port}/   (Ctrl-C ends it)")
    print(
        f"from another machine: ssh -N -L {port}:127.0.0.1:{port} {getpass.getuser()}@"
        f"{socket.gethostname()}   and open the same address there",
        flush=True,
    )
    asyncio.run(_until_interrupted(app, listener))
    return GOOD


async def _until_interrupted(app: web.Application, listener: socket.socket) -> None:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def _progress(line: str) -> None:
    """Show a line on the terminal in place of the one before."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r}: want 0 to 65535")
    return int(text)


def _steps(text: str) -> tuple[int, int] | None:
    try:
        return parse_steps(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _rewards(text: str) -> tuple[float | None, float | None]:
    low, colon, high = text.partition(":")
    try:
        return parse_rewards(low, high if colon else low)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; MIN:MAX, as 0:0.5 or :0.5") from error
