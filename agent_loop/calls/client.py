"""The tool client: cache, choice of server, rate limiter, concurrency slot, request, deadline.

A cached answer needs no limiter and no slot. A request that failed is tried again as long as that
can help (`tool_server.wire.http` has the table):

- It was certainly not executed: until the deadline. Callers of a server that is away wait together
  (`agent_loop.calls.servers`), which costs no attempt.
- It may have been executed, and nobody answered: until the deadline, if the call may run twice.
- The tool answered that it failed: `max_retries` times, if the call may run twice.

The pauses between attempts grow, with full jitter. All processes obey a `Retry-After`. Waiting for
limiter and slot ends early enough to leave time for the request.
"""

import asyncio
import logging
import math
import os
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import Any, TypeVar

import aiohttp
from typing_extensions import Self

from agent_loop.calls.cache import CACHE_S, Cache
from agent_loop.calls.limiter import make_limiter, state_path
from agent_loop.calls.loop_throttle import LoopThrottle
from agent_loop.calls.own_limits import OwnLimits, limited
from agent_loop.calls.result_store import ResultStore
from agent_loop.calls.routes import Limiter, Route
from agent_loop.calls.servers import LONGEST_PAUSE_S, Server, Servers, backoff_s
from agent_loop.calls.tool_requests import ToolRequests
from agent_loop.deadline import CLOSE_S, Deadline
from agent_loop.watchdog import waits_for
from config.compat import timeout
from config.schema import MixedConfig, ToolCacheConfig, ToolConfig
from rate_limit.slots import FileSlots
from tool_server.wire.protocol import (
    END_SESSION,
    Again,
    Fault,
    ToolCall,
    ToolRejected,
    ToolResult,
    ToolTimeout,
    ToolUnavailable,
)

BACKOFF_START_S = 0.25
BACKOFF_CAP_S = 8.0

LOOK_AGAIN_S = 0.5
"""How often the callers of a server that is away look whether one of them had an answer."""

CALLS_PER_TURN = 64
"""Calls that start in one pass of the event loop; see `LoopThrottle`."""

STORE_BYTES = 256 << 20
"""Largest size of the file of results that processes share."""

NOT_JOINED = "an equal call that this one joined has no answer"
NOT_TWICE = (
    "it may have been executed, so it is not sent again; for a tool that may run twice, set "
    "`retry` in its entry of `tools`"
)
NO_PLACE = (
    "raise rate_limit_per_minute, max_workers or timeout under tool_config, or the tool's own "
    "rate, slots and timeout"
)

PURE_TOOLS = frozenset({"retrieve", "calculate", "run_code"})
"""Tools whose answer depends only on the call."""

logger = logging.getLogger(__name__)

R = TypeVar("R")

Slots = Callable[[float], AbstractAsyncContextManager[object]]
"""A concurrency limit: given the seconds that a call may wait, a place to be held."""


@dataclass(slots=True)
class _Opened:
    """Open resources of a client, shared by the clients of all sources."""

    requests: ToolRequests | None = None
    resources: dict[Hashable, Any] = field(default_factory=dict)
    """What `resource` made."""


