"""Start or resume a run: check, make its data, start tool server and trainer, watch, summarise.

The launcher does no training. It ends its child processes, however it ends itself. If it is killed,
the same command resumes the run. SIGUSR1 does what `verl-mixed stop` does: the trainer saves a
checkpoint after its current step, and the run ends.
"""

import secrets
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.text import Text

from cluster.cluster_watch import ClusterWatch
from cluster.ray_cluster import ClusterUnreachable, ask
from config.lookup import at
from config.schema import ConfigError
from verl_mixed.agentfly.files import keep_copies
from verl_mixed.exit_codes import GOOD, INTERRUPTED, NOT_GOOD, USAGE
from verl_mixed.launch import processes
from verl_mixed.launch.failure import RunFailed, RunStopped
from verl_mixed.launch.generated import forms_of, make_generated_data
from verl_mixed.launch.on_end import Verdict, tell
from verl_mixed.launch.plan import Plan, make_plan
from verl_mixed.launch.processes import GRACE_S
from verl_mixed.launch.ray_lines import dashboard_line, found_line
from verl_mixed.launch.retries import Retries, killed_launcher
from verl_mixed.launch.summary import report_and_list_files, summarise
from verl_mixed.launch.tool_server import ToolServer
from verl_mixed.launch.trainer import TRAINER, trainer_environ
from verl_mixed.launch.watching import RunProcesses, watch_run
from verl_mixed.run.compose import save_config
from verl_mixed.run.settings import SETTINGS
from verl_mixed.run.state import RunFolder, RunHeld
from verl_mixed.run.text import printable
from verl_mixed.run.versions import note, versions_now
from verl_mixed.views.watch.live import view_on
from verl_mixed.views.watch.run_reader import RunReader


def train(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    *,
    trainer: Sequence[str] = TRAINER,
    console: Console | None = None,
    config_files: Sequence[Path] = (),
    retries: int = 0,
) -> int:
    """Run to the end.

    Args:
        arguments: Hydra overrides of the command line.
        environ: environment with the settings.
        trainer: command that gets the path of the run's config.yaml.
        console: the screen; None takes stdout.
        config_files: files that the arguments were read from; a run that starts keeps copies.
        retries: how often a run that failed is started again.

    Returns:
        Exit code: 0 complete, 1 failed, 2 a setting is wrong, 130 interrupted.
    """
    console = console or Console(highlight=False, soft_wrap=True)
    say = partial(_print_lines, console)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.default_int_handler)  # SIGUSR1: nothing can be saved yet
    plan: Plan | None = None
    told: list[RunFolder] = []  # once the run was started, ON_END hears of its end

    def end(code: int, verdict: Verdict, cause: str = "") -> int:
        if told and (command := environ.get("ON_END", "").strip()):
            tell(command, told[0], verdict, cause, environ, say)
        return code

    try:
        plan = make_plan(arguments, environ)
        with plan.folder.claim():
            if left := processes.end_run(plan.folder.path, GRACE_S):
                say(f"ended {left} processes that an earlier start left behind")
            again = Retries(
                retries,
                say,
                memory=plan.folder.retries,
                record=plan.folder.failures,
                is_stopped=plan.folder.stop_request.exists,
            )
            refused, before = plan.folder_problems(), plan.next_start()
            if before.is_complete and not refused:
                say(f"complete: {plan.folder.path} has all {plan.total_steps} steps")
                report_and_list_files(plan.folder, say)
                if killed_launcher(environ, plan.total_steps):  # before it could tell
                    told.append(plan.folder)
                again.end()
                return end(GOOD, "complete")
            with _kept_up(again):
                if killed := killed_launcher(environ, plan.folder.last_step()):
                    told.append(plan.folder)
                    _take_over(again, killed, plan, environ)
                else:
                    again.begin()
                start = partial(_start, plan, refused, arguments, environ, config_files, say)
                if killed:
                    _repeated(start, before.seen, again, plan, environ)
                else:
                    start()
                    told.append(plan.folder)
                signal.signal(signal.SIGUSR1, lambda *_: plan.folder.stop_request.touch())
                run = partial(
                    _run, plan, environ=environ, trainer=trainer, console=console, say=say
                )
                code = _run_again(run, again, plan, environ, say)
                return end(
                    code, "complete" if code == GOOD else "failed", "" if code == GOOD else "audit"
                )
    except ConfigError as error:
        count = len(error.problems)
        say(f"cannot start, {count} problem{'s' * (count > 1)}:")
        for problem in error.problems:
            say(f"  - {problem}")
        return end(USAGE, "failed", error.problems[0])
    except RunHeld as error:
        say(f"error: {error}")
        return USAGE
    except RunFailed as error:
        say(f"\nfailed: {error}")
        return end(NOT_GOOD, "failed", error.cause)
    except RunStopped as stopped:
        say(f"\n{stopped}")
        return end(INTERRUPTED, "stopped", str(stopped))
    except KeyboardInterrupt:
        does = plan.next_start().action if plan else "starts the run"
        say(f"\ninterrupted; the same command {does}")
        return end(INTERRUPTED, "interrupted", "a signal")


@contextmanager
def _kept_up(again: Retries) -> Iterator[None]:
    """Forget the count of retries when the run ends; only a launcher that is killed leaves it."""
    try:
        yield
    finally:
        again.end()


def _take_over(again: Retries, killed: RunFailed, plan: Plan, environ: Mapping[str, str]) -> None:
    """Go on in the place of a launcher that was killed, as far as its retries let this one.

    Raises:
        RunStopped: the run was stopped.
        RunFailed: there is no retry left.
    """
    if not again.recall():
        raise RunStopped("the run was stopped, so its launcher is not started again")
    if not again.go_on(killed, plan, environ):
        raise killed


