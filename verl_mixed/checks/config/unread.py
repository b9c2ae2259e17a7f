"""Keys that a run does not read: who reads which key, and the refusal of the others.

`READERS` is the one table. docs/settings.md shows it, and a test sets each of its keys where nobody
reads it. A key that is not in the table is not refused here, whether the run reads it or not.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_loop.training.estimators import ESTIMATORS, UNTRIED
from config.lookup import at
from config.schema import TAG_FIELDS, TOOL_CONFIG, MixedConfig, template_of
from verl_mixed.checks.config.algorithm import LOSSES, has_critic, has_reference
from verl_mixed.checks.config.modes import VERLS_AGENTS
from verl_mixed.run.sections import agent_loops, section_of, sound_sources
from verl_mixed.run.settings import SERVER_URL_KEY, is_own_tool_server

_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_REF = "actor_rollout_ref.ref"
_ROLLOUT = "actor_rollout_ref.rollout"
_TURNS = f"{_ROLLOUT}.multi_turn"

ESTIMATOR, MODE, BACKEND = "algorithm.adv_estimator", "trainer.v1.trainer_mode", f"{_ROLLOUT}.name"
ENGINE, LIMITER = "model_engine", f"{TOOL_CONFIG}.enable_global_rate_limit"
MASKING = f"{TOOL_CONFIG}.state_masking"
_CORRECTION = "algorithm.rollout_correction"
IS, BYPASS = f"{_CORRECTION}.rollout_is", f"{_CORRECTION}.bypass_mode"
_HYBRID = "trainer.v1.separate_async.hybrid_rollout"
SWITCH, ADAPTIVE_SWITCH = (
    f"{_HYBRID}.{name}" for name in ("enable_switch", "adaptive_switch_threshold")
)
FILTER, KL_TYPE = "algorithm.filter_groups.enable", "algorithm.kl_ctrl.type"
KL_IN_REWARD, KL_IN_LOSS = "algorithm.use_kl_in_reward", f"{_ACTOR}.use_kl_loss"
LOSS_MODE = f"{_ACTOR}.policy_loss.loss_mode"
BY_TOKENS, REF_BY_TOKENS, ROLLOUT_BY_TOKENS = (
    f"{_ACTOR}.use_dynamic_bsz",
    f"{_REF}.log_prob_use_dynamic_bsz",
    f"{_ROLLOUT}.log_prob_use_dynamic_bsz",
)

CRITIC = "a critic"
REJECTING = "rejection sampling"
REPLACING = "a run that replaces prompts"
OURS = "an agent loop of this project or of your own"
VERLS = "verl's tool_agent or an agent loop of your own"
SEVERAL_TURNS = "an agent other than single_turn_agent"
VERLS_TOOLS = "an agent that calls tools by name, of a source without `tools`"
NATIVE = "native_agent, verl's tool_agent or an agent loop of your own"
TAGS = "an agent other than react_agent, native_agent and verl's, or a prompt with tags"
SHARED_FILE = "a run with a rate_limit_file"
OWN_SERVER = "the run's own tool server"
TO_WANDB = "a run that logs to wandb"
DECIDED = "a run that decides its shares (mixed.controller, mixed.unit=trained_tokens)"
REFERENCE = "a reference model"
KL_LOSS = "a KL loss"
KL_REWARD = "a KL term of the reward"
DPPO = "dppo_tv, dppo_kl or a loss of your own"
LORA = "LoRA"
MEGATRONS_LORA = "megatron with lora.rank above 0"
TOKENS_OF_ACTOR = "a model with micro-batches by tokens"
ROWS_OF_REF = "a reference model with micro-batches of rows"


@dataclass(frozen=True, slots=True)
class Reader:
    """Which runs read a key. A key with several readers needs all of them."""

    key: str
    """A key of the run config; with parts, all of them."""

    by: str
    """What decides: a key of the run config, or a name of `_DERIVED`. Empty: no run reads it."""

    values: tuple[Any, ...] = (True,)
    """Its values with which the key is read."""

    instead: str = ""
    """What has the effect if no run uses the key, or not this one."""


_ASYNC = ("mixed_colocate_async", "mixed_separate_async")
_OF_ADAPTIVE_SWITCH = [
    f"{_HYBRID}.switch_threshold_{name}" for name in ("step_up", "step_down", "release_steps")
]
_LOOPS_TAGS = [name for name in TAG_FIELDS if not name.startswith("answer_")]
_GRPO = ("state_masked_grpo", "grpo", "grpo_passk", "grpo_vectorized")
WITH_CLIP_RATIO = ("dppo_tv", "dppo_kl")
"""Losses of verl that read `clip_ratio`. The others read `clip_ratio_low` and `clip_ratio_high`."""

HF_OPTIONS = ("num_threads", "prefix_cache_mb")
"""Keys of `engine_kwargs.hf` that cpu_engine/rollout.py reads."""

_NOT_IN_V1 = "verl's V1 trainers do not have it"
_PER_GPU = "ppo_micro_batch_size_per_gpu"
_LOG_PROBS_PER_GPU = "log_prob_micro_batch_size_per_gpu"
_TOKENS_OF_CRITIC = "its micro-batches are filled up to critic.ppo_infer_max_token_len_per_gpu"

READERS: tuple[Reader, ...] = (
    # the estimator
    Reader("algorithm.state_masked_grpo", ESTIMATOR, ("state_masked_grpo",)),
    Reader("algorithm.norm_adv_by_std_in_grpo", ESTIMATOR, _GRPO),
    Reader("algorithm.gamma", ESTIMATOR, ("gae", "reinforce_plus_plus")),
    Reader("algorithm.lam", ESTIMATOR, ("gae",)),
    Reader("algorithm.filter_groups.metric", FILTER),
    Reader("algorithm.filter_groups.max_inflight_gen_batches", FILTER),
    Reader("algorithm.kl_penalty", KL_IN_REWARD),
    Reader("algorithm.kl_ctrl.type", KL_IN_REWARD),
    Reader("algorithm.kl_ctrl.kl_coef", KL_REWARD),
    *(
        Reader(f"algorithm.kl_ctrl.{name}", by, values)
        for name in ("horizon", "target_kl")
        for by, values in ((KL_IN_REWARD, (True,)), (KL_TYPE, ("adaptive",)))
    ),
    Reader(f"{_ACTOR}.kl_loss_coef", KL_LOSS),
    Reader(f"{_ACTOR}.kl_loss_type", KL_IN_LOSS),
    Reader(f"{_ACTOR}.clip_ratio", DPPO, instead="others have clip_ratio_low and clip_ratio_high"),
    Reader(_REF, REFERENCE),
    Reader("critic", CRITIC),
    Reader(f"{IS}_threshold", IS, ("token", "sequence")),
    Reader(f"{IS}_batch_normalize", IS, ("token", "sequence")),
    Reader(f"{_CORRECTION}.rollout_rs_threshold", REJECTING),
    # micro-batches: of rows, or filled by tokens
    Reader(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", BY_TOKENS, (False,)),
    Reader(f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu", ROLLOUT_BY_TOKENS, (False,)),
    Reader(f"{_REF}.log_prob_micro_batch_size_per_gpu", ROWS_OF_REF),
    Reader(f"{_ACTOR}.ppo_max_token_len_per_gpu", TOKENS_OF_ACTOR),
    Reader(f"{_ROLLOUT}.log_prob_max_token_len_per_gpu", ROLLOUT_BY_TOKENS),
    Reader(f"{_REF}.log_prob_max_token_len_per_gpu", REF_BY_TOKENS),
    # the mode
    Reader("trainer.v1.colocate_async", MODE, ("mixed_colocate_async",)),
    Reader("trainer.v1.separate_async", MODE, ("mixed_separate_async",)),
    Reader("mixed.lead", MODE, _ASYNC),
    *(
        Reader(f"trainer.v1.{mode}.num_warmup_batches", "mixed.lead", ("auto",))
        for mode in ("colocate_async", "separate_async")
    ),
    Reader("trainer.v1.sampler.max_off_policy_threshold", MODE, _ASYNC),
    Reader("trainer.v1.sampler.max_off_policy_strategy", MODE, _ASYNC),
    Reader("trainer.v1.sampler.sync_refill_failed_groups", MODE, ("mixed_sync",)),
    Reader("algorithm.filter_groups.max_inflight_gen_batches", MODE, ("mixed_sync",)),
    Reader(f"{_ROLLOUT}.nnodes", MODE, ("mixed_separate_async",)),
    Reader("actor_rollout_ref.hybrid_engine", MODE, ("mixed_separate_async",)),
    Reader(f"{_ROLLOUT}.checkpoint_engine.backend", MODE, ("mixed_separate_async",)),
    *(
        Reader(key, SWITCH)
        for key in (
            ADAPTIVE_SWITCH,
            f"{_HYBRID}.switch_threshold_ratio",
            f"{_HYBRID}.switch_cost_window_size",
            *_OF_ADAPTIVE_SWITCH,
        )
    ),
    *(Reader(key, ADAPTIVE_SWITCH) for key in _OF_ADAPTIVE_SWITCH),
    # the engine of the rollout
    Reader(f"{_ROLLOUT}.engine_kwargs.hf", BACKEND, ("hf",)),
    Reader(f"{_ROLLOUT}.engine_kwargs.vllm", BACKEND, ("vllm", "vllm_cpu")),
    Reader(f"{_ROLLOUT}.engine_kwargs.sglang", BACKEND, ("sglang",)),
    Reader(f"{_ROLLOUT}.skip_tokenizer_init", BACKEND, ("sglang",)),
    Reader(f"{_ROLLOUT}.gpu_memory_utilization", BACKEND, ("vllm", "sglang", "vllm_cpu")),
    Reader(f"{_ROLLOUT}.enforce_eager", BACKEND, ("vllm", "sglang", "vllm_cpu")),
    Reader(f"{_ROLLOUT}.max_model_len", BACKEND, ("vllm", "sglang", "vllm_cpu")),
    Reader(f"{_ROLLOUT}.quantization", BACKEND, ("vllm", "sglang", "vllm_cpu")),
    Reader(f"{_ROLLOUT}.enable_chunked_prefill", BACKEND, ("vllm", "vllm_cpu")),
    Reader(f"{_ROLLOUT}.enable_prefix_caching", BACKEND, ("vllm", "vllm_cpu")),
    Reader(f"{_ROLLOUT}.scheduling_policy", BACKEND, ("vllm", "vllm_cpu")),
    Reader(f"{_ROLLOUT}.cudagraph_capture_sizes", BACKEND, ("vllm",)),
    Reader(f"{_ROLLOUT}.enable_sleep_mode", BACKEND, ("vllm", "vllm_cpu")),
    Reader(f"{_ROLLOUT}.max_num_batched_tokens", BACKEND, ("hf", "vllm", "vllm_cpu")),
    Reader(f"{_ROLLOUT}.logprobs_mode", BACKEND, ("hf", "vllm", "vllm_cpu")),
    Reader(f"{_ROLLOUT}.full_determinism", BACKEND, ("hf", "vllm", "vllm_cpu")),
    # the training engine
    Reader(f"{_ROLLOUT}.full_determinism", ENGINE, ("dp", "torchtitan", "veomni")),
    *(
        Reader(f"{model}.{name}", ENGINE, engines, instead)
        for model in (_MODEL, "critic.model")
        for name, engines, instead in (
            (
                "enable_gradient_checkpointing",
                ("dp", "veomni"),
                "megatron has megatron.override_transformer_config.recompute_granularity, "
                "torchtitan has torchtitan.activation_checkpoint",
            ),
            (
                "enable_activation_offload",
                ("dp",),
                "veomni has veomni.enable_async_activation_offload",
            ),
            ("use_liger", ("dp",), ""),
        )
    ),
    Reader(f"{_MODEL}.lora.merge", LORA),
    Reader(f"{_MODEL}.lora", MEGATRONS_LORA, instead="dp has lora_rank, lora_alpha and others"),
    # agent loops: ours, verl's, or others of the user
    Reader("mixed.turns", OURS),
    Reader(MASKING, OURS),
    Reader(f"{_TURNS}.max_turn_length", OURS),
    *(Reader(f"{TOOL_CONFIG}.{name}", TAGS) for name in _LOOPS_TAGS),
    Reader(f"{_TURNS}.max_assistant_turns", SEVERAL_TURNS),
    Reader(f"{_TURNS}.max_parallel_calls", SEVERAL_TURNS),
    Reader(f"{_TURNS}.tool_config_path", VERLS_TOOLS),
    Reader(f"{_TURNS}.function_tool_path", VERLS_TOOLS),
    Reader(f"{_TURNS}.format", NATIVE),
    Reader(f"{_TURNS}.max_user_turns", VERLS),
    Reader(f"{_TURNS}.max_tool_response_length", VERLS),
    Reader(f"{_TURNS}.tool_response_truncate_side", VERLS),
    # tools
    Reader("mixed.rate_limit", LIMITER),
    Reader("mixed.rate_limit.on_config_change", SHARED_FILE),
    Reader(f"{TOOL_CONFIG}.rate_limit_per_minute", LIMITER),
    Reader(f"{TOOL_CONFIG}.burst", LIMITER),
    Reader(f"{TOOL_CONFIG}.request_interval", LIMITER),
    Reader(f"{TOOL_CONFIG}.rate_limit_file", LIMITER),
    Reader("mixed.tool_server", OWN_SERVER),
    # decided shares
    Reader("mixed.control.window", DECIDED),
    Reader("mixed.control.floor", "mixed.controller", ("progress", "worst")),
    # alarms
    Reader("mixed.wandb_artifacts", TO_WANDB),
    Reader("trainer.resume_from_path", "trainer.resume_mode", ("resume_path",)),
    *(
        Reader(key, by, (value,))
        for key in ("mixed.max_probs_diff", "mixed.drift.warn_probs_diff")
        for by, value in ((MASKING, True), (BYPASS, False))
    ),
    Reader("mixed.max_replacements", REPLACING),
    # nobody: verl's keys that the mixture replaces, or that verl's V1 trainers ignore
    Reader("mixed.rate_limit.across_nodes", "", instead="a start sets it itself"),
    Reader("data.shuffle", "", instead="the mixture plan is the order of rows (mixed.seed)"),
    Reader("data.seed", "", instead="the mixture plan is the order of rows (mixed.seed)"),
    Reader("data.sampler", "", instead="the mixture plan is the order of rows"),
    Reader("data.gen_batch_size", "", instead="the mixture plan gives single prompts"),
    Reader("data.reward_fn_key", "", instead="the source (data_source) has the reward"),
    Reader("trainer.balance_batch", "", instead="every batch is laid out over the ranks"),
    Reader("trainer.use_v1", "", instead="the trainers of the mixture are verl's V1 trainers"),
    Reader("trainer.esi_redundant_time", "", instead="`verl-mixed stop` saves a checkpoint"),
    Reader("algorithm.use_pf_ppo", "", instead=_NOT_IN_V1),
    Reader("algorithm.pf_ppo", "", instead=_NOT_IN_V1),
    Reader(
        "algorithm.filter_groups.max_num_gen_batches",
        "",
        instead="mixed.max_replacements bounds them",
    ),
    Reader("sandbox_fusion", "", instead="tool_config.server_url names the server"),
    Reader(
        f"{_ROLLOUT}.agent.default_agent_loop", "", instead="mixed.sources.<name>.agent decides"
    ),
    Reader(f"{_ROLLOUT}.engine_kwargs.trtllm", "", instead="trtllm is not supported"),
    Reader("mixed.run_dir", "", instead="mixed.experiment names the folder of a run"),
    Reader("data.return_raw_input_ids", "", instead="agent loops render their prompts themselves"),
    Reader("trainer.ray_wait_register_center_timeout", "", instead=_NOT_IN_V1),
    Reader("trainer.v1.sampler.sampler_kwargs", "", instead="the mixture has its own sampler"),
    Reader("actor_rollout_ref.nccl_timeout", "", instead=_NOT_IN_V1),
    Reader(f"{_ACTOR}.grad_clip", "", instead=f"{_ACTOR}.optim.clip_grad has it"),
    Reader(f"{_ACTOR}.freeze_vision_tower", "", instead=_NOT_IN_V1),
    Reader(f"{_ACTOR}.use_prefix_grouper", "", instead=_NOT_IN_V1),
    Reader(f"{_ACTOR}.ppo_micro_batch_size", "", instead=f"{_PER_GPU} has it"),
    *(
        Reader(f"{part}.log_prob_micro_batch_size", "", instead=f"{_LOG_PROBS_PER_GPU} has it")
        for part in (_ROLLOUT, _REF)
    ),
    Reader(f"{_ROLLOUT}.do_sample", "", instead="rollout.temperature and top_p decide"),
    Reader(f"{_ROLLOUT}.val_kwargs.do_sample", "", instead="val_kwargs.temperature=0 is greedy"),
    Reader(f"{_ROLLOUT}.over_sample_rate", "", instead=_NOT_IN_V1),
    Reader(
        f"{_ROLLOUT}.standalone_gpu_memory_utilization",
        "",
        instead="gpu_memory_utilization is that of all engines",
    ),
    Reader(f"{_ROLLOUT}.multi_stage_wake_up", "", instead=_NOT_IN_V1),
    *(
        Reader(f"{_TURNS}.{name}", "", instead="verl's agent loops do not have it")
        for name in (
            "num_repeat_rollouts",
            "use_inference_chat_template",
            "tokenization_sanity_check_mode",
        )
    ),
    Reader("actor_rollout_ref.rollout.checkpoint_manager_class", "", instead=_NOT_IN_V1),
    Reader("critic.grad_clip", "", instead="critic.optim.clip_grad has it"),
    *(
        Reader(f"critic.{name}", "", instead=_TOKENS_OF_CRITIC)
        for name in (
            "use_dynamic_bsz",
            "ppo_micro_batch_size",
            "ppo_micro_batch_size_per_gpu",
            "ppo_max_token_len_per_gpu",
            "forward_micro_batch_size",
            "forward_micro_batch_size_per_gpu",
            "forward_max_token_len_per_gpu",
        )
    ),
)
"""Key -> who reads it. Shared by the check, by docs/settings.md and by the test that walks it."""

_SWITCHES = {
    "critic.enable",
    # read by every engine, or, as the last, by vLLM; checks/config/lora.py refuses ranks
    *(f"{_MODEL}.lora.{name}" for name in ("rank", "merge", "fully_sharded_loras")),
}
"""Keys below a key of the table that others read too, or that decide who reads."""


def _has_agents(config: Mapping[str, Any], *kinds: str, with_tools: bool = True) -> bool:
    """Whether a source uses loops of these kinds, or may use them because its rows name them; with
    `with_tools=False`, a source that names no tools."""
    loops, _ = agent_loops(config)
    sources = [source for source in sound_sources(config).values() if source.takes_part]
    agents = {source.agent for source in sources if with_tools or source.tools is None}
    if loops is None or None in agents:
        return True
    return not {*kinds}.isdisjoint(_kind(str(agent), loops) for agent in agents)


def _kind(agent: str, loops: Mapping[str, Mapping[str, Any]]) -> str:
    """An agent of verl, react_agent, or whose loop it is: ours, others."""
    if agent in VERLS_AGENTS:
        return agent
    package, _, target = str(loops.get(agent, {}).get("_target_")).partition(".")
    if package == "verl":
        return "single_turn_agent" if target.endswith(".SingleTurnAgentLoop") else "tool_agent"
    if package == "agent_loop":
        names = {"ReactAgentLoop": "react_agent", "NativeAgentLoop": "native_agent"}
        return names.get(target.rpartition(".")[2], "ours")
    return "others"


def _reads_tags(config: Mapping[str, Any]) -> bool:
    """Whether a loop acts on tags, or a prompt shows them."""
    mixed, _ = section_of(MixedConfig, at(config, "mixed", {}), "mixed")
    if mixed is None or _has_agents(config, "ours", "others"):
        return True
    sources = {name: mixed.sources[name] for name in mixed.ratios}
    texts = [str(template_of(n, s, s.agent, mixed.prompts)) for n, s in sources.items()]
    texts += [str(source.system_prompt) for source in sources.values()]
    texts += [str(loop.get("system_prompt")) for loop in (agent_loops(config)[0] or {}).values()]
    return any(f"{{{name}}}" in text for text in texts for name in _LOOPS_TAGS)


def _replaces(config: Mapping[str, Any]) -> bool:
    keys = ("trainer.v1.sampler.sync_refill_failed_groups", "algorithm.filter_groups.enable")
    return at(config, MODE) != "mixed_sync" or any(at(config, key) for key in keys)


def _kl_of_reward(config: Mapping[str, Any]) -> bool:
    """Whether the coefficient is used, or asks for what the run has: no KL, or that of the loss."""
    coefficient = at(config, "algorithm.kl_ctrl.kl_coef")
    is_of_loss = at(config, KL_IN_LOSS) and coefficient == at(config, f"{_ACTOR}.kl_loss_coef")
    return bool(at(config, KL_IN_REWARD) or is_of_loss or coefficient == 0)


def _tokens_of_actor(config: Mapping[str, Any]) -> bool:
    """Whether a number of tokens is used that is the actor's or, as composed, follows it."""
    of_ref = has_reference(config) and at(config, REF_BY_TOKENS)
    is_followed = of_ref or has_critic(config) or at(config, ENGINE) == "torchtitan"
    return bool(at(config, BY_TOKENS) or is_followed)


