"""Settings of agent loops, and state that all trajectories of a process share.

Read from the run config once per process. Of verl only the keys of its config are used.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from agent_loop.calls.loop_throttle import LoopThrottle
from agent_loop.deadline import Deadline
from agent_loop.loop_lag import LoopLag
from agent_loop.rewards.attempt import Reward
from agent_loop.rewards.custom import LoopReward
from agent_loop.rewards.registry import reward_for
from agent_loop.rewards.terms import with_terms
from agent_loop.turns.turn_loop import Budget
from agent_loop.watchdog import Watchdog
from config.schema import (
    LOOPS_OWN,
    TOOL_CONFIG,
    MixedConfig,
    ToolConfig,
    default_reward,
    load_section,
)

logger = logging.getLogger(__name__)

DEFAULT_SERVER_URL = "http://127.0.0.1:8100"
"""Where `verl-mixed serve-tools` listens, for a config without `tool_config`, where TOOL_SERVER_URL
is not set."""

STRING_STOPS = frozenset({"hf", "vllm", "vllm_cpu", "openai"})
"""Backends that can stop at a string. vLLM needs a tokenizer for that, with which verl starts it
(workers/rollout/vllm_rollout/vllm_async_server.py:328 at 0.9.1)."""

STARTS_PER_PASS = 4
"""Trajectories that start in one pass of the event loop. A start renders a prompt and takes some
milliseconds; all trajectories of a step at once would stop the loop for seconds."""

ROUTE_BACKENDS = frozenset({"vllm", "sglang"})
"""Backends that return the experts which they chose for each token."""

ROUTE_KEYS = ("num_hidden_layers", "num_experts_per_tok")
"""Keys of a model's config: layers and experts of a token, the shape of the engine's routes."""


def most_open_requests(max_num_seqs: int | None, workers: int) -> int:
    """Requests that each of `workers` agent loop workers may have open at one rollout server.

    A rollout server is a Ray actor with max(1000, max_num_seqs + 16) slots, where 16 are for verl's
    control calls. While weights are synced, requests wait inside the server and keep their slots.
    If they have all of them, the call that would let them go on never gets one, and the run hangs.

    The workers together stay within the slots unless there are more workers than that, which
    `verl-mixed check` refuses.

    Source: `RolloutReplica.max_concurrency` (workers/rollout/replica.py:257 at 0.9.1), verl#7587
    and verl#7990.
    """
    slots = max(1000, (max_num_seqs or 0) + 16)  # verl refuses None, a server at a URL has none
    return max(1, (slots - 16) // workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """The part of the run config that agent loops read, and their shared state."""

    mixed: MixedConfig
    """Without sources in a recipe of verl's own, which has no `mixed`."""

    tools: ToolConfig
    budget: Budget
    """Limits of sources that have none of their own."""

    trajectory_s: float = 300.0
    """Seconds for one trajectory."""

    max_actions: int
    """Actions that one turn may ask for."""

    backend: str
    """verl's name of the rollout backend."""

    sampling: Mapping[str, float]
    """Temperature and top_p of training, for sources that have none of their own."""

    watchdog: Watchdog
    call_format: str | None = None
    """verl's name of the format of native tool calls (`multi_turn.format`)."""

    lag: LoopLag = field(default_factory=LoopLag)
    """Lag of this process's event loop."""

    starts: LoopThrottle = field(default_factory=lambda: LoopThrottle(STARTS_PER_PASS))
    """Trajectories pass it when they start."""

    error_counts: Counter[str] = field(default_factory=Counter)
    """Kind of an error in a loop -> how often it occurred."""

    @property
    def judges(self) -> bool:
        """Whether rewards of this project judge. Without sources, verl's reward loop does."""
        return bool(self.mixed.sources)

    def deadline_of(self, step_deadline: float | None = None) -> Deadline:
        """The deadline of a trajectory that begins now. That of its step is on
        `time.monotonic`."""
        deadline = Deadline.after(self.trajectory_s, "trajectory_s", time.monotonic)
        if step_deadline is None:
            return deadline
        return deadline.within(max(0.0, step_deadline - time.monotonic()), "step_s")

    def reward_deadline(self) -> Deadline:
        """The deadline of a reward that is computed from now on."""
        return Deadline.after(self.mixed.deadlines.reward_s, "reward_s")

    def budget_of(self, source: str) -> Budget:
        """Limits of one trajectory of a source."""
        budget = self.budget
        own = self.mixed.sources.get(source)
        if own is None:
            return budget
        length = own.max_response_length or budget.response_length
        return replace(
            budget,
            max_turns=own.max_turns or budget.max_turns,
            response_length=min(length, budget.response_length),
        )

    def sampling_of(self, source: str, given: dict[str, Any]) -> dict[str, Any]:
        """verl's sampling parameters, with the source's own values; validation's stay."""
        own = self.mixed.sources.get(source)
        changed = {
            name: getattr(own, name)
            for name, common in self.sampling.items()
            if own is not None and getattr(own, name) is not None and given.get(name) == common
        }
        return {**given, **changed}

    def observation_style_of(self, source: str) -> str:
        """`inline` or `chat`."""
        own = self.mixed.sources.get(source)
        return (own and own.observation_style) or self.mixed.turns.observation_style

    def on_truncated_of(self, source: str) -> str:
        """`train` or `mask`."""
        own = self.mixed.sources.get(source)
        return (own and own.on_truncated) or self.mixed.on_truncated

    def reward_name_of(self, source: str) -> str:
        own = self.mixed.sources.get(source)
        return default_reward(source) if own is None else own.reward_name(source)

    def reward_of(self, source: str, verdict: Mapping[str, Any] | None = None) -> Reward:
        """The source's reward, with its options and terms; see `reward_for` for errors.

        A loop's own `verdict` is the reward if the source names none, or `loop`. If the source
        names another, that one is the reward, and the verdict is recorded beside it.
        """
        own, name = self.mixed.sources.get(source), self.reward_name_of(source)
        reward = reward_for(name, own.reward_options if own is not None else {})
        if verdict is not None:
            named = reward if own is not None and own.reward not in (None, LOOPS_OWN) else None
            reward = LoopReward(verdict=verdict, named=named)
        return reward if own is None else with_terms(reward, own.reward_terms)

    def log_loop_error(self, source: str, row_id: str, error: str, trace: str) -> None:
        """Log the first error of a kind with its traceback; later the 2nd, 4th, 8th and so on."""
        kind = f"{source} {error.split(':')[0]} {trace.splitlines()[-3:-2]}"
        self.error_counts[kind] += 1
        count = self.error_counts[kind]
        if count == 1:
            logger.error("agent loop raised source=%s row_id=%s\n%s", source, row_id, trace)
        elif count & (count - 1) == 0:
            logger.error(
                "agent loop raised again source=%s row_id=%s times=%d error=%s",
                *(source, row_id, count, error),
            )


