"""The driver of an evaluation: `python -m agent_loop.evaluation.main FOLDER`.

verl adapter: `LLMServerManager` (workers/rollout/llm_server.py at 0.9.1), which starts the rollout
servers of `separate_async`, here with weights from disk. There is no trainer, no optimizer, no
TransferQueue and no weight sync. FOLDER has `config.yaml` and `job.json`; the records are appended
to `records.jsonl`, so that an evaluation that was killed goes on.
"""

import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from omegaconf import DictConfig, OmegaConf

from agent_loop.evaluation.selection import Selection
from agent_loop.ray_path import keep_folder_off_workers
from agent_loop.records.evaluation_records import JOB, RECORDS, SELECTED, Key, Record, RecordsFile
from agent_loop.records.run_folder import write_text
from agent_loop.row import Row
from agent_loop.training.main import join
from agent_loop.training.verl_config import refusals
from config.schema import ConfigError

CONFIG = "config.yaml"
"""File in the folder of an evaluation; `agent_loop.records.evaluation_records` names the others."""

SAYS = "evaluation: "
"""Begins the lines that the launcher prints too."""

LINE_S = 5.0
"""Seconds between two lines of progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to evaluate, beside the config."""

    step: int
    """Training step of the weights, from which the seeds are made."""

    selection: Selection
    base_url: str = ""
    """URL of an OpenAI-compatible server; empty: the rollout backend of the config."""

    model: str = ""
    """Name of the model at that server."""


def write_job(job: Job, folder: Path) -> None:
    """Write `job.json`."""
    write_text(folder / JOB, json.dumps(asdict(job), indent=1) + "\n")


def read_job(folder: Path) -> Job:
    """The job of a folder."""
    return msgspec.json.decode((folder / JOB).read_bytes(), type=Job)


def main(folder: Path) -> None:
    """Make the records that are missing, then write all in order.

    Raises:
        ConfigError: verl refuses the config, or no row is chosen.
        RuntimeError: verl did not load the `verl.plugins` entry point.
    """
    import verl  # loads the plugin  # noqa: F401
    from verl.utils.device import auto_set_device

    plugin = sys.modules.get("agent_loop.plugin")
    if plugin is None or not plugin.is_loaded():
        raise RuntimeError(
            "verl did not load the entry point verl.plugins -> agent_loop.plugin: install the "
            "project (pip install --no-deps -e .) and unset VERL_USE_EXTERNAL_PLUGINS"
        )
    config = OmegaConf.load(folder / CONFIG)
    assert isinstance(config, DictConfig), "the launcher writes a mapping"
    job, file = read_job(folder), RecordsFile(folder / RECORDS)
    auto_set_device(config)
    if not job.base_url and (problems := refusals(config)):
        raise ConfigError(problems)
    rows = _rows(config, job.selection)
    chosen = [_key(row, 0)[:2] for row in rows]
    write_text(folder / SELECTED, json.dumps(chosen) + "\n")
    tasks = [(row, sample) for row in rows for sample in range(job.selection.samples)]
    pending = [task for task in tasks if _key(*task) not in file.records]
    _say(f"{len(tasks) - len(pending)} of {len(tasks)} trajectories are there")
    file.rewrite()
    if pending:
        _run(config, job, pending, len(tasks), file)
    file.rewrite()


def _rows(config: DictConfig, selection: Selection) -> list[dict[str, Any]]:
    """The chosen rows of the validation files, as validation inside a run gets them."""
    from verl.trainer.ppo.utils import create_rl_dataset
    from verl.utils.config import omega_conf_to_dataclass

    model: Any = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    dataset: Any = create_rl_dataset(
        config.data.val_files,
        config.data,
        model.tokenizer,
        model.processor,
        is_train=False,
        max_samples=config.data.get("val_max_samples", -1),
    )
    dataset.is_validation = True
    columns = dataset.dataframe.select_columns(["data_source", "extra_info"])
    keys = [_key(row, 0)[:2] for row in columns]
    places = selection.of(keys)
    if not places:
        known = ", ".join(
            f"{name} ({n})" for name, n in sorted(Counter(s for s, _ in keys).items())
        )
        raise ConfigError([f"no row to evaluate: the validation files have rows of {known}"])
    return [dataset[place] for place in places]


