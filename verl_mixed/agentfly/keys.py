"""Table: what each key of a config file in AgentFly's style sets in the run config.

Source: AgentFly at 1256586, docs/start/hydra_config.md and the training setup of its tutorials.
"""

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agent_loop.rewards.custom import split_path
from agent_loop.rewards.registry import REWARDS
from config.lookup import CONFIG_DIR
from config.schema import TOOL_CONFIG
from verl_mixed.run.sections import FORMAT_KEY, MODEL_KEY
from verl_mixed.run.settings import absolute_if_local

_TURNS = TOOL_CONFIG.rpartition(".")[0]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

MICRO_BATCH = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
LOG_PROBS = tuple(
    f"actor_rollout_ref.{part}.log_prob_micro_batch_size_per_gpu" for part in ("rollout", "ref")
)
BY_TOKENS = f"{ACTOR}.use_dynamic_bsz"

EVERY_SOURCE = "mixed.sources.*."
"""Prefix of a key that is set for every source that takes part in the mixture."""

AGENTS = {
    "react": "react_agent",
    "hf": "native_agent",
    "code": "code_execution_agent",
    "search": "search_agent",
    "math": "math_agent",
}
"""AgentFly's `agent_type` -> ours."""

TOOLS = {
    "code_interpreter": "run_code",
    "python_executor": "run_code",
    "google_search_serper": "search",
    "google_search": "search",
    "dense_retrieve": "search",
    "async_dense_retrieve": "search",
    "async_dense_retrieve_api": "search",
    "calculator": "calculate",
    "answer": "",
}
"""AgentFly's tool -> our tool; the answer is not a tool here and has an empty name."""

TOOLS_OF = {
    "code_execution_agent": {"run_code"},
    "search_agent": {"search"},
    "math_agent": {"calculate"},
}
"""The tools of each agent that has exactly these."""

REACT, NATIVE = "react_agent", "native_agent"
TOOL_NAMES = {name: f"agent_loops.{name}.tool_names" for name in (REACT, NATIVE)}
"""Agent whose tools can be chosen -> the key of their list."""

NOT_HERE = ("gui", "custom")
"""Types of agents that need a class of the user's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What a key of AgentFly's style sets."""

    wants: str
    """Description of the accepted values, for messages."""

    accepts: Callable[[Any], bool]
    sets: tuple[str, ...] = ()
    """Keys of the run config."""

    convert: Callable[[Any], Any] = lambda value: value
    """AgentFly's value -> the run config's value."""

    sets_with_others: str = ""
    """What the key sets together with other keys; such a key has no `sets`."""

    sets_nothing: str = ""
    """Why the key sets nothing."""

    only_with_critic: bool = False
    """Without a critic the key sets nothing."""

    @property
    def target(self) -> str:
        """What the key sets, for messages; empty if it sets nothing."""
        return ", ".join(self.sets) or self.sets_with_others


