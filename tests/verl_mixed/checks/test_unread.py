"""Keys that a run does not read are refused: the table of readers, line by line."""

import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_loop.training.estimators import ESTIMATORS
from config.lookup import CONFIG_DIR, at, flatten
from config.schema import TOOL_CONFIG, ConfigError
from tests.verl_mixed.checks.test_profiles import PROFILES, config_of
from tests.verl_mixed.conftest import RunEnviron
from verl_mixed.checks.config.algorithm import LOSSES
from verl_mixed.checks.config.unread import (
    ADAPTIVE_SWITCH,
    BACKEND,
    BY_TOKENS,
    BYPASS,
    CRITIC,
    DECIDED,
    DPPO,
    ENGINE,
    ESTIMATOR,
    HF_OPTIONS,
    IS,
    KL_IN_LOSS,
    KL_IN_REWARD,
    KL_LOSS,
    KL_REWARD,
    KL_TYPE,
    LIMITER,
    LORA,
    LOSS_MODE,
    MASKING,
    MEGATRONS_LORA,
    MODE,
    NATIVE,
    OURS,
    OWN_SERVER,
    READERS,
    REF_BY_TOKENS,
    REFERENCE,
    REJECTING,
    REPLACING,
    ROWS_OF_REF,
    SEVERAL_TURNS,
    SHARED_FILE,
    SWITCH,
    TAGS,
    TO_WANDB,
    TOKENS_OF_ACTOR,
    VERLS,
    VERLS_TOOLS,
    WITH_CLIP_RATIO,
    Reader,
    is_read,
    read_by,
    unread_problems,
)
from verl_mixed.launch.plan import make_plan
from verl_mixed.run.compose import TRAINING_ENGINES, verl_folder
from verl_mixed.run.settings import SERVER_URL_KEY

Config = dict[str, Any]
MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
REFILL = "trainer.v1.sampler.sync_refill_failed_groups"
AGENT = "mixed.sources.<name>.agent"
LOSS = "actor_rollout_ref.actor.loss"
ACTOR = "actor_rollout_ref.actor"
COEFFICIENT = {f"{ACTOR}.kl_loss_coef": 0.01}
KL_COEFFICIENTS = ("algorithm.kl_ctrl.kl_coef", f"{ACTOR}.kl_loss_coef")
VERLS_LOOPS = [f"mixed.sources.{name}.agent=tool_agent" for name in ("taco", "nq", "math")]
VALUES: dict[str, tuple[Any, ...]] = {
    ESTIMATOR: ESTIMATORS,
    MODE: ("mixed_sync", "mixed_colocate_async", "mixed_separate_async"),
    BACKEND: ("hf", "vllm", "vllm_cpu", "sglang"),
    ENGINE: TRAINING_ENGINES,
    IS: ("token", "sequence", None),
    KL_TYPE: ("fixed", "adaptive"),
    "mixed.controller": ("off", "progress", "worst"),
    **dict.fromkeys((LIMITER, MASKING, BYPASS, SWITCH, ADAPTIVE_SWITCH), (True, False)),
}
"""The key that decides who reads -> its values."""

UNREAD: dict[str, dict[str, Any]] = {
    CRITIC: {ESTIMATOR: "grpo"},
    REFERENCE: {KL_IN_LOSS: False},
    KL_LOSS: {KL_IN_LOSS: False},
    KL_REWARD: {KL_IN_REWARD: False},
    DPPO: {LOSS_MODE: "vanilla"},
    TOKENS_OF_ACTOR: {BY_TOKENS: False},
    ROWS_OF_REF: {BY_TOKENS: True, REF_BY_TOKENS: True},
    LORA: {f"{MODEL}.lora_rank": 0},
    MEGATRONS_LORA: {ENGINE: "dp"},
    REJECTING: {f"{CORRECTION}.rollout_rs": None},
    REPLACING: {REFILL: False},
    OURS: {AGENT: "tool_agent"},
    NATIVE: {AGENT: "math_agent"},
    VERLS: {AGENT: "math_agent"},
    SEVERAL_TURNS: {AGENT: "single_turn_agent"},
    VERLS_TOOLS: {AGENT: "react_agent", "mixed.sources.<name>.tools": ["calculate"]},
    TAGS: {AGENT: "react_agent"},
    SHARED_FILE: {f"{TOOL_CONFIG}.rate_limit_file": None},
    OWN_SERVER: {SERVER_URL_KEY: "http://host:80"},
    DECIDED: {"mixed.controller": "off"},
    TO_WANDB: {"trainer.logger": ["console"]},
}
"""What else decides -> keys and values with which a run does not read."""

