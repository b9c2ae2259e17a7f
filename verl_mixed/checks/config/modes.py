"""Modes of verl and settings of agent loops that would lose the mixture or mislead the trainer."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from agent_loop.calls.own_limits import OwnLimits
from agent_loop.limited import own_limits_of
from agent_loop.loop_settings import (
    ROUTE_BACKENDS,
    ROUTE_KEYS,
    STRING_STOPS,
)
from agent_loop.rewards.judge_options import JudgeOptions
from config.gateway import GATEWAY_LOOP
from config.lookup import at
from config.schema import LOOPS_OWN, TOOL_CONFIG, MixedConfig, ToolConfig
from config.tool_entries import differing_limits, without_secrets
from verl_mixed.run.sections import agent_loops, entry_of, loop_of, section_of, sound_sources

_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"

VERLS_AGENTS = {"tool_agent", "single_turn_agent"}
"""Agent loops that verl registers itself."""

_MANAGER = "agent_loop.loop_worker.MixedAgentLoopManager"

_MODES = ("mixed_sync", "mixed_colocate_async", "mixed_separate_async")
"""Trainers of the mixture; see `agent_loop.training.trainer`."""

_DATASET = {"path": "pkg://agent_loop.dataset", "name": "MixedRLHFDataset"}
_TOOL_DEADLINES = ("trajectory_s", "step_s")
"""Deadlines that a call of a tool may pass."""

_STORE = "transfer_queue.backend.storage_backend"
_SWITCH = "trainer.v1.separate_async.hybrid_rollout.enable_switch"
_FOR_ALL = {
    "max_turns": f"{_ROLLOUT}.multi_turn.max_assistant_turns",
    "max_response_length": "data.max_response_length",
}
"""Limit of a source -> the key that limits all sources, verl's own loops too."""


def mode_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Modes and settings of verl that would lose the mixture."""
    mode = at(config, "trainer.v1.trainer_mode")
    if mode not in _MODES:
        yield (
            f"trainer.v1.trainer_mode={mode!r}: no such trainer of the mixture; choose "
            f"{', '.join(_MODES)}"
        )
    if at(config, "skip.rollout_tq.enable"):
        yield (
            "skip.rollout_tq.enable=True: it puts saved rollouts past the replay buffer, which "
            "keeps the quotas; set it to false"
        )
    if at(config, "distillation.enabled"):
        yield (
            "distillation.enabled=True: training on a teacher's log-probs was never tried with the "
            "mixture; set it to false"
        )
    yield from _switch_problems(config)
    if (multi_turn := at(config, f"{_ROLLOUT}.multi_turn.enable")) is not True:
        yield (
            f"{_ROLLOUT}.multi_turn.enable={multi_turn!r}: agent loops work in turns; set it to "
            "true, and for single answers mixed.sources.<name>.agent=single_turn_agent"
        )
    if (store := at(config, _STORE)) != "SimpleStorage":
        yield f"{_STORE}={store!r}: no other store was tried; set it to SimpleStorage"
    if (given := at(config, "data.custom_cls")) != _DATASET:
        yield (
            f"data.custom_cls={given!r}: the dataset of the mixture gives rows their agent and "
            f"prompt; leave it at {_DATASET}"
        )
    if at(config, "data.mixture") is not None:
        yield (
            "data.mixture is for a recipe of verl's: shares are mixed.sources.<name>.ratio here; "
            "remove it"
        )
    sampler = at(config, "trainer.v1.sampler.custom_sampler.path")
    if sampler:
        yield (
            f"trainer.v1.sampler.custom_sampler.path={sampler!r}: the mixture has a sampler of its "
            "own, which keeps the quotas; set it to null"
        )
    if at(config, f"{_ACTOR}.shuffle"):
        yield (
            f"{_ACTOR}.shuffle=True: mini-batches would be drawn by chance and lose their quotas; "
            "set it to false"
        )
    workers = at(config, "data.dataloader_num_workers", 0)
    if workers:
        yield (
            f"data.dataloader_num_workers={workers!r}: the trainer reads each row itself when the "
            "plan draws it, which takes 0.04 ms for a text; set it to 0"
        )
    if at(config, f"{_ROLLOUT}.calculate_log_probs") is not True:
        yield (
            f"{_ROLLOUT}.calculate_log_probs: every sampled token is recorded with its log-prob, "
            "and an agent loop raises without one; set it to true"
        )
    limit = at(config, "data.train_max_samples", -1)
    if limit is not None and limit > 0:
        yield (
            f"data.train_max_samples={limit}: verl would leave rows out that the mixture plan "
            "counts on; name smaller files, or set it to -1"
        )
    if at(config, "data.filter_overlong_prompts"):
        yield (
            "data.filter_overlong_prompts=True: verl would leave rows out that the mixture plan "
            "counts on; set it to false, long prompts are named before the run starts"
        )


def _switch_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Settings with which verl ignores the switch of training GPUs to rollout, or delays requests.

    The check of unread keys reports the switch in other modes.
    """
    if not at(config, _SWITCH) or at(config, "trainer.v1.trainer_mode") != "mixed_separate_async":
        return
    if at(config, "actor_rollout_ref.hybrid_engine") is False:
        yield (
            f"{_SWITCH}=True with actor_rollout_ref.hybrid_engine=False: the training GPUs of "
            "mixed_separate_async then have no engine that could generate, and verl ignores the "
            "switch; set hybrid_engine=true, or enable_switch=false"
        )
    if at(config, f"{_ROLLOUT}.name") == "sglang":
        yield (
            f"{_SWITCH}=True with {_ROLLOUT}.name='sglang': verl's SGLang server keeps requests "
            "that arrive when mixed_separate_async takes its GPUs back for training, until they "
            "generate again, which may be steps later; choose vllm, or set it to false"
        )