def _is_whole(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_texts(value: Any) -> bool:
    return _is_text(value) or (
        isinstance(value, list) and all(map(_is_text, value)) and value != []
    )


def _is_ratios(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _is_name(name) and _is_number(ratio) and ratio >= 0 for name, ratio in value.items()
    )


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\w+", value) is not None


def texts(value: str | list[str]) -> list[str]:
    """One or several texts as a list."""
    return [value] if isinstance(value, str) else value


def files(value: str | list[str]) -> list[str]:
    """One or several files as a list of absolute paths."""
    return [os.path.abspath(name) for name in texts(value)]


def _whole(*sets: str) -> Key:
    return Key(wants="a whole number", accepts=_is_whole, sets=sets)


def _integer(*sets: str) -> Key:
    return Key(wants="a whole number", accepts=lambda value: type(value) is int, sets=sets)


def _number(*sets: str) -> Key:
    return Key(wants="a number", accepts=_is_number, sets=sets)


def _text(*sets: str) -> Key:
    return Key(wants="a text", accepts=_is_text, sets=sets)


def _truth(*sets: str) -> Key:
    return Key(wants="true or false", accepts=lambda value: type(value) is bool, sets=sets)


def _only(value: Any, why: str) -> Key:
    """A key that sets nothing and accepts only the value that describes this project."""
    shown = str(value).lower() if isinstance(value, bool) else value
    return Key(wants=f"{shown}: {why}", accepts=lambda given: given == value, sets_nothing=why)


_MODEL = Key(
    wants="a model folder or name",
    accepts=_is_text,
    sets=(MODEL_KEY,),
    convert=absolute_if_local,
)
_ESTIMATOR = Key(
    wants="an estimator, as grpo",
    accepts=_is_text,
    sets=("algorithm.adv_estimator",),
    convert=lambda name: {"ppo": "gae"}.get(name, name),
)
_EXPERIMENT = Key(wants="a name", accepts=_is_text, sets=("mixed.experiment",))
_LOGGERS = Key(wants="names of loggers", accepts=_is_texts, sets=("trainer.logger",), convert=texts)
_DATA = Key(
    wants="a file or a list of files",
    accepts=lambda value: value == [] or _is_texts(value),
    sets_with_others="the files of the sources",
)
_PROFILES = sorted(path.stem for path in (CONFIG_DIR / "profile").glob("*.yaml"))
_RESPONSE = _whole("data.max_response_length")

KEYS: Mapping[str, Key] = {
    # agent; also as agent.init_config.*, agent.run_config.* and agent.generation_config.*
    "agent.agent_type": Key(
        wants=f"{', '.join(AGENTS)}, or an agent of config/agent_loops.yaml or agent_loops; "
        f"{' and '.join(NOT_HERE)} are none: name your class as agent_loops.<name>._target_, and "
        "<name> here",
        accepts=lambda value: _is_text(value) and value not in NOT_HERE,
        sets_with_others=f"{EVERY_SOURCE}agent",
    ),
    "agent.tools": Key(
        wants=f"a list of {', '.join(TOOLS)}",
        accepts=lambda value: (
            value == [] or (_is_texts(value) and set(texts(value)) <= TOOLS.keys())
        ),
        sets_with_others=f"{EVERY_SOURCE}agent, {', '.join(TOOL_NAMES.values())}",
        sets_nothing="the agent has exactly these tools",
    ),
    "agent.reward_name": Key(
        wants=f"one of {', '.join(REWARDS)}, or path/to/file.py:function",
        accepts=lambda value: (
            _is_text(value) and (value in REWARDS or split_path(value) is not None)
        ),
        sets=(f"{EVERY_SOURCE}reward",),
    ),
    "agent.system_prompt": _text(f"{EVERY_SOURCE}system_prompt"),
    "agent.model_name_or_path": _MODEL,
    "agent.max_steps": _whole(f"{_TURNS}.max_assistant_turns"),
    "agent.max_turns": _whole(f"{_TURNS}.max_assistant_turns"),
    "agent.num_chains": _whole(f"{ROLLOUT}.n"),
    "agent.max_tokens": _whole(f"{_TURNS}.max_turn_length"),
    "agent.max_tokens_per_turn": _whole(f"{_TURNS}.max_turn_length"),
    "agent.temperature": _number(f"{ROLLOUT}.temperature"),
    "agent.top_p": _number(f"{ROLLOUT}.top_p"),
    "agent.top_k": _integer(f"{ROLLOUT}.top_k"),
    "agent.max_model_len": _whole(f"{ROLLOUT}.max_model_len"),
    "agent.tool_parser_name": _text(FORMAT_KEY),
    "agent.template": Key(
        wants="a text", accepts=_is_text, sets_nothing="the model's own chat template is used"
    ),
    "agent.backend": _only("async_verl", "verl's asynchronous rollout is used"),
    "agent.use_agent": _only(True, "every prompt has an agent loop"),
    "agent.train_on_last_turn": _only(False, "every turn of the policy is trained"),
    # data
    "data.train_files": _DATA,
    "data.val_files": _DATA,
    "data.source": Key(
        wants="a name of letters, digits and _",
        accepts=_is_name,
        sets_with_others=f"{EVERY_SOURCE}ratio",
    ),
    "data.ratios": Key(
        wants="source: a number >= 0",
        accepts=_is_ratios,
        sets_with_others=f"{EVERY_SOURCE}ratio",
    ),
    # algorithm, training
    "algorithm.adv_estimator": _ESTIMATOR,
    "training.algorithm": _ESTIMATOR,
    "training.learning_rate": _number(f"{ACTOR}.optim.lr"),
    "training.kl_coef": _number("algorithm.kl_ctrl.kl_coef", f"{ACTOR}.kl_loss_coef"),
    "training.use_kl_loss": _truth(f"{ACTOR}.use_kl_loss"),
    "training.kl_loss_type": _text(f"{ACTOR}.kl_loss_type"),
    "training.entropy_coeff": _number(f"{ACTOR}.entropy_coeff"),
    "training.ppo_mini_batch_size": _whole(f"{ACTOR}.ppo_mini_batch_size"),
    "training.ppo_micro_batch_size_per_gpu": _whole(f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
    "training.response_length": _RESPONSE,
    "training.total_training_steps": _whole("trainer.total_training_steps"),
    "training.save_freq": _integer("trainer.save_freq"),
    "training.test_freq": _integer("trainer.test_freq"),
    "training.val_before_train": _truth("trainer.val_before_train"),
    "training.critic_warmup": _whole("trainer.critic_warmup"),
    "training.seed": _whole("mixed.seed"),
    # hardware
    "hardware.profile": Key(
        wants=f"one of {', '.join(_PROFILES)}", accepts=_PROFILES.__contains__, sets=("profile",)
    ),
    "hardware.num_gpus": _whole("trainer.n_gpus_per_node"),
    "hardware.n_gpus_per_node": _whole("trainer.n_gpus_per_node"),
    "hardware.num_nodes": _whole("trainer.nnodes"),
    "hardware.nnodes": _whole("trainer.nnodes"),
    "hardware.num_cpus": _whole("ray_kwargs.ray_init.num_cpus"),
    "hardware.tensor_parallel_size": _whole(f"{ROLLOUT}.tensor_model_parallel_size"),
    "hardware.gpu_memory_utilization": _number(f"{ROLLOUT}.gpu_memory_utilization"),
    "hardware.param_offload": _truth(
        f"{ACTOR}.fsdp_config.param_offload", "actor_rollout_ref.ref.fsdp_config.param_offload"
    ),
    "hardware.optimizer_offload": _truth(f"{ACTOR}.fsdp_config.optimizer_offload"),
    "hardware.use_ray": _only(True, "a run starts Ray, or joins the cluster of MASTER_IP"),
    "hardware.ray_port": Key(
        wants="a port number", accepts=_is_whole, sets_nothing="RAY_PORT of setup_cluster.sh has it"
    ),
    # monitoring
    "monitoring.loggers": _LOGGERS,
    "monitoring.project_name": _text("trainer.project_name"),
    "monitoring.experiment_name": _EXPERIMENT,
    "monitoring.save_freq": _integer("trainer.save_freq"),
    "monitoring.test_freq": _integer("trainer.test_freq"),
    # sections of verl, where a key means something else here
    "trainer.experiment_name": _EXPERIMENT,
    "actor_rollout_ref.rollout.response_length": _RESPONSE,
    "actor_rollout_ref.rollout.prompt_length": _whole("data.max_prompt_length"),
    MICRO_BATCH: Key(
        wants="a whole number",
        accepts=_is_whole,
        sets=(MICRO_BATCH,),
        sets_with_others="the micro-batches of log-probs",
    ),
    "critic.model.path": Key(
        wants="a model folder or name",
        accepts=_is_text,
        sets=("critic.model.path",),
        convert=absolute_if_local,
        only_with_critic=True,
    ),
    "critic.ppo_mini_batch_size": Key(
        wants="a whole number",
        accepts=_is_whole,
        sets=("critic.ppo_mini_batch_size",),
        only_with_critic=True,
    ),
    "critic.ppo_micro_batch_size_per_gpu": Key(
        wants="a whole number",
        accepts=_is_whole,
        sets_nothing="verl's V1 trainers fill the critic's micro-batches by tokens",
    ),
}

SECTIONS = {"model": "actor_rollout_ref.model", "rollout": ROLLOUT}
"""Sections of AgentFly's agent_config.yaml that stand elsewhere in the run config."""