NOT_COMPOSED = {
    "data.sampler",
    "mixed.rate_limit.across_nodes",
    "trainer.v1.sampler.sampler_kwargs",
    f"{ROLLOUT}.checkpoint_manager_class",
    f"{ROLLOUT}.enable_sleep_mode",
    f"{ROLLOUT}.standalone_gpu_memory_utilization",
    *(f"{ROLLOUT}.engine_kwargs.{name}" for name in ("hf", "vllm", "sglang", "trtllm")),
}
"""Keys of the table that a user can add, and that no config file has."""


def put(config: Config, key: str, value: Any) -> None:
    if "<name>" in key:
        for name in config["mixed"]["sources"]:
            put(config, key.replace("<name>", name), value)
        return
    *path, last = key.split(".")
    for part in path:
        config = config.setdefault(part, {})
    config[last] = value


def follow(config: Config, remedy: str) -> None:
    """Do what a message says: set keys or a profile."""
    _, *settings = remedy.partition(" (")[0].split()
    for key, _, value in (setting.partition("=") for setting in settings):
        if key == "PROFILE":
            put(config, BACKEND, at(config_of(value), BACKEND))
        else:
            put(config, key, yaml.safe_load(value))


def walk(*, reading: bool) -> Iterator[Any]:
    """A line of the table and a value with which its key is, or is not, read."""
    for reader in READERS:
        for value in VALUES.get(reader.by, (True, False)) if reader.by else [None]:
            if (value in reader.values and reader.by != "") is reading:
                yield pytest.param(reader, value, id=f"{reader.key}-{value}")


def changed(reader: Reader, value: Any) -> tuple[Config, str]:
    """A run where what decides has a value, and the key, or the first below it, another one."""
    config = deepcopy(config_of("laptop"))
    leaf = next((key for key in flatten(config) if f"{key}.".startswith(f"{reader.key}.")), None)
    assert leaf or reader.key in NOT_COMPOSED, f"no key {reader.key}"
    put(config, leaf or reader.key, "another")
    if reader.by in UNREAD and value:
        follow(config, read_by(reader)[1])
    elif reader.by:
        for other, unread in UNREAD.get(reader.by, {reader.by: value}).items():
            put(config, other, unread)
    return config, leaf or reader.key


@pytest.mark.parametrize(("reader", "value"), [*walk(reading=False)])
def test_a_key_that_is_not_read_is_refused_and_the_remedy_helps(reader: Reader, value: Any) -> None:
    config, key = changed(reader, value)

    found = [text for text in unread_problems(config, {key}) if text.startswith(f"{key}='another'")]

    rule = f"only {read_by(reader)[0]} reads it" if reader.by else f"{reader.instead}; remove it"
    (text,) = (text for text in found if rule in text)
    if reader.by:
        follow(config, text.split("; remove it, or ")[1])
        assert is_read(reader, config)


@pytest.mark.parametrize(("reader", "value"), [*walk(reading=True)])
def test_a_key_that_is_read_is_not_refused_for_that(reader: Reader, value: Any) -> None:
    config, key = changed(reader, value)
    others = [row for row in READERS if f"{key}.".startswith(f"{row.key}.") and row != reader]

    assert is_read(reader, config)
    assert len([*unread_problems(config, {key})]) <= len(others)


@pytest.mark.slow
@pytest.mark.parametrize("profile", PROFILES)
def test_what_this_project_ships_is_nobodys_setting(run_environ: RunEnviron, profile: str) -> None:
    plan = make_plan([f"{ESTIMATOR}=grpo"], run_environ | {"PROFILE": profile})

    assert list(unread_problems(plan.config, plan.changed)) == []


@pytest.mark.slow
def test_a_users_own_profile_may_repeat_what_a_shipped_one_has(
    run_environ: RunEnviron, tmp_path: Path
) -> None:
    (tmp_path / "own" / "profile").mkdir(parents=True)
    own = (CONFIG_DIR / "profile" / "gpu.yaml").read_text() + "  balance_batch: false\n"
    (tmp_path / "own" / "profile" / "mine.yaml").write_text(own)

    plan = make_plan(
        ["profile=mine", f"hydra.searchpath=[file://{tmp_path / 'own'}]"],
        run_environ | {"PROFILE": ""},
    )

    (problem,) = unread_problems(plan.config, plan.changed)
    assert problem.startswith("trainer.balance_batch=False: ")