def loop_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Settings of the agent loops that contradict one another or the rollout backend."""
    mixed, _ = section_of(MixedConfig, at(config, "mixed", {}), "mixed")
    tools, _ = section_of(ToolConfig, at(config, TOOL_CONFIG, {}), TOOL_CONFIG)
    if mixed is None or tools is None:
        return  # the check of sections reports it
    yield from _foreign_problems(config)
    named = {
        name: source.agent
        for name, source in sound_sources(config).items()
        if source.takes_part and source.agent is not None  # else `data_problems` reads the rows
    }
    yield from filter(None, (truncation_problem(config, *pair) for pair in named.items()))
    yield from _verdict_problems(config)
    yield from _route_problems(config)
    backend = at(config, f"{_ROLLOUT}.name")
    if mixed.turns.stop_at_tag == "strings" and backend not in STRING_STOPS:
        yield (
            f"mixed.turns.stop_at_tag='strings' with {_ROLLOUT}.name={backend!r}: only "
            f"{', '.join(sorted(STRING_STOPS))} stop at strings; choose auto"
        )
    yield from _late_problems(f"{TOOL_CONFIG}.", tools.timeout, _TOOL_DEADLINES, mixed)
    yield from _own_limit_problems(mixed)
    if at(config, f"{_ROLLOUT}.agent.agent_loop_manager_class") != _MANAGER:
        yield (
            f"{_ROLLOUT}.agent.agent_loop_manager_class: want {_MANAGER}, which counts what agent "
            "loops raise and judges them; remove the override"
        )


def _own_limit_problems(mixed: MixedConfig) -> Iterator[str]:
    """Limits of single tools and judges that contradict one another or the deadlines."""
    owners: list[tuple[str, OwnLimits]] = []
    for name, source in mixed.sources.items():
        if not source.takes_part:
            continue
        with suppress(ValueError):  # a wrong reward, which the check of sources reports
            alone = mixed.model_copy(update={"sources": {name: source}})
            owners += [(f"mixed.sources.{name}", owner) for owner in own_limits_of(alone)]
    yield from differing_limits(owners)
    for place, owner in owners:
        if owner.timeout is not None:
            deadlines = ("reward_s",) if isinstance(owner, JudgeOptions) else _TOOL_DEADLINES
            named = f"{place}: {without_secrets(owner.target)!r} with "
            yield from _late_problems(named, owner.timeout, deadlines, mixed)


def _late_problems(
    place: str, timeout_s: float, deadlines: Iterable[str], mixed: MixedConfig
) -> Iterator[str]:
    """Deadlines that pass before the timeout of a call does."""
    for name in deadlines:
        longest = getattr(mixed.deadlines, name)
        if longest is not None and timeout_s >= longest:
            yield (
                f"{place}timeout={timeout_s:g} is not below mixed.deadlines.{name}={longest:g}: a "
                "server that hangs would end trajectories by the deadline, which does not name "
                "it; lower the timeout or raise the deadline"
            )


def _foreign_problems(config: Mapping[str, Any]) -> list[str]:
    """Settings of a source that verl's own agent loops do not read."""
    ours = ("max_turns", "max_response_length", "observation_style")
    return [
        f"mixed.sources.{name}.{key}={getattr(source, key)!r} with agent={source.agent!r}: verl's "
        f"own loops read no limits of a source; set {_FOR_ALL.get(key, 'it')} for all, or use "
        "another agent"
        for name, source in sound_sources(config).items()
        if source.takes_part and source.agent in VERLS_AGENTS
        for key in ours
        if getattr(source, key) is not None
    ]


def truncation_problem(config: Mapping[str, Any], name: str, agent: str) -> str | None:
    """What is wrong if a source masks truncated trajectories and its agent does not report all."""
    own = sound_sources(config)[name].on_truncated
    key = f"mixed.sources.{name}.on_truncated" if own else "mixed.on_truncated"
    if agent != "tool_agent" or (own or at(config, "mixed.on_truncated")) != "mask":
        return None
    return (
        f"{key}='mask' with agent={agent!r} of source={name!r}: verl's loop does not say that its "
        f"turns were used up, so such a trajectory would be trained; set "
        f"++mixed.sources.{name}.on_truncated=train, or use another agent"
    )


def turn_agents(config: Mapping[str, Any]) -> set[str]:
    """Agents whose loop is a `TurnAgentLoop`; a class that cannot be imported counts as none."""
    loops, _ = agent_loops(config)
    return {
        name for name, entry in (loops or {}).items() if loop_of(entry).startswith("agent_loop.")
    }


