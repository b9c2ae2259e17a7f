"""The tools of one source, opened once for an event loop, and their state for each trajectory."""

import asyncio
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from agent_loop.calls.child_process import uninterrupted
from agent_loop.calls.client import ToolClient
from agent_loop.calls.servers import FIRST_PAUSE_S, LONGEST_PAUSE_S
from agent_loop.deadline import Deadline
from agent_loop.row import Row
from agent_loop.tool_actions import mistake
from agent_loop.toolbox.spec import Tool, ToolProvider, ToolSpec, ToolState, mistake_of
from agent_loop.turns.turn_loop import Observation
from agent_loop.watchdog import Activity, following, start_for_all, waits_for
from config.compat import gather_all
from tool_server.wire.protocol import Again, ToolUnavailable

logger = logging.getLogger(__name__)


class Toolbox:
    """The tools of one source.

    Args:
        providers: pairs of what an entry names and what answers it, in order.
    """

    def __init__(self, providers: Sequence[tuple[str, ToolProvider]]) -> None:
        self._providers = providers
        self._listing: asyncio.Task[dict[str, Tool]] | None = None
        self._activity: Activity | None = None
        """What the listing waits for."""

        self._until: Deadline | None = None
        """The last deadline of those that asked for the list."""

        self._tools: dict[str, Tool] | None = None

    async def open(self, deadline: Deadline | None = None) -> None:
        """List the tools, once.

        Args:
            deadline: until when a server that is away is tried again; None: it is tried once.

        Raises:
            ToolUnavailable: an entry cannot list its tools now; the next call tries again.
            ValueError: two tools have one name, or an entry is wrong.
        """
        if self._tools is not None:
            return
        if deadline is not None and (self._until is None or self._until.at < deadline.at):
            self._until = deadline
        # All that wait share the attempts; each leaves at its own deadline.
        if self._listing is None:
            self._listing, self._activity = start_for_all(self._listed())
            self._listing.add_done_callback(self._forget_listing)
        with following(self._activity):
            self._tools = await asyncio.shield(self._listing)

    async def _listed(self) -> dict[str, Tool]:
        lists = await gather_all([self._listed_by(provider) for _, provider in self._providers])
        found: dict[str, Tool] = {}
        for tool in itertools.chain(*lists):
            if tool.spec.name in found:
                raise ValueError(
                    f"two tools are called {tool.spec.name!r}: a model calls a tool by its name; "
                    "leave one out with `only`, or rename a function"
                )
            found[tool.spec.name] = tool
        return found

    async def _listed_by(self, provider: ToolProvider) -> Sequence[Tool]:
        """The tools of an entry. While its server is away, it is tried again until the deadline."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return await provider.tools()
            except ToolUnavailable as fault:
                if fault.again is not Again.UNTIL_DEADLINE or fault.executed:
                    raise
                if self._until is None or self._until.left_s() <= pause_s:
                    raise
                if pause_s == FIRST_PAUSE_S:
                    logger.warning("%s; trying again until the trajectories' deadline", fault)
            waits_for("server")
            await asyncio.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    def _forget_listing(self, listing: "asyncio.Task[dict[str, Tool]]") -> None:
        self._listing = None
        if not listing.cancelled():
            listing.exception()  # also if nobody waits any more

    @property
    def specs(self) -> dict[str, ToolSpec]:
        """Name -> tool as the model sees it, of an opened toolbox."""
        assert self._tools is not None, "Toolbox.specs before open()"
        return {name: tool.spec for name, tool in self._tools.items()}

    def begin(self, client: ToolClient, row: Row) -> "TrajectoryTools":
        """The tools of one trajectory of an opened toolbox."""
        assert self._tools is not None, "Toolbox.begin before open()"
        # In one order: if two trajectories waited for each other's server, neither would begin.
        in_order = sorted(self._providers, key=lambda named: named[0])
        states = [provider.begin(client, row) for _, provider in in_order]
        return TrajectoryTools(self._tools, client, list(filter(None, states)))


class TrajectoryTools:
    """The tools of one trajectory; an async context manager, which starts and frees their state."""

    def __init__(
        self, tools: Mapping[str, Tool], client: ToolClient, states: Sequence[ToolState]
    ) -> None:
        self._tools, self._client, self._states = dict(tools), client, states
        self._specs = {name: tool.spec for name, tool in tools.items()}
        self._entered: list[ToolState] = []

    async def __aenter__(self) -> "TrajectoryTools":
        try:
            for state in self._states:
                tools = await state.__aenter__()
                self._entered.append(state)
                self._tools.update({tool.spec.name: tool for tool in tools})
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._entered:
            await uninterrupted(self._freed())

    async def _freed(self) -> None:
        # all at once, because one that hangs would hold the others
        ends = [state.__aexit__(None, None, None) for state in self._entered]
        for error in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(error, BaseException):
                raise error

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        """Call a tool. An unknown tool and arguments that break its schema are the model's
        mistakes; see `Tool.call` for errors."""
        if (problem := await mistake_of(name, arguments, self._specs)) is not None:
            return mistake(problem)
        return await self._tools[name].call(self._client, arguments)
