"""The profiles: each composes, verl takes every key of it, and the check of GPU runs needs none."""

import json
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from agent_loop.training.verl_config import ref_as_actor, refusals
from cluster.placement import Node, need_of, placement_problems
from config.lookup import CONFIG_DIR, at, flatten
from tests.fakes.real_tokenizers import real_tokenizer
from tests.verl_mixed.conftest import RunEnviron
from verl_mixed.checks.config import devices as gpu_check
from verl_mixed.checks.config.algorithm import ESTIMATORS, algorithm_problems
from verl_mixed.checks.config.devices import device_problems, package_gaps
from verl_mixed.checks.config.engines import ENGINES
from verl_mixed.checks.config.lora import lora_problems
from verl_mixed.launch.plan import make_plan
from verl_mixed.run.compose import REQUIRED, compose_config, resolve
from verl_mixed.run.settings import SETTINGS, VARIABLES

PROFILES = sorted(path.stem for path in CONFIG_DIR.glob("profile/*.yaml"))
GPU_PROFILES = [name for name in PROFILES if name.startswith("gpu")]
DOCUMENT = CONFIG_DIR.parent / "docs" / "profiles.md"
REQUIREMENTS = CONFIG_DIR.parent / "requirements"


@cache
def config_of(profile: str, *overrides: str, model: str = "someone/some-model") -> dict[str, Any]:
    given = [f"{key}=[x]" for key in REQUIRED if key.startswith("data.")]
    return resolve(
        compose_config(
            [
                f"profile={profile}",
                "mixed.run_dir=/r",
                *given,
                f"actor_rollout_ref.model.path={model}",
                *overrides,
            ]
        )
    )


def gpu_config(*overrides: str) -> dict[str, Any]:
    return config_of("gpu", *overrides)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of no weights: what verl reads of one before it loads it."""
    folder = tmp_path_factory.mktemp("model")
    real_tokenizer("pieces").save_pretrained(folder)
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 512,
    }
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


def documented(name: str, profile: str = "gpu") -> list[str]:
    """The overrides of one block of the document, which is a whole command."""
    block = re.search(rf"<!-- {name} -->\n```bash\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert block is not None, f"{DOCUMENT.name} has no block {name!r}"
    words = shlex.split(block[1].replace("\\\n", " "))
    script = words.index("./run_mixed_training.sh")
    variables = dict(word.split("=", 1) for word in words[:script])
    assert variables["PROFILE"] == profile
    assert {VARIABLES[key] for key in REQUIRED} <= variables.keys()
    assert variables.keys() <= SETTINGS.keys() | {"MASTER_IP"}
    assert all("=" in word for word in words[script + 1 :])
    return words[script + 1 :]


SGLANG = ["actor_rollout_ref.rollout.name=sglang"]
BACKENDS = [
    [],
    SGLANG,
    *([f"model_engine={name}"] for name in ENGINES),
    ["model_engine=megatron", *SGLANG],
    documented("moe"),
]
"""Overrides of `PROFILE=gpu` that choose engines."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("profile", "overrides"),
    [*((name, []) for name in PROFILES), *(("gpu", overrides) for overrides in BACKENDS[1:])],
)
def test_verl_builds_its_own_config_of_every_profile_and_backend(
    profile: str, overrides: list[str], model_folder: Path
) -> None:
    pytest.importorskip("verl")
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import HFModelConfig

    config: Any = OmegaConf.create(config_of(profile, *overrides, model=str(model_folder)))
    parts = config.actor_rollout_ref
    actor, rollout, ref, critic = (
        omega_conf_to_dataclass(part)
        for part in (parts.actor, parts.rollout, ref_as_actor(parts.ref), config.critic)
    )
    model = omega_conf_to_dataclass(parts.model, dataclass_type=HFModelConfig)

    strategy = ENGINES[config.model_engine].strategies[0]
    assert actor.strategy == ref.strategy == critic.strategy == strategy
    assert actor.engine.strategy == strategy
    assert actor.engine.full_determinism is False
    assert rollout.prompt_length == config.data.max_prompt_length
    assert model.path == str(model_folder)
    assert refusals(config) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("profile", "overrides", "refused"),
    [
        ("laptop", ["actor.loss_agg_mode=foo"], "actor: verl refuses it: Invalid loss_agg_mode: f"),
        ("laptop", ["+actor.megatron.x=1"], "unexpected keyword argument 'megatron'"),
        ("gpu", ["rollout.mode=sync"], "rollout: verl refuses it: Rollout mode 'sync' has been"),
        ("gpu", ["+rollout.quantisation=fp8"], "unexpected keyword argument 'quantisation'"),
        ("gpu", ["actor.use_kl_loss=true", "+ref.typo=1"], "ref: verl refuses it: "),
        ("gpu", ["rollout.val_kwargs.do_sample=true", "rollout.temperature=0"], "temperature"),
    ],
)
def test_what_verl_would_refuse_later_is_named_before_ray(
    profile: str, overrides: list[str], refused: str
) -> None:
    pytest.importorskip("verl")
    given = [re.sub(r"^\+?", r"\g<0>actor_rollout_ref.", override) for override in overrides]

    (problem,) = refusals(OmegaConf.create(config_of(profile, *given)))

    assert refused in problem


