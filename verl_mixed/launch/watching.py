"""Watching a run until its trainer ends: the screen, lost nodes, and how the run ended."""

import math
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.cluster_watch import ClusterWatch
from verl_mixed.diagnose.verdict import verdict_on
from verl_mixed.launch.failure import RunFailed, RunStopped, log_tail, reason_of_end
from verl_mixed.launch.plan import Plan
from verl_mixed.launch.tool_server import ToolServer
from verl_mixed.views.watch.live import View
from verl_mixed.views.watch.run_reader import RunReader

POLL_S = 0.5

LOST_NODE_S = 60.0
"""Time for the trainer to end by itself after a node or an actor is lost; a collective, or a call
to TransferQueue, may hang for longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProcesses:
    """The processes of a run that are watched."""

    trainer: subprocess.Popen[bytes]
    log_start: int
    """Size of train.log in bytes when the trainer was started."""

    server: ToolServer | None
    """The run's own tool server."""

    cluster: ClusterWatch | None
    """Watch of the cluster that the run joined."""


def watch_run(
    plan: Plan,
    running: RunProcesses,
    reader: RunReader,
    view: View,
    on_log: Callable[[str], bool] | None = None,
) -> None:
    """Show the run until the trainer ends.

    `on_log` gets the end of the log until it returns True.

    Raises:
        RunFailed: the trainer failed or ended early, or the tool server ended too often.
        RunStopped: the run ended because it was asked to.
    """
    code = _wait_for_end(running, reader, view, on_log)
    folder = plan.folder
    if code != 0:
        why = _why_failed(plan, running, code)
        raise RunFailed(
            f"{why.words}\nThe log is {folder.log}. {folder.last_step()} of "
            f"{plan.total_steps} steps have metrics; the same command {plan.next_start().action}.",
            cause=why.cause,
            step=folder.last_step(),
            mends=why.mends,
        )
    if folder.last_step() < plan.total_steps:
        if folder.stop_request.exists():
            raise RunStopped(
                f"stopped after step {folder.last_step()} of {plan.total_steps}, as asked; the "
                f"same command {plan.next_start().action}"
            )
        raise RunFailed(
            f"the trainer ended after step {folder.last_step()} of {plan.total_steps} without an "
            f"error; the log is {folder.log}",
            step=folder.last_step(),
        )


def _wait_for_end(
    running: RunProcesses, reader: RunReader, view: View, on_log: Callable[[str], bool] | None
) -> int | None:
    """The trainer's exit code; None if it still runs `LOST_NODE_S` after it lost something."""
    lost_at = math.inf

    def look() -> None:
        nonlocal on_log
        reader.read()
        view.update(reader.state())
        if on_log and on_log(reader.log_text):
            on_log = None

    with view:
        while (code := running.trainer.poll()) is None:
            look()
            if running.server is not None:
                running.server.keep_up()
            if running.cluster is not None and (running.cluster.lost or running.cluster.lost_actor):
                lost_at = min(lost_at, time.monotonic())
            if time.monotonic() > lost_at + LOST_NODE_S:
                break
            time.sleep(POLL_S)
        look()
    return code


@dataclass(frozen=True, slots=True, kw_only=True)
class _Why:
    words: str
    cause: str
    mends: bool = True


def _why_failed(plan: Plan, running: RunProcesses, code: int | None) -> _Why:
    """The trainer's reason, and the lost node or the known failure behind it."""
    log = plan.folder.log
    reason = reason_of_end(log, running.log_start, code)
    if running.cluster is not None and (lost := running.cluster.explain(reason)):
        words = (
            f"{lost}; `./setup_cluster.sh setup` brings it back; a run is resumed with as many "
            f"nodes as it was started with\nThe trainer's reason: {reason}"
        )
        return _Why(words=words, cause=lost)
    actor = running.cluster.lost_actor if running.cluster is not None else ""
    because = _Why(words=f"{actor}\nThe trainer's reason: {reason}", cause=actor)
    if actor and code is None:
        return because
    text = log_tail(log, running.log_start)
    verdict = verdict_on(text, has_cluster=plan.cluster is not None)
    if verdict and (verdict.is_known or not actor):
        words = "\n".join([reason, *verdict.lines])
        return _Why(words=words, cause=verdict.cause, mends=verdict.mends)
    return because if actor else _Why(words=reason, cause=reason)
