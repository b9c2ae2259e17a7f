"""Training engines (`model_engine`): which are supported, their parallel sizes and data ranks.

The arithmetic is verl's at 0.9.1: the device meshes and `get_data_parallel_size` of
`workers/engine/*/transformer_impl.py`. A test compares the two. Engines of the rollout are checked
in `verl_mixed.checks.config.devices`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from config.lookup import at
from verl_mixed.checks.config.algorithm import has_critic, has_reference, is_count
from verl_mixed.run.compose import NO_SUCH_ENGINE
from verl_mixed.run.sections import sound_sources

_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_ROLLOUT = "actor_rollout_ref.rollout"
_CRITIC = "critic"
ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What verl's config calls a training engine."""

    section: str
    """Section of the actor and of the reference model with the engine's settings."""

    critic: str
    """The same of the critic."""

    strategies: tuple[str, ...]
    """Values of `strategy` that choose this engine."""

    splits_heads: str
    """Key of the actor with the size that must divide the attention heads."""

    sizes: tuple[str, ...] = ()
    """Keys of the section that are parallel sizes."""

    once: tuple[str, ...] = ()
    """More keys that shape its groups of ranks, if it makes them once in a process. The model that
    is built first decides these keys and `sizes`; those of the other models are ignored."""


ENGINES: Mapping[str, Engine] = {
    "dp": Engine(
        section="fsdp_config",
        critic="fsdp",
        strategies=("fsdp2", "fsdp"),
        splits_heads="ulysses_sequence_parallel_size",
    ),
    "megatron": Engine(
        section="megatron",
        critic="megatron",
        strategies=("megatron",),
        splits_heads="megatron.tensor_model_parallel_size",
        sizes=(
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
        ),
        once=("expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size"),
    ),
    "torchtitan": Engine(
        section="torchtitan",
        critic="torchtitan",
        strategies=("torchtitan",),
        splits_heads="torchtitan.tensor_parallel_size",
        sizes=(
            "tensor_parallel_size",
            "data_parallel_shard_size",
            "data_parallel_replicate_size",
            "expert_parallel_size",
        ),
    ),
    "veomni": Engine(
        section="veomni",
        critic="veomni",
        strategies=("veomni",),
        splits_heads="veomni.ulysses_parallel_size",
        sizes=("ulysses_parallel_size", "expert_parallel_size"),
        once=("fsdp_size",),
    ),
}
"""The values of `model_engine` for which verl has trainer configs."""

_REFUSED: Mapping[str, tuple[Any, str]] = {
    "megatron.dynamic_context_parallel": (False, "it was never tried with this project"),
    "torchtitan.pipeline_parallel_size": (1, "verl has no forward pass over pipeline stages"),
    "torchtitan.context_parallel_size": (
        1,
        "verl gives different rows to the ranks that would share a sequence",
    ),
}
"""Key below a model -> the only value that is supported, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How an engine lays one model over all training GPUs."""

    ranks: int
    """Data-parallel ranks; each trains an equal part of a batch."""

    sequence_ranks: int
    """Ranks that share the tokens of one sequence."""

    head_ranks: int
    """Ranks that share the attention heads of one layer."""


def engine_of(config: Mapping[str, Any]) -> Engine | None:
    """The run's training engine; None for a `model_engine` that is not supported."""
    return ENGINES.get(at(config, "model_engine", "dp"))


def layout_of(config: Mapping[str, Any], part: str = _ACTOR) -> Layout | None:
    """The layout of the actor, of the reference model or of the critic.

    `part` is its key in the run config. None if sizes are wrong; `engine_problems` reports which.
    """
    layout, problems = _layout(config, part)
    return None if problems else layout


def engine_problems(config: Mapping[str, Any]) -> list[str]:
    """Training engines that are not supported, and sizes that do not fit the training GPUs."""
    name, engine = at(config, "model_engine", "dp"), engine_of(config)
    if engine is None:
        return [f"model_engine={name!r}: {NO_SUCH_ENGINE}"]
    return list(_section_problems(config, name, engine)) or [
        *_feature_problems(config, name, engine),
        *_layout_problems(config, engine),
    ]


