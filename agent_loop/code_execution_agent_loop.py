"""Agent loop of TACO: runs programs in the sandbox; the answer is a program."""

from typing import Any

from agent_loop.turn_agent_loop import TaggedAgentLoop
from agent_loop.turns.tags import Action, ActionKind
from agent_loop.turns.turn_loop import Observation


class CodeExecutionAgentLoop(TaggedAgentLoop):
    """`<code>` runs with the example input; `<answer>` is the program that the reward tests."""

    actions = (ActionKind.CODE, ActionKind.ANSWER)

    async def act(self, action: Action, extras: dict[str, Any]) -> Observation:
        return await self.run_code(action.content, extras.get("example_input", ""))
