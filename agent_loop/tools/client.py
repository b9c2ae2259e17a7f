"""The tool client: pooled session, limiter, slot, retries, breaker, deadline, cache.

Order of a call: cache -> limiter -> slot -> request. A cached answer passes neither limiter nor
slot. Who waits for these two leaves the request its time before the deadline. A request that failed
for a passing reason is tried again with capped exponential backoff and full jitter, through the
limiter again; a server that says `Retry-After` is obeyed by every process.

Source for full jitter: Brooker, "Exponential Backoff and Jitter", AWS Architecture Blog 2015.
"""

import asyncio
import json
import math
import os
import random
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Protocol

import aiohttp
from typing_extensions import Self

from agent_loop.compat import timeout
from agent_loop.tools.cache import SingleFlightCache, content_key
from agent_loop.tools.limiter import make_limiter, state_path
from agent_loop.tools.protocol import (
    ToolCall,
    ToolRejected,
    ToolResult,
    ToolTimeout,
    ToolUnavailable,
)
from agent_loop.watchdog import waits_for
from config.schema import MixedConfig, ToolConfig
from rate_limit.slots import FileSlots

PURE_TOOLS = frozenset({"run_code", "retrieve", "calculate"})
"""Tools whose answer depends on nothing but the call."""

BACKOFF_START_S = 0.25
BACKOFF_CAP_S = 8.0

BREAKER_FAILURES = 20
"""Failed requests in a row that open the breaker."""

RETRY_AFTER_CAP_S = 600.0
"""A `Retry-After` beyond it is taken for a mistake: it stops every process of the host."""

BREAKER_OPEN_S = 5.0
"""While it is open a call fails at once; after it one call tries."""


class Limiter(Protocol):
    """What a client needs of a rate limiter."""

    async def acquire_async(
        self, n: int = 1, timeout_s: float | None = None, source: str = ""
    ) -> float: ...

    async def penalise_async(self, retry_after_s: float = 0.0) -> None: ...


class Slots(Protocol):
    """What a client needs of a concurrency limit."""

    def hold_async(self, timeout_s: float | None = None) -> AbstractAsyncContextManager[object]: ...


class _Again(Exception):
    """A failure worth another attempt."""

    def __init__(
        self, reason: str, retry_after_s: float | None = None, is_overload: bool = False
    ) -> None:
        super().__init__(_whole(reason))
        self.retry_after_s, self.is_overload = retry_after_s, is_overload


class _Server:
    """The server as the clients of all sources know it: session, breaker, how fast it answers.

    The breaker opens after many failures in a row: calls then fail at once, but for one that tries.
    """

    def __init__(self, url: str, timeout_s: float, clock: Callable[[], float]):
        self.session: aiohttp.ClientSession | None = None
        self._url, self._clock = url, clock
        self._failures_in_a_row = 0
        self._opened_at: float | None = None
        self._most_request_s = timeout_s / 4
        self._mean_request_s: float | None = None

    @property
    def request_s(self) -> float:
        """What a request needs before its deadline: twice the mean of those that were answered."""
        if self._mean_request_s is None:
            return self._most_request_s
        return min(self._most_request_s, 2 * self._mean_request_s)

    def check(self, call: ToolCall) -> None:
        """Raises `ToolUnavailable` while it is open."""
        if self._opened_at is None:
            return
        if self._clock() - self._opened_at < BREAKER_OPEN_S:
            raise ToolUnavailable(
                f"not calling {self._url} for tool={call.tool!r}: its last "
                f"{self._failures_in_a_row} requests failed; trying again after {BREAKER_OPEN_S} s",
                tool=call.tool,
                server=self._url,
            )
        self._opened_at = self._clock()  # this one tries, the others wait for its answer

    def note_failure(self) -> None:
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= BREAKER_FAILURES:
            self._opened_at = self._clock()

    def note_answer(self, request_s: float) -> None:
        mean_s = request_s if self._mean_request_s is None else self._mean_request_s
        self._mean_request_s = mean_s + (request_s - mean_s) / 8
        self._failures_in_a_row, self._opened_at = 0, None


@dataclass(slots=True)
class _Progress:
    """How far a call is."""

    is_asking: bool = False
    """A request is under way; otherwise it waits for its turn."""


