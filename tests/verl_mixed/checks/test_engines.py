"""Training engines: those that are refused, and the ranks of the others as verl computes them."""

import ast
import importlib.util
import json
from copy import deepcopy
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from config.schema import ConfigError
from tests.verl_mixed.checks.test_profiles import config_of
from verl_mixed.checks.config.batches import batch_problems
from verl_mixed.checks.config.devices import device_problems, shape_problems
from verl_mixed.checks.config.engines import ENGINES, layout_of
from verl_mixed.run.compose import REQUIRED, TRAINING_ENGINES, compose_config, resolve

ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout"))
ULYSSES = f"{ACTOR}.ulysses_sequence_parallel_size"


@cache
def composed(*engine: str) -> DictConfig:
    """The config of `PROFILE=gpu` with a training engine, unresolved."""
    given = (f"{key}={'a/b' if key.endswith('path') else '[x]'}" for key in REQUIRED)
    return compose_config(["profile=gpu", "mixed.run_dir=/r", *given, *engine])


def gpu_config(*overrides: str) -> dict[str, Any]:
    """`PROFILE=gpu` with overrides. Only engines are composed anew, because that is slow."""
    engine = [text for text in overrides if text.startswith("model_engine=")]
    config = deepcopy(composed(*engine))
    for text in overrides:
        key, _, value = text.lstrip("+").partition("=")
        OmegaConf.update(config, key, yaml.safe_load(value), force_add=True)
    return resolve(config)


def gpus(number: int) -> tuple[str, ...]:
    return (f"trainer.n_gpus_per_node={min(number, 8)}", f"trainer.nnodes={max(number // 8, 1)}")


def sizes(engine: str, **given: int) -> list[str]:
    part = "actor_rollout_ref.actor" + ("" if engine == "dp" else f".{engine}")
    return [f"model_engine={engine}", *(f"{part}.{key}={size}" for key, size in given.items())]


def megatron(tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, etp: int | None = None):
    return sizes(
        "megatron",
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        **({} if etp is None else {"expert_tensor_parallel_size": etp}),
    )


def torchtitan(shard: int, replicate: int = 1, tp: int = 1, ep: int = 1):
    return sizes(
        "torchtitan",
        data_parallel_shard_size=shard,
        data_parallel_replicate_size=replicate,
        tensor_parallel_size=tp,
        expert_parallel_size=ep,
    )


def veomni(sp: int = 1, ep: int = 1):
    return sizes("veomni", ulysses_parallel_size=sp, expert_parallel_size=ep)


def verls_size(engine: str, world: int, config: dict[str, Any]) -> int:
    """`get_data_parallel_size` of verl's engine, whose package need not be installed."""
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.origin is not None
    folder = "fsdp" if engine == "dp" else engine
    path = Path(spec.origin).parent / "workers" / "engine" / folder / "transformer_impl.py"
    tree = ast.parse(path.read_text())
    (method, *_) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "get_data_parallel_size"
    )
    settings = SimpleNamespace(**config["actor_rollout_ref"]["actor"][ENGINES[engine].section])
    ulysses = getattr(settings, "ulysses_parallel_size", None)
    known: dict[str, Any] = {
        "torch": SimpleNamespace(distributed=SimpleNamespace(get_world_size=lambda: world)),
        "parallel_state": SimpleNamespace(
            get_parallel_state=lambda: SimpleNamespace(ulysses_size=ulysses)
        ),
    }
    exec(compile(ast.Module([method], []), path, "exec"), known)
    engine_object = SimpleNamespace(
        engine_config=settings,
        ulysses_sequence_parallel_size=config["actor_rollout_ref"]["actor"].get(
            "ulysses_sequence_parallel_size"
        ),
    )
    return known["get_data_parallel_size"](engine_object)


def verls_megatron_size(config: dict[str, Any]) -> int:
    """The ranks that verl's own check counts: the smallest batch that it takes."""
    from verl.utils.config import validate_config

    plain: Any = OmegaConf.create(config)
    plain.actor_rollout_ref.rollout.n = plain.actor_rollout_ref.actor.ppo_mini_batch_size = 1
    plain.actor_rollout_ref.actor.use_dynamic_bsz = False
    for part in (plain.actor_rollout_ref.actor, plain.critic):
        part.ppo_micro_batch_size_per_gpu = 1
    plain.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu = 1
    for batch in range(1, 65):
        plain.data.train_batch_size = batch
        try:
            validate_config(plain, use_reference_policy=False, use_critic=False)
        except AssertionError:
            continue
        return batch
    raise AssertionError("verl takes no batch")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:set sequence parallel to false")
