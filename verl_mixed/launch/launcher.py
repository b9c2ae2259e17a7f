"""Start or resume a run: prepare, check, start the tool server and the trainer, watch, sum up.

The launcher does no training. It owns two child processes and ends both however it ends itself; a
run that was killed goes on with the same command.
"""

import json
import math
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_loop.cpu.models.pretrained import SMOLLM_FOLDER
from agent_loop.rewards import split_path
from agent_loop.tools.limiter import state_path
from cluster.cluster_watch import ClusterWatch, own_ip
from cluster.ray_cluster import ask
from config.lookup import at, files_at
from config.schema import (
    TOOL_CONFIG,
    ConfigError,
    MixedConfig,
    SourceConfig,
    ToolConfig,
    load_section,
)
from samplers.rows.sources.demo import DEMO_SOURCES
from verl_mixed.agentfly.files import keep_copies
from verl_mixed.checks.machine.ray_cluster import cluster_problems
from verl_mixed.checks.preflight import preflight
from verl_mixed.diagnose.diagnose import diagnose_tail
from verl_mixed.exit_codes import GOOD, INTERRUPTED, NOT_GOOD, USAGE
from verl_mixed.launch import processes
from verl_mixed.prepare.pretrained import rows_folder
from verl_mixed.prepare.source_files import add_files_of_sources, sources_with_files
from verl_mixed.run.audit import audit_run, describe
from verl_mixed.run.compose import (
    REQUIRED,
    compose_config,
    load_config,
    resolve,
    save_config,
    unset_keys,
)
from verl_mixed.run.name import display_name, name_problems
from verl_mixed.run.sections import sound_sources
from verl_mixed.run.settings import (
    ADDRESS_KEY,
    SERVER_URL_KEY,
    SETTINGS,
    is_own_tool_server,
    overrides_from,
)
from verl_mixed.run.state import RUNS, RunFolder, RunHeld, changed_keys
from verl_mixed.run.text import printable
from verl_mixed.run.versions import REPOSITORY, note, versions_now
from verl_mixed.views.estimates import improvements
from verl_mixed.views.progress import Line, last_error, series
from verl_mixed.views.report import write_report
from verl_mixed.views.summary import PHASE_WORDS, phase_means, trained
from verl_mixed.views.watch.live import View, view_on
from verl_mixed.views.watch.run_reader import RunReader

TRAINER = (sys.executable, "-m", "agent_loop.training.main")

SERVER_START_S = 90.0
"""Deadline of the tool server's start: indexing and the sandbox's proof take most of it."""

GRACE_S = 15.0
"""Between asking a process to end and killing it; Ray needs some seconds."""

POLL_S = 0.5

LOST_NODE_S = 60.0
"""For the trainer to end by itself when a node is lost; a collective may wait for much longer."""

OF_OWN_RAY = (
    "num_cpus",
    "num_gpus",
    "resources",
    "object_store_memory",
    "include_dashboard",
    "dashboard_host",
    "dashboard_port",
    "_temp_dir",
)
"""Keys of `ray_kwargs.ray_init` that `ray.init` refuses or ignores on a cluster that runs."""

LOG_TAIL_BYTES = 200_000


class RunFailed(RuntimeError):
    """The run ended without being complete; the message is for the user."""


class RunStopped(RuntimeError):
    """The run saved a checkpoint and ended because somebody asked for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be run."""

    config: dict[str, Any]
    """Resolved."""

    folder: RunFolder
    own_tool_server: bool

    demo: Path | None
    """Folder of the demo when the run uses it, made or not."""

    cluster: str | None = None
    """Address of the Ray cluster that the run joins; None where it starts one of its own."""

    @property
    def total_steps(self) -> int:
        """Step after which the run is complete."""
        return int(at(self.config, "trainer.total_training_steps"))

    @property
    def server_url(self) -> str:
        """Where agent loops reach their tools."""
        return str(at(self.config, SERVER_URL_KEY))

    def problems(self, *, data: bool = True, machine: bool = True) -> list[str]:
        """What keeps it from starting.

        Args:
            data: look into data files and model; False where they are still to be made.
            machine: ask this machine for the GPUs and nodes too; False where it is only a check.
        """
        problems = preflight(
            self.config, own_tool_server=self.own_tool_server, data=data, machine=machine
        )
        if self.cluster is not None:
            problems += cluster_problems(self.config, self.cluster)
        if self.demo is not None:
            problems += [
                f"no rows of source={name!r}: the demo has {', '.join(DEMO_SOURCES)}; name "
                f"its files (mixed.sources.{name}.files), or files and a model of your own "
                "(TRAIN_FILES, VAL_FILES, MODEL_PATH)"
                for name, source in sound_sources(self.config).items()
                if name not in DEMO_SOURCES and not source.files
            ]
        return problems