@pytest.mark.slow
@pytest.mark.parametrize(
    ("profile", "overrides"),
    [
        ("gpu", ["actor_rollout_ref.model.lora_rank=16"]),
        ("gpu", ["model_engine=megatron", "actor_rollout_ref.model.lora.rank=16"]),
        ("laptop", ["algorithm.adv_estimator=gae"]),
    ],
)
def test_verl_judges_a_config_without_the_model_and_without_vllm(
    profile: str, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("verl")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    here = "actor_rollout_ref.model.path=someone/some-model"

    config = OmegaConf.create(config_of(profile, *overrides, here))

    assert refusals(config) == []
    assert config.critic.model.path == "someone/some-model"  # the check works on a copy


@pytest.mark.slow
@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_sets_only_keys_that_verl_or_this_project_has(profile: str) -> None:
    stock = resolve(compose_config(["~profile", "mixed.run_dir=/r"]), complete=False)
    # What verl leaves open: given on to ray.init, to transformers, to a backend, or with a default
    # in the dataclass alone.
    open_ended = re.compile(
        r"ray_kwargs\.ray_init\.|actor_rollout_ref\.model\.override_config\.|critic\.model\."
        r"override_config\.|.*\.mixed_precision\.|actor_rollout_ref\.rollout\.engine_kwargs\.\w+\.|"
        r"actor_rollout_ref\.rollout\.(multi_turn\.max_turn_length|enable_sleep_mode)|"
        r"(mixed|data)\.prompts\."
    )

    added = flatten(config_of(profile)).keys() - flatten(stock).keys()

    assert [key for key in sorted(added) if not open_ended.match(key)] == []


@pytest.mark.slow
@pytest.mark.parametrize("profile", GPU_PROFILES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_composes_on_gpus(profile: str, estimator: str) -> None:
    config = config_of(profile, f"algorithm.adv_estimator={estimator}")

    assert algorithm_problems(config) == []
    assert device_problems(config) == []
    assert at(config, "critic.model.path") == at(config, "actor_rollout_ref.model.path")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("profile", GPU_PROFILES)
def test_lora_composes_on_gpus(profile: str, engine: str, model_folder: Path) -> None:
    pytest.importorskip("verl")
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import HFModelConfig

    lora = ("lora_rank=16", "lora_alpha=32", "target_modules=[q_proj,v_proj]", "lora.merge=true")
    for given in (lora, lora[:-1]):
        keys = [f"actor_rollout_ref.model.{setting}" for setting in given]
        engine_key = f"actor_rollout_ref.rollout.name={engine}"
        config = config_of(profile, engine_key, *keys, model=str(model_folder))
        parts: Any = OmegaConf.create(config["actor_rollout_ref"])

        model = omega_conf_to_dataclass(parts.model, dataclass_type=HFModelConfig)

        assert [*lora_problems(config)] == device_problems(config) == []
        assert omega_conf_to_dataclass(parts.rollout).name == engine
        assert (model.lora_rank, model.lora_alpha) == (16, 32)
        assert list(model.target_modules) == ["q_proj", "v_proj"]
        assert model.lora["merge"] == ("lora.merge=true" in given)


def test_the_gpu_profile_is_vllm_and_fsdp2_with_our_loops_trainer_and_limiter() -> None:
    config = gpu_config()
    rollout = at(config, "actor_rollout_ref.rollout")

    assert (rollout["name"], rollout["dtype"]) == ("vllm", "bfloat16")
    assert rollout["agent"]["agent_loop_manager_class"].startswith("agent_loop.")
    assert rollout["multi_turn"]["tool_config"]["enable_global_rate_limit"]
    assert at(config, "trainer.v1.trainer_mode") == "mixed_sync"
    assert at(config, "trainer.device") == "cuda"
    # follows instructions: the base config's prompts are bare
    assert "{code_start_tag}" in at(config, "mixed.prompts.code.system")
    # what follows the actor in verl's own config
    assert at(config, "actor_rollout_ref.ref.strategy") == "fsdp2"
    assert rollout["log_prob_use_dynamic_bsz"] is True
    assert rollout["log_prob_max_token_len_per_gpu"] == at(
        config, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    )


def test_the_asynchronous_profile_is_the_gpu_profile_in_another_mode() -> None:
    gpu, other = (flatten(config_of(name)) for name in ("gpu", "gpu_async"))

    assert {key for key in gpu | other if gpu.get(key) != other.get(key)} == {
        "algorithm.rollout_correction.rollout_is",
        "mixed.deadlines.stuck_after_s",
        "mixed.deadlines.trajectory_s",
        "mixed.experiment",
        "trainer.v1.trainer_mode",
    }
    assert other["trainer.v1.trainer_mode"] == "mixed_colocate_async"
    # truncated importance sampling of tokens, with log-probs of the trainer
    correction = "algorithm.rollout_correction"
    assert (other[f"{correction}.rollout_is"], other[f"{correction}.bypass_mode"]) == (
        "token",
        False,
    )
    # a trajectory waits while the policy is updated, in each step that it may span
    updates = other["trainer.v1.sampler.max_off_policy_threshold"] - 1
    waited_s = updates * other["mixed.deadlines.stuck_after_s"] / 2
    assert other["mixed.deadlines.trajectory_s"] == gpu["mixed.deadlines.trajectory_s"] + waited_s


def test_prompts_of_the_command_line_win_over_the_profiles() -> None:
    assert at(gpu_config("prompts=bare"), "mixed.prompts.code.system") is None


@pytest.mark.parametrize(
    ("nodes", "per_node", "cpus", "fits"),
    [(1, 8, 64, True), (1, 8, 32, False), (2, 8, 64, True), (4, 8, 28, True), (4, 8, 24, False)],
)
def test_the_gpu_profile_is_placed_on_one_node_and_on_many(
    nodes: int, per_node: int, cpus: int, fits: bool
) -> None:
    need = need_of(gpu_config(f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={per_node}"))
    assert need is not None

    problems = placement_problems(need, [Node(cpus=cpus, gpus=per_node)] * nodes)

    assert (problems == []) == fits, problems


def test_engines_apart_from_training_are_placed_on_nodes_of_their_own() -> None:
    config = gpu_config(*documented("separate"))
    need = need_of(config)
    assert need is not None

    assert device_problems(config) == []
    assert need.gpus == 16
    assert placement_problems(need, [Node(cpus=64, gpus=8)] * 2) == []
    (problem,) = placement_problems(need, [Node(cpus=64, gpus=8)])
    assert "no room" in problem or "there is room for" in problem


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (["actor_rollout_ref.rollout.tensor_model_parallel_size=3"], "one engine takes 3 GPUs"),
        (["actor_rollout_ref.rollout.tensor_model_parallel_size=16"], "one engine takes 16 GPUs"),
        (["actor_rollout_ref.rollout.tensor_model_parallel_size=0"], "want whole numbers"),
        (["actor_rollout_ref.rollout.max_model_len=8192"], "max_model_len allows 8192 tokens"),
        (["data.max_response_length=30000"], "ppo_max_token_len_per_gpu allows 20480 tokens"),
    ],
)
def test_a_size_that_gpus_cannot_take_is_named(overrides: list[str], word: str) -> None:
    assert word in "\n".join(device_problems(gpu_config(*overrides)))


@pytest.mark.parametrize(
    "overrides",
    [
        ["actor_rollout_ref.rollout.tensor_model_parallel_size=8"],
        ["actor_rollout_ref.rollout.tensor_model_parallel_size=16", "trainer.nnodes=2"],
        [
            "data.max_response_length=30000",
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        ],
    ],
)
def test_a_size_that_gpus_can_take_is_no_problem(overrides: list[str]) -> None:
    assert device_problems(gpu_config(*overrides)) == []


@pytest.mark.slow
def test_packages_that_are_missing_here_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def gaps(installed: set[str], *overrides: str) -> str:
        monkeypatch.setattr(gpu_check, "_is_installed", lambda module: module in installed)
        return "\n".join(package_gaps(gpu_config(*overrides)))

    sdpa = "actor_rollout_ref.model.override_config.attn_implementation=sdpa"
    assert gaps({"vllm", "flash_attn"}) == ""
    assert "vllm is not installed" in gaps({"flash_attn"})
    assert "set it to sdpa" in gaps({"vllm"})
    assert gaps({"vllm"}, sdpa) == ""
    assert "critic" in gaps({"vllm"}, sdpa, "algorithm.adv_estimator=gae")
    assert "with verl's sglang extra" in gaps({"vllm", "flash_attn"}, *SGLANG)
    assert "megatron is not installed" in gaps({"vllm"}, "model_engine=megatron")
    assert gaps({"vllm", "megatron"}, "model_engine=megatron") == ""


def test_nothing_that_only_gpus_need_is_missing_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "_is_installed", lambda module: False)

    assert package_gaps(config_of("laptop", "algorithm.adv_estimator=gae")) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("profile", "overrides"), [("gpu_async", []), *(("gpu", overrides) for overrides in BACKENDS)]
)
def test_a_gpu_run_is_checked_on_a_machine_without_one(
    run_environ: RunEnviron, profile: str, overrides: list[str]
) -> None:
    environ = run_environ | {"PROFILE": profile, "TRAIN_BATCH_SIZE": "8", "ROLLOUT_N": "8"}

    assert make_plan(overrides, environ).problems(machine=False) == []


