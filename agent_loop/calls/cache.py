"""Results of pure tools: kept in memory and in the store of the host, and equal calls at the same
time share one request.

A cached answer serves only callers whose servers would answer the same: the fingerprint of what
answered is in its key, and it is looked up under the one that a server named last.
"""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace

import msgspec
from cachetools import TTLCache

from agent_loop.calls.result_store import ResultStore
from agent_loop.calls.routes import Route
from agent_loop.deadline import Deadline
from agent_loop.watchdog import Activity, activity_now, following
from tool_server.wire.protocol import Fault, ToolCall, ToolResult, ToolTimeout
from tool_server.wire.responses import decode, dumps, may_be_cached

CACHE_BYTES = 32 << 20
"""Largest size of the results in memory, per event loop."""

CACHE_S = 86_400.0
"""Seconds that a result is kept."""

_ENTRY_BYTES = 1024
"""What a result takes beside its JSON."""


def content_key(call: ToolCall) -> str:
    """A hash that is equal for calls of one tool with equal JSON payloads, in any order of keys."""
    content = [call.tool, call.payload]
    try:
        text = msgspec.json.encode(content, order="sorted")
    except UnicodeEncodeError:  # a lone surrogate
        text = json.dumps(content, sort_keys=True).encode()
    return hashlib.sha256(text).hexdigest()


@dataclass(frozen=True, slots=True)
class _Request:
    """The request of one caller, for whose answer others wait."""

    outcome: "asyncio.Future[ToolResult | Fault | None]"
    """None: the caller was cancelled."""

    activity: Activity | None


class Cache:
    """The results of one event loop, the least recently used dropped first. Failures are not kept.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.store: ResultStore | None = None
        """Of the processes of this host."""

        self._results: TTLCache[str, ToolResult] = TTLCache(CACHE_BYTES, CACHE_S, clock, _size_of)
        self._under_way: dict[str, _Request] = {}

    async def answer(
        self,
        call: ToolCall,
        route: Route,
        deadline: Deadline,
        ask: Callable[[], Awaitable[ToolResult]],
    ) -> ToolResult:
        """A result that is known, or that of an equal call that is under way, or else of `ask`.

        If the other call is cancelled, or ends at a deadline that is earlier than this one's, one
        of those who waited for it asks anew.

        Raises:
            TimeoutError: the other call has no answer before this one's deadline.
            Fault: that of `ask`, or of the other call.
        """
        key = f"{content_key(call)}{route.key}"
        while True:
            if (known := self._known(key, route, call)) is not None:
                return _shared(known)
            if (request := self._under_way.get(key)) is None:
                return await self._ask(key, ask)
            with following(request.activity):
                await asyncio.wait([request.outcome], timeout=deadline.left_s())
            if not request.outcome.done():
                raise TimeoutError
            outcome = request.outcome.result()
            if isinstance(outcome, ToolResult):
                return _shared(outcome)
            may_ask = (
                isinstance(outcome, ToolTimeout) and deadline.left_s() > route.servers.request_s
            )
            if outcome is not None and not may_ask:
                raise copy(outcome) from outcome  # one that several tasks raise grows with each

    async def _ask(self, key: str, ask: Callable[[], Awaitable[ToolResult]]) -> ToolResult:
        outcome: ToolResult | Fault | None = None
        future = asyncio.get_running_loop().create_future()
        self._under_way[key] = _Request(future, activity_now())
        try:
            outcome = result = await ask()
            if may_be_cached(result):
                self._keep(f"{key}:{result.origin}", result)
                if self.store is not None:
                    self.store.put(f"{key}:{result.origin}", dumps(result.body))
            return result
        except Fault as fault:
            outcome = fault
            raise
        finally:
            del self._under_way[key]
            future.set_result(outcome)

    def _known(self, key: str, route: Route, call: ToolCall) -> ToolResult | None:
        """A result, in memory or in the store, of what may answer the call now."""
        if (origin := route.origin_of(call.tool)) is None:
            return None
        key = f"{key}:{origin}"
        if (kept := self._results.get(key)) is not None:
            return kept
        if self.store is not None and (stored := self.store.get(key)) is not None:
            with suppress(ValueError, TypeError, RecursionError):  # another program wrote this
                result = ToolResult(body=decode(call, stored), tool=call.tool, origin=origin)
                self._keep(key, result)
                return result
        return None

    def _keep(self, key: str, result: ToolResult) -> None:
        with suppress(ValueError):  # larger than all results may be
            self._results[key] = result


def _size_of(result: ToolResult) -> int:
    return _ENTRY_BYTES + len(msgspec.json.encode(result.body))


def _shared(result: ToolResult) -> ToolResult:
    """The result as it is for a caller that asked nobody."""
    return replace(
        result, latency_s=0.0, limiter_wait_s=0.0, server_wait_s=0.0, attempts=0, cached=True
    )