@pytest.mark.parametrize(
    ("world", "overrides", "ranks"),
    [
        (8, ["model_engine=dp"], 8),
        (8, sizes("dp", ulysses_sequence_parallel_size=8), 1),
        (16, sizes("dp", ulysses_sequence_parallel_size=4), 4),
        (8, megatron(), 8),
        (8, megatron(tp=2, cp=2), 2),
        (16, megatron(tp=2, pp=2, ep=4, etp=1), 4),
        (16, megatron(tp=4, pp=2, cp=2), 1),
        (32, megatron(tp=2, ep=8, etp=1), 16),
        (8, ["model_engine=torchtitan"], 8),
        (16, ["model_engine=torchtitan"], 16),
        (16, torchtitan(shard=2, replicate=4, tp=2), 8),
        (8, torchtitan(shard=4, tp=2, ep=4), 4),
        (8, veomni(sp=4), 2),
        (16, veomni(sp=2, ep=8), 8),
    ],
)
def test_ranks_are_those_that_verl_counts(world: int, overrides: list[str], ranks: int) -> None:
    pytest.importorskip("verl")
    config = gpu_config(*gpus(world), *overrides)

    layout = layout_of(config)

    assert device_problems(config) == []
    assert layout is not None and layout.ranks == ranks
    engine = config["model_engine"]
    if engine == "megatron":
        assert verls_megatron_size(config) == ranks
    else:
        assert verls_size(engine, world, config) == ranks


@pytest.mark.slow
def test_a_batch_is_divided_by_ranks_and_not_by_gpus() -> None:
    batch = ("data.train_batch_size=2", f"{ROLLOUT}.n=2")

    assert "of the 8 data-parallel ranks" in batch_problems(gpu_config(*batch))[0]
    for overrides in (
        sizes("dp", ulysses_sequence_parallel_size=8),
        megatron(tp=4),
        torchtitan(shard=4, tp=2),
        veomni(sp=2),
    ):
        assert batch_problems(gpu_config(*batch, *overrides)) == []