def make_plan(arguments: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """Compose the config of a run.

    Args:
        arguments: Hydra overrides of the command line.
        environ: environment with the settings of the scripts.

    Raises:
        ConfigError: settings, overrides or config files are wrong.
    """
    overrides = overrides_from(environ, arguments)
    return plan_of(compose_config(overrides), overrides)


def plan_of(config: DictConfig, overrides: Sequence[str]) -> Plan:
    """Fill in what a composed config leaves to the launcher.

    Args:
        config: as composed; it is changed.
        overrides: what it was composed with.

    Raises:
        ConfigError: settings are wrong.
    """
    if problems := name_problems(OmegaConf.select(config, "mixed.experiment")):
        raise ConfigError(problems)
    if not isinstance(sources := config.mixed.sources, DictConfig):
        raise ConfigError(
            [f"mixed.sources={sources!r}: want source -> its settings; name at least one"]
        )
    folder = RunFolder(RUNS / config.mixed.experiment)
    config.mixed.run_dir = str(folder.path)
    _find_agent_loops(config)
    _find_limiter(config)
    _find_rewards(config)
    _find_checkpoint(config)
    address = _join_cluster(config)
    demo = _use_demo(config)
    add_files_of_sources(config)
    if config.trainer.experiment_name is None:
        is_demo = demo == demo_folder(config.mixed.seed).absolute()
        config.trainer.experiment_name = display_name(config, overrides, is_demo=is_demo)
    return Plan(
        demo=demo,
        config=resolve(config, complete=False),
        folder=folder,
        own_tool_server=is_own_tool_server(str(OmegaConf.select(config, SERVER_URL_KEY))),
        cluster=address,
    )


def _find_agent_loops(config: DictConfig) -> None:
    """Make the path of the agent loops absolute: workers look for it from another folder."""
    agent = config.actor_rollout_ref.rollout.agent
    if agent.agent_loop_config_path:
        given = Path(agent.agent_loop_config_path)
        ours = REPOSITORY / given
        found = ours if ours.is_file() and not given.is_file() else given
        agent.agent_loop_config_path = str(found.absolute())


def _find_limiter(config: DictConfig) -> None:
    """Make the path of a shared limiter absolute: workers would each make one in their folder."""
    key = f"{TOOL_CONFIG}.rate_limit_file"
    given = OmegaConf.select(config, key)
    if given:
        OmegaConf.update(config, key, os.path.abspath(str(given)))


def _find_rewards(config: DictConfig) -> None:
    """Make the paths of rewards in files absolute: workers look for them from another folder."""
    for source in config.mixed.sources.values():
        given = source.get("reward") if isinstance(source, DictConfig) else None
        if isinstance(given, str) and (parted := split_path(given)):
            source.reward = f"{Path(parted[0]).expanduser().absolute()}:{parted[1]}"


def _find_checkpoint(config: DictConfig) -> None:
    """Make the path of a checkpoint absolute: the trainer looks for it from another folder."""
    given = config.trainer.resume_from_path
    if isinstance(given, str):
        config.trainer.resume_from_path = str(Path(given).expanduser().absolute())


def _join_cluster(config: DictConfig) -> str | None:
    """Leave out what only a run's own Ray is told, where it joins one that runs."""
    address = OmegaConf.select(config, ADDRESS_KEY)
    if not address:
        return None
    ray_init = config.ray_kwargs.ray_init
    with open_dict(ray_init):
        for key in OF_OWN_RAY:
            ray_init.pop(key, None)
    return str(address)


def _use_demo(config: DictConfig) -> Path | None:
    """Fill in generated data, and the demo's model, where a run on a CPU names none of its own;
    sources may bring files besides."""
    model = config.actor_rollout_ref.model
    if is_smollm := model.path == str(SMOLLM_FOLDER):
        model.path = str(SMOLLM_FOLDER.absolute())  # workers look for it from another folder
    unset = unset_keys(config)
    if config.trainer.device != "cpu":
        return None
    if unset == REQUIRED.keys():
        folder = demo_folder(config.mixed.seed).absolute()
        model.path = str(folder / "model")
    elif is_smollm and unset == {"data.train_files", "data.val_files"}:
        folder = rows_folder(config.mixed.seed).absolute()
    else:
        return None
    names = sorted(set(config.mixed.sources) - sources_with_files(config))
    config.data.train_files = [str(folder / f"{name}_train.parquet") for name in names]
    config.data.val_files = [str(folder / f"{name}_val.parquet") for name in names]
    return folder


def demo_folder(seed: int) -> Path:
    """Where the demo of a seed is kept, from the repository's root."""
    return Path("data") / "demo" / f"seed{seed}"


def is_made(demo: Path) -> bool:
    """Whether the demo is there; its own code decides whether it is still the right one."""
    return (demo / "demo.json").exists()


def train(
    arguments: Sequence[str],
    environ: Mapping[str, str] | None = None,
    *,
    trainer: Sequence[str] = TRAINER,
    console: Console | None = None,
    config_files: Sequence[Path] = (),
) -> int:
    """Run to the end.

    Args:
        arguments: Hydra overrides of the command line.
        environ: environment with the settings; None takes this process's.
        trainer: command that gets the path of the run's config.yaml.
        console: the screen; None takes stdout.
        config_files: files that the arguments were read from; a run that starts keeps copies.

    Returns:
        Exit code: 0 complete, 1 failed, 2 a setting is wrong, 130 interrupted.
    """
    environ = os.environ if environ is None else environ
    console = console or Console(highlight=False, soft_wrap=True)
    _interrupt_on((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        plan = make_plan(arguments, environ)
        with plan.folder.claim():
            return _train(plan, arguments, environ, trainer, console, config_files)
    except ConfigError as error:
        _say_problems(console, error.problems)
        return USAGE
    except RunHeld as error:
        _say(console, f"error: {error}")
        return USAGE
    except RunFailed as error:
        _say(console, f"\nfailed: {error}")
        return NOT_GOOD
    except RunStopped as stopped:
        _say(console, f"\n{stopped}")
        return INTERRUPTED
    except KeyboardInterrupt:
        _say(console, "\ninterrupted; the same command resumes the run")
        return INTERRUPTED


def _train(
    plan: Plan,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    trainer: Sequence[str],
    console: Console,
    config_files: Sequence[Path],
) -> int:
    folder = plan.folder
    if left := processes.end_run(folder.path, GRACE_S):
        _say(console, f"ended {left} processes that an earlier start left behind")
    refused = _refused_changes(plan)
    goes_back = at(plan.config, "trainer.resume_mode") != "auto"
    if folder.is_done(plan.total_steps) and not refused and not goes_back:
        _say(console, f"complete: {folder.path} has all {plan.total_steps} steps")
        _write_report(folder, console)
        return GOOD
    if problems := [*refused, *plan.problems(data=plan.demo is None)]:
        raise ConfigError(problems)
    if plan.demo is not None:
        _prepare_demo(plan.demo, int(at(plan.config, "mixed.seed", 0)))
        if problems := plan.problems():
            raise ConfigError(problems)

    save_config(plan.config, folder.config)
    for state in folder.path.glob("rate_limit.*"):
        state.unlink()  # nobody else is left, and the rate may have been changed since
    settings = {name: environ[name] for name in SETTINGS if environ.get(name)}
    folder.note_command(["verl-mixed", "train", *arguments], settings)
    keep_copies(config_files, folder.path / "config")
    folder.stop_request.unlink(missing_ok=True)
    seen = folder.last_step()
    state = f"resuming, {seen} of {plan.total_steps} steps seen" if seen else "new"
    _say(console, f"run          {folder.path} ({state})")
    _say(console, f"log          {folder.log}")
    if address := _dashboard(plan.config):
        _say(console, f"dashboard    {address}")
    _note_versions(plan, console)
    if plan.cluster is not None and plan.own_tool_server and not environ.get("TOOL_SERVER_TOKEN"):
        environ = {**environ, "TOOL_SERVER_TOKEN": secrets.token_hex(16)}  # others reach it too
    children: list[subprocess.Popen[bytes]] = []
    is_started = False
    try:
        try:
            server = _start_tool_server(plan, environ, children, console)
            started_at = folder.log.stat().st_size if folder.log.exists() else 0
            child = processes.start(
                [*trainer, str(folder.config)],
                log=folder.log,
                environ=_trainer_environ(plan, environ),
                run_dir=folder.path,
            )
            children.append(child)
            is_started = True
            with _cluster_watch(plan, environ) as cluster:
                reader = RunReader(folder, log_from=started_at)
                view = view_on(console, reader, seen)
                _watch(plan, child, server, cluster, reader, view, started_at)
        finally:
            _end_all(folder.path, children)
        return _sum_up(plan, console)
    finally:
        if is_started:
            _write_report(folder, console)


def _note_versions(plan: Plan, console: Console) -> None:
    """Keep what the run is started with, and say what is not as it was."""
    nodes = []
    if plan.cluster is not None:
        nodes = [node.ip for node in ask(plan.cluster).nodes]
        _say(console, f"cluster      {plan.cluster} ({len(nodes)} nodes)")
    for change in note(plan.folder.versions, versions_now(nodes)):
        _say(console, f"note         not as at the last start: {change}")


def _cluster_watch(
    plan: Plan, environ: Mapping[str, str]
) -> AbstractContextManager[ClusterWatch | None]:
    return ClusterWatch(plan.cluster, environ) if plan.cluster is not None else nullcontext()


def _refused_changes(plan: Plan) -> list[str]:
    """Changes of the config that would make a resumed run another run."""
    folder = plan.folder
    if not folder.config.exists() or not folder.has_trained():
        return []
    return [
        f"{change} in {folder.path}: the run was started otherwise; set it back to resume, or "
        "choose another EXPERIMENT_NAME (a changed mixture: mixed.on_change=continue)"
        for change in changed_keys(load_config(folder.config), plan.config)
    ]


def _prepare_demo(folder: Path, seed: int) -> None:
    """Make the demo in a process of its own: it needs torch, which the launcher does not keep."""
    command = [sys.executable, "-m", "verl_mixed", "prepare"]
    if folder == rows_folder(seed).absolute():
        command += ["smollm", "--seed", str(seed)]
    else:
        command += ["demo", "--seed", str(seed), "--out", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True) as child:
        try:
            code = child.wait()
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)  # it removes its half-made folder
            child.wait(GRACE_S)
            raise
    if code:
        raise RunFailed(f"data and model could not be made (exit {code}); see above")


def _start_tool_server(
    plan: Plan,
    environ: Mapping[str, str],
    children: list[subprocess.Popen[bytes]],
    console: Console,
) -> subprocess.Popen[bytes] | None:
    """Start the run's own tool server and wait for it, unless one is given."""
    if not plan.own_tool_server:
        _say(console, f"tools        {plan.server_url} (given)")
        return None
    folder = plan.folder
    ready_file = folder.path / "tool_server.json"
    ready_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "verl_mixed", "serve-tools"]
    command += ["--ready-file", str(ready_file)]
    if plan.cluster is not None:
        command += ["--host", own_ip(plan.cluster)]
    tools = load_section(ToolConfig, at(plan.config, TOOL_CONFIG), TOOL_CONFIG)
    mixed = load_section(MixedConfig, at(plan.config, "mixed"), "mixed")
    command += ["--limiter", str(state_path(tools, mixed))]
    settings = {"port": 0} | (mixed.tool_server or {})
    command += ["--settings", json.dumps(settings)]
    if not {"corpus_path", "search_upstream"} & settings.keys() and (corpus := _corpus(plan)):
        command += ["--corpus", str(corpus)]
    server = processes.start(command, log=folder.server_log, environ=environ, run_dir=folder.path)
    children.append(server)
    deadline = time.monotonic() + SERVER_START_S
    while not ready_file.exists():
        if server.poll() is not None or time.monotonic() > deadline:
            raise RunFailed(
                f"the tool server did not start: {_reason(folder.server_log, 0, server.poll())}; "
                f"its log is {folder.server_log}"
            )
        time.sleep(0.1)
    url = json.loads(ready_file.read_text())["url"]
    at(plan.config, TOOL_CONFIG)["server_url"] = url
    save_config(plan.config, folder.config)
    token = environ.get("TOOL_SERVER_TOKEN", "")
    request = urllib.request.Request(
        f"{url}/health", headers={"Authorization": f"Bearer {token}"} if token else {}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        health = json.load(answer)
    if health["sandbox"] is None and _runs_code(plan.config):
        raise RunFailed(f"no isolation for programs, so none is run: {health['sandbox_why']}")
    _say(
        console, f"tools        {url} (sandbox {health['sandbox']}, {health['passages']} passages)"
    )
    return server


def _corpus(plan: Plan) -> Path | None:
    """Passages for the own tool server: `corpus.jsonl` beside the training files."""
    corpus = Path(files_at(plan.config, "data.train_files")[0]).parent / "corpus.jsonl"
    return corpus if corpus.exists() else None


def _runs_code(config: Mapping[str, Any]) -> bool:
    sources = at(config, "mixed.sources", {}).values()
    return any(
        load_section(SourceConfig, source, "mixed.sources").takes_part
        and str(source.get(key)).startswith("code")
        for source in sources
        for key in ("agent", "reward")
    )


def _trainer_environ(plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    wanted = {
        "HYDRA_FULL_ERROR": "1",
        "OMP_NUM_THREADS": "1",  # two threads on a shared core are slower than one
        "PYTHONUNBUFFERED": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TENSORBOARD_DIR": str(plan.folder.tensorboard),
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_DIR": str(plan.folder.wandb),
        "WANDB_CONSOLE": "off",  # train.log has it
        "WANDB_RUN_ID": plan.folder.wandb_run_id(),
        "WANDB_RESUME": "allow",
    }
    if at(plan.config, "trainer.device") == "cpu":
        wanted["VERL_PLATFORM"] = "cpu"  # verl would take GPUs that are there
    if not environ.get("WANDB_API_KEY"):
        wanted |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    given = {name: value for name, value in environ.items() if value}
    given.pop("RAY_ADDRESS", None)  # a cluster that other work of this shell uses
    given.pop("TENSORBOARD_DIR", None)  # one folder a run
    return wanted | given


def _dashboard(config: Mapping[str, Any]) -> str | None:
    ray_init = at(config, "ray_kwargs.ray_init", {})
    if not ray_init.get("include_dashboard") or not ray_init.get("dashboard_port"):
        return None
    return f"http://{ray_init.get('dashboard_host', '127.0.0.1')}:{ray_init['dashboard_port']}"


def _watch(
    plan: Plan,
    trainer: subprocess.Popen[bytes],
    server: subprocess.Popen[bytes] | None,
    cluster: ClusterWatch | None,
    reader: RunReader,
    view: View,
    started_at: int,
) -> None:
    """Show the run until the trainer ends.

    Raises:
        RunFailed: it ended badly or early, or the tool server did.
    """
    folder = plan.folder
    lost_at = math.inf
    with view:
        while (code := trainer.poll()) is None:
            reader.read()
            view.update(reader.state())
            if server is not None and server.poll() is not None:
                raise RunFailed(
                    f"the tool server ended: {_reason(folder.server_log, 0, server.poll())}; its "
                    f"log is {folder.server_log}; the same command resumes"
                )
            if cluster is not None and cluster.lost:
                lost_at = min(lost_at, time.monotonic())
            if time.monotonic() > lost_at + LOST_NODE_S:
                break
            time.sleep(POLL_S)
        reader.read()
        view.update(reader.state())
    if code != 0:
        reason = _reason(folder.log, started_at, code)
        if cluster is not None and (lost := cluster.explain(reason)):
            reason = (
                f"{lost}; `./setup_cluster.sh setup` brings it back; a run is resumed with as many "
                f"nodes as it was started with\nThe trainer said: {reason}"
            )
        elif known := diagnose_tail(_tail(folder.log, started_at)):
            signature = known.signature
            reason += f"\nknown: {signature.title}: {signature.cause}; {signature.remedy}"
        raise RunFailed(f"{reason}\n{_how_far(plan)}")
    if folder.last_step() < plan.total_steps:
        if folder.stop_request.exists():
            raise RunStopped(
                f"stopped after step {folder.last_step()} of {plan.total_steps}, as asked; the "
                f"same command resumes from checkpoint global_step_{folder.saved_step()}"
            )
        raise RunFailed(
            f"the trainer ended after step {folder.last_step()} of {plan.total_steps} without an "
            f"error; the log is {folder.log}"
        )


def _how_far(plan: Plan) -> str:
    folder = plan.folder
    saved = folder.saved_step()
    resumes = f"resumes from checkpoint global_step_{saved}" if saved else "begins again"
    return (
        f"The log is {folder.log}. {folder.last_step()} of {plan.total_steps} steps have metrics; "
        f"the same command {resumes}."
    )


def _reason(log: Path, started_at: int, code: int | None) -> str:
    """Why a child ended, from its log and exit code."""
    text = _tail(log, started_at)
    if error := last_error(text):
        return error
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"
    words = [line for line in text.splitlines() if line.strip()]
    return f"exit {code}: {words[-1].strip()}" if words else f"exit {code}, and nothing in its log"


def _tail(path: Path, started_at: int) -> str:
    """The end of a log, of this start only."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(started_at, size - LOG_TAIL_BYTES))
        return file.read().decode(errors="replace")


def _end_all(run_dir: Path, children: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the trainer, then the server, then whatever Ray left; signals wait meanwhile."""
    held = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        for child in reversed(children):
            processes.end([child], GRACE_S)
            child.wait()
        processes.end_run(run_dir, GRACE_S, sessions=[child.pid for child in children])
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)


def _interrupt_on(numbers: Sequence[signal.Signals]) -> None:
    for number in numbers:
        signal.signal(number, signal.default_int_handler)


def _say(console: Console, text: str) -> None:
    """Print text, some of it from logs and files: none of it is markup or acts on the terminal."""
    for line in text.split("\n"):
        console.print(Text(printable(line)))


def _say_problems(console: Console, problems: Sequence[str]) -> None:
    _say(console, f"cannot start, {len(problems)} problem{'s' * (len(problems) > 1)}:")
    for problem in problems:
        _say(console, f"  - {problem}")


def _sum_up(plan: Plan, console: Console) -> int:
    """Hold the ledger against the plan, print what came out."""
    folder = plan.folder
    folder.mark_done()
    table = changes_table(folder.lines())
    if table.row_count:
        console.print(table)
    if cost := cost_words(folder.lines()):
        _say(console, f"cost         {cost}")
    try:
        report = audit_run(folder, plan.config)
    except ValueError as error:
        _say(console, f"audit not possible: {error}")
        return NOT_GOOD
    for line in describe(report):
        _say(console, line)
    return GOOD if report.ok else NOT_GOOD


def cost_words(lines: Sequence[Line]) -> str | None:
    """Mean seconds of a step with its longest phases, and the most memory in use; None before a
    step."""
    steps = trained(lines)
    seconds = [value for _, value in series(steps, "timing_s/step")]
    if not seconds:
        return None
    longest = list(phase_means(steps).items())[:4]
    phases = ", ".join(f"{PHASE_WORDS.get(phase, phase)} {mean:.1f}" for phase, mean in longest)
    used = [value for _, value in series(steps, "actor/perf/cpu_memory_used_gb")]
    memory = f"; at most {max(used):.1f} GB of this machine's memory in use" if used else ""
    return f"{fmean(seconds):.1f} s a step ({phases}){memory}"


def changes_table(lines: Sequence[Line]) -> Table:
    """First against last validation of every source, and their mean where it is of the same measure
    at the same steps; no row before two."""
    table = Table("source", "validation first", "last", "change", title_justify="left")
    found = [one for one in improvements(lines) if one.measure != "training reward"]
    for one in found:
        solved = " solved" if one.measure == "validation pass rate" else ""
        table.add_row(
            Text(printable(one.source)),
            f"{one.first.mean:.2f}",
            f"{one.last.mean:.2f}",
            Text(f"{one.change_words}{solved}: {one.verdict}"),
        )
    if (
        len(found) > 1
        and len({(one.measure, one.first.steps, one.last.steps) for one in found}) == 1
    ):
        first = fmean(one.first.mean for one in found)
        last = fmean(one.last.mean for one in found)
        table.add_row("mean", f"{first:.2f}", f"{last:.2f}", f"{last - first:+.2f}")
    return table


def _write_report(folder: RunFolder, console: Console) -> None:
    """Write the report, of a run that failed or was stopped too, and say where things are."""
    try:
        write_report(folder)
    except (OSError, ValueError) as error:
        _say(console, f"report not written: {error}")
    else:
        _say(console, f"report       {folder.report}")
    _say(console, f"curves       tensorboard --logdir {shlex.quote(str(folder.tensorboard))}")
    _say(console, f"trajectories {folder.path / 'trajectories'}")