def _section_problems(config: Mapping[str, Any], name: str, engine: Engine) -> Iterator[str]:
    """Strategies and sections of another engine, which verl's config classes refuse late."""
    for part in [_ACTOR, _REF] + [_CRITIC] * has_critic(config):
        strategy = at(config, f"{part}.strategy")
        if strategy not in engine.strategies:
            others = [each for each, one in ENGINES.items() if strategy in one.strategies]
            remedy = f"set model_engine={others[0]} to have it" if others else NO_SUCH_ENGINE
            yield (
                f"{part}.strategy={strategy!r} with model_engine={name!r}: want "
                f"{' or '.join(engine.strategies)}; {remedy}"
            )
        is_critic = part == _CRITIC
        own = engine.critic if is_critic else engine.section
        others = {other.critic if is_critic else other.section for other in ENGINES.values()}
        for section in sorted(others - {own}):
            if at(config, f"{part}.{section}") is not None:
                yield (
                    f"{part}.{section} with model_engine={name!r}: it is a section of another "
                    f"training engine, and verl refuses it after minutes; set model_engine="
                    f"{_engine_with(section)}, or remove it (settings of {name} are below "
                    f"{part}.{own})"
                )


def _engine_with(section: str) -> str:
    """The `model_engine` whose settings are in this section of the actor or the critic."""
    return next(name for name, one in ENGINES.items() if section in (one.section, one.critic))


def _models(config: Mapping[str, Any]) -> list[str]:
    """The keys of the models of a run, the actor first."""
    # torchtitan has no critic, which is a problem of its own
    with_critic = has_critic(config) and at(config, "model_engine") != "torchtitan"
    return [_ACTOR] + [_REF] * has_reference(config) + [_CRITIC] * with_critic


def _feature_problems(config: Mapping[str, Any], name: str, engine: Engine) -> Iterator[str]:
    """What an engine cannot do at all."""
    for part in _models(config):
        for key, (supported, why) in _REFUSED.items():
            if (value := at(config, f"{part}.{key}", supported)) != supported:
                yield f"{part}.{key}={value!r}: {why}; set it to {str(supported).lower()}"
    layout = layout_of(config)
    if name in ("dp", "veomni") and layout is not None and layout.sequence_ranks > 1:
        ulysses = f"{_ACTOR}.{engine.splits_heads}={layout.sequence_ranks}"
        if not at(config, "actor_rollout_ref.model.use_remove_padding"):
            yield (
                f"{ulysses}: a sequence can only be split if rows are packed; set "
                "actor_rollout_ref.model.use_remove_padding=true"
            )
        attention = at(config, ATTENTION, "flash_attention_2")
        if name == "dp" and "flash" not in str(attention):
            yield (
                f"{ulysses} with {ATTENTION}={attention!r}: verl gathers the parts of a sequence "
                "in flash attention only, so each rank would attend to its own part; set it to 1, "
                "or choose flash_attention_2 (GPUs only)"
            )
    if name != "torchtitan":
        return
    if has_critic(config):
        yield (
            "model_engine='torchtitan' with algorithm.adv_estimator=gae: verl has no critic for "
            "this engine; choose another engine, or an estimator without a critic"
        )
    common = at(config, f"{_ROLLOUT}.temperature")
    for source, settings in sound_sources(config).items():
        if settings.takes_part and settings.temperature not in (None, common):
            yield (
                f"mixed.sources.{source}.temperature={settings.temperature} with "
                f"model_engine='torchtitan': this engine divides all rows by one temperature "
                f"({_ROLLOUT}.temperature={common}); leave it out, or choose another engine"
            )


def _layout_problems(config: Mapping[str, Any], engine: Engine) -> Iterator[str]:
    """Sizes that do not fit the GPUs, and models that are laid out in different ways."""
    actor, problems = _layout(config, _ACTOR)
    yield from problems
    for part in _models(config)[1:] if not problems else ():
        layout, of_part = _layout(config, part)
        yield from of_part
        for name in (*engine.sizes, *engine.once) if engine.once else ():
            key = f"{engine.section}.{name}"
            first, other = (at(config, f"{model}.{key}") for model in (_ACTOR, part))
            if other != first:
                yield (
                    f"{part}.{key}={other!r} and {_ACTOR}.{key}={first!r}: the groups of ranks "
                    "are made once in a process, for the model that is built first, so one value "
                    "would be ignored; make them equal"
                )
        if not of_part and not engine.once and layout.ranks != actor.ranks:
            yield (
                f"{part} has {layout.ranks} data-parallel ranks and {_ACTOR} has {actor.ranks}: a "
                "batch is laid out for the actor's ranks once; give both the same parallel sizes"
            )


