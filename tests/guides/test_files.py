"""Tutorial 6's config files and its script with flags, as typed: each key reaches the run."""

import json
import shutil
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from config.lookup import at, flatten
from tests.guides.conftest import GPU
from tests.guides.table import MEANS, NOTHING, SOURCE
from verl_mixed.cli import main, parser_for
from verl_mixed.commands.arguments import config_overrides
from verl_mixed.launch.plan import Plan, make_plan

pytestmark = pytest.mark.slow

AGENT_CONFIG = """
agent:
  agent_type: "react"
  model_name_or_path: "Qwen/Qwen2.5-7B-Instruct"
  template: "qwen2.5-no-tool"
  backend: "async_verl"
  tools:
    - "code_interpreter"
    - "google_search_serper"
    - "answer"
  max_steps: 8
  num_chains: 8
  use_agent: true
  reward_name: "math_reward_tool"
  system_prompt: "Think step by step. Use tools where they help."
model:
  path: "Qwen/Qwen2.5-7B-Instruct"
  use_remove_padding: false
  enable_gradient_checkpointing: false
data:
  train_files: "./data/train.json"
  val_files: "./data/val.json"
  train_batch_size: 64
  val_batch_size: 32
rollout:
  name: "vllm"
  response_length: 512
  tensor_model_parallel_size: 2
  gpu_memory_utilization: 0.5
  log_prob_micro_batch_size_per_gpu: 4
"""

TRAINING_CONFIG = """
algorithm:
  adv_estimator: "grpo"
  kl_ctrl:
    kl_coef: 0.001
actor_rollout_ref:
  actor:
    optim:
      lr: 5e-7
    ppo_mini_batch_size: 64
    ppo_micro_batch_size_per_gpu: 2
    use_kl_loss: true
    kl_loss_coef: 0.001
    kl_loss_type: "mse"
    entropy_coeff: 0.001
    fsdp_config:
      param_offload: true
      optimizer_offload: true
  ref:
    log_prob_micro_batch_size_per_gpu: 4
    fsdp_config:
      param_offload: true
critic:
  model:
    path: "Qwen/Qwen2.5-7B-Instruct"
  ppo_mini_batch_size: 64
  ppo_micro_batch_size_per_gpu: 2
trainer:
  total_training_steps: 200
  save_freq: 50
  test_freq: 10
  val_before_train: false
  critic_warmup: 0
  logger: ['console', 'wandb']
  project_name: "AgentFly-Training"
  experiment_name: "my_experiment"
  n_gpus_per_node: 8
  nnodes: 1
"""

ADVANCED = """
agent:
  agent_type: react
  model_name_or_path: Qwen/Qwen2.5-7B-Instruct
  template: qwen2.5-no-tool
  tools: [code_interpreter, answer]
  reward_name: math_reward
  max_steps: 8
  num_chains: 8
  backend: async_verl
data:
  train_files: ./data/train.json
  val_files: ./data/val.json
  train_batch_size: 64
training:
  algorithm: grpo
  learning_rate: 5e-7
  kl_coef: 0.001
  entropy_coeff: 0.001
  response_length: 512
  total_training_steps: 200
  save_freq: 50
  test_freq: 10
hardware:
  use_ray: true
  ray_port: 6379
  num_cpus: 192
  num_gpus: 8
  num_nodes: 1
  tensor_parallel_size: 2
  gpu_memory_utilization: 0.5
monitoring:
  loggers: [console, wandb]
  project_name: AgentFly
  experiment_name: advanced
"""

SECTIONS = {
    "model.": "actor_rollout_ref.model.",
    "rollout.": "actor_rollout_ref.rollout.",
    "monitoring.loggers": "trainer.logger",
    "monitoring.project_name": "trainer.project_name",
    "monitoring.experiment_name": "mixed.experiment",
    "training.algorithm": "algorithm.adv_estimator",
    "training.learning_rate": "actor_rollout_ref.actor.optim.lr",
    "training.kl_coef": "actor_rollout_ref.actor.kl_loss_coef",
    "training.entropy_coeff": "actor_rollout_ref.actor.entropy_coeff",
    "training.response_length": "data.max_response_length",
    "training.": "trainer.",
    "hardware.use_ray": NOTHING,
    "hardware.ray_port": NOTHING,
    "hardware.num_cpus": "ray_kwargs.ray_init.num_cpus",
    "hardware.num_gpus": "trainer.n_gpus_per_node",
    "hardware.num_nodes": "trainer.nnodes",
    "hardware.tensor_parallel_size": "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "hardware.gpu_memory_utilization": "actor_rollout_ref.rollout.gpu_memory_utilization",
}
"""Beginning of a typed key -> the beginning of the run config's key."""

FILES = {"agent_config": [AGENT_CONFIG, TRAINING_CONFIG], "training_config": [ADVANCED]}
OWN_TEST = {"agent.tools", "data.train_files", "data.val_files", "agent.system_prompt"}
KEYS = [
    (name, key, value)
    for name, texts in FILES.items()
    for text in texts
    for key, value in flatten(yaml.safe_load(text)).items()
    if key not in OWN_TEST
]