@pytest.mark.slow
@pytest.mark.parametrize("in_defaults", [True, False])
def test_a_users_own_profile_chooses_the_training_engine_in_its_defaults(
    run_environ: RunEnviron, tmp_path: Path, in_defaults: bool
) -> None:
    choice = "override /model_engine: megatron, " if in_defaults else ""
    value = "" if in_defaults else "model_engine: megatron\n"
    (tmp_path / "profile").mkdir()
    own = f"# @package _global_\ndefaults: [gpu, {choice}_self_]\n{value}"
    (tmp_path / "profile" / "mine.yaml").write_text(own)
    overrides = ["profile=mine", f"hydra.searchpath=[file://{tmp_path}]"]

    if in_defaults:
        plan = make_plan(overrides, run_environ | {"PROFILE": ""})
        assert list(unread_problems(plan.config, plan.changed)) == []
    else:
        with pytest.raises(ConfigError, match=r"model_engine=megatron in a config file: .* `overr"):
            make_plan(overrides, run_environ | {"PROFILE": ""})


@pytest.mark.slow
def test_keys_of_a_ray_of_the_run_s_own_are_refused_on_a_cluster(run_environ: RunEnviron) -> None:
    plan = make_plan(
        ["++ray_kwargs.ray_init.num_cpus=4", "++ray_kwargs.ray_init.dashboard_host=0.0.0.0"],
        run_environ | {"MASTER_IP": "127.0.0.1", "RAY_DASHBOARD_PORT": "9999"},
    )

    found = [text for text in plan.problems(data=False, machine=False) if "ray_init" in text]
    assert [text.split(":")[0].rpartition(".")[2] for text in found] == [
        "num_cpus",
        "dashboard_host",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        (
            [
                "algorithm.adv_estimator=grpo",
                "algorithm.state_masked_grpo.dr_grpo=true",
                "algorithm.state_masked_grpo.scale={math: 2}",
                "algorithm.lam=0.9",
                "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
                "actor_rollout_ref.actor.loss_scale_factor=100",
            ],
            ["state_masked_grpo.dr_grpo=True", "state_masked_grpo.scale.math", "algorithm.lam=0.9"],
        ),
        (["critic.enable=false", "critic.optim.lr=1e-4"], ["critic.optim.lr"]),
        (
            [f"{BYPASS}=true", "mixed.max_probs_diff=0.1", "mixed.drift.warn_probs_diff=0.1"],
            [f"max_probs_diff=0.1: only {BYPASS}=false", f"warn_probs_diff=0.1: only {BYPASS}"],
        ),
        (
            [
                f"{IS}_threshold=5",
                f"{CORRECTION}.rollout_rs_threshold=5",
                f"{IS}_batch_normalize=1",
            ],
            ["set algorithm.rollout_correction.rollout_is=token", "batch_normalize", "rollout_rs="],
        ),
        (
            [
                *VERLS_LOOPS,
                f"{TOOL_CONFIG}.start_state_marker=AA",
                f"{TOOL_CONFIG}.answer_end_tag=BB",
                f"{MASKING}=false",
            ],
            ["state_masking=False", "start_state_marker='AA'"],
        ),
        (["mixed.rate_limit.on_config_change=adopt"], ["on_config_change='adopt'"]),
        (
            [
                "critic.grad_clip=2",  # said once, though there is no critic either
                f"{ACTOR}.kl_loss_coef=0.01",
                f"{ACTOR}.clip_ratio=0.3",
                "actor_rollout_ref.ref.fsdp_config.param_offload=true",
                "actor_rollout_ref.ref.strategy=fsdp2",  # as it is shipped
                f"{ROLLOUT}.val_kwargs.do_sample=false",
                f"+{ROLLOUT}.engine_kwargs.hf.num_thread=2",
                "mixed.sources.math.kind=json",
            ],
            [
                "kl_loss_coef=0.01: only a KL loss",
                "clip_ratio=0.3: only dppo_tv, dppo_kl or a loss of your own reads it (others have",
                "ref.fsdp_config.param_offload=True: only a reference model",
                "val_kwargs.do_sample=False: no run uses it: val_kwargs.temperature=0 is greedy",
                "critic.grad_clip=2: no run uses it: critic.optim.clip_grad has it",
                f"hf.num_thread=2: {ROLLOUT}.name=hf does not have it; remove it, or set one of",
                "mixed.sources.math.kind='json': only the source's own files have a kind",
            ],
        ),
        (
            [f"{REFILL}=false", "mixed.max_replacements=3"],
            ["mixed.max_replacements=3"],
        ),
        (
            [
                "critic.optim.lr=1e-4",
                "trainer.v1.separate_async.parameter_sync_step=2",
                f"{ROLLOUT}.gpu_memory_utilization=0.9",
                "mixed.tool_server={sandbox_workers: 2}",
                "algorithm.state_masked_grpo.dr_grpo=false",  # as it is shipped
            ],
            [
                "critic.optim.lr",
                "separate_async.parameter_sync_step",
                "gpu_memory_utilization=0.9",
                "mixed.tool_server.sandbox_workers=2",
            ],
        ),
        # max_probs_diff is the profile's, and not the user's
        ([f"{LIMITER}=false", f"{TOOL_CONFIG}.burst=3", f"{MASKING}=false"], ["burst=3"]),
        ([f"{MASKING}=false", "mixed.max_probs_diff=0.1"], ["mixed.max_probs_diff=0.1"]),
        (
            [
                "data.shuffle=true",
                "+data.sampler.class_path=x",
                "trainer.balance_batch=false",
                f"{ROLLOUT}.multi_turn.format=llama3_json",
            ],
            [
                "multi_turn.format",
                "data.shuffle=True: no run uses it",
                "data.sampler.class_path",
                "trainer.balance_batch=False",
            ],
        ),
    ],
)
def test_what_a_user_sets_and_the_run_ignores_is_a_problem_of_the_run(
    run_environ: RunEnviron, overrides: list[str], refused: list[str]
) -> None:
    found = make_plan(overrides, run_environ).problems()

    assert len(found) == len(refused), found
    assert all(words in text for words, text in zip(refused, found, strict=True)), found


