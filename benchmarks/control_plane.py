"""What the trainer process costs beside verl's, with an engine and an optimizer that only wait.

    python -m benchmarks.control_plane [--quick] [--sizes 64x16x2048,...] [--sources 3,64]
    python -m benchmarks.control_plane --in-process [--sizes 1024x16x32768,...]
    python -m benchmarks.control_plane --steps 10000

verl's `fit` runs: with `MixedSyncTrainer`, and with verl's own `PPOTrainerSync`. Real are: both
trainers, both replay buffers, TransferQueue under Ray, the output path of the loop workers (verl's
`_agent_loop_postprocess`, this project's `judged_outputs`), the ledger, trajectory files and audit.
Stand-ins are: the dataset (rows in memory), the engine (a trajectory ends after a lognormal time,
the slowest after 20 times the median), and the training processes (they write log-probs and wait).
Tokens are drawn once for `TEMPLATES` trajectories, of which every trajectory is a copy.

`--in-process` replaces TransferQueue by a dict whose rows share arrays, and verl's work on tokens
by nothing. A batch then needs no memory for its tokens, so that this project's own cost can be
measured at sizes whose tokens do not fit. verl's `PPOTrainerSync` does not run in that mode.

The file runs in a checkout of release 1.0.0 or 1.1.0 as well, if it is copied into `benchmarks/`
there.
"""

import argparse
import asyncio
import ctypes
import gc
import importlib
import importlib.util
import json
import logging
import math
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from tokenizers import Tokenizer, decoders, models
from transfer_queue import KVBatchMeta
from transfer_queue.storage.managers.simple_storage_manager import AsyncSimpleStorageManager
from transformers import PreTrainedTokenizerFast
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.dataset.rl_dataset import collate_fn

import agent_loop

IS_1_0 = not (Path(agent_loop.__file__ or "").parent / "training").is_dir()

SIZES = (
    "20x8x128",
    "64x16x2048",
    "64x16x8192",
    "256x16x2048",
    "1024x16x512",
)
"""Prompts x trajectories of each x longest response, in tokens. Larger ones need over 6 GB."""

IN_PROCESS_SIZES = tuple(f"{p}x16x{t}" for p in (64, 256, 1024) for t in (2048, 8192, 32768))

TEMPLATES = 64
VOCABULARY = 1000
PROMPT_TOKENS = 128
TURNS = 4
TOOL_TOKENS = 16
MEAN_LENGTH = 0.75
"""Mean response over the longest."""

TAIL = 20.0
"""Time of the slowest trajectory over the median."""

TOKENS_PER_S = 2.5e6
"""Trained tokens a second: 512 GPUs with 5,000 each."""

LOG_PROB, ENTROPY = -0.5, 0.3
TOKENS_PER_PUT = 1 << 22
RANKS = 64


class Size(NamedTuple):
    prompts: int
    n: int
    tokens: int

    @classmethod
    def parse(cls, text: str) -> "Size":
        return cls(*map(int, text.split("x")))

    @property
    def trajectories(self) -> int:
        return self.prompts * self.n

    def __str__(self) -> str:
        return f"{self.prompts:,} x {self.n} x {self.tokens:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run, in a process of its own."""

    trainer: str
    """`verl` or `mixed`."""

    size: str
    sources: int = 3
    steps: int = 2
    """The last one is reported."""

    in_process: bool = False
    generate_s: float = 2.0
    """Of the slowest trajectory; the others end while the trainer polls."""

    update_s: float | None = None
    """Of log-probs and update together, half each; None: at `TOKENS_PER_S`."""

    every: int = 0
    """Report the memory after so many steps; 0 reports the parts of the last step."""


# --- measuring ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Part:
    wall_s: float = 0.0
    cpu_s: float = 0.0
    growth_bytes: int = 0
    """Peak of the process's memory over what it had when the step began."""


def memory(name: str) -> int:
    """`VmRSS`, or `VmHWM`, its peak since `forget_peak`, in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(name))


def forget_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


OVERLAPPED = ("old log-probs", "update")
"""Parts beside which our threads work: their CPU is of the main thread alone. CPU of other parts
includes the threads of TransferQueue's client."""