class ToolClient:
    """Calls tools over HTTP; an async context manager.

    Args:
        url: base URL of the server, or several base URLs.
        limiter: shared rate limit; None for no limit.
        slots: shared concurrency limit; None for no limit.
        timeout_s: seconds for one call, with its waits, attempts and pauses.
        max_retries: attempts after the first one, where the tool answers that it failed.
        patience_s: seconds that a call waits for servers that are away.
        caches: whether results of pure tools are kept, and equal calls at once are one.
        open_store: opens the store of results that processes share, when the client is opened.
        limits: gives a route the limits of its own; without a run, no rate and slots.
        sleep: pause between attempts.
        clock: monotonic seconds.
        rng: draws the jitter.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        limiter: Limiter | None,
        slots: Slots | None = None,
        timeout_s: float = 30.0,
        max_retries: int = 3,
        patience_s: float = math.inf,
        caches: bool = True,
        open_store: Callable[[], ResultStore | None] = lambda: None,
        limits: Callable[[Route, OwnLimits], Route] = limited,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        urls = [each.rstrip("/") for each in ([url] if isinstance(url, str) else url)]
        self.source = ""
        """Source of the calls, for the limiter."""

        self.deadline: Deadline | None = None
        """Of the trajectory whose calls these are."""

        self.limiter, self.slots, self.patience_s = limiter, slots or _no_slots, patience_s
        self.sleep, self.clock, self.rng = sleep, clock, rng or random.Random()
        self.limits = limits
        self._throttle = LoopThrottle(CALLS_PER_TURN)
        self.route = Route(
            servers=Servers(urls, timeout_s, clock),
            post=self._post_http,
            timeout_s=timeout_s,
            max_retries=max_retries,
            advice="is the server up, and the rate limit high enough? ask "
            f"{', '.join(urls)}/health",
        )
        """How calls of this client are answered."""

        self.opened = _Opened()
        self._open_store = open_store
        self._cache = Cache(clock) if caches else None

    async def __aenter__(self) -> Self:
        self.opened.requests = ToolRequests()
        if self._cache is not None:
            self._cache.store = self._open_store()
        return self

    async def __aexit__(self, *exception: object) -> None:
        opened = self.opened
        requests, opened.requests = opened.requests, None
        resources, opened.resources = opened.resources, {}
        try:
            for resource in resources.values():
                if (close := getattr(resource, "close", None)) is not None:
                    try:
                        await close()
                    except Exception:  # the others are still closed
                        logger.exception("cannot close %s", type(resource).__name__)
            if requests is not None:
                await requests.session.close()
        finally:
            if self._cache is not None and (store := self._cache.store) is not None:
                self._cache.store = None
                await store.close()

    def for_source(self, source: str, deadline: Deadline | None = None) -> Self:
        """A client for the calls of one source, or of one trajectory that has a deadline; it shares
        everything with this client, also being open."""
        twin = copy(self)
        twin.source, twin.deadline = source, deadline
        return twin

    def on(self, route: Route) -> Self:
        """A client whose calls take another route; it shares everything else with this client."""
        twin = copy(self)
        twin.route = route
        return twin

    def resource(self, key: Hashable, make: Callable[[], R]) -> R:
        """What this client's event loop has under a key; made at first use. If it has a method
        `close`, that is awaited when the client is closed."""
        if key not in self.opened.resources:
            self.opened.resources[key] = make()
        return self.opened.resources[key]

    @property
    def session(self) -> aiohttp.ClientSession:
        """The open HTTP session, also for routes to other HTTP servers."""
        return self._requests.session

    @property
    def _requests(self) -> ToolRequests:
        if self.opened.requests is None:
            raise RuntimeError("a call outside `async with ToolClient(...)`")
        return self.opened.requests

    async def call(self, call: ToolCall) -> ToolResult:
        """Run one call.

        If the caller is cancelled, its slot and its limiter queue entry are freed, and its request
        is closed. If other callers wait for the same answer, one of them asks.

        Raises:
            ToolRejected: the server refuses what the model wrote.
            ToolUnavailable: no answer within the deadline, the tool failed in all attempts, or a
                server refuses the token.
        """
        deadline = Deadline.after(self.route.timeout_s, "timeout", self.clock)
        if call.tool == END_SESSION:  # also after the deadline of the trajectory
            deadline = deadline.within(CLOSE_S, "timeout")
        elif (own := self.deadline) is not None:
            deadline = deadline.within(own.left_s(), f"the rest of mixed.deadlines.{own.name}")
        await self._throttle.enter()
        attempts = _Attempts(self, call, deadline)
        if self._cache is not None and self._is_pure(call):
            try:
                return await self._cache.answer(call, self.route, deadline, attempts.result)
            except TimeoutError as error:
                raise attempts.lost(NOT_JOINED, ToolTimeout) from error
        try:
            return await attempts.result()
        finally:
            if call.tool == END_SESSION:
                self.route.servers.forget(call.session)

    def _is_pure(self, call: ToolCall) -> bool:
        """Whether the answer depends only on the call."""
        if self.route.caches is not None:
            return self.route.caches and not call.session
        return call.idempotent and call.deterministic and call.tool in PURE_TOOLS

    async def _post_http(self, call: ToolCall, server: Server) -> ToolResult:
        return await self._requests.post(call, server)


class _Attempts:
    """One call of a client: its waits, requests and pauses, until an answer, a fault or its
    deadline."""

    def __init__(self, client: ToolClient, call: ToolCall, deadline: Deadline) -> None:
        self._client, self._call, self._deadline = client, call, deadline
        self._route, self._clock = client.route, client.clock
        self._server: Server | None = None
        """The server that is asked, or for which the call waits; None while it waits for limiter or
        slot."""

        self._is_asking = False
        self._limiter_wait_s = self._server_wait_s = 0.0
        self._requests = 0
        """Those that may have been executed."""

        self._failures = 0
        """Those that the tool answered with a failure."""

        self._pauses = 0
        self._tried: set[Server] = set()
        self._tries: Server | None = None
        """The server that is away and that this call is to try."""

        self._last: Fault | None = None

    async def result(self) -> ToolResult:
        """The answer of the first request that has one."""
        started = self._clock()
        try:
            async with timeout(self._deadline.left_s()):
                result = await self._answer()
        except TimeoutError as error:  # a LimiterTimeout is one
            fault = self._too_late(str(error))
            fault.server_wait_s = self._server_wait_s
            raise fault from error
        except Fault as fault:
            fault.server_wait_s = self._server_wait_s
            raise
        return replace(
            result,
            latency_s=self._clock() - started - self._limiter_wait_s - self._server_wait_s,
            limiter_wait_s=self._limiter_wait_s,
            server_wait_s=self._server_wait_s,
            attempts=self._requests,
        )

    async def _answer(self) -> ToolResult:
        client, call, route, servers = self._client, self._call, self._route, self._route.servers
        has_grant = False

        def for_waiting_s() -> float:
            """The rest is the request's."""
            left_s, limit_s = self._deadline.left_s(), self._deadline.limit_s
            return max(0.0, left_s - min(servers.request_s, limit_s / 4))

        while True:
            if servers.is_one_away or not self._deadline.left_s():
                await self._turn()
            waited_from, self._server = self._clock(), None
            waits_for("limiter")
            # the tool's own first, because a grant of the run's limit expires
            for limiter in filter(None, () if has_grant else (route.limiter, client.limiter)):
                await limiter.acquire_async(timeout_s=for_waiting_s(), source=client.source)
            has_grant = True
            own = (route.slots.hold_async if route.slots else _no_slots)(for_waiting_s())
            async with own, client.slots(for_waiting_s()):
                asked_at = self._clock()
                self._limiter_wait_s += asked_at - waited_from
                server = servers.choose(call, self._tried, self._tries)
                if server.away_since is not None and server is not self._tries:
                    continue  # it went away meanwhile; the grant stays
                has_grant, was_executed = False, True
                self._server, self._tries, self._is_asking = server, None, True
                self._requests += 1
                servers.begin(server, call)
                waits_for("tool")
                try:
                    result = await self._post(server)
                    servers.note_answer(server, self._clock() - asked_at, call.tool, result.origin)
                    return result
                except ToolRejected:
                    server.note_answer()
                    raise
                except ToolUnavailable as error:
                    fault, was_executed = error, error.executed
                finally:
                    servers.end(server, call, was_executed=was_executed)
            await self._pause(server, fault)

    async def _turn(self) -> None:
        """Wait until a server may be asked; while all are away, until this call may try one."""
        while left_s := self._deadline.left_s():
            server = self._route.servers.choose(self._call, self._tried, self._tries)
            if server is self._tries:
                return
            wait_s = server.take_turn(self._clock())
            if not wait_s:
                self._tries = server if server.away_since is not None else None
                return
            self._server = server
            is_over = self._call.tool == END_SESSION  # the session ended with the server, or will
            if is_over or self._server_wait_s >= self._client.patience_s:
                raise self.lost()
            await self._wait_for_server(min(wait_s, left_s, LOOK_AGAIN_S))
        raise TimeoutError

    async def _wait_for_server(self, seconds: float) -> None:
        waits_for("server")
        started = self._clock()
        try:
            await self._client.sleep(seconds)
        finally:
            self._server_wait_s += self._clock() - started

    async def _pause(self, server: Server, fault: ToolUnavailable) -> None:
        """Wait before the next attempt, or raise the fault if there is none."""
        route = self._route
        self._last, self._is_asking = fault, False
        self._requests -= not fault.executed
        self._failures += fault.again is Again.COUNTED
        self._tried.add(server)
        if fault.is_overload or (fault.again is Again.NEVER and not fault.is_away):
            server.note_answer()
        elif fault.again is not Again.NEVER:  # else it says nothing of the other calls
            server.note_failure(self._clock(), fault)
        pause_s = fault.retry_after_s or 0.0
        if fault.is_overload or fault.retry_after_s is not None:
            if route.servers.has_other(self._call, self._tried):  # asked without the pause
                server.ask_at = max(server.ask_at, self._clock() + pause_s)
                pause_s = 0.0
            # Another program's overload must not slow down the calls of the tool servers.
            limiter = route.limiter or (self._client.limiter if route.is_http else None)
            if limiter is not None:
                await limiter.penalise_async(pause_s)
        if fault.again is Again.NEVER:
            raise fault
        if fault.executed and not self._call.idempotent:
            raise self.lost(NOT_TWICE) from fault
        if self._failures > route.max_retries:
            raise self.lost() from fault
        left_s = self._deadline.left_s()
        if pause_s and pause_s >= left_s:
            raise self.lost(kind=ToolTimeout) from fault
        cap_s = LONGEST_PAUSE_S if fault.is_away else BACKOFF_CAP_S
        own_s = backoff_s(self._pauses, BACKOFF_START_S, cap_s, self._client.rng)
        self._pauses += 1
        pause_s = min(left_s, max(pause_s, own_s))
        if fault.again is Again.COUNTED:
            await self._client.sleep(pause_s)
        else:
            await self._wait_for_server(pause_s)

    async def _post(self, server: Server) -> ToolResult:
        """One request. If another server could answer too, it gets half of the time that is
        left."""
        call, route = self._call, self._route
        if not call.idempotent or not route.servers.has_other(call, {*self._tried, server}):
            return await route.post(call, server)
        patience = timeout(self._deadline.left_s() / 2)
        try:
            async with patience:
                return await route.post(call, server)
        except TimeoutError as error:
            if not patience.expired():
                raise
            raise ToolUnavailable(
                "no answer in half of the time", tool=call.tool, again=Again.UNTIL_DEADLINE
            ) from error

    def lost(self, why: str = "", kind: type[ToolUnavailable] = ToolUnavailable) -> ToolUnavailable:
        parts = [f"{self._requests} attempts"]
        if self._server_wait_s:
            parts.append(f"{self._server_wait_s:.1f} s of waiting for the server")
        if last := self._last or (self._server.last_fault if self._server is not None else ""):
            parts.append(f"last: {last}")
        asked = self._route.names if self._server is None else self._server.name
        limit_s = self._deadline.limit_s
        limit = f"{limit_s:.3g}" if limit_s < 1000 else f"{limit_s:.0f}"
        return kind(
            f"no answer from {asked} for tool={self._call.tool!r} within "
            f"{self._deadline.name}={limit} s: "
            f"{', '.join(parts)}{f'; {why}' if why else ''}; {self._route.advice}",
            tool=self._call.tool,
        )

    def _too_late(self, words: str) -> ToolUnavailable:
        """The fault of a call whose time is over."""
        why = ""
        if self._is_asking and self._server is not None:
            self._server.note_failure(self._clock())
        elif self._server is None and self._deadline.limit_s:
            why = f"no place in the limiter or the slots ({words or 'it still waited'}); {NO_PLACE}"
        return self.lost(why, ToolTimeout)