def _key(columns: Mapping[str, Any], sample: int) -> Key:
    row = Row.from_columns(columns)
    return row.source, row.row_id, sample


def _run(
    config: DictConfig,
    job: Job,
    pending: Sequence[tuple[dict[str, Any], int]],
    total: int,
    file: RecordsFile,
) -> None:
    """Start servers and workers, run the sessions, and append their records."""
    import ray

    from agent_loop.limited import settle_limiters

    keep_folder_off_workers()
    if not OmegaConf.select(config, "ray_kwargs.ray_init.address"):
        OmegaConf.update(config, "ray_kwargs.ray_init.address", "local", force_add=True)
    join(config)
    try:
        settle_limiters(config)
        client, at_once = _engine(config, job)
        from agent_loop.evaluation.worker import EvaluationWorker  # imports verl's loops

        make: Any = ray.remote(EvaluationWorker).options(scheduling_strategy="SPREAD")
        workers = [
            make.remote(config, client)
            for _ in range(config.actor_rollout_ref.rollout.agent.num_workers)
        ]
        _say("engine and workers are starting")
        made, began_s, said_s = list[Record](), 0.0, 0.0
        for done in _answers(workers, pending, job.step, at_once):
            file.append(done)
            made += done
            now = time.monotonic()
            if not began_s:  # the start is over with the first answer
                began_s = said_s = now
            if now - said_s >= LINE_S or len(made) == len(pending):
                said_s = now
                left_s = (now - began_s) * (len(pending) - len(made)) / len(made)
                _say(f"{total - len(pending) + len(made)} of {total} {_means(made, left_s)}")
    finally:
        ray.shutdown()


def _engine(config: DictConfig, job: Job) -> tuple[Any, int]:
    """A client of the engine, and how many sessions it may run at once."""
    rollout = config.actor_rollout_ref.rollout
    workers = rollout.agent.num_workers
    if job.base_url:
        from agent_loop.evaluation.engine_openai import OpenAIClient

        most = max(1, rollout.max_num_seqs // workers)
        return OpenAIClient(config, job.base_url, job.model, most), most * workers
    from agent_loop.evaluation.servers import EvaluationServers

    servers: Any = EvaluationServers.create(config=config)
    return servers.get_client(), rollout.max_num_seqs * len(servers.get_replicas())


def _answers(
    workers: Sequence[Any], pending: Sequence[tuple[dict[str, Any], int]], step: int, at_once: int
) -> Iterator[list[Record]]:
    """Run the sessions, `at_once` at a time; yields the records of those that ended."""
    import ray

    waiting, running = iter(enumerate(pending)), set[Any]()
    while True:
        for number, (row, sample) in waiting:
            running.add(workers[number % len(workers)].evaluate.remote(row, sample, step))
            if len(running) >= at_once:
                break
        if not running:
            return
        ray.wait(list(running), num_returns=1)
        ended, _ = ray.wait(list(running), num_returns=len(running), timeout=0)
        running -= set(ended)
        yield ray.get(ended)


def _means(made: Sequence[Record], left_s: float) -> str:
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for record in made:
        if not record.lost:
            rewards[record.source].append(record.reward)
    means = ", ".join(f"{source} {fmean(own):.2f}" for source, own in sorted(rewards.items()))
    number = sum(record.lost for record in made)
    lost = f", {number} lost" if number else ""
    return f"trajectories{lost}, left {left_s:.0f}s: {means}"


def _say(text: str) -> None:
    print(f"{SAYS}{text}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