@pytest.fixture(scope="module")
def folder(guides_folder: Path) -> Path:
    for name, texts in FILES.items():
        (guides_folder / f"{name}.yaml").write_text("".join(texts))
    return guides_folder


@pytest.fixture(scope="module")
def plans(folder: Path) -> Iterator[dict[str, tuple[Plan, str]]]:
    found: dict[str, tuple[Plan, str]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, value in GPU.items():
            patch.setenv(name, value)
        for name in FILES:
            screen = StringIO()
            arguments = parser_for(["train"]).parse_args(["train", f"{name}.yaml"])
            found[name] = (make_plan(config_overrides(arguments, screen), GPU), screen.getvalue())
    yield found


@pytest.mark.parametrize(("name", "typed", "value"), KEYS)
def test_each_key_of_a_file_reaches_the_run(
    plans: dict[str, tuple[Plan, str]], name: str, typed: str, value: Any
) -> None:
    plan, said = plans[name]
    start = next((start for start in SECTIONS if typed.startswith(start)), "")
    key = f"{SECTIONS.get(start, '')}{typed[len(start) :]}" if start else typed
    key, convert = MEANS.get(key, (key, lambda value: value))
    if start and SECTIONS[start] == NOTHING:
        key = NOTHING
    if isinstance(value, str) and typed.endswith(("lr", "learning_rate")):
        value = float(value)  # YAML 1.1 reads 5e-7 as a text

    if key == NOTHING:
        assert f"  {typed} = " in said and "-> nothing: " in said.split(f"  {typed} = ")[1]
    else:
        assert at(plan.config, key) == convert(value)


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_accepted_as_a_whole(
    plans: dict[str, tuple[Plan, str]], folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SERPER_API_KEY", GPU["SERPER_API_KEY"])

    assert plans[name][0].problems(machine=False) == []


def test_the_system_prompt_is_added_before_the_agents_instructions(
    plans: dict[str, tuple[Plan, str]],
) -> None:
    config = plans["agent_config"][0].config

    assert at(config, f"{SOURCE}.system_prompt").startswith("Think step by step.")
    assert at(config, f"{SOURCE}.prompt") is None


FLAGS = (
    # train_advanced.py's flags: (typed after `verl-mixed train`, what is printed)
    (["training_config.yaml", "--dry-run"], "dry run: nothing was started or written"),
    (["training_config.yaml", "--validate-only"], "train_batch_size: 64"),
    (["--config", "training_config.yaml", "--dry-run"], "runs/advanced"),
    (["--dry-run", "training_config.yaml", "trainer.save_freq=7"], "trainer.save_freq=7"),
    (["--validate-only", "trainer.save_freq=7", "training_config.yaml"], "save_freq: 7"),
    (["trainer.save_freq=7", "--dry-run", "--config", "training_config.yaml"], "runs/advanced"),
    (["training_config.yaml", "--dry-run", "trainer.save_freq=7"], "trainer.save_freq=7"),
    (["trainer.save_freq=7", "--validate-only", "training_config.yaml"], "save_freq: 7"),
)


@pytest.fixture
def again(
    folder: Path, plans: dict[str, tuple[Plan, str]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The run of training_config.yaml, which has trained a step."""
    monkeypatch.chdir(folder)
    run = folder / "runs" / "advanced"
    (run / "checkpoints" / "global_step_1").mkdir(parents=True)
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1")
    step = {"step": 1, "time": 1.0, "metrics": {"training/global_step": 1}}
    (run / "metrics.jsonl").write_text(f"{json.dumps(step)}\n")
    OmegaConf.save(plans["training_config"][0].config, run / "config.yaml")
    yield run
    shutil.rmtree(folder / "runs")


def type_train(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """What `verl-mixed train` prints, all of it but the machine's lack of GPUs."""
    for name, value in GPU.items():
        monkeypatch.setenv(name, value)

    code = main(["train", *words])

    screen = capsys.readouterr()
    assert code == 2, "this machine has no 8 GPUs, which a start would refuse too"
    assert "no problems" not in screen.err
    return screen.out + screen.err


@pytest.mark.parametrize(("words", "shows"), FLAGS)
def test_the_flags_of_the_training_script_are_here(
    folder: Path,
    words: list[str],
    shows: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)

    assert shows in type_train(words, monkeypatch, capsys)


@pytest.mark.parametrize("flag", ["--validate-only", "--dry-run"])
def test_a_flag_looks_at_a_run_that_is_there_and_changes_nothing(
    again: Path,
    flag: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = {path: path.read_bytes() for path in again.rglob("*") if path.is_file()}

    said = type_train([flag, "training_config.yaml"], monkeypatch, capsys)

    assert "old value" not in said
    assert {path: path.read_bytes() for path in again.rglob("*") if path.is_file()} == before


def test_a_dry_run_of_a_run_that_is_there_names_what_was_changed(
    again: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["training_config.yaml", "data.train_batch_size=32", "--dry-run"]

    said = type_train(words, monkeypatch, capsys)

    assert f"run          {Path('runs', again.name)} (1 of 200 steps seen" in said
    assert "problem: data.train_batch_size: 64 -> 32" in said
