"""Hosts every agent loop of a process: counts what it raises, records what the engine returned.

verl adapter: `AgentLoopWorkerTQ` and `AgentLoopManagerTQ` (trainer/ppo/v1/agent_loop_tq.py at
0.9.1), chosen by `rollout.agent.agent_loop_manager_class`. verl takes a loop that raises for a
failed group and shows it nowhere; here it is one trajectory without gradient, counted and named.
Loops that are not ours (verl's `tool_agent` and `single_turn_agent`, or a user's) get what ours
have: a deadline, the watchdog, the source's reward over the model's own words, and a record.
"""

import asyncio
import itertools
import time
import traceback
from collections.abc import Iterator
from typing import Any

import hydra
import ray
from omegaconf import DictConfig, OmegaConf
from tensordict import NonTensorData
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopOutput,
    DictConfigWrap,
    ToolListWrap,
    _agent_loop_registry,
)
from verl.trainer.ppo.v1.agent_loop_tq import (
    AgentLoopManagerTQ,
    AgentLoopWorkerTQ,
    apply_greedy_sampling_params,
)

from agent_loop.seeds import seed_from
from agent_loop.tools.client import shared_client
from agent_loop.tools.protocol import ToolError
from agent_loop.turn_agent_loop import TurnAgentLoop, judged_output
from agent_loop.turns.engine_client import (
    EngineTurn,
    RecordingClient,
    seeds_of_trajectory,
    turns_of_trajectory,
)
from agent_loop.turns.foreign_loop import partial_rollout, rollout_of
from agent_loop.turns.loop_settings import settings_of
from agent_loop.turns.observation_style import codec_of
from agent_loop.turns.trajectory import StopReason, Trajectory
from agent_loop.turns.turn_loop import Rollout, is_being_cancelled
from agent_loop.watchdog import waits_for
from samplers.replay_buffer import prompt_of

_TheirWorker: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class  # pyright: ignore[reportAttributeAccessIssue]