def _repeated(
    start: Callable[[], None], seen: int, again: Retries, plan: Plan, environ: Mapping[str, str]
) -> None:
    """Start; the cluster may fail once more while the launcher that was killed returns."""
    while True:
        try:
            return start()
        except (ConfigError, ClusterUnreachable) as error:
            if not again.go_on(RunFailed(str(error), step=seen), plan, environ):
                raise


def _start(
    plan: Plan,
    refused: Sequence[str],
    arguments: Sequence[str],
    environ: Mapping[str, str],
    config_files: Sequence[Path],
    say: Callable[[str], None],
) -> None:
    """Check the run, make its data, and note the start. ConfigError: it cannot start."""
    _make_ready(plan, refused)
    _note_start(plan, arguments, environ, config_files, say)


def _print_lines(console: Console, text: str) -> None:
    """Print text from logs and files; none of it is markup or acts on the terminal."""
    for line in text.split("\n"):
        console.print(Text(printable(line)))


def _make_ready(plan: Plan, refused: Sequence[str]) -> None:
    """Check the run, and make its data if it has none. ConfigError: it cannot start."""
    if problems := [*refused, *plan.problems(data=plan.generated is None)]:
        raise ConfigError(problems)
    if plan.generated is not None:
        seed = int(at(plan.config, "mixed.seed", 0))
        make_generated_data(plan.generated, seed, forms_of(plan.config))
        if problems := plan.problems():
            raise ConfigError(problems)


def _note_start(
    plan: Plan,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    config_files: Sequence[Path],
    say: Callable[[str], None],
) -> None:
    """Write config, command and versions into the run's folder, and print where things are."""
    folder = plan.folder
    save_config(plan.config, folder.config)
    for state in folder.path.glob("rate_limit.*"):
        state.unlink()  # no process of the run is left, and the rate may have changed
    settings = {name: environ[name] for name in SETTINGS if environ.get(name)}
    folder.note_command(["verl-mixed", "train", *arguments], settings)
    keep_copies(config_files, folder.path / "config")
    folder.stop_request.unlink(missing_ok=True)
    say(f"run          {folder.path} ({plan.next_start().words(plan.length)})")
    say(f"log          {folder.log}")
    nodes = []
    if plan.cluster is not None:
        nodes = [node.ip for node in ask(plan.cluster).nodes]
        say(f"cluster      {plan.cluster} ({len(nodes)} nodes)")
        if dashboard := dashboard_line(plan.config, plan.cluster, environ):
            say(f"dashboard    {dashboard}")
    elif found := found_line(plan.config, environ):
        say(f"ray          {found}")
    for change in note(folder.versions, versions_now(nodes)):
        say(f"note         not as at the last start: {change}")
    for warning in plan.warnings():
        say(f"warning      {warning}")


def _run_again(
    run: Callable[[int], int],
    again: Retries,
    plan: Plan,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> int:
    """Run, again after a failure as often as the retries let it."""
    while True:
        try:
            return run(plan.next_start().step)
        except RunFailed as failure:
            if not again.go_on(failure, plan, environ):
                raise
            say(plan.next_start().words(plan.length))


def _run(
    plan: Plan,
    seen: int,
    *,
    environ: Mapping[str, str],
    trainer: Sequence[str],
    console: Console,
    say: Callable[[str], None],
) -> int:
    """Run tool server and trainer to their end, and print what the run has reached.

    Raises:
        RunFailed, RunStopped: the run ended before it was complete.
    """
    folder = plan.folder
    if plan.own_tool_server and not environ.get("TOOL_SERVER_TOKEN"):
        # other machines of a cluster, and other users of this one, reach the tool server too
        environ = {**environ, "TOOL_SERVER_TOKEN": secrets.token_hex(16)}

    def on_log(text: str) -> bool:
        """Print where the dashboard of the run's own Ray is, once Ray has said it."""
        line = None if plan.cluster else dashboard_line(plan.config, None, environ, text)
        if line:
            say(f"dashboard    {line}")
        return line is not None

    children: list[subprocess.Popen[bytes]] = []
    is_started = False
    try:
        try:
            server = None
            if plan.own_tool_server:
                server = ToolServer(plan, environ, children, say)
                server.start()
            else:
                say(f"tools        {plan.server_url} (given)")
            log_start = folder.log.stat().st_size if folder.log.exists() else 0
            child = processes.start(
                [*trainer, str(folder.config)],
                log=folder.log,
                environ=trainer_environ(plan, environ),
                run_dir=folder.path,
            )
            children.append(child)
            is_started = True
            folder.link_log()
            name = str(folder.config)
            with (
                ClusterWatch(plan.cluster, environ, run=name) if plan.cluster else nullcontext()
            ) as cluster:
                running = RunProcesses(
                    trainer=child, log_start=log_start, server=server, cluster=cluster
                )
                reader = RunReader(folder, log_from=log_start)
                watch_run(plan, running, reader, view_on(console, reader, seen), on_log)
        finally:
            end_all(folder.path, children)
        return summarise(plan, console, say)
    finally:
        if is_started:
            report_and_list_files(folder, say)


def end_all(run_dir: Path, children: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the trainer, then the server, then what Ray left; signals wait until this is done."""
    handlers = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        for child in reversed(children):
            child.terminate()
            try:
                child.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        processes.end_run(run_dir, GRACE_S, sessions=[child.pid for child in children])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