# --- docs/profiles.md -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "profile"),
    [
        *((name, "gpu") for name in ("one gpu", "30b", "moe", "separate")),
        ("colocate", "gpu_async"),
    ],
)
def test_overrides_in_the_document_compose_and_are_sound(name: str, profile: str) -> None:
    config = config_of(profile, *documented(name, profile))

    assert device_problems(config) == []
    need = need_of(config)
    assert need is not None


@pytest.mark.parametrize(("profile", "least"), [("gpu", 25), ("gpu_async", 15)])
def test_the_documents_table_says_what_the_profile_has(profile: str, least: int) -> None:
    config = config_of(profile)
    (section,) = re.findall(
        rf"^## [^\n]*`PROFILE={profile}`\n(.*?)^## ", DOCUMENT.read_text(), re.DOTALL | re.M
    )
    rows = re.findall(r"^\| `([\w.]+)` \|[^|]*\|[^|]*\| `([^`]+)` \|", section, re.M)
    assert len(rows) >= least

    said = {key: OmegaConf.create(f"value: {value}").value for key, value in rows}

    assert said == {key: at(config, key) for key in said}


# --- docs/compatibility.md ------------------------------------------------------------------------


def test_the_documented_versions_are_those_of_the_locks() -> None:
    table = (DOCUMENT.parent / "compatibility.md").read_text()
    rows = re.findall(r"^\| (\w[\w-]+) \| ([^|]+) \| ([^|]+) \|[^|]*\|$", table, re.M)
    said = {name: (laptop, gpu) for name, laptop, gpu in rows}
    assert {"verl", "torch", "vllm", "transformers", "ray"} <= said.keys()
    for column, names in ((0, ("torch.txt", "laptop.lock")), (1, ("gpu.lock",))):
        lines = [line for name in names for line in (REQUIREMENTS / name).read_text().splitlines()]
        pins = {line.partition(" ")[0].lower() for line in lines}
        for name in said.keys() - {"package", "Python", "cupy", "flash-attn"}:
            version = said[name][column].split()[0].rstrip(",")
            assert version == "-" or f"{name}=={version}".lower() in pins, (name, version)