def _no_slots(timeout_s: float) -> AbstractAsyncContextManager[object]:
    return nullcontext()


def store_of(cache: ToolCacheConfig, run_dir: str) -> ResultStore | None:
    """The store of a run's results; None if processes do not share them.

    There is one file per host, because SQLite's log needs memory that only processes of one host
    share.
    """
    if cache.store != "sqlite":
        return None
    path = Path(run_dir) / f"tool_cache.{gethostname()}.sqlite"
    return ResultStore(path, STORE_BYTES, CACHE_S)


# The key has the pid, because a forked child inherits the dict, and the loop itself, because the id
# of a loop can be reused.
_Key = tuple[int, asyncio.AbstractEventLoop, ToolConfig, str]
_shared: dict[_Key, ToolClient] = {}


async def shared_client(config: ToolConfig, mixed: MixedConfig) -> ToolClient:
    """The client of this event loop, created on first use and closed when the loop ends."""
    key = (os.getpid(), asyncio.get_running_loop(), config, mixed.run_dir)
    if key not in _shared:
        cache, path = config.cache, state_path(config, mixed)
        client = ToolClient(
            config.server_urls,
            limiter=make_limiter(config, mixed) if config.enable_global_rate_limit else None,
            slots=FileSlots(path.with_suffix(".slots"), config.max_workers).hold_async,
            timeout_s=config.timeout,
            max_retries=config.max_retries,
            caches=cache.store != "none",
            open_store=partial(store_of, cache, mixed.run_dir),
            limits=partial(limited, tools=config, mixed=mixed),
        )
        _shared[key] = await client.__aenter__()
        await client.resource("until the loop ends", partial(_close_with_loop, key)).__anext__()
    return _shared[key]


async def _close_with_loop(key: _Key) -> AsyncGenerator[None, None]:
    """Closes the client when the loop ends: `asyncio.run` then closes the loop's generators."""
    try:
        yield
    finally:
        await _shared.pop(key).__aexit__(None, None, None)