class Clock:
    """Time and memory of the trainer's methods, in the last step that was begun."""

    def __init__(self) -> None:
        self.parts: defaultdict[str, Part] = defaultdict(Part)
        self._begin_bytes = 0

    def begin_step(self) -> None:
        self.parts.clear()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # else the new step reuses pages that were freed
        self._begin_bytes = memory("VmRSS")

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        is_main = threading.current_thread() is threading.main_thread()
        is_alone = is_main and name.removeprefix("verl: ") not in OVERLAPPED
        cpu = time.process_time if is_alone else time.thread_time
        measures_memory = is_main and not name.startswith("verl:")
        if measures_memory:
            forget_peak()
        wall_s, cpu_s = time.perf_counter(), cpu()
        try:
            yield
        finally:
            part = self.parts[name]
            part.wall_s += time.perf_counter() - wall_s
            part.cpu_s += cpu() - cpu_s
            if measures_memory:
                part.growth_bytes = max(part.growth_bytes, memory("VmHWM") - self._begin_bytes)

    def wrap(self, owner: Any, method: str, name: str) -> None:
        inner = getattr(owner, method)

        def measured(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return inner(*args, **kwargs)

        setattr(owner, method, measured)


# --- rows, tokens and times -----------------------------------------------------------------------


def source_name(number: int) -> str:
    return f"s{number:03d}"


def _exists(module: str) -> bool:
    with suppress(ModuleNotFoundError):  # the folder of the module is missing
        return importlib.util.find_spec(module) is not None
    return False


_MixtureRows: Any = object
if _exists("samplers.mixture_rows"):  # 1.0.0 and 1.1.0 have none
    _MixtureRows = importlib.import_module("samplers.mixture_rows").MixtureRows


class Rows(_MixtureRows):
    """The dataset: rows in memory, equally many of each source."""

    def __init__(self, count: int, sources: int) -> None:
        self._sources = [source_name(row % sources) for row in range(count)]
        self.is_validation = False

    @property
    def dataframe(self) -> Any:
        if _MixtureRows is not object:
            return None
        return SimpleNamespace(with_format=lambda _: {"data_source": self._sources})

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, row: int) -> dict[str, Any]:
        source = self._sources[row]
        row_id = f"{source}:{row:016x}"
        return {
            "raw_prompt": [{"role": "user", "content": f"What is {row}?"}],
            "data_source": source,
            "agent_name": "stand_in",
            "row_id": row_id,
            "index": row,
            "reward_model": {"style": "rule", "ground_truth": '"0"'},
            "extra_info": {"split": "train", "index": row, "row_id": row_id, "extras": "{}"},
        }


class Batches:
    """verl's dataloader over the rows."""

    def __init__(self, rows: Rows, size: int) -> None:
        self._rows, self._size = rows, size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for first in range(0, len(self._rows) - self._size + 1, self._size):
            yield collate_fn([self._rows[row] for row in range(first, first + self._size)])


def lengths_of(longest: int) -> list[int]:
    """(TEMPLATES,) lognormal lengths of responses, cut at the longest."""
    spread = np.exp(np.random.default_rng(0).normal(0, 0.5, TEMPLATES))
    median, mean = 0.0, 0.0
    while mean < MEAN_LENGTH * longest:
        median += longest / 256
        mean = np.clip(median * spread, 16, longest).mean()
    return np.clip(median * spread, 16, longest).astype(int).tolist()


def delay_of(key: str, slowest_s: float) -> float:
    """The engine's time for a trajectory: lognormal, cut at `TAIL` medians."""
    draw = np.random.default_rng(abs(hash(key)) % (1 << 32)).lognormal(0, math.log(TAIL) / 3)
    return slowest_s * min(float(draw), TAIL) / TAIL


def template_of(uid: str, session: int) -> int:
    return (int.from_bytes(uid[:6].encode(), "little") + 7 * session) % TEMPLATES


@lru_cache(maxsize=1)
def tokenizer() -> PreTrainedTokenizerFast:
    """Each token is a word."""
    words = {f" w{token}": token for token in range(VOCABULARY)} | {"<end>": VOCABULARY}
    model = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    model.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="<end>", pad_token="<end>", unk_token="<end>"
    )


def ours(name: str, *modules: str) -> Any:
    """A name of this project, from the first of these modules that this checkout has, else from
    the last, whose import then says what is missing."""
    module = next(filter(_exists, modules), modules[-1])
    return getattr(importlib.import_module(module), name)


