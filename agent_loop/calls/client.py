"""The tool client: cache, rate limiter, concurrency slots, choice of server, retries, deadline.

A call goes through: cache -> limiter -> slot -> server -> request. A cached answer needs no limiter
and no slot. Waiting for limiter and slot ends early enough to leave time for the request. A request
that failed for a passing reason is tried again, with capped exponential backoff and full jitter,
through the limiter, and at another server if there is one. All processes obey a `Retry-After`.

A cached answer serves only callers whose servers would answer the same: it is kept with its origin
(`ToolResult.origin`), and looked up under the last origins that the servers named.

Source for full jitter: Brooker, "Exponential Backoff and Jitter", AWS Architecture Blog 2015.
"""

import asyncio
import logging
import os
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import aiohttp
import msgspec
from typing_extensions import Self

from agent_loop.calls.cache import SingleFlightCache, content_key
from agent_loop.calls.limiter import make_limiter, state_path
from agent_loop.calls.loop_throttle import LoopThrottle
from agent_loop.calls.own_limits import OwnLimits, limited
from agent_loop.calls.result_store import Store, open_store_of
from agent_loop.calls.routes import Limiter, RequestFailed, Route, Slots
from agent_loop.calls.servers import Server, Servers
from agent_loop.calls.transport import HttpTransport
from agent_loop.watchdog import waits_for
from config.compat import gather_all, timeout
from config.schema import MixedConfig, ToolConfig
from rate_limit.slots import FileSlots
from tool_server.wire.protocol import (
    END_SESSION,
    ToolCall,
    ToolResult,
    ToolTimeout,
    ToolUnavailable,
)
from tool_server.wire.responses import decode, dumps, may_be_cached

BACKOFF_START_S = 0.25
BACKOFF_CAP_S = 8.0

CALLS_PER_TURN = 64
"""Calls that start in one pass of the event loop; see `LoopThrottle`."""

LATE_S = 1.0
"""If the event loop notices the end of a call's time so late, the loop stood still, and the answer
may have been waiting: the server's breaker does not count the failure."""

HEALTH_S = 2.0
"""Longest wait for the servers' `/health` before the first look into a shared store."""

CACHE_BYTES = 32 << 20
"""Size of all results in memory, per event loop."""


logger = logging.getLogger(__name__)

R = TypeVar("R")


class LimitRoute(Protocol):
    def __call__(self, route: Route, limits: OwnLimits) -> Route:
        """The route with limits of its own."""
        ...


@dataclass(slots=True)
class _Progress:
    """How far a call is."""

    asked: Server | None = None
    """The server at which a request is under way; None while the call waits for its turn."""