def test_verls_own_rule_for_micro_batches_of_a_fixed_size_counts_gpus() -> None:
    fixed = (
        f"{ACTOR}.use_dynamic_bsz=false",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=1",
        "data.train_batch_size=2",
        f"{ROLLOUT}.n=2",
        f"{ULYSSES}=8",
    )
    (problem,) = batch_problems(gpu_config(*fixed))
    assert "no multiple of 8" in problem
    (problem,) = batch_problems(gpu_config(f"{ROLLOUT}.log_prob_use_dynamic_bsz=false"))[:1]
    assert "unless they are equal" in problem


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([f"{ULYSSES}=3"], ["fsdp_config: ulysses_sequence_parallel_size=3 must divide"]),
        (
            [f"{ULYSSES}=2", "actor_rollout_ref.model.use_remove_padding=false"],
            ["set actor_rollout_ref.model.use_remove_padding=true"],
        ),
        (
            [f"{ULYSSES}=2", "actor_rollout_ref.model.override_config.attn_implementation=sdpa"],
            ["in flash attention only"],
        ),
        ([f"{ULYSSES}=0"], ["fsdp_config: ulysses_sequence_parallel_size=0: want whole"]),
        ([f"{ACTOR}.fsdp_config.fsdp_size=3"], ["fsdp_size=3 must divide the 8 ranks"]),
        (["algorithm.use_kl_in_reward=true", f"{ULYSSES}=2"], []),
        (
            [
                f"{ACTOR}.use_kl_loss=true",
                f"{ULYSSES}=2",
                f"{REF}.ulysses_sequence_parallel_size=4",
            ],
            [f"{REF} has 2 data-parallel ranks and {ACTOR} has 4"],
        ),
        (
            ["algorithm.adv_estimator=gae", "critic.ulysses_sequence_parallel_size=2"],
            [f"critic has 4 data-parallel ranks and {ACTOR} has 8"],
        ),
        (["algorithm.adv_estimator=gae", f"{ULYSSES}=2"], []),
        (megatron(tp=3), ["must divide the number of GPUs"]),
        (megatron(ep=16), ["expert_model_parallel_size=16 x pipeline_model_parallel_size=1"]),
        (
            [*megatron(tp=2), "algorithm.adv_estimator=gae"],
            [],
        ),
        (
            [
                *megatron(),
                f"{ACTOR}.use_kl_loss=true",
                f"{REF}.megatron.expert_model_parallel_size=4",
            ],
            [f"{REF}.megatron.expert_model_parallel_size=4 and {ACTOR}.megatron.expert_model"],
        ),
        (
            [*megatron(), f"{ACTOR}.megatron.dynamic_context_parallel=true"],
            ["dynamic_context_parallel=True: it was never tried", "set it to false"],
        ),
        (
            [*sizes("torchtitan", pipeline_parallel_size=2), f"{ACTOR}.use_kl_loss=true"],
            [f"{part}.torchtitan.pipeline_parallel_size=2: verl has no" for part in (ACTOR, REF)],
        ),
        (sizes("torchtitan", context_parallel_size=2), ["context_parallel_size=2: verl gives"]),
        (
            [*sizes("torchtitan", max_seq_len=10239), f"{ACTOR}.use_kl_loss=true"],
            [f"{part}.torchtitan.max_seq_len allows 10239 tokens" for part in (ACTOR, REF)],
        ),
        (
            ["model_engine=torchtitan", f"{ACTOR}.torchtitan.max_seq_len=null"],
            ["max_seq_len allows 2048 tokens"],
        ),
        (torchtitan(shard=4), ["must be the number of GPUs"]),
        (torchtitan(shard=-1), ["data_parallel_shard_size=-1: want whole numbers"]),
        (torchtitan(shard=8, ep=3), ["expert_parallel_size=3 must divide"]),
        (
            ["model_engine=torchtitan", "algorithm.adv_estimator=gae"],
            ["verl has no critic for this engine"],
        ),
        (
            ["model_engine=torchtitan", "mixed.sources.math.temperature=0.5"],
            ["divides all rows by one temperature"],
        ),
        (
            [
                "model_engine=torchtitan",
                "mixed.sources.math.temperature=0.5",
                "mixed.sources.math.ratio=0",
            ],
            [],
        ),
        (veomni(sp=3), ["ulysses_parallel_size=3 must divide"]),
        (veomni(ep=3), ["expert_parallel_size=3 must divide"]),
        (
            [*veomni(sp=2), "actor_rollout_ref.model.use_remove_padding=false"],
            [f"{ACTOR}.veomni.ulysses_parallel_size=2: a sequence can only be split"],
        ),
        (
            [*veomni(), "algorithm.adv_estimator=gae", "critic.veomni.fsdp_size=4"],
            [f"critic.veomni.fsdp_size=4 and {ACTOR}.veomni.fsdp_size=-1"],
        ),
        ([*sizes("veomni", fsdp_size=4), "algorithm.adv_estimator=gae"], []),
        ([f"{ACTOR}.strategy=fsdp"], []),
        (
            [f"{ACTOR}.strategy=fsdp_turbo"],
            ["actor.strategy='fsdp_turbo'", "ref.strategy='fsdp_turbo'"],
        ),
        (["model_engine=megatron", f"{ACTOR}.strategy=automodel"], ["strategy='automodel'"]),
        (
            [f"{ACTOR}.strategy=megatron"],
            [f"{part}.strategy='megatron' with model_engine='dp'" for part in (ACTOR, REF)],
        ),
        (
            ["model_engine=megatron", f"+{ACTOR}.fsdp_config.param_offload=true"],
            ["actor.fsdp_config with model_engine='megatron'"],
        ),
        (["trainer.device=npu"], ["trainer.device='npu'", "mindspeed"]),
        ([f"{ROLLOUT}.name=trtllm"], ["rollout.name='trtllm'"]),
        ([f"{ROLLOUT}.name=hf"], ["rollout.name='hf'"]),
        ([f"{ROLLOUT}.pipeline_model_parallel_size=2"], ["no pipeline parallelism for vllm"]),
        (
            [f"{ROLLOUT}.tensor_model_parallel_size=4", f"{ROLLOUT}.expert_parallel_size=2"],
            ["expert_parallel_size=2: verl wants 1, or 4"],
        ),
        (
            [f"{ROLLOUT}.tensor_model_parallel_size=4", f"{ROLLOUT}.expert_parallel_size=4"],
            [],
        ),
        ([f"{ROLLOUT}.disaggregation.enabled=true"], ["disaggregation.enabled=true"]),
        (
            [f"{ROLLOUT}.n_gpus_per_node=4", f"{ROLLOUT}.tensor_model_parallel_size=8"],
            [f"{ROLLOUT}.n_gpus_per_node=4 and trainer.n_gpus_per_node=8"],
        ),
        ([f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.ignore_eos=true"], ["ignore_eos=True"]),
        ([f"{ROLLOUT}.ignore_eos=true"], []),
    ],
)
def test_what_an_engine_cannot_do_is_refused_by_name(
    overrides: list[str], words: list[str]
) -> None:
    found = "\n".join(device_problems(gpu_config(*overrides)))

    assert all(word in found for word in words)
    assert bool(found) == bool(words), found


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        ([], None),
        ([f"{ROLLOUT}.tensor_model_parallel_size=8"], "does not divide the 12 attention heads"),
        *(
            (overrides, f"{ACTOR}.{key} is 8, which does not divide the 12 attention heads")
            for key, overrides in {
                "ulysses_sequence_parallel_size": [f"{ULYSSES}=8"],
                "megatron.tensor_model_parallel_size": megatron(tp=8),
                "torchtitan.tensor_parallel_size": torchtitan(shard=1, tp=8),
                "veomni.ulysses_parallel_size": veomni(sp=8),
            }.items()
        ),
        (megatron(tp=2, cp=4), None),
        ([f"{ROLLOUT}.max_model_len=20000"], "verl takes no more"),
        (["data.max_response_length=16000"], "18048 together"),
        ([f"{ROLLOUT}.max_model_len=16384", "data.max_response_length=16000"], None),
    ],
)
def test_a_size_that_the_model_cannot_have_is_refused(
    tmp_path: Path, overrides: list[str], word: str | None
) -> None:
    shape = {"text_config": {"num_attention_heads": 12}, "max_position_embeddings": 16384}
    (tmp_path / "config.json").write_text(json.dumps(shape))

    found = list(shape_problems(gpu_config(*overrides, f"actor_rollout_ref.model.path={tmp_path}")))

    assert [word in text for text in found if word] == [True] * bool(word)
    assert len(found) == bool(word)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (["model_engine=megatron"], "model_engine='megatron': with trainer.device=cpu it must be"),
        ([f"{ULYSSES}=2"], "ulysses_sequence_parallel_size=2 must divide"),
        ([f"{ULYSSES}=2", "trainer.n_gpus_per_node=2"], "in flash attention only"),
        ([f"{ACTOR}.fsdp_config.fsdp_size=3", "trainer.n_gpus_per_node=4"], "fsdp_size=3 must"),
        *(
            ([f"{ROLLOUT}.{kind}_parallel_size=2"], f"{kind}_parallel_size=2: with trainer.device")
            for kind in ("tensor_model", "data", "pipeline_model", "expert")
        ),
        ([f"{ROLLOUT}.n_gpus_per_node=4"], "n_gpus_per_node=4 and trainer.n_gpus_per_node=1"),
    ],
)
def test_what_a_cpu_cannot_do_is_refused(overrides: list[str], word: str) -> None:
    assert word in "\n".join(device_problems(config_of("laptop", *overrides)))


@pytest.mark.parametrize("engine", ["automodel", "fsdp_turbo", "mindspeed"])
def test_engines_without_a_trainer_config_are_refused_by_name(engine: str) -> None:
    with pytest.raises(ConfigError, match=f"model_engine={engine}: verl has trainer configs for"):
        compose_config([f"model_engine={engine}"])


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        *((f"{prefix}model_engine=megatron", "write model_engine=NAME") for prefix in ("+", "++")),
        ("~model_engine", "write model_engine=NAME"),
        ("+training_engine=megatron", "set model_engine instead"),
        ("~training_engine", "set model_engine instead"),
    ],
)
def test_an_engine_s_files_are_replaced_only(override: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose_config([override])
    (found,) = error.value.problems
    assert found.startswith(f"{override}: ") and remedy in found


def test_every_engine_has_its_settings() -> None:
    folder = Path(__file__).parents[3] / "config" / "training_engine"

    assert sorted(path.stem for path in folder.glob("*.yaml")) == sorted(TRAINING_ENGINES)
    assert sorted(ENGINES) == sorted(TRAINING_ENGINES)