@lru_cache(maxsize=TEMPLATES)
def rollout_of(number: int, longest: int) -> Any:
    """A trajectory of `TURNS` turns with a tool's result between two of them."""
    trajectory_of = ours("Trajectory", "agent_loop.turns.trajectory", "agent_loop.trajectory")
    stop_reason = ours("StopReason", "agent_loop.turns.trajectory", "agent_loop.trajectory")
    where = "agent_loop.turn_loop" if IS_1_0 else "agent_loop.turns.turn_loop"
    loop = importlib.import_module(where)
    rng = np.random.default_rng(number)
    ids = rng.integers(0, VOCABULARY, PROMPT_TOKENS + longest).tolist()
    trajectory = trajectory_of(ids[:PROMPT_TOKENS])
    length = lengths_of(longest)[number]
    tool = min(TOOL_TOKENS, length // (2 * TURNS))
    own = (length - (TURNS - 1) * tool) // TURNS
    turns, calls, at = [], [], PROMPT_TOKENS
    for turn in range(TURNS):
        part = ids[at : at + own]
        trajectory.add_model_tokens(part, [LOG_PROB] * len(part))
        trajectory.cut_turn(len(part), tokenizer().decode(part))
        versions = {} if IS_1_0 else {"min_global_steps": 0, "max_global_steps": 0}
        turns.append(loop.Turn(tokens=len(part), generate_s=0.1, **versions))
        at += own
        if turn < TURNS - 1:
            part = ids[at : at + tool]
            trajectory.add_tool_tokens(part, tokenizer().decode(part))
            calls.append(
                loop.Call(
                    turn=turn + 1,
                    action="code",
                    arguments="print(1)",
                    status="ok",
                    tool="code",
                    latency_s=0.05,
                    attempts=1,
                )
            )
            at += tool
    return loop.Rollout(
        trajectory=trajectory,
        stop_reason=stop_reason.ANSWERED,
        answer="0",
        turns=turns,
        calls=calls,
    )


async def output_of(config: DictConfig, row: dict[str, Any], number: int, mixed: bool) -> Any:
    """verl's output of a trajectory; every second one of a template is solved."""
    rollout = rollout_of(number, config.data.max_response_length)
    score = float(row["session_id"] % 2)
    if not mixed:
        trajectory = rollout.trajectory
        return AgentLoopOutput(
            prompt_ids=trajectory.prompt_ids,
            response_ids=trajectory.response_ids,
            response_mask=trajectory.response_mask,
            response_logprobs=trajectory.log_probs,
            reward_score=score,
            num_turns=2 * TURNS,
            metrics=AgentLoopMetrics(generate_sequences=0.0, tool_calls=0.0),
            extra_fields={
                "reward_extra_info": {"acc": score}, "min_global_steps": 0, "max_global_steps": 0
            },
        )  # fmt: skip
    module: Any = importlib.import_module("agent_loop.turn_agent_loop")
    judging = module.judge

    async def judge(*_: Any) -> dict[str, float]:
        return {"score": score, "acc": score, "format": 1.0, "infra_error": 0.0, "loop_error": 0.0}

    module.judge = judge
    try:
        settings = ours("settings_of", "agent_loop.loop_settings", "agent_loop.turns.loop_settings")
        version = [0] if IS_1_0 else 0
        if _exists("agent_loop.row"):  # earlier releases take the columns
            row = importlib.import_module("agent_loop.row").Row.from_columns(row)
        if hasattr(module, "judged_output"):  # before a session could be several rows
            return await module.judged_output(rollout, row, None, settings(config), version)
        return (await module.judged_outputs([rollout], row, None, settings(config), version))[0][1]
    finally:
        module.judge = judging


# --- stand-ins under Ray --------------------------------------------------------------------------

_Worker: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class  # pyright: ignore[reportAttributeAccessIssue]


ENDED = "ended"
"""`samplers.queue_view.ENDED`, which 1.0.0 does not have."""


def ended_tag(config: DictConfig, uid: str) -> dict[str, Any]:
    """As `MixedAgentLoopWorker` names a group that ended."""
    keys = [f"{uid}_{session}_0" for session in range(config.actor_rollout_ref.rollout.n)]
    return {"partition": "train", "keys": keys}


class LoopWorker(_Worker):
    """verl's worker, whose loops wait and then hand over a trajectory."""

    def __init__(self, config: DictConfig, job: Job) -> None:
        self.config, self.job = config, job
        self.background_tasks = set()
        self.processor, self.reward_loop_worker_handles = None, None
        self.distillation_enabled = False
        self.busy_s = self.began_cpu_s = 0.0
        tq.init()

    async def generate_sequences(self, batch: TensorDict) -> None:
        self.began_cpu_s, self.ended = time.process_time(), 0.0
        await super().generate_sequences(batch)

    async def _run_prompt(self, prompt: dict[str, Any], *args: Any, **options: Any) -> None:
        uid = prompt["uid"]
        await super()._run_prompt(prompt, *args, **options)
        if self.job.trainer == "mixed":
            await tq.async_kv_put(key=uid, partition_id=ENDED, tag=ended_tag(self.config, uid))

    async def _run_agent_loop(
        self, sampling_params: Any, trajectory: dict[str, Any], *, trace: bool = True, **row: Any
    ) -> None:
        uid, session = row["uid"], row["session_id"]
        await asyncio.sleep(delay_of(f"{uid}_{session}", self.job.generate_s))
        number = template_of(uid, session)
        output = await output_of(self.config, row, number, self.job.trainer == "mixed")
        row.pop("agent_name")
        await self._agent_loop_postprocess(output, trajectory["validate"], **row)
        self.busy_s, self.ended = time.process_time() - self.began_cpu_s, time.time()

    async def seconds(self) -> tuple[float, float]:
        """CPU of the step's trajectories, and when the last one was handed over."""
        return self.busy_s, self.ended


class Optimizer:
    """The training processes: they write what log-prob passes return."""

    def __init__(self) -> None:
        tq.init()

    def write(self, keys: list[str], lengths: list[int]) -> None:
        longest = torch.full((max(lengths),), LOG_PROB)
        entropy = torch.full((max(lengths),), ENTROPY)
        first = 0
        while first < len(keys):
            last, tokens = first, 0
            while last < len(keys) and (tokens == 0 or tokens + lengths[last] <= TOKENS_PER_PUT):
                tokens += lengths[last]
                last += 1
            part = lengths[first:last]
            columns = {
                name: torch.nested.as_nested_tensor([of[:n] for n in part], layout=torch.jagged)
                for name, of in (("log_probs", longest), ("entropy", entropy))
            }
            fields = TensorDict(columns, batch_size=len(part))
            tq.kv_batch_put(keys=keys[first:last], partition_id="train", fields=fields)
            first = last


class WorkerGroup:
    """verl's handle of the training processes."""

    def __init__(self, job: Job, optimizer: Any) -> None:
        ranks = math.gcd(Size.parse(job.size).trajectories, RANKS)
        self._dispatch_info = {"actor": list(range(ranks))}
        self._job, self._optimizer, self._step = job, optimizer, 1

    def _work(self, batch: KVBatchMeta) -> None:
        """Half of a step's time, in the step that is reported."""
        tokens = sum(tag["seq_len"] for tag in batch.tags)
        update_s = tokens / TOKENS_PER_S if self._job.update_s is None else self._job.update_s
        if self._step == self._job.steps:
            time.sleep(update_s / 2)

    def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        if self._optimizer is not None:
            lengths = [tag["seq_len"] for tag in batch.tags]
            ray.get(self._optimizer.write.remote(list(batch.keys), lengths))
        self._work(batch)
        return batch

    def update_actor(self, batch: KVBatchMeta) -> Any:
        self._work(batch)
        self._step += 1
        return {"metrics": {"mfu": [0.5], "grad_norm": [1.0]}}


class Nothing:
    """verl's checkpoint, rollout and reward managers, which have nothing to do."""

    reward_loop_worker_handles = ()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: 1


class Manager:
    """verl's agent loop manager with one worker."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def generate_sequences(self, prompts: TensorDict) -> None:
        ray.get(self._worker.generate_sequences.remote(prompts))


# --- stand-ins in the trainer's process -----------------------------------------------------------


_pack: Any = AsyncSimpleStorageManager._pack_field_values  # pyright: ignore[reportAttributeAccessIssue]


class SharedQueue:
    """TransferQueue in a dict. A row is its template's arrays and columns of its own."""

    def __init__(self, config: DictConfig) -> None:
        self._config = config
        self._tags: dict[str, dict[str, Any]] = {}
        self._ended: dict[str, dict[str, Any]] = {}
        self._rows: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {}
        self._templates: dict[tuple[int, int], tuple[dict[str, Any], bytes]] = {}

    def plug(self) -> None:
        for name in ("kv_list", "kv_clear", "kv_batch_put", "kv_batch_get", "get_client"):
            setattr(tq, name, getattr(self, name))

    def generate_sequences(self, prompts: TensorDict) -> None:
        """As the loop workers, at once."""
        columns = {name: list(prompts.get(name)) for name in ("uid", "data_source", "row_id")}
        for uid, source, row_id in zip(*columns.values(), strict=True):
            uid, source, row_id = (getattr(v, "data", v) for v in (uid, source, row_id))
            for session in range(self._config.actor_rollout_ref.rollout.n):
                number = template_of(uid, session), session % 2
                fields, extra = self._template(*number)
                key = f"{uid}_{session}_0"
                own = {"uid": uid, "data_source": source, "row_id": row_id}
                self._rows[key] = number, own | {"extra_fields": extra}
                prompt, response = len(fields["prompts"]), len(fields["responses"])
                self._tags[key] = {
                    "status": "success", "prompt_len": prompt, "response_len": response,
                    "seq_len": prompt + response, "min_global_steps": 0, "max_global_steps": 0,
                }  # fmt: skip
            self._tags[uid]["status"] = "finished"
            self._ended[uid] = ended_tag(self._config, uid)

    def _template(self, number: int, session: int) -> tuple[dict[str, Any], bytes]:
        if (number, session) not in self._templates:
            row = {"data_source": source_name(0), "session_id": session, "extra_info": {}}
            output = asyncio.run(output_of(self._config, row, number, mixed=True))
            fields = output.as_dict()
            extra = pickle.dumps(fields.pop("extra_fields"))
            count = len(fields["responses"])
            of_token = {"entropy": ENTROPY, "old_log_probs": LOG_PROB, "advantages": session - 0.5}
            fields |= {name: torch.full((count,), value) for name, value in of_token.items()}
            self._templates[number, session] = fields, extra
        return self._templates[number, session]

    def kv_list(self, partition_id: str | None = None) -> dict[str, Any]:
        return {"train": self._tags, ENDED: dict(self._ended)}

    def get_client(self) -> "SharedQueue":
        return self

    def kv_retrieve_meta(self, keys: Sequence[str], partition_id: str) -> Any:
        return SimpleNamespace(custom_meta=[self._tags[key] for key in keys])

    def kv_clear(self, keys: Sequence[str], partition_id: str) -> None:
        for key in keys:
            if partition_id == ENDED:
                del self._ended[key]
                continue
            self._tags.pop(key, None)
            self._rows.pop(key, None)

    def kv_batch_put(
        self, keys: Sequence[str], partition_id: str, fields: Any = None, tags: Any = None
    ) -> KVBatchMeta:
        assert fields is None, "verl's work is left out"
        self._tags |= zip(keys, tags, strict=True)
        return KVBatchMeta(partition_id=partition_id, keys=list(keys), tags=list(tags))

    def kv_batch_get(
        self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str]
    ) -> TensorDict:
        columns = {}
        for name in select_fields:
            values = [self._value(key, name) for key in keys]
            if values[0] is not None:
                columns[name] = _pack(values)
        return TensorDict(columns, batch_size=len(keys))

    def _value(self, key: str, name: str) -> Any:
        number, own = self._rows[key]
        if name == "extra_fields":
            return pickle.loads(own[name])  # as after a transfer: an object of its own
        return own[name] if name in own else self._templates[number][0].get(name)


