"""Hosts every agent loop of a process: counts what it raises, records what the engine returned.

verl adapter: `AgentLoopWorkerTQ` and `AgentLoopManagerTQ` (trainer/ppo/v1/agent_loop_tq.py at
0.9.1), chosen by `rollout.agent.agent_loop_manager_class`. verl takes a loop that raises for a
failed group and shows it nowhere; here it is one trajectory without gradient, counted and named.
Loops that are not ours (verl's `tool_agent` and `single_turn_agent`, or a user's) get what ours
have: a deadline, the watchdog, the source's reward over the model's own words, and a record.
"""

import asyncio
import math
import time
import traceback
from contextvars import ContextVar
from typing import Any

import hydra
import ray
from omegaconf import DictConfig, OmegaConf
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopOutput,
    DictConfigWrap,
    ToolListWrap,
    _agent_loop_registry,
)
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from agent_loop.compat import timeout
from agent_loop.foreign_loop import rollout_of
from agent_loop.judging import judge
from agent_loop.loop_settings import settings_of
from agent_loop.observation_style import codec_of
from agent_loop.tools.client import shared_client
from agent_loop.tools.protocol import ToolError, ToolUnavailable
from agent_loop.trajectory import StopReason, Trajectory
from agent_loop.turn_agent_loop import TurnAgentLoop, output_of
from agent_loop.turn_loop import Rollout
from agent_loop.watchdog import waits_for

_turns: ContextVar[list[Any] | None] = ContextVar("engine_turns", default=None)


