"""Keys that a run does not read: who reads which key, and the refusal of the others.

`READERS` is the one table. docs/settings.md shows it, and a test sets each of its keys where nobody
reads it. A key that is not in the table is not refused here, whether the run reads it or not.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agent_loop.training.estimators import ESTIMATORS, UNTRIED
from config.lookup import at
from config.schema import TAG_FIELDS, TOOL_CONFIG, MixedConfig, templates_of
from verl_mixed.checks.config.algorithm import has_critic
from verl_mixed.checks.config.modes import VERLS_AGENTS
from verl_mixed.run.sections import agent_loops, section_of, sound_sources
from verl_mixed.run.settings import SERVER_URL_KEY, is_own_tool_server

_ROLLOUT = "actor_rollout_ref.rollout"
_TURNS = f"{_ROLLOUT}.multi_turn"

ESTIMATOR, MODE, BACKEND = "algorithm.adv_estimator", "trainer.v1.trainer_mode", f"{_ROLLOUT}.name"
ENGINE, LIMITER = "model_engine", f"{TOOL_CONFIG}.enable_global_rate_limit"
MASKING = f"{TOOL_CONFIG}.state_masking"
DR_GRPO, NORM = (f"algorithm.state_masked_grpo.{name}" for name in ("dr_grpo", "norm_by_std"))
_CORRECTION = "algorithm.rollout_correction"
IS, BYPASS = f"{_CORRECTION}.rollout_is", f"{_CORRECTION}.bypass_mode"

FOLLOWING = "state_masked_grpo without a norm_by_std of its own"
CRITIC = "a critic"
REJECTING = "rejection sampling"
REPLACING = "a run that replaces prompts"
OURS = "an agent loop of this project or of your own"
VERLS = "an agent loop of verl or of your own"
TAGS = f"{OURS}, or a prompt with tags"
CACHE = "a cache of tool results"
SHARED_FILE = "a run with a rate_limit_file"
OWN_SERVER = "the run's own tool server"
STOPPING = "a run with an infra_error_limit below 1"


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
    """What has the effect if no run uses the key."""


_ASYNC = ("mixed_colocate_async", "mixed_separate_async")
_LOOPS_TAGS = [name for name in TAG_FIELDS if not name.startswith("answer_")]
_GRPO = ("state_masked_grpo", "grpo", "grpo_passk", "grpo_vectorized")

READERS: tuple[Reader, ...] = (
    # the estimator
    Reader("algorithm.state_masked_grpo", ESTIMATOR, ("state_masked_grpo",)),
    Reader(NORM, DR_GRPO, (False,)),
    Reader("algorithm.norm_adv_by_std_in_grpo", ESTIMATOR, _GRPO),
    Reader("algorithm.norm_adv_by_std_in_grpo", FOLLOWING),
    Reader("algorithm.gamma", ESTIMATOR, ("gae", "reinforce_plus_plus")),
    Reader("algorithm.lam", ESTIMATOR, ("gae",)),
    Reader("critic", CRITIC),
    Reader(f"{IS}_threshold", IS, ("token", "sequence")),
    Reader(f"{IS}_batch_normalize", IS, ("token", "sequence")),
    Reader(f"{_CORRECTION}.rollout_rs_threshold", REJECTING),
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
    # agent loops: ours, verl's, or others of the user
    Reader("mixed.turns", OURS),
    Reader("mixed.deadlines.turn_s", OURS),
    Reader(MASKING, OURS),
    Reader(f"{_TURNS}.max_turn_length", OURS),
    *(Reader(f"{TOOL_CONFIG}.{name}", TAGS) for name in _LOOPS_TAGS),
    Reader(f"{_TURNS}.format", VERLS),
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
    Reader(f"{TOOL_CONFIG}.cache.max_mb", CACHE),
    Reader(f"{TOOL_CONFIG}.cache.ttl_s", CACHE),
    Reader(f"{TOOL_CONFIG}.deterministic_code", CACHE),
    Reader("mixed.tool_server", OWN_SERVER),
    # alarms
    Reader("mixed.infra_error_window", STOPPING),
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

_SWITCHES = {"critic.enable"}
"""Keys below a key of the table that decide whether the others are read."""


def _has_agents(config: Mapping[str, Any], *kinds: str) -> bool:
    """Whether a source uses loops of these kinds, or may use them because its rows name them."""
    loops, _ = agent_loops(config)
    agents = {source.agent for source in sound_sources(config).values() if source.takes_part}
    if loops is None or None in agents:
        return True
    return not {*kinds}.isdisjoint(_kind(str(agent), loops) for agent in agents)


def _kind(agent: str, loops: Mapping[str, Mapping[str, Any]]) -> str:
    target = "verl." if agent in VERLS_AGENTS else str(loops.get(agent, {}).get("_target_"))
    return {"agent_loop": "ours", "verl": "verl's"}.get(target.partition(".")[0], "others")


def _reads_tags(config: Mapping[str, Any]) -> bool:
    """Whether a loop acts on tags, or verl's loops show them in the prompt of a source."""
    mixed, _ = section_of(MixedConfig, at(config, "mixed", {}), "mixed")
    if mixed is None or _has_agents(config, "ours", "others"):
        return True
    templates = templates_of(mixed.sources, mixed.prompts)
    texts = [str(templates[name]) for name in mixed.ratios]
    return any(f"{{{name}}}" in text for text in texts for name in _LOOPS_TAGS)