def leave_out_verls_work() -> None:
    """verl's methods that compute with tokens do nothing."""

    def wait(self: Any, batch: KVBatchMeta, metrics: Any) -> Any:
        return self.actor_rollout_wg.compute_log_prob(batch)

    def same(_: Any, batch: KVBatchMeta, *args: Any, **kwargs: Any) -> Any:
        return batch

    verls: Any = PPOTrainer
    verls._compute_old_log_prob = wait
    verls._compute_advantage = verls._compute_metrics = same


# --- one run --------------------------------------------------------------------------------------


def config_of(job: Job, run_dir: str) -> DictConfig:
    size = Size.parse(job.size)
    module = "cluster.compose" if IS_1_0 else "verl_mixed.run.compose"
    compose = importlib.import_module(module)
    source = "{ratio:1,agent:code_execution_agent,reward:exact_match_reward}"
    overrides = [
        f"mixed.run_dir={run_dir}", "data.train_files=[a]", "data.val_files=[b]",
        "actor_rollout_ref.model.path=c", "mixed.trajectory_sample=4", "trainer.logger=[]",
        "trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1",
        f"data.train_batch_size={size.prompts}", f"data.max_response_length={size.tokens}",
        f"actor_rollout_ref.rollout.n={size.n}", "mixed.max_probs_diff=null",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={size.prompts}",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true",
        "actor_rollout_ref.rollout.multi_turn.tool_config.enable_global_rate_limit=false",
        "trainer.total_epochs=1000000", f"trainer.total_training_steps={job.steps}",
        *(f"~mixed.sources.{name}" for name in ("taco", "nq", "math")),
        *(f"+mixed.sources.{source_name(i)}={source}" for i in range(job.sources)),
    ]  # fmt: skip
    if not IS_1_0:
        overrides += ["mixed.trajectory_sample_step=16", "mixed.trajectory_keep=500"]
    if job.trainer == "verl":
        overrides += ["trainer.v1.trainer_mode=sync", "algorithm.adv_estimator=grpo"]
        overrides += ["trainer.v1.sampler.sync_refill_failed_groups=false"]
    config = OmegaConf.create(compose.resolve(compose.compose_config(overrides)))
    assert isinstance(config, DictConfig)
    config.actor_rollout_ref.model = {"path": "c"}
    return config


