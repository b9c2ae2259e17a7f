"""The rows of the guides: what is typed, and what must happen.

`commands.py` has the long commands; each of their words is a row too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from config.schema import TOOL_CONFIG
from tests.guides import commands

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
REF, TURNS = "actor_rollout_ref.ref", "actor_rollout_ref.rollout.multi_turn"
SOURCE = "mixed.sources.json"
"""The source of AgentFly's JSON files."""

NOTHING = ""
"""A key that sets nothing: the translation says why."""

COMMANDS: Mapping[str, str] = {
    "training guide, math": commands.EXAMPLE_MATH,
    "training guide, search": commands.EXAMPLE_SEARCH,
    "training guide, code": commands.EXAMPLE_CODE,
    "training example": commands.EXAMPLE_RST,
    "training example, GSM8K": commands.EXAMPLE_GSM8K,
    "tutorial 6, train_basic.sh": commands.BASIC_SCRIPT,
    "tutorial 6, quick_start.py": commands.QUICK_START,
    "tutorial 6, train_multinode.slurm": commands.SLURM,
}

AGENTS = {
    "hf": "native_agent",
    "react": "react_agent",
    "code": "code_execution_agent",
}

MEANS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "agent.agent_type": (f"{SOURCE}.agent", AGENTS.__getitem__),
    "agent.template": (NOTHING, str),
    "agent.backend": (NOTHING, str),
    "agent.use_agent": (NOTHING, bool),
    "agent.model_name_or_path": ("actor_rollout_ref.model.path", str),
    "agent.max_steps": (f"{TURNS}.max_assistant_turns", int),
    "agent.max_turns": (f"{TURNS}.max_assistant_turns", int),
    "agent.max_tokens_per_turn": (f"{TURNS}.max_turn_length", int),
    "agent.num_chains": (f"{ROLLOUT}.n", int),
    "agent.reward_name": (f"{SOURCE}.reward", str),
    f"{ROLLOUT}.response_length": ("data.max_response_length", int),
    "trainer.experiment_name": ("mixed.experiment", str),
    # no critic without gae, and verl's V1 trainers fill its micro-batches by tokens
    "critic.ppo_mini_batch_size": (NOTHING, int),
    "critic.ppo_micro_batch_size_per_gpu": (NOTHING, int),
}
"""Typed key -> the key of the resolved run config, and how the value becomes its value. Keys that
are not here keep name and value. `agent.tools` and the files of `data` have tests of their own."""

TOOLS = {
    # command -> agent and its exact list of tools; None: the agent has always exactly these
    "training guide, math": ("native_agent", ["calculate"]),
    "training guide, search": ("react_agent", ["search"]),
    "training guide, code": ("code_execution_agent", None),
    "training example": ("code_execution_agent", None),
    "training example, GSM8K": ("native_agent", ["calculate"]),
    "tutorial 6, train_basic.sh": ("react_agent", ["run_code"]),
    "tutorial 6, quick_start.py": ("react_agent", []),
}

DEFAULTS: Mapping[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "algorithm.kl_ctrl.horizon": 10000,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.val_before_train": True,
    "trainer.critic_warmup": 0,
    f"{ACTOR}.use_kl_loss": True,
    f"{ACTOR}.entropy_coeff": 0.001,
    "actor_rollout_ref.model.enable_gradient_checkpointing": False,
    f"{ROLLOUT}.gpu_memory_utilization": 0.5,
}
"""Key -> the default that the training guide names. `agent.use_agent` has no other value here."""