@pytest.mark.parametrize(
    ("values", "keys"),
    [
        # a user's own estimator may read any key
        ({ESTIMATOR: "mine"}, {"algorithm.state_masked_grpo.scale", "algorithm.lam"}),
        # checks/config/lora.py says it
        ({ENGINE: "megatron"}, {"actor_rollout_ref.model.lora_rank"}),
        (
            {AGENT: "tool_agent", "mixed.sources.nq.prompt": {"user": "{question}{code_end_tag}"}},
            {f"{TOOL_CONFIG}.code_end_tag"},
        ),
        ({AGENT: "react_agent"}, {f"{ROLLOUT}.multi_turn.tool_config_path"}),
        # without a KL loss these ask for what the run does anyway
        ({f"{ACTOR}.kl_loss_coef": 0, "algorithm.kl_ctrl.kl_coef": 0}, {*KL_COEFFICIENTS}),
        ({KL_IN_LOSS: True, "algorithm.kl_ctrl.kl_coef": 0.01, **COEFFICIENT}, {*KL_COEFFICIENTS}),
        (
            {
                f"{ACTOR}.fsdp_config.param_offload": True,
                "actor_rollout_ref.ref.fsdp_config.param_offload": True,
            },
            {"actor_rollout_ref.ref.fsdp_config.param_offload"},
        ),
        # verl asks for both numbers of rows if only the reference model is filled by tokens
        (
            {KL_IN_LOSS: True, BY_TOKENS: False, REF_BY_TOKENS: True},
            {"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"},
        ),
        # the critic's number of tokens follows the actor's
        ({ESTIMATOR: "gae", BY_TOKENS: False}, {f"{ACTOR}.ppo_max_token_len_per_gpu"}),
        ({LOSS_MODE: "mine"}, {f"{ACTOR}.clip_ratio"}),
        ({f"{ROLLOUT}.engine_kwargs.hf.prefix_cache_mb": 9}, {f"{ROLLOUT}.engine_kwargs.hf"}),
        # a source that takes no part for one run keeps its settings
        (
            {"mixed.sources.math.ratio": 0},
            {"mixed.sources.math.ratio", "algorithm.state_masked_grpo.scale.math"},
        ),
    ],
)
def test_what_may_be_read_or_is_said_elsewhere_is_not_refused(
    values: dict[str, Any], keys: set[str]
) -> None:
    config = deepcopy(config_of("laptop"))
    for key, value in values.items():
        put(config, key, value)

    assert list(unread_problems(config, keys)) == []