def plug_dataset(job: Job) -> None:
    """verl's `_init_dataloader` with the rows in memory."""
    size = Size.parse(job.size)

    def init(self: Any) -> None:
        self.train_dataset = self.val_dataset = Rows(max(4096, 4 * size.prompts), job.sources)
        self.train_dataloader = Batches(self.train_dataset, size.prompts)
        self.train_dataloader_it = None
        self.steps_per_epoch, self.total_training_steps = job.steps, job.steps

    verls: Any = PPOTrainer
    verls._init_dataloader = init


def make_trainer(job: Job, config: DictConfig, optimizer: Any) -> Any:
    """A trainer after verl's own start, without its processes."""
    if job.trainer == "mixed":
        cls = ours("MixedSyncTrainer", "agent_loop.training.trainer", "agent_loop.trainer")
    else:
        cls = PPOTrainerSync
    trainer: Any = cls(config)
    trainer.tokenizer = tokenizer()
    trainer._init_dataloader()
    trainer._init_dump_executor()
    trainer.actor_rollout_wg = WorkerGroup(job, optimizer)
    trainer.checkpoint_manager = trainer.resource_pool_manager = Nothing()
    trainer.reward_loop_manager = Nothing()
    trainer.global_steps = 0
    if job.trainer == "mixed":
        trainer.ledger.begin(trainer.plan.description())
    return trainer


