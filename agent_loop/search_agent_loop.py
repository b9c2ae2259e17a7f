"""Agent loop of NQ: searches passages; the answer is short."""

from typing import Any

from agent_loop.tool_actions import search
from agent_loop.turn_agent_loop import TaggedAgentLoop
from agent_loop.turns.tags import Action, ActionKind
from agent_loop.turns.turn_loop import Observation


class SearchAgentLoop(TaggedAgentLoop):
    """`<search>` finds the `topk` best passages; `<answer>` is the short answer."""

    actions = (ActionKind.SEARCH, ActionKind.ANSWER)

    def __init__(self, *args: Any, topk: int = 3, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.topk = topk

    async def act(self, action: Action, extras: dict[str, Any]) -> Observation:
        return await search(self.client, action.content, self.topk)