def _follows(config: Mapping[str, Any]) -> bool:
    """Whether norm_by_std is that of verl's key; other estimators have no norm_by_std."""
    of_verl = at(config, "algorithm.norm_adv_by_std_in_grpo")
    return at(config, ESTIMATOR) != "state_masked_grpo" or at(config, NORM, of_verl) == of_verl


def _replaces(config: Mapping[str, Any]) -> bool:
    keys = ("trainer.v1.sampler.sync_refill_failed_groups", "algorithm.filter_groups.enable")
    return at(config, MODE) != "mixed_sync" or any(at(config, key) for key in keys)


_AGENT = "set mixed.sources.<name>.agent="

_DERIVED: Mapping[str, tuple[Callable[[Mapping[str, Any]], bool], str]] = {
    # without norm_by_std, Dr.GRPO and the key agree
    DR_GRPO: (lambda config: bool(at(config, DR_GRPO) and at(config, NORM)), ""),
    BYPASS: (lambda config: bool(at(config, BYPASS)), ""),
    FOLLOWING: (_follows, f"remove {NORM}"),
    CRITIC: (has_critic, f"set {ESTIMATOR}=gae"),
    REJECTING: (
        lambda config: bool(at(config, f"{_CORRECTION}.rollout_rs")),
        f"set {_CORRECTION}.rollout_rs=token_k1",
    ),
    REPLACING: (_replaces, "set trainer.v1.sampler.sync_refill_failed_groups=true"),
    OURS: (lambda config: _has_agents(config, "ours", "others"), f"{_AGENT}math_agent"),
    VERLS: (lambda config: _has_agents(config, "verl's", "others"), f"{_AGENT}tool_agent"),
    TAGS: (_reads_tags, f"{_AGENT}math_agent"),
    CACHE: (
        lambda config: at(config, f"{TOOL_CONFIG}.cache.store") != "none",
        f"set {TOOL_CONFIG}.cache.store=sqlite",
    ),
    SHARED_FILE: (
        lambda config: bool(at(config, f"{TOOL_CONFIG}.rate_limit_file")),
        f"set {TOOL_CONFIG}.rate_limit_file=/path/of/the/file",
    ),
    OWN_SERVER: (
        lambda config: is_own_tool_server(str(at(config, SERVER_URL_KEY))),
        f"set {SERVER_URL_KEY}=http://127.0.0.1:0",
    ),
    STOPPING: (
        lambda config: at(config, "mixed.infra_error_limit") != 1,
        "set mixed.infra_error_limit=0.5",
    ),
}
"""What decides and is more than one value of one key -> whether it is so in a run, and what to do
for it; empty if that is to set a key."""


def unread_problems(config: Mapping[str, Any], changed: Collection[str]) -> Iterator[str]:
    """Keys that are set and that this run would ignore.

    `changed` are the leaves with another value than this project ships, see `changed_keys`.
    """
    for reader in READERS:
        keys = [key for key in sorted(changed) if f"{key}.".startswith(f"{reader.key}.")]
        if not keys or is_read(reader, config):
            continue
        rule = f"no run uses it: {reader.instead}; remove it"
        if reader.by:
            words, remedy = read_by(reader)
            now = f", and here it is {at(config, reader.by)!r}" if words != reader.by else ""
            rule = f"only {words} reads it{now}; remove it, or {remedy}"
        for key in keys:
            if key not in _SWITCHES:
                yield f"{key}={at(config, key)!r}: {rule}"


def is_unread(key: str, config: Mapping[str, Any]) -> bool:
    """Whether the table says that a run with this config does not read a key."""
    rows = [row for row in READERS if f"{key}.".startswith(f"{row.key}.")]
    return key not in _SWITCHES and not all(is_read(row, config) for row in rows)


def is_read(reader: Reader, config: Mapping[str, Any]) -> bool:
    """Whether a run with this config reads the key of this row."""
    if not reader.by:
        return False
    if reader.by == ESTIMATOR and at(config, ESTIMATOR) not in ESTIMATORS + UNTRIED:
        return True  # a user's own estimator may read any key
    value = _DERIVED[reader.by][0](config) if reader.by in _DERIVED else at(config, reader.by)
    return value in reader.values


def read_by(reader: Reader) -> tuple[str, str]:
    """Who reads the key of a row, in words or as `key=value`; and what to do to have it read."""
    remedy = _DERIVED[reader.by][1] if reader.by in _DERIVED else ""
    if remedy:
        return reader.by, remedy
    values = (str(v).lower() if isinstance(v, bool) else v for v in reader.values)
    words = f"{reader.by}={' or '.join(values)}"
    return words, f"set {words}"