@dataclass(slots=True)
class _Opened:
    """Open resources of a client, shared by the clients of all sources."""

    transport: HttpTransport | None = None
    store: Store | None = None
    health: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while `/health` of the servers is asked."""

    health_was_asked: bool = False
    local_origins: set[str] = field(default_factory=set)
    """Origins of results of local routes; they never change."""

    resources: dict[Hashable, Any] = field(default_factory=dict)
    """What `resource` made."""


class ToolClient:
    """Calls tools over HTTP; an async context manager.

    Args:
        url: base URL of the server, or several base URLs.
        limiter: shared rate limit; None for no limit.
        slots: shared concurrency limit; None for no limit.
        timeout_s: seconds for one call, with its waits, attempts and pauses.
        max_retries: attempts after the first one.
        cache_size: results of pure tools kept in memory; 0 turns cache and store off.
        cache_bytes: largest size of all these results.
        cache_ttl_s: seconds that a result is kept.
        open_store: opens the store of results that processes share, when the client is opened.
        deterministic_code: whether a program counts as deterministic if its caller does not know.
        limits: gives a route the limits of its own. None: deadline, retries and cache only, because
            a rate and slots need the state of a run.
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
        cache_size: int = 4096,
        cache_bytes: float = CACHE_BYTES,
        cache_ttl_s: float = 86_400.0,
        open_store: Callable[[], Store | None] | None = None,
        deterministic_code: bool = True,
        limits: LimitRoute | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        urls = [each.rstrip("/") for each in ([url] if isinstance(url, str) else url)]
        self.url = ", ".join(urls)
        self.source = ""
        """Source of the calls, for the limiter."""

        self._limiter, self._slots = limiter, slots
        self._sleep, self.clock = sleep, clock
        self._rng = rng or random.Random()
        self.limits = limits or _limited_alone
        self._throttle = LoopThrottle(CALLS_PER_TURN)
        servers = self._servers = Servers(urls, timeout_s, clock)
        self.route = Route(
            servers=servers,
            post=self._post_http,
            timeout_s=timeout_s,
            max_retries=max_retries,
            advice=f"is the server up, and the rate limit high enough? ask {self.url}/health",
        )
        """How calls of this client are answered."""

        opened = self._opened = _Opened()
        self._open_store = open_store if cache_size else None
        self._cache = None
        self._deterministic_code = deterministic_code

        def again(error: BaseException, left_s: float) -> bool:
            return isinstance(error, ToolTimeout) and left_s > servers.request_s

        def is_current(result: ToolResult) -> bool:
            own = opened.local_origins
            return result.origin in own or result.origin in servers.origins(result.tool)

        if cache_size:
            self._cache = SingleFlightCache[ToolResult](
                cache_size,
                may_be_cached,
                again,
                is_current=is_current,
                size_of=lambda result: len(msgspec.json.encode(result.body)),
                capacity_bytes=cache_bytes,
                ttl_s=cache_ttl_s,
                clock=clock,
            )

    async def __aenter__(self) -> Self:
        self._opened.transport = HttpTransport()
        if self._open_store is not None:
            self._opened.store = self._open_store()
        return self

    async def __aexit__(self, *exception: object) -> None:
        opened = self._opened
        transport, opened.transport = opened.transport, None
        store, opened.store = opened.store, None
        resources, opened.resources = opened.resources, {}
        try:
            for resource in resources.values():
                if (close := getattr(resource, "close", None)) is not None:
                    try:
                        await close()
                    except Exception:  # the others are still closed
                        logger.exception("cannot close %s", type(resource).__name__)
            if transport is not None:
                await transport.close()
        finally:
            if store is not None:
                await store.close()

    def for_source(self, source: str) -> Self:
        """A client for calls of one source; it shares everything with this client, also being
        open."""
        twin = copy(self)
        twin.source = source
        return twin

    def on(self, route: Route) -> Self:
        """A client whose calls take another route; it shares everything else with this client."""
        twin = copy(self)
        twin.route = route
        if route.key:
            self._opened.local_origins.update(*(s.origins.values() for s in route.servers.all))
        return twin

    def forget_resources(self) -> None:
        self._opened.resources.clear()

    def resource(self, key: Hashable, make: Callable[[], R]) -> R:
        """What this client's event loop has under a key; made at first use. If it has a method
        `close`, that is awaited when the client is closed."""
        if key not in self._opened.resources:
            self._opened.resources[key] = make()
        return self._opened.resources[key]

    @property
    def session(self) -> aiohttp.ClientSession:
        """The open HTTP session, also for routes to other HTTP servers."""
        if self._opened.transport is None:
            raise RuntimeError("a call outside `async with ToolClient(...)`")
        return self._opened.transport.session

    async def call(self, call: ToolCall) -> ToolResult:
        """Run one call.

        If the caller is cancelled, its slot and its limiter queue entry are freed, and its request
        is closed unless other callers wait for the same answer.

        Raises:
            ToolRejected: the server refuses this call (4xx but 429): the model's own mistake.
            ToolUnavailable: no valid answer within the deadline or after all retries, the breakers
                of all servers or of the session's server are open, or a server refuses the token.
        """
        came_at = self.clock()
        await self._throttle.enter()
        timeout_s = self.route.timeout_s - (self.clock() - came_at)
        if self._cache is not None and self._is_pure(call):
            return await self._call_cached(self._cache, call, timeout_s)
        try:
            return await self._call_in_time(call, timeout_s)
        finally:
            if call.tool == END_SESSION:
                self.route.servers.forget(call.session)

    @property
    def _names(self) -> str:
        return ", ".join(server.url for server in self.route.servers.all)

    def _is_pure(self, call: ToolCall) -> bool:
        """Whether the answer depends only on the call."""
        if self.route.caches is not None:
            return self.route.caches and not call.session
        if not call.idempotent or call.deterministic is False:
            return False
        if call.tool == "run_code":
            return call.deterministic or self._deterministic_code
        return call.tool in PURE_TOOLS

    async def _call_cached(
        self, cache: SingleFlightCache[ToolResult], call: ToolCall, timeout_s: float
    ) -> ToolResult:
        key = f"{content_key(call)}{self.route.key}"
        try:
            result, joined = await cache.get(key, partial(self._make, key, call), timeout_s)
        except TimeoutError as error:
            raise ToolTimeout(
                f"no answer from {self._names} for tool={call.tool!r} within timeout="
                f"{self.route.timeout_s:g} s to an equal call that this one joined; "
                f"{self.route.advice}",
                tool=call.tool,
            ) from error
        if joined:
            return replace(result, latency_s=0.0, limiter_wait_s=0.0, attempts=0, cached=True)
        return result

    async def _make(self, key: str, call: ToolCall, timeout_s: float) -> ToolResult:
        """The stored result, or the result of a new request."""
        if (store := self._opened.store) is None:
            return await self._call_in_time(call, timeout_s)
        started = self.clock()
        if self.route.is_http:
            await self._ask_health(min(HEALTH_S, timeout_s / 4))
        for origin in self.route.servers.origins(call.tool):
            body = await store.get(f"{key}:{origin}")
            with suppress(ValueError, RecursionError):  # another program wrote this
                if body is not None:
                    body = decode(call, dumps(body))
                    return ToolResult(
                        body=body, attempts=0, cached=True, tool=call.tool, origin=origin
                    )
        result = await self._call_in_time(call, timeout_s - (self.clock() - started))
        if self._opened.store is not None and may_be_cached(result):
            store.put(f"{key}:{result.origin}", result.body)
        return result

    async def _ask_health(self, timeout_s: float) -> None:
        """Ask the servers once for their origins, without which the store has no keys."""
        opened = self._opened
        if opened.health_was_asked or (transport := opened.transport) is None:
            return
        async with opened.health:
            if not opened.health_was_asked:
                servers = self._servers.all
                await gather_all([transport.ask_origins(each, timeout_s) for each in servers])
                opened.health_was_asked = True

    async def _call_in_time(self, call: ToolCall, timeout_s: float) -> ToolResult:
        route, progress = self.route, _Progress()
        deadline = self.clock() + timeout_s
        try:
            async with timeout(timeout_s):
                return await self._attempts(call, progress, timeout_s)
        except TimeoutError as error:  # a LimiterTimeout is one
            server = progress.asked
            if server is None:
                raise ToolTimeout(
                    f"no place for tool={call.tool!r} at {self._names} within "
                    f"timeout={route.timeout_s:g} s ({str(error) or 'it still waited'}); raise "
                    "rate_limit_per_minute, max_workers or timeout under tool_config, or the "
                    "tool's own rate, slots and timeout",
                    tool=call.tool,
                ) from error
            if self.clock() - deadline < LATE_S:
                route.servers.note_failure(server)
            raise ToolTimeout(
                f"no answer from {server.url} for tool={call.tool!r} within "
                f"timeout={route.timeout_s:g} s; {route.advice}",
                tool=call.tool,
            ) from error

    async def _attempts(self, call: ToolCall, progress: _Progress, timeout_s: float) -> ToolResult:
        route, clock, limiter = self.route, self.clock, self._limiter
        servers = route.servers
        limiter_wait_s = 0.0
        started = clock()
        deadline = started + timeout_s
        tried: list[Server] = []

        def for_waiting_s() -> float:
            # `servers` may be those of routes with a longer timeout.
            reserved_s = min(servers.request_s, route.timeout_s / 4)
            return max(0.0, deadline - reserved_s - clock())

        for attempt in range(1, route.max_retries + 2):
            servers.check(call)
            waited_from = clock()
            waits_for("limiter")
            if route.limiter is not None:  # first, because a grant of the run's limit expires
                await route.limiter.acquire_async(timeout_s=for_waiting_s(), source=self.source)
            if limiter is not None:
                await limiter.acquire_async(timeout_s=for_waiting_s(), source=self.source)
            own = _held(route.slots, for_waiting_s())
            async with own, _held(self._slots, for_waiting_s()):
                server = servers.choose(call, tried)
                asked_at = clock()
                limiter_wait_s += asked_at - waited_from
                progress.asked = server
                server.in_flight += 1
                waits_for("tool")
                was_executed = True
                try:
                    if len(servers.all) == 1:
                        outcome = await route.post(call, server)
                    else:
                        outcome = await self._request_of_several(call, server, tried, deadline)
                except RequestFailed as failure:
                    outcome, was_executed = failure, failure.was_executed
                finally:
                    server.in_flight -= 1
                    servers.release(call, was_executed=was_executed)
            progress.asked = None
            if not isinstance(outcome, RequestFailed):
                now = clock()
                servers.note_answer(server, now - asked_at, call.tool, outcome.origin)
                return replace(
                    outcome,
                    latency_s=now - started - limiter_wait_s,
                    limiter_wait_s=limiter_wait_s,
                    attempts=attempt,
                )
            if outcome.blames_server:
                servers.note_failure(server)
            tried.append(server)
            await self._pause(attempt, outcome, server, tried, call, for_waiting_s)
        raise AssertionError("the last attempt returns or raises")

    async def _pause(
        self,
        attempt: int,
        last: RequestFailed,
        server: Server,
        tried: Sequence[Server],
        call: ToolCall,
        for_waiting_s: Callable[[], float],
    ) -> None:
        """Wait before the next attempt, or raise `ToolUnavailable` if there is none."""
        route = self.route
        retry_after_s = last.retry_after_s or 0.0
        if last.is_overload or last.retry_after_s is not None:
            if route.servers.has_other(tried):  # the other server can be asked without the pause
                route.servers.pause(server, retry_after_s)
                retry_after_s = 0.0
            # Another program's overload must not slow down the calls of the tool servers.
            limiter = route.limiter or (self._limiter if route.is_http else None)
            if limiter is not None:
                await limiter.penalise_async(retry_after_s)
        cap_s = min(BACKOFF_CAP_S, BACKOFF_START_S * 2 ** (attempt - 1))
        pause_s = max(retry_after_s, self._rng.uniform(0.0, cap_s))
        kind, advice = ToolUnavailable, route.advice
        if last.was_executed and not call.idempotent:
            advice = (
                "it may have been executed, so it is not tried again; if it may run twice, set "
                "`retry` in its entry of `tools` (ToolCall.idempotent)"
            )
        elif attempt <= route.max_retries:
            if pause_s < for_waiting_s():
                await self._sleep(pause_s)
                return
            kind = ToolTimeout
        raise kind(
            f"no answer from {server.url} for tool={call.tool!r}: {attempt} attempts within "
            f"timeout={route.timeout_s:g} s, last: {last}; {advice}",
            tool=call.tool,
        ) from last

    async def _request_of_several(
        self, call: ToolCall, server: Server, tried: Sequence[Server], deadline: float
    ) -> ToolResult:
        """A request that gets half of the remaining time, so that another server can still be
        asked."""
        route = self.route
        if not call.idempotent or not route.servers.has_other([*tried, server]):
            return await route.post(call, server)
        patience_s = (deadline - self.clock()) / 2
        limit = timeout(patience_s)
        try:
            async with limit:
                return await route.post(call, server)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise RequestFailed(f"no answer within {patience_s:.1f} s") from error

    async def _post_http(self, call: ToolCall, server: Server) -> ToolResult:
        transport = self._opened.transport
        if transport is None:
            raise RuntimeError("ToolClient.call outside `async with ToolClient(...)`")
        return await transport.post(call, server)