@pytest.mark.parametrize(
    ("profile", "overrides", "key", "said"),
    [
        ("laptop", (), f"{ROLLOUT}.gpu_memory_utilization", "'hf'; remove it, or set PROFILE=vllm"),
        ("laptop", (), f"{ROLLOUT}.cudagraph_capture_sizes", "'hf'; remove it, or set PROFILE=gpu"),
        ("vllm_cpu", (), f"{ROLLOUT}.engine_kwargs.hf", "remove it, or set PROFILE=laptop"),
        ("gpu", (), f"{ROLLOUT}.engine_kwargs.hf", "remove it, or set PROFILE=laptop"),
        (
            "gpu",
            (f"{ROLLOUT}.name=sglang",),
            f"{ROLLOUT}.logprobs_mode",
            f"and here it is 'sglang'; remove it, or set {ROLLOUT}.name=vllm",
        ),
        (
            "laptop",
            (),
            f"{MODEL}.lora.alpha",
            f"remove it, or set PROFILE=gpu {ENGINE}=megatron {MODEL}.lora.rank=16",
        ),
        (
            "gpu",
            (f"{ENGINE}=megatron",),
            f"{MODEL}.enable_gradient_checkpointing",
            "(megatron has megatron.override_transformer_config.recompute_granularity, torchtitan "
            f"has torchtitan.activation_checkpoint); remove it, or set {ENGINE}=dp (or veomni)",
        ),
    ],
)
def test_the_remedy_can_be_typed_and_fits_the_device(
    profile: str, overrides: tuple[str, ...], key: str, said: str
) -> None:
    (text,) = unread_problems(config_of(profile, *overrides), {key})

    assert said in text
    assert text.endswith(said.rpartition("; ")[2]) or "PROFILE=vllm_cpu" in text


def test_megatron_recomputes_activations_as_the_profile_says() -> None:
    config = config_of("gpu", f"{ENGINE}=megatron")

    for part in (ACTOR, "actor_rollout_ref.ref", "critic"):
        found = at(config, f"{part}.megatron.override_transformer_config")
        assert [found[f"recompute_{name}"] for name in ("granularity", "method", "num_layers")] == [
            "full",
            "uniform",
            1,
        ]


HANDED_ON = (
    # sections that verl gives on as they are: to MindSpeed's FSDP, Megatron-Bridge, TransferQueue,
    # Ray, Nsight; and what its config classes read themselves
    r".*\.fsdp_config\.turbo_config|.*\.model\.lora|.*\.fsdp\.turbo_config|transfer_queue\.backend|"
    r"ray_kwargs\.ray_init|global_profiler\.global_tool_config|.*\.optim\.warmup_style|"
    r".*\.model\.external_lib|.*\.tiled_mlp\.num_shards|"
    # refused elsewhere as a whole
    r"distillation|reward\.reward_model|reward_model|"
    # read by the launcher, or by names that are put together
    r"mixed\.leakage|model_engine|.*\.tool_config\.(server_url|\w+_tag)"
)
NOT_OF_A_RUN = re.compile(
    r"trainer/config/|workers/config/|ray_trainer|main_ppo_v0|sft|model_merger|hf_rollout|naive|"
    r"experimental/(fully|one_step|separation|transfer|teacher)|trainer/distillation|trtllm|"
    r"main_(eval|generation)|rollout/schemas"
)
"""Files of verl that hold config classes, or that no V1 trainer runs."""


def test_a_key_that_no_source_names_is_in_the_table() -> None:
    verl = verl_folder()
    files = [
        file
        for file in verl.rglob("*.py")
        if not NOT_OF_A_RUN.search(file.relative_to(verl).as_posix())
    ]
    for package in ("agent_loop", "cpu_engine", "samplers", "cluster"):
        files += (CONFIG_DIR.parent / package).rglob("*.py")
    named: set[str] = set()
    for file in files:
        named.update(re.findall(r"[.\"'](\w+)", file.read_text()))
    of_nobody = tuple(f"{row.key}." for row in READERS if not row.by)

    keys = flatten(config_of("laptop")).keys() | flatten(config_of("gpu")).keys()
    unnamed = [key for key in sorted(keys) if key.rpartition(".")[2] not in named]

    assert f"{ACTOR}.grad_clip" in unnamed
    assert [
        key
        for key in unnamed
        if not f"{key}.".startswith(of_nobody) and not re.match(f"({HANDED_ON})(\\.|$)", key)
    ] == []


def test_losses_and_options_are_those_of_the_source() -> None:
    losses = (verl_folder() / "trainer" / "ppo" / "core_algos.py").read_text()
    rollout = (CONFIG_DIR.parent / "cpu_engine" / "rollout.py").read_text()

    registered = re.findall(r'@register_policy_loss\("(\w+)"\)', losses)
    assert {*registered} == {*LOSSES} and {*WITH_CLIP_RATIO} == {"dppo_tv", "dppo_kl"}
    assert {*re.findall(r'options\.get\("(\w+)"', rollout)} == {*HF_OPTIONS}
