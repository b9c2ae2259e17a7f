"""Keys that a run does not read: who reads which key, and the refusal of the others.

`READERS` is the one table. docs/settings.md shows it, and a test sets each of its keys where nobody
reads it. Keys that are not in the table are read by every run, or refused where they are checked.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agent_loop.training.estimators import ESTIMATORS, UNTRIED
from config.lookup import at
from config.schema import TOOL_CONFIG
from verl_mixed.checks.config.algorithm import has_critic
from verl_mixed.checks.config.modes import VERLS_AGENTS
from verl_mixed.run.sections import agent_loops, sound_sources
from verl_mixed.run.settings import SERVER_URL_KEY, is_own_tool_server

_ROLLOUT = "actor_rollout_ref.rollout"
_TURNS = f"{_ROLLOUT}.multi_turn"
_MODEL = "actor_rollout_ref.model"

ESTIMATOR, MODE, BACKEND = "algorithm.adv_estimator", "trainer.v1.trainer_mode", f"{_ROLLOUT}.name"
ENGINE, LIMITER = "model_engine", f"{TOOL_CONFIG}.enable_global_rate_limit"
AGENTS, CACHE, CRITIC, OWN_SERVER, STOPPING = (
    "agents of the sources",
    "tool_config.cache.store",
    "a critic",
    "the run's own tool server",
    "mixed.infra_error_limit below 1",
)


@dataclass(frozen=True, slots=True)
class Reader:
    """Which runs read a key. A key with several readers needs all of them."""

    key: str
    """A key of the run config; with parts, all of them."""

    by: str
    """The setting that decides: a key of the run config, or a name of `_DERIVED`. Empty: none."""

    values: tuple[Any, ...] = ()
    """Values of that setting with which the key is read."""

    instead: str = ""
    """What has the effect if no run uses the key."""


_ASYNC = ("mixed_colocate_async", "mixed_separate_async")
_GRPO = ("state_masked_grpo", "grpo", "grpo_passk", "grpo_vectorized")

READERS: tuple[Reader, ...] = (
    # the estimator
    Reader("algorithm.state_masked_grpo", ESTIMATOR, ("state_masked_grpo",)),
    Reader("algorithm.norm_adv_by_std_in_grpo", ESTIMATOR, _GRPO),
    Reader("algorithm.gamma", ESTIMATOR, ("gae", "reinforce_plus_plus")),
    Reader("algorithm.lam", ESTIMATOR, ("gae",)),
    Reader("critic", CRITIC, (True,)),
    # the mode
    Reader("trainer.v1.colocate_async", MODE, ("mixed_colocate_async",)),
    Reader("trainer.v1.separate_async", MODE, ("mixed_separate_async",)),
    Reader("trainer.v1.sampler.max_off_policy_threshold", MODE, _ASYNC),
    Reader("trainer.v1.sampler.max_off_policy_strategy", MODE, _ASYNC),
    Reader("trainer.v1.sampler.sync_refill_failed_groups", MODE, ("mixed_sync",)),
    Reader("algorithm.filter_groups.max_inflight_gen_batches", MODE, ("mixed_sync",)),
    Reader(f"{_ROLLOUT}.nnodes", MODE, ("mixed_separate_async",)),
    Reader(f"{_ROLLOUT}.standalone_gpu_memory_utilization", MODE, ("mixed_separate_async",)),
    Reader("actor_rollout_ref.hybrid_engine", MODE, ("mixed_separate_async",)),
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
    Reader(f"{_MODEL}.lora_rank", ENGINE, ("dp", "veomni")),
    Reader(f"{_MODEL}.lora.rank", ENGINE, ("megatron",)),
    # agent loops: ours, verl's, or others of the user
    Reader("mixed.turns", AGENTS, ("ours", "others")),
    Reader("mixed.deadlines.turn_s", AGENTS, ("ours", "others")),
    Reader(f"{_TURNS}.max_turn_length", AGENTS, ("ours", "others")),
    Reader(f"{_TURNS}.format", AGENTS, ("verl's", "others")),
    Reader(f"{_TURNS}.max_user_turns", AGENTS, ("verl's", "others")),
    Reader(f"{_TURNS}.max_tool_response_length", AGENTS, ("verl's", "others")),
    Reader(f"{_TURNS}.tool_response_truncate_side", AGENTS, ("verl's", "others")),
    # tools
    Reader("mixed.rate_limit", LIMITER, (True,)),
    Reader(f"{TOOL_CONFIG}.rate_limit_per_minute", LIMITER, (True,)),
    Reader(f"{TOOL_CONFIG}.burst", LIMITER, (True,)),
    Reader(f"{TOOL_CONFIG}.request_interval", LIMITER, (True,)),
    Reader(f"{TOOL_CONFIG}.rate_limit_file", LIMITER, (True,)),
    Reader(f"{TOOL_CONFIG}.cache.max_mb", CACHE, (True,)),
    Reader(f"{TOOL_CONFIG}.cache.ttl_s", CACHE, (True,)),
    Reader(f"{TOOL_CONFIG}.deterministic_code", CACHE, (True,)),
    Reader("mixed.tool_server", OWN_SERVER, (True,)),
    # alarms
    Reader("mixed.infra_error_window", STOPPING, (True,)),
    Reader("mixed.max_probs_diff", f"{TOOL_CONFIG}.state_masking", (True,)),
    Reader("mixed.drift.warn_probs_diff", f"{TOOL_CONFIG}.state_masking", (True,)),
    # nobody: verl's keys that the mixture replaces, or that verl's V1 trainers ignore
    Reader("mixed.rate_limit.across_nodes", "", instead="a start sets it itself"),
    Reader("data.shuffle", "", instead="the mixture plan is the order of rows (mixed.seed)"),
    Reader("data.seed", "", instead="the mixture plan is the order of rows (mixed.seed)"),
    Reader("data.sampler", "", instead="the mixture plan is the order of rows"),
    Reader("data.gen_batch_size", "", instead="the mixture plan gives single prompts"),
    Reader("data.reward_fn_key", "", instead="the source (data_source) has the reward"),
    Reader("trainer.total_epochs", "", instead="trainer.total_training_steps ends a run"),
    Reader("trainer.balance_batch", "", instead="every batch is laid out over the ranks"),
    Reader("trainer.use_v1", "", instead="the trainers of the mixture are verl's V1 trainers"),
    Reader("trainer.esi_redundant_time", "", instead="`verl-mixed stop` saves a checkpoint"),
    Reader("algorithm.use_pf_ppo", "", instead="verl's V1 trainers do not have it"),
    Reader("algorithm.pf_ppo", "", instead="verl's V1 trainers do not have it"),
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
    Reader(f"{_TURNS}.enable", "", instead="the agent of a source decides"),
)
"""Key -> who reads it. Shared by the check, by docs/settings.md and by the test that walks it."""


def _agents(config: Mapping[str, Any]) -> set[str] | None:
    """Whose loops the sources use; None if the rows name some of them."""
    loops, _ = agent_loops(config)
    agents = {source.agent for source in sound_sources(config).values() if source.takes_part}
    if loops is None or None in agents:
        return None
    return {_kind(str(agent), loops) for agent in agents}


def _kind(agent: str, loops: Mapping[str, Mapping[str, Any]]) -> str:
    target = "verl." if agent in VERLS_AGENTS else str(loops.get(agent, {}).get("_target_"))
    return {"agent_loop": "ours", "verl": "verl's"}.get(target.partition(".")[0], "others")


def _estimator(config: Mapping[str, Any]) -> set[str] | None:
    """The estimator; None for a user's own, which may read any key."""
    name = at(config, ESTIMATOR)
    return {name} if name in ESTIMATORS + UNTRIED else None