class ToolClient:
    """Calls tools over HTTP; an async context manager.

    Args:
        url: base URL of the server.
        limiter: shared rate limit; None for no limit.
        slots: shared concurrency limit; None for no limit.
        timeout_s: seconds for one call: waiting, attempts and pauses together.
        max_retries: further attempts after the first.
        cache_size: results of pure tools kept; 0 keeps none.
        sleep: pause between attempts.
        clock: monotonic seconds.
        rng: draws the jitter.
    """

    def __init__(
        self,
        url: str,
        *,
        limiter: Limiter | None,
        slots: Slots | None = None,
        timeout_s: float = 30.0,
        max_retries: int = 3,
        cache_size: int = 4096,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.source = ""
        """Whose calls these are, for the limiter."""

        self.stats: Counter[str] = Counter()
        """calls, cached, requests, retries, rejected, unavailable."""

        self._limiter, self._slots = limiter, slots
        self._timeout_s, self._max_retries = timeout_s, max_retries
        self._sleep, self._clock = sleep, clock
        self._rng = rng or random.Random()
        server = self._server = _Server(self.url, timeout_s, clock)

        def again(error: BaseException, left_s: float) -> bool:
            return isinstance(error, ToolTimeout) and left_s > server.request_s

        self._cache = (
            SingleFlightCache[ToolResult](cache_size, _is_repeatable, again) if cache_size else None
        )

    async def __aenter__(self) -> Self:
        self._server.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        session, self._server.session = self._server.session, None
        if session is not None:
            await session.close()

    def for_source(self, source: str) -> Self:
        """The same client for calls of a source: it is open while this one is, and shares all."""
        twin = copy(self)
        twin.source = source
        return twin

    async def call(self, call: ToolCall) -> ToolResult:
        """Run one call.

        A caller that is cancelled gives back its slot and its place in line, and closes its request
        unless others wait for the same answer.

        Raises:
            ToolRejected: the server refuses this call (4xx but 429).
            ToolUnavailable: no answer of the tool's kind within the deadline or after all retries,
                or the breaker is open.
        """
        self.stats["calls"] += 1
        if self._cache is None or call.tool not in PURE_TOOLS:
            return await self._call_counted(call, self._timeout_s)
        try:
            result, joined = await self._cache.get(
                content_key(call), partial(self._call_counted, call), self._timeout_s
            )
        except TimeoutError as error:
            self.stats["unavailable"] += 1
            raise ToolTimeout(
                f"no answer from {self.url} for tool={call.tool!r} within timeout="
                f"{self._timeout_s} s to an equal call that this one joined; ask {self.url}/health",
                tool=call.tool,
                server=self.url,
            ) from error
        if not joined:
            return result
        self.stats["cached"] += 1
        return ToolResult(body=result.body, attempts=0, cached=True)

    async def _call_counted(self, call: ToolCall, timeout_s: float) -> ToolResult:
        progress = _Progress()
        try:
            async with timeout(timeout_s):
                return await self._attempts(call, progress, timeout_s)
        except ToolRejected:
            self.stats["rejected"] += 1
            raise
        except ToolUnavailable:
            self.stats["unavailable"] += 1
            raise
        except TimeoutError as error:  # a LimiterTimeout is one
            self.stats["unavailable"] += 1
            if not progress.is_asking:
                raise ToolTimeout(
                    f"no place for tool={call.tool!r} at {self.url} within "
                    f"timeout={self._timeout_s} s ({str(error) or 'it still waited'}); raise "
                    "rate_limit_per_minute, max_workers or timeout under tool_config",
                    tool=call.tool,
                    server=self.url,
                ) from error
            self._server.note_failure()
            raise ToolTimeout(
                f"no answer from {self.url} for tool={call.tool!r} within "
                f"timeout={self._timeout_s} s; is the server up, and the rate limit high enough? "
                f"ask {self.url}/health",
                tool=call.tool,
                server=self.url,
            ) from error

    async def _attempts(self, call: ToolCall, progress: _Progress, timeout_s: float) -> ToolResult:
        server, clock = self._server, self._clock
        limiter_wait_s = 0.0
        started = clock()
        deadline = started + timeout_s

        def for_waiting_s() -> float:
            return max(0.0, deadline - server.request_s - clock())

        for attempt in range(1, self._max_retries + 2):
            server.check(call)
            waited_from = clock()
            waits_for("limiter")
            if self._limiter is not None:
                await self._limiter.acquire_async(timeout_s=for_waiting_s(), source=self.source)
            slot = self._slots.hold_async(for_waiting_s()) if self._slots else nullcontext()
            try:
                async with slot:
                    asked_at = clock()
                    limiter_wait_s += asked_at - waited_from
                    progress.is_asking = True
                    waits_for("tool")
                    body = await self._request(call)
            except _Again as failure:
                progress.is_asking = False
                server.note_failure()
                last = failure
            else:
                server.note_answer(clock() - asked_at)
                return ToolResult(
                    body=body,
                    latency_s=clock() - started - limiter_wait_s,
                    limiter_wait_s=limiter_wait_s,
                    attempts=attempt,
                )
            if self._limiter is not None and (last.is_overload or last.retry_after_s is not None):
                await self._limiter.penalise_async(last.retry_after_s or 0.0)
            cap_s = min(BACKOFF_CAP_S, BACKOFF_START_S * 2 ** (attempt - 1))
            pause_s = max(last.retry_after_s or 0.0, self._rng.uniform(0.0, cap_s))
            if attempt > self._max_retries or pause_s >= for_waiting_s():
                kind = ToolUnavailable if attempt > self._max_retries else ToolTimeout
                raise kind(
                    f"no answer from {self.url} for tool={call.tool!r}: {attempt} attempts within "
                    f"timeout={self._timeout_s} s, last: {last}; check the tool server",
                    tool=call.tool,
                    server=self.url,
                ) from last
            self.stats["retries"] += 1
            await self._sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")

    async def _request(self, call: ToolCall) -> dict[str, Any]:
        session = self._server.session
        if session is None:
            raise RuntimeError("ToolClient.call outside `async with ToolClient(...)`")
        self.stats["requests"] += 1
        try:
            async with session.post(f"{self.url}/{call.tool}", json=call.payload) as response:
                if response.status == 429 or response.status >= 500:
                    text = (await response.text(errors="replace"))[:200]
                    raise _Again(
                        f"HTTP {response.status} {text}",
                        _retry_after(response),
                        is_overload=response.status in (429, 503),
                    )
                if response.status >= 400:
                    text = _whole((await response.text(errors="replace"))[:500])
                    raise ToolRejected(
                        f"HTTP {response.status} for tool={call.tool!r}: {text}",
                        tool=call.tool,
                        server=self.url,
                    )
                body = await response.json(content_type=None, loads=_loads)
        except (aiohttp.ClientError, ConnectionError, ValueError, RecursionError) as error:
            raise _Again(f"{type(error).__name__}: {error}") from error
        if not isinstance(body, dict):
            raise _Again(f"the answer is no JSON object but {type(body).__name__}")
        is_well_formed = _WELL_FORMED.get(call.tool)
        if is_well_formed is not None and not is_well_formed(body):
            raise _Again(f"the answer is not one of /{call.tool}: {str(body)[:200]}")
        if call.tool == "run_code" and body.get("status") == "SandboxError":
            # The sandbox's own fault under HTTP 200: no verdict on the program.
            raise _Again(f"SandboxError: {body.get('message')}")
        return body


def _whole(text: str) -> str:
    """The text with a `?` for each half character, which no JSON line or msgpack can carry."""
    return text.encode(errors="replace").decode()


def _loads(text: str) -> Any:
    """A server's JSON; in its strings, as `_whole`."""
    body = json.loads(text)
    if _HALF.search(text):
        body = json.loads(_whole(json.dumps(body, ensure_ascii=False)))
    return body


_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""What a half character comes as: JSON in UTF-8 cannot hold it otherwise."""


def _retry_after(response: aiohttp.ClientResponse) -> float | None:
    """Seconds of a `Retry-After` header; dates are not understood and count as absent."""
    try:
        seconds = float(response.headers.get("Retry-After", ""))
    except ValueError:
        return None
    return min(RETRY_AFTER_CAP_S, max(0.0, seconds)) if not math.isnan(seconds) else None


def _is_run(body: dict[str, Any]) -> bool:
    """SandboxFusion's answer; a program that succeeded has an output."""
    run = body.get("run_result") or {}
    if not isinstance(body.get("status"), str) or not isinstance(run, dict):
        return False
    return body["status"] != "Success" or isinstance(run.get("stdout"), str)


def _is_search(body: dict[str, Any]) -> bool:
    """Search-R1's answer with scores: passages per query, one query at least."""
    found = body.get("result")
    if not isinstance(found, list) or not found:
        return False
    return all(isinstance(passages, list) and all(map(_is_passage, passages)) for passages in found)


def _is_passage(item: Any) -> bool:
    document = item.get("document") if isinstance(item, dict) else None
    return isinstance(document, dict) and "contents" in document


def _is_calculation(body: dict[str, Any]) -> bool:
    return "result" in body or "error" in body


_WELL_FORMED: dict[str, Callable[[dict[str, Any]], bool]] = {
    "run_code": _is_run,
    "retrieve": _is_search,
    "calculate": _is_calculation,
}
"""Whether an answer has what the agent loops and rewards read of it; otherwise its server is broken
or another program."""


def _is_repeatable(result: ToolResult) -> bool:
    """Whether the next equal call would surely end the same: a time-out also says who was busy."""
    return (result.body.get("run_result") or {}).get("status") != "TimeLimitExceeded"


# The pid, because a forked child inherits the dict; the loop itself, because an id comes again.
_shared: dict[tuple[int, asyncio.AbstractEventLoop, ToolConfig, str], ToolClient] = {}


async def shared_client(config: ToolConfig, mixed: MixedConfig) -> ToolClient:
    """This process's client for this event loop, made on first use and kept.

    Args:
        config: the run's tool settings.
        mixed: its other settings: folder and limiter.
    """
    key = (os.getpid(), asyncio.get_running_loop(), config, mixed.run_dir)
    if key not in _shared:
        limited = config.enable_global_rate_limit
        client = ToolClient(
            config.server_url,
            limiter=make_limiter(config, mixed) if limited else None,
            slots=FileSlots(state_path(config, mixed).with_suffix(".slots"), config.max_workers),
            timeout_s=config.timeout,
            max_retries=config.max_retries,
        )
        await client.__aenter__()
        _shared[key] = client
    return _shared[key]
