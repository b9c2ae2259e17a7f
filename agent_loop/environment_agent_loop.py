"""Agent loop of stateful environments: `mixed.sources.<name>.environment`.

The environment says what the model reads first, answers each message or tool call of the model,
gives each step a reward, and says when the episode is over (docs/environments.md). The rewards of
the steps are in the trajectory's calls; their sum, or the last one, is the reward of the
trajectory. An episode that the environment does not end is ended by the limits of turns and tokens.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from agent_loop.environments.provider import EnvironmentProvider, Episode
from agent_loop.native_agent_loop import NativeAgentLoop, format_of
from agent_loop.prompts import opening_of
from agent_loop.records.trajectory_record import COMMON_PARTS
from agent_loop.row import Row
from agent_loop.tool_actions import mistake
from agent_loop.toolbox.spec import mistake_of, specs_of_tools
from agent_loop.turns.codec import HFCodec
from agent_loop.turns.native import STEP, TEXT
from agent_loop.turns.observation_style import GlueOf
from agent_loop.turns.tags import Action, Language
from agent_loop.turns.turn_loop import Observation, Rollout
from tool_server.wire.protocol import ToolUnavailable

_TAKEN = frozenset({*COMMON_PARTS, "steps"} - {"acc"})
"""Parts of a reward that an environment's `info` does not set; they become `info_<name>`."""


class EnvironmentAgentLoop(NativeAgentLoop):
    """Each message of the model, or each of its tool calls, is a step of the environment."""

    acts_at_end = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._episode: Episode | None = None
        self._one_at_a_time = asyncio.Lock()
        """The calls of one message are steps one after another."""

    async def begin(self, row: Row) -> None:
        source = row.source
        own = self.settings.mixed.sources.get(source)
        if own is None or own.environment is None:
            raise ValueError(
                f"source={source} with agent={type(self).__name__} has no environment; set "
                f"mixed.sources.{source}.environment"
            )
        environment: EnvironmentProvider = self.client.resource(
            f"environment {own.environment.model_dump_json()}",
            partial(EnvironmentProvider, own.environment, self.client),
        )
        episode = environment.begin(self.client, row)
        self._episode = await self._held.enter_async_context(episode)
        try:
            self.specs = {each.name: each for each in specs_of_tools(self._episode.start.tools)}
        except ValueError as error:
            raise ToolUnavailable(f"the environment of source={source}: {error}") from error

    async def conversations(self, messages: list[dict[str, Any]]) -> list[Rollout]:
        episode = self._begun
        first = opening_of(messages, episode.start.messages)
        rollout = await self.converse(first)
        parts = {
            f"info_{name}" if name in _TAKEN else name: own for name, own in episode.info.items()
        }
        rollout.verdict = {**parts, "score": episode.reward, "steps": len(episode.rewards)}
        return [rollout]

    async def act(self, action: Action, extras: dict[str, Any]) -> Observation:
        episode = self._begun
        if action.kind == STEP:
            given: Any = action.content
        else:
            wrong = await mistake_of(action.kind, action.arguments, self.specs)
            if wrong is not None:
                return mistake(wrong)
            given = {"name": action.kind, "arguments": dict(action.arguments)}
        async with self._one_at_a_time:
            if episode.is_over:
                return mistake("the episode is over")
            step, result = await episode.step(given)
        return Observation(text=step.observation, result=result, reward=step.reward, ends=step.done)

    def dialogue(
        self, codec: HFCodec, source: str, prompt_ids: Sequence[int]
    ) -> tuple[Language, GlueOf]:
        call_format = format_of(self.settings.call_format) if self.specs else TEXT
        dialogue = self.in_template(codec, prompt_ids, call_format, None)
        return dialogue, dialogue.glue

    @property
    def _begun(self) -> Episode:
        assert self._episode is not None, "a conversation before begin()"
        return self._episode