OPTIONS: tuple[tuple[str, str, Any], ...] = (
    # the training guide's lists of options: (typed, key of the resolved config, its value); not
    # with the default that the guide names, which leaving the key out gives too (DEFAULTS)
    ("agent.use_agent=True", NOTHING, True),
    ("agent.init_args.model_name_or_path=c/d", "actor_rollout_ref.model.path", "c/d"),
    ("agent.init_args.template=qwen2.5", NOTHING, "qwen2.5"),
    ("agent.init_args.template=qwen2.5-vl", NOTHING, "qwen2.5-vl"),
    ("agent.init_args.agent_type=hf", f"{SOURCE}.agent", "native_agent"),
    ("agent.init_args.agent_type=react", f"{SOURCE}.agent", "react_agent"),
    ("agent.init_args.agent_type=code", f"{SOURCE}.agent", "code_execution_agent"),
    ("agent.init_args.tools=[calculator]", f"{SOURCE}.agent", "math_agent"),
    ("agent.init_args.tools=[google_search,answer]", f"{SOURCE}.agent", "search_agent"),
    (
        "agent.init_args.reward_name=math_reward_string_equal",
        f"{SOURCE}.reward",
        "math_reward_string_equal",
    ),
    ("agent.init_args.reward_name=qa_f1_reward", f"{SOURCE}.reward", "qa_f1_reward"),
    ("agent.reward_name=math_reward_tool", f"{SOURCE}.reward", "math_reward_tool"),
    ("agent.init_args.backend=async_verl", NOTHING, "async_verl"),
    ("agent.max_turns=3", f"{TURNS}.max_assistant_turns", 3),
    ("agent.init_args.max_turns=3", f"{TURNS}.max_assistant_turns", 3),
    ("agent.num_chains=6", f"{ROLLOUT}.n", 6),
    ("agent.max_tokens_per_turn=100", f"{TURNS}.max_turn_length", 100),
    ("agent.generation_config.max_tokens=100", f"{TURNS}.max_turn_length", 100),
    ("algorithm.adv_estimator=gae", "algorithm.adv_estimator", "gae"),
    ("algorithm.adv_estimator=ppo", "algorithm.adv_estimator", "gae"),
    ("algorithm.adv_estimator=grpo", "algorithm.adv_estimator", "grpo"),
    (
        "algorithm.adv_estimator=reinforce_plus_plus",
        "algorithm.adv_estimator",
        "reinforce_plus_plus",
    ),
    ("algorithm.adv_estimator=rloo", "algorithm.adv_estimator", "rloo"),
    ("algorithm.adv_estimator=remax", "algorithm.adv_estimator", "remax"),
    ("algorithm.gamma=0.9", "algorithm.gamma", 0.9),
    ("algorithm.lam=0.9", "algorithm.lam", 0.9),
    ("algorithm.use_kl_in_reward=True", "algorithm.use_kl_in_reward", True),
    ("algorithm.kl_ctrl.type=fixed", "algorithm.kl_ctrl.type", "fixed"),
    ("algorithm.kl_ctrl.kl_coef=0.01", "algorithm.kl_ctrl.kl_coef", 0.01),
    ("algorithm.kl_ctrl.target_kl=0.2", "algorithm.kl_ctrl.target_kl", 0.2),
    ("algorithm.kl_ctrl.horizon=5000", "algorithm.kl_ctrl.horizon", 5000),
    ("trainer.project_name=AgentRL", "trainer.project_name", "AgentRL"),
    ("trainer.experiment_name=mine", "mixed.experiment", "mine"),
    ("trainer.logger=['console']", "trainer.logger", ["console"]),
    ("trainer.logger=['wandb']", "trainer.logger", ["wandb"]),
    ("trainer.logger=['console','wandb']", "trainer.logger", ["console", "wandb"]),
    ("trainer.total_training_steps=30", "trainer.total_training_steps", 30),
    # 8 rows, 4 a batch
    ("trainer.total_epochs=3", "trainer.total_training_steps", 6),
    ("trainer.nnodes=2", "trainer.nnodes", 2),
    ("trainer.n_gpus_per_node=4", "trainer.n_gpus_per_node", 4),
    ("trainer.save_freq=-1", "trainer.save_freq", -1),
    ("trainer.test_freq=-1", "trainer.test_freq", -1),
    ("trainer.val_before_train=False", "trainer.val_before_train", False),
    ("trainer.critic_warmup=2", "trainer.critic_warmup", 2),
    ("trainer.resume_mode=auto", "trainer.resume_mode", "auto"),
    ("trainer.resume_mode=disable", "trainer.resume_mode", "disable"),
    ("data.train_batch_size=8", "data.train_batch_size", 8),
    ("data.val_batch_size=16", "data.val_batch_size", 16),
    (f"{ACTOR}.optim.lr=5e-7", f"{ACTOR}.optim.lr", 5e-7),
    (f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.ppo_mini_batch_size", 2),
    (
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        2,
    ),
    (f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.use_kl_loss", True),
    (f"{ACTOR}.entropy_coeff=0.001", f"{ACTOR}.entropy_coeff", 0.001),
    (f"{ACTOR}.fsdp_config.param_offload=True", f"{ACTOR}.fsdp_config.param_offload", True),
    (
        f"{ACTOR}.fsdp_config.optimizer_offload=True",
        f"{ACTOR}.fsdp_config.optimizer_offload",
        True,
    ),
    ("actor_rollout_ref.model.path=c/d", "actor_rollout_ref.model.path", "c/d"),
    (
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing",
        False,
    ),
    (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.name", "vllm"),
    (f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.name", "sglang"),
    (f"{ROLLOUT}.response_length=256", "data.max_response_length", 256),
    (f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.tensor_model_parallel_size", 2),
    (f"{ROLLOUT}.gpu_memory_utilization=0.5", f"{ROLLOUT}.gpu_memory_utilization", 0.5),
    (
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=2",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
        2,
    ),
    # tutorial 6: the five algorithms, and its list of options
    ("agent.system_prompt='Think first.'", f"{SOURCE}.system_prompt", "Think first."),
    ("agent.tools=[code_interpreter]", f"{SOURCE}.agent", "code_execution_agent"),
    (
        "agent.tools=[code_interpreter,google_search_serper,answer]",
        f"{SOURCE}.agent",
        "react_agent",
    ),
)

PAIRS: tuple[tuple[str, str, Any], ...] = (
    # options of the guides that are read together with another one
    ("algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl", "algorithm.kl_penalty", "kl"),
    ("algorithm.use_kl_in_reward=True algorithm.kl_penalty=abs", "algorithm.kl_penalty", "abs"),
    ("algorithm.use_kl_in_reward=True algorithm.kl_penalty=mse", "algorithm.kl_penalty", "mse"),
    (
        "algorithm.use_kl_in_reward=True algorithm.kl_penalty=low_var_kl",
        "algorithm.kl_penalty",
        "low_var_kl",
    ),
    (
        "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.type",
        "adaptive",
    ),
    (f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=0.01", f"{ACTOR}.kl_loss_coef", 0.01),
    (f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=mse", f"{ACTOR}.kl_loss_type", "mse"),
    (f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=kl", f"{ACTOR}.kl_loss_type", "kl"),
    (
        f"{ACTOR}.use_kl_loss=True {REF}.fsdp_config.param_offload=True",
        f"{REF}.fsdp_config.param_offload",
        True,
    ),
    ("algorithm.adv_estimator=gae critic.model.path=c/d", "critic.model.path", "c/d"),
    ("algorithm.adv_estimator=gae critic.ppo_mini_batch_size=2", "critic.ppo_mini_batch_size", 2),
    ("trainer.total_training_steps=null trainer.total_epochs=1", "trainer.total_training_steps", 2),
)

REFUSED: tuple[tuple[str, str], ...] = (
    # what is typed, and the word that works instead
    ("agent.agent_type=gui", "_target_"),
    ("agent.agent_type=custom", "_target_"),
    ("agent_loops.custom_agent._target_=your.custom.AgentLoop", "No module named 'your'"),
    ("+agent_loops.x._target_=json.Nothing", "module 'json' has no attribute 'Nothing'"),
    ("agent.init_args.agent_type=gui", "_target_"),
    ("agent.backend=async_vllm", "async_verl"),
    ("agent.max_step=3", "agent.max_steps"),
    ("agent.agent_typ=react", "agent.agent_type"),
    ("agent.reward_name=maths_reward", "math_reward"),
    ("agent.tools=[code_interpretor]", "code_interpreter"),
    ("agent.agent_type=code agent.tools=[answer]", "react"),
    ("trainer.total_epochs=3 trainer.total_training_steps=5", "trainer.total_training_steps"),
    ("trainer.total_training_steps=null", "trainer.total_epochs"),
    ("trainer.total_training_step=5", "trainer.total_training_steps"),
    ("algorithm.use_kl_in_reward=True algorithm.kl_penalty=full", "k1, k2, k3"),
    ("data.train_files=no/such.parquet data.val_files=no/such.parquet", "no/such.parquet"),
    ("trainer.resume_mode=resume_path", "trainer.resume_from_path"),
    (f"{TURNS}.enable=false", f"{TURNS}.enable"),
)

SCRIPT_SETTINGS: tuple[tuple[str, str, Any], ...] = (
    # the README's settings of run_mixed_training.sh: (variable, typed, key of the config -> value)
    ("TACO_RATIO", "0.4", {"mixed.sources.taco.ratio": 0.4}),
    ("NQ_RATIO", "0.3", {"mixed.sources.nq.ratio": 0.3}),
    ("MATH_RATIO", "0.3", {"mixed.sources.math.ratio": 0.3}),
    ("MODEL_PATH", "someone/model", {"actor_rollout_ref.model.path": "someone/model"}),
    ("LEARNING_RATE", "5e-7", {f"{ACTOR}.optim.lr": 5e-7}),
    ("TRAIN_BATCH_SIZE", "256", {"data.train_batch_size": 256}),
    ("RATE_LIMIT_PER_MINUTE", "60000", {f"{TOOL_CONFIG}.rate_limit_per_minute": 60000}),
    ("TOOL_MAX_WORKERS", "100", {f"{TOOL_CONFIG}.max_workers": 100}),
    ("TOOL_REQUEST_INTERVAL", "0.005", {f"{TOOL_CONFIG}.request_interval": 0.005}),
    ("N_GPUS_PER_NODE", "4", {"trainer.n_gpus_per_node": 4}),
    ("NNODES", "2", {"trainer.nnodes": 2}),
    ("MAX_RESPONSE_LENGTH", "512", {"data.max_response_length": 512}),
    ("KL_COEF", "0.001", {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.001}),
    ("ROLLOUT_N", "4", {f"{ROLLOUT}.n": 4}),
    ("TOTAL_TRAINING_STEPS", "50", {"trainer.total_training_steps": 50}),
)

TYPED_TAGS = (
    # the README's two lines, as a shell hands them over
    (
        f"{TOOL_CONFIG}.code_start_tag=<custom_code>",
        f"{TOOL_CONFIG}.code_start_tag",
        "<custom_code>",
    ),
    (f"{TOOL_CONFIG}.code_end_tag=</custom_code>", f"{TOOL_CONFIG}.code_end_tag", "</custom_code>"),
)


@dataclass(frozen=True, slots=True)
class Shown:
    """A failure that the guides name: the line in a log, and what `diagnose` says to look at."""

    line: str
    says: str


FAILURES: tuple[Shown, ...] = (
    # the README's common problems, and tutorial 6's issues and patterns
    Shown("ConnectionRefusedError: [Errno 111] Connection refused", "setup_cluster.sh status"),
    Shown("ConnectionError: Could not find any running Ray instance.", "setup_cluster.sh status"),
    Shown("RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB", "gradient_checkpointing"),
    Shown("torch.OutOfMemoryError: CUDA out of memory.", "gradient_checkpointing"),
    Shown("Tool call timeout", "timeout"),
    Shown("asyncio.exceptions.TimeoutError: timeout", "timeout"),
    Shown("PermissionError: [Errno 13] Permission denied: '/data/x'", "owner or mode"),
    Shown("step:5 - actor/loss:nan - actor/grad_norm:nan", "LEARNING_RATE"),
    Shown("FileNotFoundError: Unable to find '/data/train.parquet'", "TRAIN_FILES"),
)
