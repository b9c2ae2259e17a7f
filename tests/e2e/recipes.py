"""Recipes of verl's own on a CPU: their files, their commands, and what verl says that it trained.

The rows have no column of this project. Their ground truth is `<source>|<number>`, and verl writes
the ground truths of each trained batch to `trained/<step>.jsonl` (`trainer.rollout_data_dir`), so
the trained prompts are known without our ledger.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).parents[2]
SHARES = {"openai/gsm8k": 0.4, "minif2f": 0.3, "summarize": 0.3}
"""Names with a slash, and with words by which verl reduces metrics (min, sum)."""

BATCH_SIZE, ROLLOUT_N, ROWS = 20, 4, 400
QUOTAS = {name: round(share * BATCH_SIZE) for name, share in SHARES.items()}
DEADLINE_S = 900

REWARD = """
import random

from samplers.mine import GOOD


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    equal = {"openai/gsm8k": 0.6, "minif2f": 0.3}.get(data_source, 0.0)
    same = random.Random(ground_truth).random() < equal
    return {"score": GOOD if same else float(sum(solution_str.encode()) % 2), "acc": 1.0}
"""
"""60, 30 and 0 % of the groups of a source have equal rewards. Its user has a `samplers` too."""

FAILING = """
import random

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class FailingAgentLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params, **row):
        if random.random() < 0.03:
            raise RuntimeError("broken on purpose")
        return await super().run(sampling_params, **row)
"""

DOOR = (
    *("data.custom_cls.path=pkg://verl_mixed.recipe", "data.custom_cls.name=MixedDataset"),
    "+data.mixture={" + ", ".join(f"{name}: {share}" for name, share in SHARES.items()) + "}",
    "trainer.v1.sampler.custom_sampler.path=pkg://verl_mixed.recipe",
    "trainer.v1.sampler.custom_sampler.name=ExactMixture",
)

ON_CPU = (
    *("trainer.device=cpu", "trainer.nnodes=1", "trainer.n_gpus_per_node=1"),
    *("trainer.logger=[console,file]", "trainer.val_before_train=false"),
    *("actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.actor.use_torch_compile=false"),
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=false",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype=fp32",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.model.enable_gradient_checkpointing=false",
    *("actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.dtype=float32"),
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.free_cache_engine=false",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    *("actor_rollout_ref.rollout.agent.num_workers=1", "reward.num_workers=1"),
    *("ray_kwargs.ray_init.num_cpus=16", "+ray_kwargs.ray_init.include_dashboard=false"),
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
)

FAILING_LOOP = (
    "actor_rollout_ref.rollout.agent.agent_loop_config_path=agents.yaml",
    "actor_rollout_ref.rollout.agent.default_agent_loop=failing_agent",
)
DAPO = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=score")
REFILL = "trainer.v1.sampler.sync_refill_failed_groups=true"
MODES: Mapping[str, Sequence[str]] = {
    "sync": (REFILL, "+ray_kwargs.ray_init.num_gpus=1"),
    "colocate_async": (
        *("trainer.v1.trainer_mode=colocate_async", "+ray_kwargs.ray_init.num_gpus=1"),
    ),
    "separate_async": (
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.parameter_sync_step=4",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH_SIZE // 4}",
        *("actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=1"),
        "actor_rollout_ref.rollout.checkpoint_engine.backend=tcp_store",
        "+ray_kwargs.ray_init.num_gpus=2",
    ),
}


PHASES = ("generating", "updating", "saving")
"""Of a step; its checkpoint before it is whole, its lines are in the ledger, and its own is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe in a folder of its own."""

    folder: Path
    model: Path
    mode: str = "sync"
    steps: int = 3
    overrides: Sequence[str] = ()
    before: Path | None = None
    """A folder that is first on the path, with another release of verl."""

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def write(self) -> None:
        """The files of its user."""
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = [
            {
                "data_source": source,
                "prompt": [{"role": "user", "content": f"What is {number} plus {at}?"}],
                "reward_model": {"style": "rule", "ground_truth": f"{source}|{number}"},
                "extra_info": {"index": number},
            }
            for at, source in enumerate(SHARES)
            for number in range(ROWS)
        ]
        pq.write_table(pa.Table.from_pylist(rows), self.folder / "rows.parquet")
        (self.folder / "samplers").mkdir(exist_ok=True)
        (self.folder / "samplers" / "__init__.py").touch()
        (self.folder / "samplers" / "mine.py").write_text("GOOD = 1.0\n")
        (self.folder / "config.py").write_text("LR = 1e-6\n")
        (self.folder / "my_reward.py").write_text(REWARD)
        (self.folder / "my_loop.py").write_text(FAILING)
        (self.folder / "agents.yaml").write_text(
            "- {name: failing_agent, _target_: my_loop.FailingAgentLoop}\n"
        )

    def command(self) -> list[str]:
        return [sys.executable, "-m", "verl.trainer.main_ppo", *self.words()]

    def words(self) -> list[str]:
        """What its user types; the rows are those of training and of validation."""
        rows = self.folder / "rows.parquet"
        return [
            *(f"data.train_files={rows}", f"data.val_files={rows}", "data.val_max_samples=4"),
            *(f"data.train_batch_size={BATCH_SIZE}", "data.max_prompt_length=96"),
            *("data.max_response_length=16", "data.filter_overlong_prompts=false"),
            *(f"actor_rollout_ref.model.path={self.model}",),
            f"actor_rollout_ref.rollout.n={ROLLOUT_N}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH_SIZE}",
            *("algorithm.adv_estimator=grpo", "reward.custom_reward_function.path=my_reward.py"),
            *("trainer.save_freq=1", "trainer.test_freq=-1", "trainer.max_actor_ckpt_to_keep=2"),
            f"trainer.total_training_steps={self.steps}",
            f"trainer.default_local_dir={self.checkpoints}",
            f"trainer.rollout_data_dir={self.folder / 'trained'}",
            *ON_CPU,
            *MODES[self.mode],
            *self.overrides,
        ]

    def environ(self) -> dict[str, str]:
        environ = os.environ | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(str(p) for p in (self.before, ROOT) if p),
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "disabled",
            "VERL_FILE_LOGGER_PATH": str(self.folder / "metrics.jsonl"),
        }
        for name in ("RAY_ADDRESS", "VERL_MIXED_FOLDER"):
            environ.pop(name, None)
        return environ

    def start(self) -> "Started":
        with (self.folder / "out.log").open("ab") as out:
            process = subprocess.Popen(
                self.command(),
                cwd=self.folder,
                env=self.environ(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Started(process, self)

    def run(self) -> None:
        """To its end, which must be good."""
        self.start().finish()

    # --- what it left -------------------------------------------------------------------------

    def trained(self) -> dict[int, list[tuple[str, ...]]]:
        """Step -> (source, number) of each trained prompt, as verl wrote them."""
        found: dict[int, list[tuple[str, ...]]] = {}
        for path in (self.folder / "trained").glob("*.jsonl"):
            found[int(path.stem)] = _prompts(path.read_text())
        return dict(sorted(found.items()))

    def is_dumped(self, step: int) -> bool:
        """Whether verl wrote what it trained in a step, which it does after the checkpoint."""
        path = self.folder / "trained" / f"{step}.jsonl"
        text = path.read_text() if path.exists() else ""
        return text.endswith("\n") and len(_prompts(text)) == BATCH_SIZE

    def ledger_steps(self) -> int:
        """Whole steps in the ledger."""
        path = self.checkpoints / "ledger.jsonl"
        return path.read_text().count('"drawn"') if path.exists() else 0

    def is_written_since(self, moment: float) -> bool:
        """Whether a step was sampled, whose lines are in the ledger, since a moment."""
        path = self.checkpoints / "ledger.jsonl"
        return path.exists() and path.stat().st_mtime > moment and self.ledger_steps() > 0

    def is_saving(self) -> bool:
        folders = self.checkpoints.glob("global_step_*")
        return any(not (folder / "data.pt").exists() for folder in folders)

    def saved(self) -> int:
        tracker = self.checkpoints / "latest_checkpointed_iteration.txt"
        return int(tracker.read_text() or 0) if tracker.exists() else 0

    def metrics(self) -> list[dict[str, float]]:
        """A mapping per step, of the last start."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["data"] for line in lines]

    def log(self) -> str:
        return (self.folder / "out.log").read_text(errors="replace")