OF_TRAINER = {
    "prepare_step": "prompts",
    "_balance_batch": "check and order",
    "_compute_old_log_prob": "old log-probs",
    "_compute_advantage": "advantage",
    "_update_actor": "update",
    "_keep_accounts": "accounts",
    "_compute_metrics": "metrics",
}
"""Method -> the part of a step that it is."""

OF_VERL = ("_compute_old_log_prob", "_compute_advantage", "_update_actor", "_compute_metrics")
"""Methods of verl's that ours call."""


def measure(trainer: Any, clock: Clock) -> None:
    for method in OF_VERL:
        clock.wrap(PPOTrainer, method, f"verl: {OF_TRAINER[method]}")
    for method, name in OF_TRAINER.items():
        if hasattr(trainer, method):
            clock.wrap(trainer, method, name)
    clock.wrap(trainer.replay_buffer, "sample", "wait and choose")
    if hasattr(trainer, "_prepare"):
        accounts = importlib.import_module("agent_loop.training.accounts")
        clock.wrap(accounts, "read_token_sums", "thread: sums over tokens")
        writes = "write_whole" if hasattr(accounts, "write_whole") else "write_lines"
        clock.wrap(accounts, writes, "thread: trajectory files")
        clock.wrap(trainer, "_prepare", "thread: metrics, drift, tokens to write")
        steps = importlib.import_module("agent_loop.training.optimizer_steps")
        clock.wrap(steps, "read_trajectories", "thread: facts")


def actor(cls: Any, *arguments: Any) -> Any:
    made: Any = ray.remote(cls)
    return made.options(num_cpus=0.1).remote(*arguments)


