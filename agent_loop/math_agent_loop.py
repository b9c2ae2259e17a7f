"""MATH: calculate when wanted, answer."""

from typing import Any

from agent_loop.tagged_agent_loop import TaggedAgentLoop
from agent_loop.tags import Action, ActionKind
from agent_loop.tool_actions import calculate
from agent_loop.turn_loop import Observation


class MathAgentLoop(TaggedAgentLoop):
    """`<code>` holds an arithmetic expression for the calculator; `<answer>` is the result."""

    actions = (ActionKind.CODE, ActionKind.ANSWER)

    async def act(self, action: Action, extras: dict[str, Any]) -> Observation:
        return await calculate(self.client, action.content)
