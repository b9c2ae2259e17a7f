"""The tools of one source, opened once for an event loop, and their state for each trajectory."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from agent_loop.calls.client import ToolClient
from agent_loop.row import Row
from agent_loop.tool_actions import mistake
from agent_loop.toolbox.spec import Tool, ToolProvider, ToolSpec, ToolState
from agent_loop.turns.turn_loop import Observation
from config.compat import timeout
from tool_server.wire.protocol import ToolUnavailable

CLOSE_S = 10.0
"""Longest time in which the state of a trajectory is freed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedProvider:
    """An entry of `tools`, and the names of the tools that it offers; None: all."""

    provider: ToolProvider
    only: Sequence[str] | None = None
    target: str = ""
    """What the entry names. Trajectories start their state in the order of targets: if two waited
    for each other's server, neither would begin."""


class Toolbox:
    """The tools of one source.

    Args:
        opened: the entries, in order.
    """

    def __init__(self, opened: Sequence[OpenedProvider]) -> None:
        self._opened = opened
        self._listing: asyncio.Task[dict[str, Tool]] | None = None
        self._tools: dict[str, Tool] | None = None

    async def open(self) -> None:
        """List the tools, once.

        Raises:
            ToolUnavailable: an entry cannot list its tools now; the next call tries again.
            ValueError: two tools have one name, or an entry is wrong.
        """
        if self._tools is not None:
            return
        # All that wait share the outcome: a server that does not start is tried once for them.
        if self._listing is None:
            self._listing = asyncio.ensure_future(self._listed())
            self._listing.add_done_callback(self._forget_listing)
        self._tools = await asyncio.shield(self._listing)

    async def _listed(self) -> dict[str, Tool]:
        found: list[Tool] = []
        listing = [each.provider.tools() for each in self._opened]
        for each, tools in zip(self._opened, await asyncio.gather(*listing), strict=True):
            found += offered(tools, each.only)
        return by_name(found)

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
        states = [
            (each, state)
            for each in sorted(self._opened, key=lambda opened: opened.target)
            if (state := each.provider.begin(client, row)) is not None
        ]
        return TrajectoryTools(self._tools, client, states)


class TrajectoryTools:
    """The tools of one trajectory; an async context manager, which starts and frees their state."""

    def __init__(
        self,
        tools: Mapping[str, Tool],
        client: ToolClient,
        states: Sequence[tuple[OpenedProvider, ToolState]],
    ) -> None:
        self._tools, self._client, self._states = dict(tools), client, states

    async def __aenter__(self) -> "TrajectoryTools":
        try:
            for each, state in self._states:
                for tool in offered(await state.start(), each.only):
                    self._tools[tool.spec.name] = tool
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._close()

    async def _close(self) -> None:
        """Free the state of all entries, within `CLOSE_S`, also if the trajectory is cancelled."""
        closing = [asyncio.ensure_future(_closed(state)) for _, state in self._states]
        if not closing:
            return
        try:
            await asyncio.wait(closing)
        except asyncio.CancelledError:
            await asyncio.wait(closing)
            raise
        for each in closing:
            each.result()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        """Call a tool. An unknown tool and arguments that break its schema are the model's
        mistakes; see `Tool.call` for errors."""
        tool = self._tools.get(name)
        if tool is None:
            return mistake(f"no tool {name!r}; there are {', '.join(self._tools) or 'none'}")
        if (problem := tool.spec.mistake(arguments)) is not None:
            return mistake(problem)
        return await tool.call(self._client, arguments)


async def _closed(state: ToolState) -> None:
    with suppress(TimeoutError, ToolUnavailable):
        async with timeout(CLOSE_S):
            await state.close()


def offered(tools: Sequence[Tool], only: Sequence[str] | None) -> list[Tool]:
    """The tools that an entry offers.

    Raises:
        ValueError: `only` names a tool that is not there.
    """
    if only is None:
        return list(tools)
    there = {tool.spec.name: tool for tool in tools}
    check_only(only, there)
    return [there[name] for name in only]


def check_only(only: Sequence[str] | None, there: Collection[str]) -> None:
    """Refuse names that are not there.

    Raises:
        ValueError: `only` has such a name.
    """
    if unknown := sorted(set(only or ()) - set(there)):
        raise ValueError(f"only={unknown}: no such tools; there are {', '.join(sorted(there))}")


def by_name(tools: Sequence[Tool]) -> dict[str, Tool]:
    """Name -> tool.

    Raises:
        ValueError: two tools have one name.
    """
    found: dict[str, Tool] = {}
    for tool in tools:
        if tool.spec.name in found:
            raise ValueError(
                f"two tools are called {tool.spec.name!r}: a model calls a tool by its name; leave "
                "one out with `only`, or rename a function"
            )
        found[tool.spec.name] = tool
    return found