def run(job: Job) -> dict[str, Any]:
    """Run `fit`; the parts of the last step, or the memory after every so many steps."""
    os.environ.update({"RAY_AUTH_MODE": "disabled", "TQDM_DISABLE": "1"})
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(job, folder)
        plug_dataset(job)
        worker = optimizer = None
        if job.in_process:
            leave_out_verls_work()
            queue = SharedQueue(config)
            queue.plug()
            manager: Any = queue
        else:
            ray.init(
                address="local", num_cpus=4, include_dashboard=False, log_to_driver=False,
                object_store_memory=100 << 20, runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}},
            )  # fmt: skip
            tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
            worker = actor(LoopWorker, config, job)
            optimizer = actor(Optimizer)
            manager = Manager(worker)
        trainer = make_trainer(job, config, optimizer)
        clock, marks, seen = Clock(), [], {}
        if not job.every:  # the measurement itself takes longer than a small step
            measure(trainer, clock)
            clock.wrap(manager, "generate_sequences", "verl: prompts")
        step, end = trainer.step, trainer.on_step_end

        def begin(metrics: Any, timing_raw: Any) -> Any:
            if not job.every:
                clock.begin_step()
            begun = time.time()
            batch = step(metrics, timing_raw)
            tokens = sum(tag["seq_len"] for tag in batch.tags)
            seen.update({"step_s": time.time() - begun, "tokens": tokens})
            return batch

        def mark() -> None:
            end()
            if job.every and trainer.global_steps % job.every == 0:
                marks.append((trainer.global_steps, memory("VmRSS")))

        trainer.step, trainer.on_step_end = begin, mark
        trainer.fit(manager)
        if worker is not None:
            seen["loops_cpu_s"] = ray.get(worker.seconds.remote())[0]
        if job.every:
            write_run(config, trainer.train_dataset, Path(folder))
            seen |= audit(folder)
    return seen | {
        "marks": marks,
        "parts": {name: vars_of(part) for name, part in clock.parts.items()},
    }


def vars_of(part: Part) -> dict[str, float]:
    return {"wall_s": part.wall_s, "cpu_s": part.cpu_s, "growth_bytes": part.growth_bytes}


def write_run(config: DictConfig, rows: Rows, folder: Path) -> None:
    """What the audit reads beside the ledger."""
    table = [
        rows[number] | {"prompt": rows[number]["raw_prompt"], "ability": "none"}
        for number in range(len(rows))
    ]
    pq.write_table(pa.Table.from_pylist(table), folder / "train.parquet")
    config.data.train_files = [str(folder / "train.parquet")]
    OmegaConf.save(config, folder / "config.yaml")


AUDIT = """
import sys
from verl_mixed.cli import main
code = main(["audit", sys.argv[1]])
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(code, int(peak.split()[1]) << 10)
"""