def _layout(config: Mapping[str, Any], part: str) -> tuple[Layout, list[str]]:
    """The layout, and why it cannot be; without problems the layout is exact."""
    unknown = Layout(ranks=1, sequence_ranks=1, head_ranks=1)
    name, engine = at(config, "model_engine", "dp"), engine_of(config)
    per_node, nodes = at(config, "trainer.n_gpus_per_node"), at(config, "trainer.nnodes")
    if engine is None or not is_count(per_node) or not is_count(nodes):
        return unknown, []  # other checks report it
    section = f"{part}.{engine.critic if part == _CRITIC else engine.section}"
    given = at(config, section) or {}
    if name == "dp":
        sizes: dict[str, Any] = {"ulysses_sequence_parallel_size": _ulysses(config, part, given)}
    else:
        sizes = {key: given.get(key) for key in engine.sizes}
    if name == "megatron":
        tensor = sizes["tensor_model_parallel_size"]
        sizes["expert_tensor_parallel_size"] = given.get("expert_tensor_parallel_size") or tensor
    if wrong := {key: size for key, size in sizes.items() if not is_count(size)}:
        named = ", ".join(f"{key}={size!r}" for key, size in wrong.items())
        return unknown, [f"{section}: {named}: want whole numbers >= 1"]
    make = {"dp": _dp, "megatron": _megatron, "torchtitan": _torchtitan, "veomni": _veomni}[name]
    gpus = nodes * per_node
    layout, rules = make(gpus, sizes, given)
    return layout, [
        f"{section}: {rule}, and there are {gpus} training GPUs (trainer.n_gpus_per_node="
        f"{per_node} x trainer.nnodes={nodes}); change one of them"
        for rule in rules
    ]


def _ulysses(config: Mapping[str, Any], part: str, given: Mapping[str, Any]) -> Any:
    """The sequence-parallel size of FSDP, which verl's actor takes from two places."""
    key = "ulysses_sequence_parallel_size"
    of_part = at(config, f"{part}.{key}", 1)
    return of_part if part != _CRITIC and of_part != 1 else given.get(key, 1)


_Made = tuple[Layout, list[str]]
"""A layout over a number of GPUs, and the rules that the sizes break."""


def _divides(gpus: int, sizes: Mapping[str, int], *names: str) -> list[str]:
    product = math.prod(sizes[name] for name in names)
    shown = " x ".join(f"{name}={sizes[name]}" for name in names)
    return [] if gpus % product == 0 else [f"{shown} must divide the number of GPUs"]


def _sharded(ranks: int, given: Mapping[str, Any]) -> list[str]:
    """FSDP's groups of `fsdp_size` ranks; a negative number, or all ranks, is one group."""
    size = given.get("fsdp_size", -1)
    if isinstance(size, int) and (size < 0 or (size and ranks % min(size, ranks) == 0)):
        return []
    return [f"fsdp_size={size!r} must divide the {ranks} ranks, or be -1"]


def _dp(gpus: int, sizes: Mapping[str, int], given: Mapping[str, Any]) -> _Made:
    (ulysses,) = sizes.values()
    layout = Layout(ranks=gpus // ulysses, sequence_ranks=ulysses, head_ranks=ulysses)
    return layout, _divides(gpus, sizes, *sizes) + _sharded(gpus, given)


def _veomni(gpus: int, sizes: Mapping[str, int], given: Mapping[str, Any]) -> _Made:
    ulysses = sizes["ulysses_parallel_size"]
    layout = Layout(ranks=gpus // ulysses, sequence_ranks=ulysses, head_ranks=ulysses)
    rules = [rule for name in sizes for rule in _divides(gpus, sizes, name)]
    return layout, rules or _sharded(layout.ranks, given)


def _megatron(gpus: int, sizes: Mapping[str, int], given: Mapping[str, Any]) -> _Made:
    tensor, pipeline, context, expert, expert_tensor = sizes
    layout = Layout(
        ranks=gpus // (sizes[tensor] * sizes[pipeline] * sizes[context]),
        sequence_ranks=sizes[context],
        head_ranks=sizes[tensor],
    )
    return layout, [
        *_divides(gpus, sizes, tensor, pipeline, context),
        *_divides(gpus, sizes, expert_tensor, expert, pipeline),
    ]


def _torchtitan(gpus: int, sizes: Mapping[str, int], given: Mapping[str, Any]) -> _Made:
    tensor, shard, replicate, expert = sizes
    layout = Layout(
        ranks=sizes[shard] * sizes[replicate],
        sequence_ranks=sizes[tensor],
        head_ranks=sizes[tensor],
    )
    factors = (tensor, shard, replicate)
    rules = []
    if math.prod(sizes[name] for name in factors) != gpus:
        shown = " x ".join(f"{name}={sizes[name]}" for name in factors)
        rules.append(f"{shown} must be the number of GPUs")
    if sizes[shard] * sizes[tensor] % sizes[expert]:
        rules.append(f"{expert}={sizes[expert]} must divide {shard} x {tensor}")
    return layout, rules