_DERIVED: Mapping[str, Callable[[Mapping[str, Any]], Collection[Any] | None]] = {
    ESTIMATOR: _estimator,
    AGENTS: _agents,
    CACHE: lambda config: {at(config, f"{TOOL_CONFIG}.cache.store") != "none"},
    CRITIC: lambda config: {has_critic(config) or at(config, "critic.enable") is False},
    OWN_SERVER: lambda config: {is_own_tool_server(str(at(config, SERVER_URL_KEY)))},
    STOPPING: lambda config: {at(config, "mixed.infra_error_limit") != 1},
}
"""Setting that is no key -> its values in a run; None if they are not known."""


def unread_problems(config: Mapping[str, Any], changed: Collection[str]) -> Iterator[str]:
    """Keys that are set and that this run would ignore.

    `changed` are the leaves with another value than this project ships, see `changed_keys`.
    """
    for reader in READERS:
        keys = [k for k in sorted(changed) if k == reader.key or k.startswith(f"{reader.key}.")]
        if not keys or is_read(reader, config):
            continue
        rule = f"no run uses it: {reader.instead}; remove it"
        if reader.by:
            now = at(config, reader.by) if "." in reader.by or reader.by == ENGINE else None
            rule = f"only {read_by(reader)} reads it"
            rule += f", and here it is {now!r}; " if now is not None else "; "
            rule += "remove it, or change that"
        for key in keys:
            yield f"{key}={at(config, key)!r}: {rule}"


def is_read(reader: Reader, config: Mapping[str, Any]) -> bool:
    """Whether a run with this config reads the key of this row."""
    if not reader.by:
        return False
    derived = _DERIVED.get(reader.by)
    current = derived(config) if derived else {at(config, reader.by)}
    return current is None or not {*current}.isdisjoint(reader.values)


def read_by(reader: Reader) -> str:
    """Who reads the key of a row, in words."""
    if not reader.by:
        return "nobody"
    if reader.values == (True,):
        return reader.by if reader.by in _DERIVED else f"{reader.by}=true"
    return f"{reader.by}={' or '.join(map(str, reader.values))}"
