"""Evaluate weights: start tool server and driver, show progress, write the results.

Each evaluation has a folder of its own, with its config, its lock, its rate limiter and the mark of
its processes, so that it does not disturb a run that is training. Processes are ended as those of a
run; if the launcher is killed, the same command goes on.
"""

import json
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent_loop.evaluation.main import SAYS, Job, write_job
from agent_loop.records.evaluation_records import RECORDS, read_records, write_records
from agent_loop.records.run_folder import write_text
from config import child
from config.lookup import at
from config.removed import other_rules, without_removed
from config.schema import ConfigError
from verl_mixed.launch import processes
from verl_mixed.launch.failure import RunFailed, reason_of_end
from verl_mixed.launch.launcher import end_all
from verl_mixed.launch.plan import Plan
from verl_mixed.launch.processes import GRACE_S
from verl_mixed.launch.tool_server import ToolServer
from verl_mixed.launch.trainer import driver_environ
from verl_mixed.run.compose import save_config, saved_config
from verl_mixed.run.evaluations import SUMMARY, Evaluation, selected_records
from verl_mixed.run.state import RunFolder, changes_of_resume
from verl_mixed.views.evaluation import summary_of, write_csv

WEIGHTS = "weights.json"
"""File with the identity of the weights that made the records of an evaluation's folder."""

DRIVER = tuple(child.command("agent_loop.evaluation.main"))
POLL_S = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Weights to evaluate."""

    label: str
    plan: Plan
    """Its folder is that of the evaluation."""

    job: Job
    ks: tuple[int, ...]
    """Of pass@k."""

    weights: str
    """What is evaluated, for people."""

    identity: Mapping[str, str]
    """Equal only for the same weights, as {"base_url": "http://host:8000/v1", "model": "mine"}."""

    @property
    def infra_error_limit(self) -> float:
        """Share of trajectories that a source may lose."""
        return float(at(self.plan.config, "mixed.infra_error_limit"))


def evaluate(
    targets: Sequence[Target],
    environ: Mapping[str, str],
    say: Callable[[str], None],
    *,
    driver: Sequence[str] = DRIVER,
    retry_lost: bool = False,
) -> list[Evaluation]:
    """Evaluate one after the other; what is complete is only read.

    Raises:
        ConfigError: the folder has an evaluation with other settings.
        RunFailed: tool server or driver failed.
        RunHeld: another process evaluates the same.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    return [_evaluate(target, environ, say, driver, retry_lost) for target in targets]


def _evaluate(
    target: Target,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    driver: Sequence[str],
    retry_lost: bool,
) -> Evaluation:
    folder = target.plan.folder
    with folder.claim():
        if left := processes.end_run(folder.path, GRACE_S):
            say(f"ended {left} processes that an earlier start left behind")
        _refuse_other_settings(target)
        if retry_lost:
            _forget_lost(folder.path / RECORDS)
        if retry_lost or not _is_complete(target):
            (folder.path / SUMMARY).unlink(missing_ok=True)
            write_job(target.job, folder.path)
            say(f"evaluating   {target.weights}")
            say(f"folder       {folder.path}")
            _run(target, environ, say, driver)
        made, _ = read_records(folder.path / RECORDS)
        records = selected_records(folder.path, made, target.job.selection.samples)
        done = Evaluation(label=target.label, step=target.job.step, records=records)
        summary = summary_of(done, target.ks) | {
            "weights": target.weights,
            "job": _plain(target.job),
        }
        text = json.dumps(summary, indent=1) + "\n"
        if not _is_complete(target) or (folder.path / SUMMARY).read_text() != text:
            (folder.path / "summary.tmp").write_text(text)
            (folder.path / "summary.tmp").replace(folder.path / SUMMARY)
            write_csv([summary], folder.path / "summary.csv")
        return done


def _plain(job: Job) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(job)))


