"""An agent loop with a sub-agent: a session of several rows.

The model may give a task to a helper, which is the same model in a conversation of its own, with a
calculator. The helper's answer is the result. Both conversations are trained with the reward of the
answer.

    agent_loops:
      delegating_agent:
        _target_: docs.examples.delegating_loop.DelegatingAgentLoop
"""

from typing import Any

from agent_loop.tool_actions import calculate
from agent_loop.turn_agent_loop import TaggedAgentLoop
from agent_loop.turns.tags import Action
from agent_loop.turns.turn_loop import Observation, Rollout
from tool_server.wire.protocol import ToolUnavailable


class DelegatingAgentLoop(TaggedAgentLoop):
    actions = ("delegate", "code", "answer")
    own_tags = {"delegate": ("<delegate>", "</delegate>")}  # noqa: RUF012  # verl's classes do so
    several_rows = True

    async def conversations(self, messages: list[dict[str, Any]]) -> list[Rollout]:
        self.helpers = list[Rollout]()
        row = await self.converse(messages)
        for helper in self.helpers:
            helper.parent = row
        return [*self.helpers, row]  # the last row answers

    async def act(self, action: Action, extras: dict[str, Any]) -> Observation:
        if action.kind == "code":
            return await calculate(self.client, action.content)
        task = [{"role": "user", "content": action.content}]
        helper = await self.converse(task, cause="sub-agent", act=self.help)
        self.helpers.append(helper)
        if helper.is_lost:
            raise ToolUnavailable(helper.fault or "", tool=helper.fault_tool)
        return Observation(text=helper.answer or "the helper has no answer")

    async def help(self, action: Action) -> Observation:
        """Run an action of the helper."""
        if action.kind == "delegate":
            return Observation(text="error: a helper cannot delegate", rejected=True)
        return await calculate(self.client, action.content)