def _limited_alone(route: Route, limits: OwnLimits) -> Route:
    """The route with the limits that need no state of a run."""
    if limits.rate is not None or limits.slots is not None:
        raise ValueError("rate and slots of a tool need the limits of a run")
    return route.limited(timeout_s=limits.timeout, max_retries=limits.retry, caches=limits.cache)


def _held(slots: Slots | None, timeout_s: float) -> AbstractAsyncContextManager[object]:
    """A slot, or nothing without a limit."""
    return nullcontext() if slots is None else slots.hold_async(timeout_s)


PURE_TOOLS = frozenset({"retrieve", "calculate"})
"""Tools whose answer depends only on the call. `run_code` is pure if its program is."""


@dataclass(slots=True)
class _Shared:
    client: ToolClient
    until_loop_ends: AsyncGenerator[None, None]


# The key has the pid, because a forked child inherits the dict, and the loop itself, because the id
# of a loop can be reused.
_shared: dict[tuple[int, asyncio.AbstractEventLoop, ToolConfig, str], _Shared] = {}


async def shared_client(config: ToolConfig, mixed: MixedConfig) -> ToolClient:
    """The client of this event loop, created on first use and closed when the loop ends."""
    key = (os.getpid(), asyncio.get_running_loop(), config, mixed.run_dir)
    if key not in _shared:
        _forget_closed_loops()
        cache = config.cache
        client = ToolClient(
            config.server_urls,
            limiter=make_limiter(config, mixed) if config.enable_global_rate_limit else None,
            slots=FileSlots(state_path(config, mixed).with_suffix(".slots"), config.max_workers),
            timeout_s=config.timeout,
            max_retries=config.max_retries,
            cache_size=0 if cache.store == "none" else 4096,
            cache_bytes=min(CACHE_BYTES, cache.max_mb * 2**20),
            cache_ttl_s=cache.ttl_s,
            open_store=partial(open_store_of, cache, mixed.run_dir),
            deterministic_code=config.deterministic_code,
            limits=partial(limited, tools=config, mixed=mixed),
        )
        _shared[key] = _Shared(client, _close_with_loop(client))
        await client.__aenter__()
        await _shared[key].until_loop_ends.__anext__()
    return _shared[key].client


async def _close_with_loop(client: ToolClient) -> AsyncGenerator[None, None]:
    """Closes the client when the loop ends: `asyncio.run` then closes the loop's generators."""
    try:
        yield
    finally:
        await client.__aexit__(None, None, None)


def _forget_closed_loops() -> None:
    """Drop this process's clients whose loop has ended.

    A parent process's clients stay, because closing a connection would change the parent's `epoll`,
    which a forked child shares.
    """
    pid = os.getpid()
    for key in [key for key in _shared if key[0] == pid and key[1].is_closed()]:
        client = _shared.pop(key).client
        client.forget_resources()  # they cannot be closed without their loop
        with suppress(StopIteration):  # nothing is awaited, because the loop is closed
            client.__aexit__(None, None, None).send(None)