class MixedAgentLoopWorker(_TheirWorker):
    """verl's worker; see the module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settings = settings_of(self.config)
        self.llm_client = RecordingClient(self.llm_client)
        codec_of(self.tokenizer).add_ends(_engine_ends(self.model_config))
        self._watchdog: asyncio.Task[None] | None = None
        rollout = self.config.actor_rollout_ref.rollout
        # vLLM samples faster without a seed for each request.
        self._is_seeded = rollout.name == "hf" or rollout.full_determinism
        self._needs_baseline = self.config.algorithm.adv_estimator == "remax"
        self._baselines: dict[str, asyncio.Task[float | None]] = {}  # by uid

    async def generate_sequences(self, batch: Any) -> None:
        if self._watchdog is None:
            self._watchdog = asyncio.create_task(self.settings.watchdog.run())
        if "step_seconds_left" in batch:  # of which this process makes a time of its own clock
            left = batch["step_seconds_left"]
            left_s = float(left[0] if isinstance(left, list) else left)
            batch["step_deadline"] = NonTensorData(time.monotonic() + left_s)
        await super().generate_sequences(batch)

    async def _run_prompt(
        self,
        prompt: dict[str, Any],
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        trace: bool = False,
    ) -> None:
        """verl's, with one greedy trajectory more where each group is compared with one: it is
        judged and not trained (`remax`, Li et al. 2023)."""
        if not self._needs_baseline or trajectory["validate"]:
            await super()._run_prompt(prompt, sampling_params, trajectory=trajectory, trace=trace)
            return
        uid, greedy = prompt["uid"], dict(sampling_params)
        apply_greedy_sampling_params(greedy)
        row = {name: value for name, value in prompt.items() if not name.startswith("__")}
        self._baselines[uid] = asyncio.create_task(self._baseline(greedy, trajectory, row))
        try:
            await super()._run_prompt(prompt, sampling_params, trajectory=trajectory, trace=trace)
        finally:
            self._baselines.pop(uid).cancel()

    async def _baseline(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], row: dict[str, Any]
    ) -> float | None:
        """Reward of a greedy trajectory; None where infrastructure ended it."""
        row |= {"session_id": "greedy"}
        with self.settings.watchdog.watch(row["data_source"], row["extra_info"]["row_id"]):
            output = await self._run(sampling_params, trajectory, row)
        return output.reward_score if any(output.response_mask) else None

    async def _run_agent_loop(
        self,
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        *,
        trace: bool = True,
        **row: Any,
    ) -> None:
        with self.settings.watchdog.watch(row["data_source"], row["extra_info"]["row_id"]):
            output = await self._run(sampling_params, trajectory, row)
            if (baseline := self._baselines.get(row["uid"])) is not None:
                waits_for("baseline")
                output.extra_fields["reward_baseline"] = await asyncio.shield(baseline)
            waits_for("transfer queue")
            row.pop("agent_name")
            await self._agent_loop_postprocess(output, trajectory["validate"], **row)

    async def _run(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], row: dict[str, Any]
    ) -> AgentLoopOutput:
        """Run one trajectory of a row to an output that has its reward."""
        agent_name = row["agent_name"]
        row = {name: value for name, value in row.items() if name != "agent_name"}
        turns: list[EngineTurn] = []
        token = turns_of_trajectory.set(turns)
        seeds_token = seeds_of_trajectory.set(self._seeds_of(trajectory, row))
        try:
            return await self._host(agent_name, sampling_params, row, turns)
        finally:
            turns_of_trajectory.reset(token)
            seeds_of_trajectory.reset(seeds_token)

    def _seeds_of(self, trajectory: dict[str, Any], row: dict[str, Any]) -> Iterator[int] | None:
        """Seeds that the trajectory's requests have in every run with the same config."""
        if not self._is_seeded:
            return None
        if trajectory["validate"]:
            prompt = ("val", trajectory["step"], row["data_source"], row["extra_info"]["row_id"])
        else:
            prompt = ("train", *prompt_of(row["uid"]))
        seed = self.config.actor_rollout_ref.rollout.seed
        own = seed_from(seed, *prompt, row["session_id"])
        return (seed_from(own, request) for request in itertools.count(1))

    async def _host(
        self,
        agent_name: str,
        sampling_params: dict[str, Any],
        row: dict[str, Any],
        turns: list[EngineTurn],
    ) -> AgentLoopOutput:
        """Run a loop to an output that has its reward and its record, whatever it does."""
        settings, source = self.settings, row["data_source"]
        tools: Any = None  # a lost trajectory is not judged
        try:
            loop = self._make_loop(agent_name)
            if isinstance(loop, TurnAgentLoop):  # keeps its own deadlines, and has all it needs
                return await loop.run(sampling_params, **row)
            tools = (await shared_client(settings.tools, settings.mixed)).for_source(source)
            rollout = await self._run_foreign(loop, sampling_params, row, turns)
        except Exception as error:
            rollout = self._lost(error)
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            rollout = self._lost(error)  # something inside the loop was cancelled, not the loop
        versions = [turn.output.extra_fields.get("global_steps") or 0 for turn in turns]
        return await judged_output(rollout, row, tools, settings, versions)

    async def _run_foreign(
        self,
        loop: Any,
        sampling_params: dict[str, Any],
        row: dict[str, Any],
        turns: list[EngineTurn],
    ) -> Rollout:
        """Run a loop that knows none of our limits; at the deadline it ends with what it has."""
        settings, source = self.settings, row["data_source"]
        codec = codec_of(self.tokenizer)
        budget = settings.budget_of(source, row.get("step_deadline"))
        running = asyncio.ensure_future(
            loop.run(settings.sampling_of(source, sampling_params), **row)
        )
        try:
            done, _ = await asyncio.wait([running], timeout=budget.timeout_s)
        finally:
            running.cancel()
            await asyncio.wait([running])
        if not done:
            return partial_rollout(turns, codec)
        output = running.result()
        if isinstance(output, list):
            raise TypeError(
                f"the loop of source={source} returned {len(output)} outputs for one trajectory: "
                "one is expected, since a group's statistics count each as a member; merge them"
            )
        return rollout_of(output, turns, codec, settings, source)

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

    def _lost(self, error: BaseException) -> Rollout:
        """A trajectory of nothing, for a loop that raised."""
        filler_id = self.tokenizer.eos_token_id
        rollout = Rollout(
            trajectory=Trajectory([filler_id]), stop_reason=StopReason.INFRA_ERROR, answer=None
        )
        rollout.trajectory.finish(filler_id)
        is_infra = isinstance(error, ToolError)
        rollout.lose((is_infra and error.tool) or "loop", f"{type(error).__name__}: {error}")
        rollout.loop_error = None if is_infra else traceback.format_exc()
        return rollout


def _engine_ends(model_config: Any) -> list[int]:
    """Tokens at which the engine itself ends a message, besides the tokenizer's own."""
    ids = getattr(getattr(model_config, "generation_config", None), "eos_token_id", None)
    return [i for i in (ids if isinstance(ids, list | tuple) else [ids]) if i is not None]


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