def _verdict_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Sources that leave the reward to a loop which computes none."""
    for name, source in sound_sources(config).items():
        is_ours = source.agent in turn_agents(config) | VERLS_AGENTS
        loop = loop_of(entry_of(config, str(source.agent)))
        judges_itself = source.environment is not None or loop == GATEWAY_LOOP
        if source.reward == LOOPS_OWN and is_ours and not judges_itself:
            yield (
                f"mixed.sources.{name}.reward={LOOPS_OWN!r} with agent={source.agent!r}: this loop "
                "computes no reward itself; name another reward"
            )


def _route_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Router replay of models with experts: routes that nobody records, or nobody reads."""
    key, metrics = "enable_rollout_routing_replay", "moe_load_balance_metrics_interval"
    recorded, interval = at(config, f"{_ROLLOUT}.{key}"), at(config, f"{_ROLLOUT}.{metrics}")
    strategy = at(config, f"{_ACTOR}.strategy")
    mode_key = f"{_ACTOR}.{strategy}.router_replay.mode"
    mode = at(config, mode_key)
    if not recorded:
        if mode == "R3":
            yield f"{mode_key}='R3': the engine records no routes; set {_ROLLOUT}.{key}=true"
        if interval:
            yield f"{_ROLLOUT}.{metrics}={interval}: no routes are recorded; set {key}=true, or 0"
        return
    if mode == "R2" or (mode != "R3" and not interval):
        yield (
            f"{_ROLLOUT}.{key}=True with {mode_key}={mode!r}: the trainer replays the engine's "
            "routes in the mode R3 only (megatron, veomni); set that, or false"
        )
    if (backend := at(config, f"{_ROLLOUT}.name")) not in ROUTE_BACKENDS:
        yield (
            f"{_ROLLOUT}.{key}=True with {_ROLLOUT}.name={backend!r}: only "
            f"{', '.join(sorted(ROUTE_BACKENDS))} return routes; set it to false"
        )
    path = Path(str(at(config, "actor_rollout_ref.model.path"))) / "config.json"
    with suppress(OSError, ValueError):  # a hub's name, or reported by the check of the model
        model = json.loads(path.read_text())
        model = model.get("text_config", model)
        if lacking := [name for name in ROUTE_KEYS if name not in model]:
            yield (
                f"{_ROLLOUT}.{key}=True: {path} has no {' and no '.join(lacking)}, the shape of "
                "routes; use a model with experts, or set it to false"
            )


def checkpoint_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Checkpoints that would be written, kept or continued otherwise than the config says."""
    actor, critic = (at(config, f"trainer.max_{role}_ckpt_to_keep") for role in ("actor", "critic"))
    if actor != critic:
        yield (
            f"trainer.max_critic_ckpt_to_keep={critic!r} with trainer.max_actor_ckpt_to_keep="
            f"{actor!r}: a checkpoint is kept or removed as a whole; set the actor's only, the "
            "critic's follows it"
        )
    given, folder = at(config, "trainer.default_local_dir"), at(config, "mixed.run_dir")
    if os.path.abspath(str(given)) != os.path.abspath(f"{folder}/checkpoints"):
        yield (
            f"trainer.default_local_dir={given!r}: checkpoints belong to one run and are in "
            f"{folder}/checkpoints, where resume, export and status look; leave it out (the folder "
            "may be a link to another disk)"
        )
    for key, why in _CHECKPOINT_KEYS.items():
        if value := at(config, key):
            yield f"{key}={value!r}: {why}"
    yield from _resume_problems(config)


_ASYNC_SAVE = "a checkpoint would count as whole before its weights are written; set it to false"
_CHECKPOINT_KEYS = {
    "trainer.default_hdfs_dir": "verl uploads no FSDP checkpoint, and no run resumes from there; "
    "set it to null, and upload in a trainer.checkpoint_callback_class",
    "trainer.remove_previous_ckpt_in_save": "it is verl's old name; set "
    "trainer.max_actor_ckpt_to_keep=1",
    "trainer.del_local_ckpt_after_load": "it removes copies of remote checkpoints, and checkpoints "
    "are local; set it to false",
    f"{_ACTOR}.checkpoint.async_save": _ASYNC_SAVE,
    "critic.checkpoint.async_save": _ASYNC_SAVE,
}
"""Keys of verl that must not be set -> the rule and the remedy."""


def _resume_problems(config: Mapping[str, Any]) -> list[str]:
    """A `resume_from_path` that is no checkpoint, or one that was interrupted."""
    if at(config, "trainer.resume_mode") != "resume_path":
        return []
    given = at(config, "trainer.resume_from_path")
    if isinstance(given, str):
        folder = Path(given)
        if re.fullmatch(r"global_step_\d+", folder.name) and (folder / "data.pt").is_file():
            return []
    return [
        f"trainer.resume_from_path={given!r}: want the folder global_step_N of a checkpoint, with "
        "the data.pt that one has which was not interrupted; correct it"
    ]