def _lora_ranks(config: Mapping[str, Any]) -> list[Any]:
    keys = ("lora.rank",) if at(config, ENGINE) == "megatron" else ("lora_rank", "lora.rank")
    return [rank for key in keys if (rank := at(config, f"{_MODEL}.{key}"))]


def _texts(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


_AGENT = "set mixed.sources.<name>.agent="

_DERIVED: Mapping[str, tuple[Callable[[Mapping[str, Any]], bool], str]] = {
    BYPASS: (lambda config: bool(at(config, BYPASS)), ""),
    CRITIC: (has_critic, f"set {ESTIMATOR}=gae"),
    REJECTING: (
        lambda config: bool(at(config, f"{_CORRECTION}.rollout_rs")),
        f"set {_CORRECTION}.rollout_rs=token_k1",
    ),
    REPLACING: (_replaces, "set trainer.v1.sampler.sync_refill_failed_groups=true"),
    OURS: (
        lambda config: _has_agents(config, "ours", "react_agent", "native_agent", "others"),
        f"{_AGENT}math_agent",
    ),
    VERLS: (lambda config: _has_agents(config, "tool_agent", "others"), f"{_AGENT}tool_agent"),
    NATIVE: (
        lambda config: _has_agents(config, "native_agent", "tool_agent", "others"),
        f"{_AGENT}native_agent",
    ),
    TAGS: (_reads_tags, f"{_AGENT}math_agent"),
    SEVERAL_TURNS: (
        lambda config: _has_agents(
            config, "ours", "react_agent", "native_agent", "tool_agent", "others"
        ),
        f"{_AGENT}math_agent",
    ),
    VERLS_TOOLS: (
        lambda config: _has_agents(
            config, "react_agent", "native_agent", "tool_agent", "others", with_tools=False
        ),
        f"{_AGENT}react_agent mixed.sources.<name>.tools=null",
    ),
    SHARED_FILE: (
        lambda config: bool(at(config, f"{TOOL_CONFIG}.rate_limit_file")),
        f"set {TOOL_CONFIG}.rate_limit_file=/path/of/the/file",
    ),
    OWN_SERVER: (
        lambda config: is_own_tool_server(str(at(config, SERVER_URL_KEY))),
        f"set {SERVER_URL_KEY}=http://127.0.0.1:0",
    ),
    TO_WANDB: (
        lambda config: "wandb" in _texts(at(config, "trainer.logger")),
        "set trainer.logger=[console,tensorboard,wandb]",
    ),
    DECIDED: (
        lambda config: (
            at(config, "mixed.controller") in ("progress", "worst")
            or at(config, "mixed.unit") == "trained_tokens"
        ),
        "set mixed.controller=progress",
    ),
    REFERENCE: (has_reference, f"set {KL_IN_LOSS}=true"),
    KL_LOSS: (
        # 0 without the loss is what such a run does
        lambda config: bool(at(config, KL_IN_LOSS) or at(config, f"{_ACTOR}.kl_loss_coef") == 0),
        f"set {KL_IN_LOSS}=true",
    ),
    KL_REWARD: (_kl_of_reward, f"set {KL_IN_REWARD}=true"),
    DPPO: (
        lambda config: at(config, LOSS_MODE) not in {*LOSSES} - {*WITH_CLIP_RATIO},
        f"set {LOSS_MODE}=dppo_tv",
    ),
    LORA: (
        lambda config: bool(_lora_ranks(config)),
        f"set {_MODEL}.lora_rank=16 (megatron: lora.rank)",
    ),
    MEGATRONS_LORA: (
        lambda config: at(config, ENGINE) == "megatron" and bool(_lora_ranks(config)),
        f"set model_engine=megatron {_MODEL}.lora.rank=16",
    ),
    TOKENS_OF_ACTOR: (_tokens_of_actor, f"set {BY_TOKENS}=true"),
    # verl asks for a number of rows wherever the actor's micro-batches have one
    ROWS_OF_REF: (
        lambda config: not (at(config, REF_BY_TOKENS) and at(config, BY_TOKENS)),
        f"set {REF_BY_TOKENS}=false",
    ),
}
"""What decides and is more than one value of one key -> whether it is so in a run, and what to do
for it; empty if that is to set a key."""


def unread_problems(config: Mapping[str, Any], changed: Collection[str]) -> Iterator[str]:
    """Keys that are set and that this run would ignore.

    `changed` are the leaves with another value than this project ships, see `changed_keys`.
    """
    by_nobody = {key for row in READERS if not row.by for key in _below(row.key, changed)}
    for reader in READERS:
        keys = _below(reader.key, changed)
        if not keys or is_read(reader, config):
            continue
        rule = f"no run uses it: {reader.instead}; remove it"
        if reader.by:
            words, remedy = read_by(reader, config)
            now = f", and here it is {at(config, reader.by)!r}" if words != reader.by else ""
            hint = f" ({reader.instead})" if reader.instead else ""
            rule = f"only {words} reads it{now}{hint}; remove it, or {remedy}"
            said_elsewhere = (_SWITCHES | by_nobody) - {reader.key}
            keys = [key for key in keys if key not in said_elsewhere]
        for key in keys:
            if not _is_the_actors(config, key):
                yield f"{key}={at(config, key)!r}: {rule}"
    yield from _option_problems(config, changed)
    yield from _kind_problems(config, changed)


def _below(prefix: str, keys: Collection[str]) -> list[str]:
    return [key for key in sorted(keys) if f"{key}.".startswith(f"{prefix}.")]


def _is_the_actors(config: Mapping[str, Any], key: str) -> bool:
    """Whether a key of the reference model has the actor's value, so that nothing is lost."""
    of_actor = key.replace(f"{_REF}.", f"{_ACTOR}.", 1)
    return of_actor != key and at(config, of_actor) == at(config, key)


def _option_problems(config: Mapping[str, Any], changed: Collection[str]) -> Iterator[str]:
    """Options of the rollout `hf` that it does not have."""
    section = f"{_ROLLOUT}.engine_kwargs.hf"
    known = [f"{section}.{name}" for name in HF_OPTIONS]
    for key in _below(section, changed) if at(config, BACKEND) == "hf" else ():
        if key not in (section, *known):
            yield (
                f"{key}={at(config, key)!r}: {_ROLLOUT}.name=hf does not have it; remove it, or "
                f"set one of {', '.join(known)}"
            )


def _kind_problems(config: Mapping[str, Any], changed: Collection[str]) -> Iterator[str]:
    """Kinds of the records in files that a source does not name."""
    for name, source in sound_sources(config).items():
        if source.files or source.val_files or not source.takes_part:
            continue
        place = f"mixed.sources.{name}"
        for key in (*_below(f"{place}.kind", changed), *_below(f"{place}.kind_options", changed)):
            yield (
                f"{key}={at(config, key)!r}: only the source's own files have a kind; remove it, "
                f"or set {place}.files=[/path/of/a/file]"
            )


def is_unread(key: str, config: Mapping[str, Any]) -> bool:
    """Whether the table says that a run with this config does not read a key."""
    rows = [row for row in READERS if _below(row.key, [key])]
    return key not in _SWITCHES and not all(is_read(row, config) for row in rows)


def is_read(reader: Reader, config: Mapping[str, Any]) -> bool:
    """Whether a run with this config reads the key of this row."""
    if not reader.by:
        return False
    if reader.by == ESTIMATOR and at(config, ESTIMATOR) not in ESTIMATORS + UNTRIED:
        return True  # a user's own estimator may read any key
    value = _DERIVED[reader.by][0](config) if reader.by in _DERIVED else at(config, reader.by)
    return value in reader.values


def read_by(reader: Reader, config: Mapping[str, Any] | None = None) -> tuple[str, str]:
    """Who reads the key of a row, in words or as `key=value`; and what to do to have it read.

    With the run's config, the remedy is one that fits its device.
    """
    remedy = _DERIVED[reader.by][1] if reader.by in _DERIVED else ""
    words = reader.by
    if not remedy:
        values = [str(v).lower() if isinstance(v, bool) else str(v) for v in reader.values]
        words = f"{reader.by}={' or '.join(values)}"
        remedy = _to_set(reader.by, values, config or {})
    if at(config or {}, "trainer.device") == "cpu":  # which has the training engine dp only
        remedy = re.sub(r"^set (?=model_engine=(?!dp))", "set PROFILE=gpu ", remedy)
    return words, remedy


def _to_set(key: str, values: Sequence[str], config: Mapping[str, Any]) -> str:
    """How to give a key one of these values; engines of the rollout come with a profile."""
    device = at(config, "trainer.device")
    if key == BACKEND and device == "cpu":
        for name, profile in {"hf": "laptop", "vllm_cpu": "vllm_cpu", "vllm": "gpu"}.items():
            if name in values:
                return f"set PROFILE={profile}"
        return f"set PROFILE=gpu {key}={values[0]}"
    if key == BACKEND and device == "cuda":
        values = [name for name in values if name in ("vllm", "sglang")]
        if not values:
            return "set PROFILE=laptop"
    others = f" (or {', '.join(values[1:])})" if values[1:] else ""
    return f"set {key}={values[0]}{others}"
