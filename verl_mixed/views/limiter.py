"""`verl-mixed limiter`: the state of a rate limiter as a table, once or every second."""

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from time import sleep

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from agent_loop.calls.limiter import own_folder
from cluster.ray_cluster import ask, recorded_address
from config.lookup import at
from config.schema import TOOL_CONFIG
from rate_limit import ray_limiter
from rate_limit.snapshot import WAIT_BOUNDS_S, Snapshot
from rate_limit.stats import reset, snapshot_of

_EVERY_S = 1.0


def state_file_of(path: Path) -> Path:
    """The state file of a limiter: `path` itself, or the one of the run in the folder `path`."""
    if not path.is_dir():
        return path
    config = path / "config.yaml"
    named = None
    if config.is_file():
        from verl_mixed.run.compose import load_config  # imports Hydra, which is slow

        named = at(load_config(config), f"{TOOL_CONFIG}.rate_limit_file")
    return Path(str(named or path / "rate_limit.state"))


def show(
    path: Path,
    *,
    as_json: bool = False,
    watch: bool = False,
    anew: bool = False,
    ray_address: str | None = None,
) -> None:
    """Print a limiter.

    Args:
        path: the state file, or the run's folder.
        as_json: print a JSON object on one line instead of the table.
        watch: print again every second, until interrupted.
        anew: reset the limiter first.
        ray_address: address of the Ray cluster whose actor holds the limiter; the actor's name is
            the path of the state file. None: the limiter is the state file.

    Raises:
        OSError: the cluster does not answer, or the file cannot be used.
        ValueError: there is no limiter, or the file is not its state.
    """
    path = state_file_of(path)
    if ray_address is None:
        try:
            if anew:
                reset(path)
                for own in _own_files(path):
                    reset(own)
            _print_all(lambda: _all_of_files(path), as_json, watch)
        except FileNotFoundError as error:
            raise ValueError(
                f"no limiter at {path}: the first tool call of a run creates it; start a run, give "
                f"its {TOOL_CONFIG}.rate_limit_file, or --ray ADDRESS if a Ray actor holds it"
            ) from error
        return
    import ray

    name = str(path.absolute())
    address = recorded_address(os.environ) if ray_address == "auto" else ray_address
    if address is not None:
        ask(address)  # Ray itself tries for minutes
    ray.init(address=ray_address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        if anew:
            for actor in (name, *_own_actors(path).values()):
                ray_limiter.end(actor)
            return
        _print_all(
            lambda: {
                tool: ray_limiter.snapshot_of(actor)
                for tool, actor in {RUNS_OWN: name, **_own_actors(path)}.items()
            },
            as_json,
            watch,
        )
    finally:
        ray.shutdown()


RUNS_OWN = ""
"""Name of the run's limiter among those of its tools."""

Snapshots = Mapping[str, Snapshot]
"""Name -> limiter: `RUNS_OWN`, and of each tool that has a rate of its own."""


def _own_files(path: Path) -> list[Path]:
    """State files of the limits that tools have of their own."""
    return sorted(own_folder(path).glob("*.state"))


def _own_actors(path: Path) -> dict[str, str]:
    """Tool or judge -> name of the actor that keeps its own rate."""
    folder = own_folder(path.absolute())
    names = sorted(name for name in ray_limiter.names() if Path(name).parent == folder)
    return {Path(name).stem: name for name in names}


def _all_of_files(path: Path) -> Snapshots:
    own = {file.stem: snapshot_of(file) for file in _own_files(path)}
    return {RUNS_OWN: snapshot_of(path), **own}


def _print_all(take: Callable[[], Snapshots], as_json: bool, watch: bool) -> None:
    if not watch:
        _print(take(), as_json)
    elif as_json:
        _every_second(lambda: _print(take(), as_json), lambda text: print(text, file=sys.stderr))
    else:
        with Live(refresh_per_second=4) as live:
            _every_second(lambda: live.update(_tables(take())), live.update)


def _every_second(act: Callable[[], object], write: Callable[[str], object]) -> None:
    try:
        while True:
            try:
                act()
            except FileNotFoundError:
                write("no limiter yet")  # the next tool call creates its file
            sleep(_EVERY_S)
    except KeyboardInterrupt:
        return


def _print(snapshots: Snapshots, as_json: bool) -> None:
    if not as_json:
        Console().print(_tables(snapshots))
        return
    own = {name: _values(each) for name, each in snapshots.items() if name != RUNS_OWN}
    print(json.dumps({**_values(snapshots[RUNS_OWN]), "tools": own}), flush=True)


def _values(snapshot: Snapshot) -> dict[str, object]:
    sums = {"waiting": snapshot.waiting, "waited_s": snapshot.waited_s}
    return {**asdict(snapshot), **sums, "wait_bounds_s": WAIT_BOUNDS_S}


def _tables(snapshots: Snapshots) -> Group:
    return Group(*(_table(each, name) for name, each in snapshots.items()))


def _table(snapshot: Snapshot, tool: str) -> Table:
    """A row for each source, and one for all."""
    rate = f"{tool}: " if tool else ""
    rate += f"{snapshot.per_minute:g} calls a minute, {snapshot.burst} back to back"
    if snapshot.rate_factor < 1:
        rate += f", slowed down to {snapshot.rate_factor:.0%}"
    if snapshot.paused_s:
        rate += f", paused for {snapshot.paused_s:.1f} s"
    table = Table(
        title=rate,
        caption=f"last minute {snapshot.utilisation:.0%} used; {snapshot.penalties} penalties, "
        f"{snapshot.abandoned} slots abandoned",
    )
    table.add_column("source")
    for name in ("granted", "waiting", "waited s", "p50 s", "p95 s", "refused"):
        table.add_column(name, justify="right")
    for name, source in snapshot.sources.items():
        at_once = source.granted - sum(source.waits)
        table.add_row(
            Text(name or "(none)"),  # not markup, whatever the name holds
            str(source.granted),
            str(source.waiting),
            f"{source.waited_s:.1f}",
            _percentile(at_once, source.waits, 0.5),
            _percentile(at_once, source.waits, 0.95),
            str(source.refused),
        )
    total, waiting = str(snapshot.granted), str(snapshot.waiting)
    table.add_row("all", total, waiting, f"{snapshot.waited_s:.1f}", "", "", "", style="bold")
    return table


def _percentile(at_once: int, waits: tuple[int, ...], share: float) -> str:
    """The least bound of the histogram that `share` of the waits do not exceed, as text."""
    callers = at_once + sum(waits)
    if not callers:
        return ""
    missing = share * callers - at_once
    if missing <= 0:
        return "0"
    for count, bound_s in zip(waits, WAIT_BOUNDS_S, strict=False):
        missing -= count
        if missing <= 0:
            return f"<{bound_s:g}"
    return f">{WAIT_BOUNDS_S[-1]:g}"
