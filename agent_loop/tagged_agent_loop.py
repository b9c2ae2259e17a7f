"""From verl's agent loop to `turn_loop`: engine, tokenizer, tools and reward of one row.

verl adapter: `AgentLoopBase` (experimental/agent_loop/agent_loop.py at 0.9.1). A loop of one's own
is a subclass that names its actions and runs one.

verl makes an instance per trajectory, so all that is dear (tool client, limiter, settings) lives in
the process. The reward is computed here, not in verl's reward worker: it then sees the answer and
nothing else, and an infrastructure fault while judging masks the trajectory as any other does.
"""

import json
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from uuid import uuid4

from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
)

from agent_loop.rewards import default_reward, reward_for
from agent_loop.rewards.verdict import no_answer
from agent_loop.tags import Action, ActionKind, Tags
from agent_loop.tools.client import ToolClient, shared_client
from agent_loop.tools.protocol import ToolError, ToolRejected
from agent_loop.trajectory import StopReason
from agent_loop.turn_loop import (
    Budget,
    Generated,
    HFCodec,
    Observation,
    Rollout,
    record_of,
    rejected,
    run_turns,
)
from config.schema import MixedConfig, ToolConfig, load_section


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """What every trajectory of a process shares, read from the run config once."""

    mixed: MixedConfig
    tools: ToolConfig
    budget: Budget
    """Of a source that names no limits of its own."""

    sampling: dict[str, float]
    """The common temperature and top_p of training."""

    def budget_of(self, source: str) -> Budget:
        """Limits of one trajectory of a source."""
        own = self.mixed.sources.get(source)
        if own is None:
            return self.budget
        length = own.max_response_length or self.budget.response_length
        return replace(
            self.budget,
            max_turns=own.max_turns or self.budget.max_turns,
            response_length=min(length, self.budget.response_length),
        )

    def sampling_of(self, source: str, given: dict[str, Any]) -> dict[str, Any]:
        """verl's sampling parameters with a source's own in place of the common ones.

        A validation that samples otherwise than training keeps its own values.
        """
        own = self.mixed.sources.get(source)
        changed = {
            name: getattr(own, name)
            for name, common in self.sampling.items()
            if own is not None and getattr(own, name) is not None and given.get(name) == common
        }
        return {**given, **changed}


_settings: dict[int, LoopSettings] = {}


class TaggedAgentLoop(AgentLoopBase):
    """An agent that asks for tools and answers with tags, inside one assistant message."""

    tokenizer: Any

    client: ToolClient
    """The process's client: limiter, slot, retries, cache."""

    actions: ClassVar[tuple[ActionKind, ...]]
    """What the model may ask for; `ActionKind.ANSWER` among them."""

    @abstractmethod
    async def act(self, action: Action, extras: dict[str, Any]) -> Observation:
        """Run one action that is not the answer.

        Args:
            action: what the model asked for.
            extras: the row's `extra_info.extras`.

        Raises:
            ToolUnavailable: the infrastructure failed; the trajectory ends as `infra_error`.
        """

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        settings = self._load_settings()
        client = await shared_client(settings.tools, settings.mixed)
        self.client = client.for_source(row["data_source"])
        extras = json.loads(row["extra_info"].get("extras") or "{}")
        request_id = uuid4().hex
        sampling_params = settings.sampling_of(row["data_source"], sampling_params)
        weight_versions: list[int] = []

        async def generate(
            prompt_ids: list[int], *, max_tokens: int, stop_token_ids: list[int]
        ) -> Generated:
            output = await self.server_manager.generate(
                request_id=request_id,
                prompt_ids=prompt_ids,
                sampling_params={
                    **sampling_params,
                    "max_tokens": max_tokens,
                    "stop_token_ids": stop_token_ids,
                },
            )
            weight_versions.append(output.extra_fields.get("global_steps") or 0)
            return Generated(token_ids=output.token_ids, log_probs=output.log_probs or [])

        async def environment(action: Action) -> Observation:
            try:
                return await self.act(action, extras)
            except ToolRejected as error:
                return rejected(error)

        rollout = await run_turns(
            prompt_ids=await self.ct_build_initial_tokens(list(row["raw_prompt"])),
            generate=generate,
            environment=environment,
            tags=Tags.from_config(settings.tools, self.actions),
            codec=HFCodec(self.tokenizer),
            budget=settings.budget_of(row["data_source"]),
            filler_id=self.tokenizer.eos_token_id,
        )
        reward = await self._judge(rollout, row, settings.mixed)
        trajectory = rollout.trajectory
        return AgentLoopOutput(
            prompt_ids=trajectory.prompt_ids,
            response_ids=trajectory.response_ids,
            response_mask=trajectory.response_mask,
            response_logprobs=trajectory.log_probs,
            reward_score=reward["score"],
            num_turns=2 + 2 * rollout.tool_calls,  # verl counts user, assistant and tool messages
            metrics=AgentLoopMetrics(
                generate_sequences=rollout.seconds["generate"],
                tool_calls=rollout.seconds["tools"],
            ),
            extra_fields={
                "reward_extra_info": reward,
                "mixed": record_of(rollout),
                "min_global_steps": min(weight_versions, default=0),
                "max_global_steps": max(weight_versions, default=0),
            },
        )

    async def _judge(
        self, rollout: Rollout, row: dict[str, Any], mixed: MixedConfig
    ) -> dict[str, float]:
        """The reward of the answer; 0 and no gradient when the judge could not be reached."""
        if rollout.stop_reason is StopReason.INFRA_ERROR:
            return no_answer()
        source = mixed.sources.get(row["data_source"])
        name = source.reward if source and source.reward else default_reward(row["data_source"])
        ground_truth = json.loads(row["reward_model"]["ground_truth"])
        try:
            return await reward_for(name)(rollout.answer, ground_truth, self.client)
        except ToolError as error:
            rollout.stop_reason = StopReason.INFRA_ERROR
            rollout.fault = f"reward={name}: {type(error).__name__}: {error}"
            rollout.trajectory.without_gradient(self.tokenizer.eos_token_id)
            return no_answer()

    def _load_settings(self) -> LoopSettings:
        key = id(self.config)
        if key not in _settings:
            multi_turn = self.rollout_config.multi_turn
            mixed = OmegaConf.to_container(self.config.mixed, resolve=True)
            tools = OmegaConf.to_container(multi_turn.tool_config, resolve=True)
            _settings[key] = LoopSettings(
                mixed=load_section(MixedConfig, mixed, "mixed"),
                tools=load_section(
                    ToolConfig, tools, "actor_rollout_ref.rollout.multi_turn.tool_config"
                ),
                budget=Budget(
                    max_turns=multi_turn.max_assistant_turns,
                    response_length=self.rollout_config.response_length,
                    max_turn_length=multi_turn.max_turn_length,
                    timeout_s=multi_turn.trajectory_timeout,
                ),
                sampling={
                    "temperature": self.rollout_config.temperature,
                    "top_p": self.rollout_config.top_p,
                },
            )
        return _settings[key]