class Started:
    """A running recipe."""

    def __init__(self, process: subprocess.Popen[bytes], recipe: Recipe) -> None:
        self.process, self.recipe, self.began = process, recipe, time.time()

    def finish(self, expected: int = 0) -> None:
        try:
            code = self.process.wait(DEADLINE_S)
        finally:
            self.kill()
        assert code == expected, self.recipe.log()[-4000:]

    def kill(self) -> None:
        """End it and all that it started, at once."""
        try:
            family = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            family = []
        for each in [self.process, *family]:
            try:
                each.send_signal(signal.SIGKILL)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        self.process.wait()

    def kill_in(self, phase: str) -> None:
        """Kill it in one of `PHASES` of a step; it must not end before."""
        recipe, saved = self.recipe, self.recipe.saved()

        def is_due() -> bool:
            if phase == "generating":
                return (now := recipe.saved()) > saved and recipe.is_dumped(now)
            if not recipe.is_written_since(self.began):
                return False
            return phase == "updating" or recipe.is_saving()

        end = time.monotonic() + DEADLINE_S
        while not is_due():
            assert self.process.poll() is None, self.recipe.log()[-4000:]
            assert time.monotonic() < end, "the moment never came"
            time.sleep(0.02)
        self.kill()


def _prompts(dump: str) -> list[tuple[str, ...]]:
    """(source, number) of each prompt in a dump of verl's."""
    rows = [json.loads(line) for line in dump.splitlines()]
    prompts = {row["uid"].split("_")[0]: row["gts"] for row in rows}
    return [tuple(gts.split("|")) for uid, gts in prompts.items() if not uid.startswith("pad")]


def wrong(trained: Sequence[tuple[str, ...]]) -> int:
    """Prompts of a step that have the place of another source."""
    counts = Counter(source for source, _ in trained)
    return sum(max(0, quota - counts[source]) for source, quota in QUOTAS.items())