class _Server:
    """A rollout server whose request ends when nobody waits for it any more.

    Ray does not pass on the cancellation of an `await` to an actor: without this a request past its
    deadline is decoded to its end.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.generate = self

    async def remote(self, *args: Any, **kwargs: Any) -> Any:
        reference = self._handle.generate.remote(*args, **kwargs)
        try:
            return await reference
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise


class _RecordingClient:
    """verl's server client (workers/rollout/llm_server.py), with the engine's answers of the
    current trajectory kept aside, and requests that are cancelled with their trajectory."""

    def __init__(self, client: Any) -> None:
        self._client = client
        acquire = client._acquire_server

        async def acquire_server(*args: Any, **kwargs: Any) -> tuple[Any, _Server]:
            server_id, handle = await acquire(*args, **kwargs)
            return server_id, _Server(handle)

        client._acquire_server = acquire_server

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        turns = _turns.get()
        waits_for("engine", turn=len(turns or []) + 1)
        try:
            output = await self._client.generate(*args, **kwargs)
        except Exception as error:
            raise ToolUnavailable(
                f"no tokens from the rollout server: {type(error).__name__}: {error}", tool="engine"
            ) from error
        if turns is not None:
            turns.append(output)
        waits_for("tool")
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


_TheirWorker: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class  # pyright: ignore[reportAttributeAccessIssue]


class MixedAgentLoopWorker(_TheirWorker):
    """verl's worker; see the module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settings = settings_of(self.config)
        self.llm_client = _RecordingClient(self.llm_client)
        self._watchdog: asyncio.Task[None] | None = None

    async def generate_sequences(self, batch: Any) -> None:
        if self._watchdog is None:
            self._watchdog = asyncio.create_task(self.settings.watchdog.run())
        await super().generate_sequences(batch)

    async def _run_agent_loop(
        self,
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        *,
        agent_name: str,
        trace: bool = True,
        **row: Any,
    ) -> None:
        source, row_id = row["data_source"], row["extra_info"]["row_id"]
        with self.settings.watchdog.watch(source, row_id):
            turns: list[Any] = []
            token = _turns.set(turns)
            try:
                output = await self._host(agent_name, sampling_params, row, turns)
            finally:
                _turns.reset(token)
            waits_for("transfer queue")
            await self._agent_loop_postprocess(output, trajectory["validate"], **row)

    async def _host(
        self,
        agent_name: str,
        sampling_params: dict[str, Any],
        row: dict[str, Any],
        turns: list[Any],
    ) -> AgentLoopOutput:
        """Run a loop to an output that has its reward and its record, whatever it does."""
        settings, source = self.settings, row["data_source"]
        began, limit_s = time.monotonic(), math.inf
        try:
            loop = self._make_loop(agent_name)
            budget = settings.budget_of(source, row.get("step_deadline"))
            # Ours keep their own deadline, and what they have at it; judging comes on top.
            is_ours = isinstance(loop, TurnAgentLoop)
            over_s = settings.mixed.deadlines.reward_s + 1 if is_ours else 0.0
            limit_s = budget.timeout_s + over_s
            sampling = sampling_params if is_ours else settings.sampling_of(source, sampling_params)
            async with timeout(limit_s):
                output = await loop.run(sampling, **row)
            if isinstance(output, list):
                raise TypeError(
                    f"agent={agent_name} returned {len(output)} outputs for one trajectory: one is "
                    "expected, since a group's statistics count each as a member; merge them"
                )
            if "mixed" in output.extra_fields:
                return output
            rollout = rollout_of(output, turns, codec_of(self.tokenizer), settings, source)
        except Exception as error:
            rollout = self._lost(error, is_late=time.monotonic() - began >= limit_s)
        tools: Any = None  # a lost trajectory is not judged
        if not rollout.is_lost:
            tools = (await shared_client(settings.tools, settings.mixed)).for_source(source)
        reward_s = settings.mixed.deadlines.reward_s
        parts = await judge(rollout, row, settings.reward_of(source), tools, reward_s)
        if rollout.loop_error is not None:
            row_id = row["extra_info"]["row_id"]
            settings.name_once(source, row_id, rollout.fault or "", rollout.loop_error)
        versions = [turn.extra_fields.get("global_steps") or 0 for turn in turns]
        return output_of(rollout, parts, settings, versions)

    def _make_loop(self, agent_name: str) -> Any:
        if agent_name not in _agent_loop_registry:
            raise LookupError(
                f"no agent={agent_name!r}: there are {sorted(_agent_loop_registry)}; add it to "
                "rollout.agent.agent_loop_config_path"
            )
        config = _agent_loop_registry[agent_name]
        given = {
            "trainer_config": DictConfigWrap(config=self.config),
            "server_manager": self.llm_client,
            "tokenizer": self.tokenizer,
            "processor": self.processor,
            "hf_model_type": self.hf_model_type,
            "dataset_cls": self.dataset_cls,
            "data_config": DictConfigWrap(self.config.data),
            "tools": ToolListWrap(self.tools),
        }
        own = _plain_settings(config)
        if own is None:
            return hydra.utils.instantiate(config=config, **given)
        return hydra.utils.get_object(config["_target_"])(**own | given)

    def _lost(self, error: Exception, *, is_late: bool) -> Rollout:
        """A trajectory of nothing, for a loop that raised or did not end."""
        filler_id = self.tokenizer.eos_token_id
        rollout = Rollout(
            trajectory=Trajectory([filler_id]), stop_reason=StopReason.INFRA_ERROR, answer=None
        )
        rollout.trajectory.finish(filler_id)
        if isinstance(error, TimeoutError) and is_late:
            rollout.stop_reason = StopReason.DEADLINE
        elif isinstance(error, ToolError):
            rollout.lose(error.tool or "tool", f"{type(error).__name__}: {error}")
        else:
            rollout.lose("loop", f"{type(error).__name__}: {error}")
            rollout.loop_error = traceback.format_exc()
        return rollout


def _plain_settings(config: Any) -> dict[str, Any] | None:
    """A loop's own settings, None where hydra has more to do than to look up a name.

    `hydra.utils.instantiate` takes 4 ms of CPU, which is more than all else in a short trajectory.
    """
    if not isinstance(config.get("_target_"), str):
        return None
    settings = config if isinstance(config, DictConfig) else OmegaConf.create(dict(config))
    values = OmegaConf.to_container(settings, resolve=True, throw_on_missing=True)
    assert isinstance(values, dict)
    values.pop("_target_")
    is_plain = all(
        not str(name).startswith("_") and (value is None or isinstance(value, (str, int, float)))
        for name, value in values.items()
    )
    return {str(name): value for name, value in values.items()} if is_plain else None


class MixedAgentLoopManager(AgentLoopManagerTQ):
    """verl's manager, with our workers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(MixedAgentLoopWorker)