# The config is kept too: otherwise a new object could get the id of a deleted one.
_settings: dict[int, tuple[DictConfig, LoopSettings]] = {}


def settings_of(config: DictConfig) -> LoopSettings:
    """The settings of a run config, which are read once in a process.

    Raises:
        ConfigError: `mixed` or `tool_config` has a mistake.
        ValueError: routes of experts are to be replayed in a recipe of verl's own.
    """
    if id(config) not in _settings:
        _settings[id(config)] = config, _read(config)
    return _settings[id(config)][1]


def _read(config: DictConfig) -> LoopSettings:
    rollout = config.actor_rollout_ref.rollout
    tool_values = {
        "server_url": os.environ.get("TOOL_SERVER_URL") or DEFAULT_SERVER_URL,
        **_given(config, TOOL_CONFIG),
    }
    tools = load_section(ToolConfig, tool_values, TOOL_CONFIG)
    # A recipe of verl's own has none of these keys. Its folder keeps the limiter of earlier starts.
    folder = OmegaConf.select(config, "trainer.default_local_dir", default=".")
    mixed_values = {
        "experiment": "",
        "run_dir": str(Path(folder).absolute()),
        "rate_limit": {"on_config_change": "refuse" if tools.rate_limit_file else "adopt"},
        **_given(config, "mixed"),
    }
    mixed = load_section(MixedConfig, mixed_values, "mixed")
    if not mixed.sources and rollout.get("enable_rollout_routing_replay"):
        raise ValueError(
            "rollout.enable_rollout_routing_replay=true: verl's worker gets no routes from this "
            "project's loops; set it to false, or train with `verl-mixed train`"
        )
    multi_turn, deadlines = rollout.multi_turn, mixed.deadlines
    return LoopSettings(
        mixed=mixed,
        tools=tools,
        budget=Budget(
            # a turn has at least one token
            max_turns=multi_turn.max_assistant_turns or rollout.response_length,
            response_length=rollout.response_length,
            max_turn_length=multi_turn.get("max_turn_length"),
            max_result_length=mixed.turns.max_observation_length,
            answer_reserve=mixed.turns.answer_reserve,
        ),
        trajectory_s=deadlines.trajectory_s,
        max_actions=multi_turn.max_parallel_calls,
        call_format=multi_turn.get("format"),
        backend=rollout.name,
        sampling={"temperature": rollout.temperature, "top_p": rollout.top_p},
        watchdog=Watchdog(deadlines.stuck_after_s),
    )


def _given(config: DictConfig, path: str) -> dict[str, Any]:
    """The values below a key of the config; empty if there is no such key."""
    values: Any = OmegaConf.select(config, path)
    return {} if values is None else cast(Any, OmegaConf.to_container(values, resolve=True))