def _is_complete(target: Target) -> bool:
    """Whether the last call evaluated the same rows with the same settings, to the end."""
    path = target.plan.folder.path / SUMMARY
    try:
        return json.loads(path.read_text())["job"] == _plain(target.job)
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _refuse_other_settings(target: Target) -> None:
    """Keep the records of a folder apart from those of other settings and other weights."""
    folder, kept = target.plan.folder, target.plan.folder.path / WEIGHTS
    changes: list[str] = []
    if folder.config.exists():
        saved = saved_config(folder.config)
        before = without_removed(saved)
        changes += other_rules(saved)
        changes += changes_of_resume(before, target.plan.config, mixture_may_change=False)
    if kept.exists() or (folder.path / RECORDS).exists():
        known = json.loads(kept.read_text()) if kept.exists() else {}
        changes += [
            f"weights: {name}: {known.get(name, 'absent')!r} -> "
            f"{target.identity.get(name, 'absent')!r}"
            for name in sorted(known.keys() | target.identity.keys())
            if known.get(name) != target.identity.get(name)
        ]
    if changes:
        raise ConfigError(
            [
                f"{change} in {folder.path}: its records were made with the old value; give "
                "another --label, or remove the folder"
                for change in changes
            ]
        )
    write_text(kept, json.dumps(dict(target.identity), indent=1) + "\n")
    save_config(target.plan.config, folder.config)


def _forget_lost(path: Path) -> None:
    if path.exists():
        write_records(path, [record for record in read_records(path)[0] if not record.lost])


def _run(
    target: Target,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    driver: Sequence[str],
) -> None:
    """Run tool server and driver to their end.

    Raises:
        RunFailed: one of them failed.
    """
    plan, folder = target.plan, target.plan.folder
    if plan.own_tool_server and not environ.get("TOOL_SERVER_TOKEN"):
        environ = {**environ, "TOOL_SERVER_TOKEN": secrets.token_hex(16)}
    children: list[subprocess.Popen[bytes]] = []
    log = folder.path / "evaluate.log"
    try:
        server = None
        if plan.own_tool_server:
            server = ToolServer(plan, environ, children, say)
            server.start()
        start = log.stat().st_size if log.exists() else 0
        child = processes.start(
            [*driver, str(folder.path)],
            log=log,
            environ=driver_environ(plan, environ),
            run_dir=folder.path,
        )
        children.append(child)
        shown = _Shown(log, start, say)
        while (code := child.poll()) is None:
            shown.read()
            if server is not None:
                server.keep_up()
            time.sleep(POLL_S)
        shown.read()
        if code != 0:
            raise RunFailed(
                f"{reason_of_end(log, start, code)}\nThe log is {log}. The same command goes on."
            )
    finally:
        end_all(folder.path, children)


class _Shown:
    """Prints the driver's lines of progress as they come."""

    def __init__(self, log: Path, start: int, say: Callable[[str], None]) -> None:
        self._log, self._at, self._say = log, start, say

    def read(self) -> None:
        with self._log.open("rb") as file:
            file.seek(self._at)
            whole, end, _ = file.read().rpartition(b"\n")
        self._at += len(whole) + len(end)
        for line in whole.decode(errors="replace").splitlines():
            if line.startswith(SAYS):
                self._say(f"             {line.removeprefix(SAYS)}")


def evaluation_config(
    given: Mapping[str, Any], *, folder: RunFolder, model: str, is_exported: bool, base_url: str
) -> dict[str, Any]:
    """The config of an evaluation, from that of a run.

    Args:
        given: the config of the run, resolved.
        folder: of the evaluation.
        model: folder or name of the weights; with `base_url` of the tokenizer.
        is_exported: whether an adapter of the run is merged into the weights.
        base_url: of an OpenAI-compatible server; empty: the rollout backend of the config.
    """
    config = dict[str, Any](json.loads(json.dumps(given)))
    parts, trainer = config["actor_rollout_ref"], config["trainer"]
    rollout, of_model = parts["rollout"], parts["model"]
    config["mixed"]["run_dir"] = str(folder.path)
    of_model |= {"path": model, "tokenizer_path": None, "hf_config_path": None}
    if is_exported:
        of_model |= {"lora_rank": 0, "lora_adapter_path": None}
        if "lora" in of_model:
            of_model["lora"]["rank"] = 0
    rollout |= {"load_format": "auto", "enable_rollout_routing_replay": False}
    if not rollout.get("nnodes"):  # the rollout shared the devices of the trainer
        rollout |= {name: trainer[name] for name in ("nnodes", "n_gpus_per_node")}
    if "checkpoint_engine" in rollout:
        rollout["checkpoint_engine"]["backend"] = "naive"  # no weights are sent
    if at(config, "actor_rollout_ref.rollout.prometheus.enable"):
        rollout["prometheus"]["enable"] = False  # the run's own file of targets
    if base_url:
        rollout |= {"name": "openai"}
    ray_init = config["ray_kwargs"]["ray_init"]
    if not ray_init.get("address"):
        ray_init["include_dashboard"] = False  # its port may be that of a run
        ray_init.pop("dashboard_port", None)
    return config
