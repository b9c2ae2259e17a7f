"""Base class of agent loops whose model calls tools by name, with JSON arguments.

The tools are those of `mixed.sources.<name>.tools`. A source without that list has the tools of the
agent's own settings: those of the tool server, and those that verl loads from
`rollout.multi_turn.tool_config_path` and `function_tool_path`.
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from agent_loop.calls.routes import local_route
from agent_loop.row import Row
from agent_loop.toolbox.entries import toolbox_of
from agent_loop.toolbox.functions import not_posted
from agent_loop.toolbox.own import ToolServerProvider
from agent_loop.toolbox.spec import ToolProvider, ToolSpec
from agent_loop.toolbox.toolbox import Toolbox, TrajectoryTools
from agent_loop.training.verl_adapters.verl_tools import tools_of
from agent_loop.turn_agent_loop import TurnAgentLoop
from agent_loop.turns.tags import Action
from agent_loop.turns.turn_loop import Observation
from config.tool_entries import OWN_TOOLS


class NamedToolsLoop(TurnAgentLoop):
    """Actions are names of tools.

    Args:
        tool_names: tools of a source that names none itself: of the tool server and of verl; an
            empty list for none; None: all.
        topk: passages of a search.
    """

    def __init__(
        self,
        *args: Any,
        tool_names: Sequence[str] | None = None,
        topk: int = 3,
        persistent_interpreter: bool = False,
        tools: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, tools=tools, **kwargs)
        self._tool_names, self._topk, self._verls = tool_names, topk, tools.tools if tools else []
        self._persistent = persistent_interpreter
        self._tools: TrajectoryTools | None = None
        self._held = AsyncExitStack()
        """What the trajectory has until its end."""

        self.specs: dict[str, ToolSpec] = {}
        """Name -> tool as the model sees it."""

    async def begin(self, row: Row) -> None:
        toolbox = self._toolbox(row.source)
        await toolbox.open(self._deadline)
        self.specs = toolbox.specs
        self._tools = await self._held.enter_async_context(toolbox.begin(self.client, row))

    async def end(self) -> None:
        await self._held.aclose()

    async def act(self, action: Action, extras: dict[str, Any]) -> Observation:
        assert self._tools is not None, "act before begin"
        return await self._tools.call(action.kind, action.arguments)

    def _toolbox(self, source: str) -> Toolbox:
        """The tools of a source, shared by the trajectories of this event loop."""
        own = self.settings.mixed.sources.get(source)
        entries = own.tools if own is not None else None
        about = (self._tool_names, self._topk, self._persistent)
        key = f"toolbox of {source} {type(self).__name__} {about}"
        return self.client.resource(
            key,
            self._of_agent
            if entries is None
            else partial(
                toolbox_of,
                entries,
                self.client,
                topk=self._topk,
                persistent=self._persistent,
            ),
        )

    def _of_agent(self) -> Toolbox:
        """The tools that the agent's own settings name. If verl and the tool server have a tool of
        one name, it is verl's."""
        verls = {tool.name: tool for tool in self._verls}
        known = [*dict.fromkeys([*OWN_TOOLS, *verls])]
        names = known if self._tool_names is None else list(dict.fromkeys(self._tool_names))
        if unknown := sorted(set(names) - set(known)):
            raise ValueError(
                f"unknown tool_names={unknown}: known are {sorted(known)}; set them in "
                "rollout.agent.agent_loop_config_path, or name tools in mixed.sources.<name>.tools"
            )
        own = [name for name in names if name not in verls]
        loaded = [verls[name] for name in names if name in verls]
        route = local_route(
            "verl's tools",
            not_posted,
            key="verl's tools",
            timeout_s=self.settings.tools.timeout,
            clock=self.client.clock,
        )
        server = ToolServerProvider(own, topk=self._topk, persistent=self._persistent)
        return Toolbox([("", server), ("", ToolProvider(tools_of(loaded, "verl's tools", route)))])