def audit(folder: str) -> dict[str, int]:
    """Exit code of `verl-mixed audit` of the run, and its peak memory in bytes."""
    command = [sys.executable, "-W", "ignore", "-c", AUDIT, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    print(done.stdout + done.stderr, file=sys.stderr)
    code, peak_bytes = done.stdout.splitlines()[-1].split()
    return {"audit": int(code), "audit_bytes": int(peak_bytes)}


# --- tables ---------------------------------------------------------------------------------------


RUN = """
import json, sys
from benchmarks.control_plane import Job, run
print(json.dumps(run(Job(**json.loads(sys.argv[1])))))
"""
"""Imported by its name, so that Ray's workers can import what they run."""


def child(**job: Any) -> dict[str, Any]:
    """`run` in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN, json.dumps(job)],
        stdout=subprocess.PIPE, text=True, check=True,
        env=os.environ | {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def own_of(result: dict[str, Any], part: str, what: str = "wall_s") -> float:
    """A part without the method of verl's that it calls."""
    parts = result["parts"]
    return parts.get(part, {}).get(what, 0.0) - parts.get(f"verl: {part}", {}).get(what, 0.0)


ON_PATH = tuple(OF_TRAINER.values())
OFF_PATH = (
    "thread: facts",
    "thread: sums over tokens",
    "thread: metrics, drift, tokens to write",
    "thread: trajectory files",
)


def critical(result: dict[str, Any], what: str) -> float:
    """Of our code in a step, while the devices wait."""
    return sum(own_of(result, part, what) for part in ON_PATH)


def growth(result: dict[str, Any]) -> float:
    """The largest growth of memory in any part of a step, in MB."""
    return max(part["growth_bytes"] for part in result["parts"].values()) / 1e6


def exponents(points: Sequence[tuple[int, int, float]]) -> str:
    """Least squares of log(cost) over log(trajectories) and log(tokens of a trajectory)."""
    if len({p[0] for p in points}) < 2 or len({p[1] for p in points}) < 2:
        return "too few sizes"
    rows = np.array([[math.log(a), math.log(b), 1.0] for a, b, _ in points])
    over = np.linalg.lstsq(rows, np.log([max(cost, 1e-4) for *_, cost in points]), rcond=None)[0]
    return f"trajectories^{over[0]:.2f}, tokens^{over[1]:.2f}"


def table_of_parts(name: str, mixed: dict[str, Any], verl: dict[str, Any] | None) -> None:
    print(f"\n**{name}**, seconds of wall time (CPU)\n")
    print("| part | verl's trainer | ours | of it ours alone | memory growth verl | ours |")
    print("|---|---:|---:|---:|---:|---:|")
    theirs = (verl or {"parts": {}})["parts"]
    for part in ("wait and choose", *ON_PATH, *OFF_PATH):
        own, other = mixed["parts"].get(part), theirs.get(part)
        if own is None and other is None:
            continue
        alone = f"{own_of(mixed, part):.2f} ({own_of(mixed, part, 'cpu_s'):.2f})"
        cells = ["" if p is None else f"{p['wall_s']:.2f} ({p['cpu_s']:.2f})" for p in (other, own)]
        grown = ["" if p is None else f"{p['growth_bytes'] / 1e6:,.0f} MB" for p in (other, own)]
        print(f"| {part} | {cells[0]} | {cells[1]} | {alone} | {grown[0]} | {grown[1]} |")


def compare(sizes: Sequence[str], sources: int, in_process: bool, **times: float) -> None:
    """The sizes one after the other, with verl's trainer beside ours."""
    rows, details = [], []
    for size in sizes:
        of = {"size": size, "sources": sources, "in_process": in_process, **times}
        verl = None if in_process else child(trainer="verl", **of)
        mixed = child(trainer="mixed", **of)
        rows.append((Size.parse(size), mixed, verl))
        details.append((f"{Size.parse(size)}, {sources} sources", mixed, verl))
        print(f"done: {size} {sources}", file=sys.stderr)
    for detail in details:
        table_of_parts(*detail)
    print("\n| size | Mtokens | ours on the critical path: wall | CPU | off it: CPU "
          "| memory growth: verl | ours | loops: trajectories per CPU second |")  # fmt: skip
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for size, mixed, verl in rows:
        off = sum(own_of(mixed, part, "cpu_s") for part in OFF_PATH)
        loops = mixed.get("loops_cpu_s")
        print(
            f"| {size} | {mixed['tokens'] / 1e6:.1f} | {critical(mixed, 'wall_s'):.2f} s "
            f"| {critical(mixed, 'cpu_s'):.2f} s | {off:.2f} s "
            f"| {'' if verl is None else f'{growth(verl):,.0f} MB'} | {growth(mixed):,.0f} MB "
            f"| {f'{size.trajectories / loops:,.0f}' if loops else ''} |"
        )
    for what in ("wall_s", "cpu_s"):
        points = [(s.trajectories, s.tokens, critical(m, what)) for s, m, _ in rows]
        print(f"\nOurs on the critical path, {what}: {exponents(points)}")


def many_steps(steps: int) -> None:
    """The memory of the trainer's accounts over many steps, and that of the audit."""
    every = max(1, steps // 10)
    seen = child(
        trainer="mixed", size="8x4x128", steps=steps, every=every,
        in_process=True, generate_s=0.0, update_s=0.0,
    )  # fmt: skip
    print("| step | memory of the trainer process |\n|---:|---:|")
    for step, size_bytes in seen["marks"]:
        print(f"| {step:,} | {size_bytes / 1e6:,.1f} MB |")
    print(f"\nverl-mixed audit of the run: {seen['audit_bytes'] / 1e6:,.0f} MB at its peak")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="one small size")
    parser.add_argument("--sizes", help="as 64x16x2048,256x16x2048")
    parser.add_argument("--sources", default="3", help="numbers of sources, as 3,16,64,100")
    parser.add_argument("--in-process", action="store_true", help="ours alone, at any size")
    parser.add_argument("--steps", type=int, help="memory over so many small steps")
    arguments = parser.parse_args()
    if arguments.steps:
        many_steps(arguments.steps)
        return
    default = IN_PROCESS_SIZES if arguments.in_process else SIZES
    sizes = arguments.sizes.split(",") if arguments.sizes else default
    if arguments.quick:
        sizes = ["8x4x64"]
    for sources in map(int, arguments.sources.split(",")):
        compare(sizes, sources, arguments.in_process)


if __name__ == "__main__":
    main()
