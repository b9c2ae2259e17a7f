"""Choice of the tool server for a request (the least loaded one that answers), and breakers.

Each server has a circuit breaker. Many failures in a row open the breaker: then the server gets
only one trial request every few seconds, until one succeeds. (The library purgatory is not used:
its open breaker lets all requests try at once, it counts cancelled requests as failures, and it
uses the wall clock.) No input or output happens here; time comes in as `clock`.

A session stays at the server that began it, because no other server has its state.
"""

import hashlib
import math
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from tool_server.wire.protocol import ToolCall, ToolUnavailable

BREAKER_FAILURES = 20
"""Failed requests in a row that open the breaker."""

BREAKER_OPEN_S = 5.0
"""Seconds between two trial requests while a breaker is open."""

MAX_PINS = 16_384
"""Sessions whose server is remembered. Above this, the session that was unused for the longest time
is forgotten, for example one whose trajectory was cancelled and never ended its session."""


class Server:
    """State of one server, shared by the clients of all sources of an event loop."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.url_origin = "url:" + hashlib.sha256(url.encode()).hexdigest()[:32]
        """`ToolResult.origin` of a server that gives no fingerprint."""

        self.in_flight = self.sessions = 0
        self.failures_in_a_row = 0
        self.failed_at = -math.inf
        self.opened_at: float | None = None
        """When the breaker opened or last let a trial request pass; None while it is closed."""

        self.paused_until = -math.inf
        """The server asked for no requests until then (`Retry-After`)."""

        self.origins: dict[str, str] = {}
        """Tool -> `ToolResult.origin` of the last answer, or what `/health` said before it."""

    def close_breaker(self) -> None:
        """The server answered, so it works; a refusal is an answer too."""
        self.failures_in_a_row, self.opened_at = 0, None

    def may_ask(self, now: float) -> bool:
        return self.opened_at is None or now - self.opened_at >= BREAKER_OPEN_S

    def recent_failures(self, now: float) -> int:
        """Failures in a row; 0 if the last one is so long ago that the server may be well again."""
        return self.failures_in_a_row if now - self.failed_at < BREAKER_OPEN_S else 0

    def rank(self, now: float, may_try: bool) -> tuple[int, float]:
        """Sort key: the server with the lowest rank gets the request.

        First comes a server that is due for a trial request, then servers by load, then paused
        servers. Recent failures count as load. A trial request can be lost: `may_try` allows it.
        """
        if self.opened_at is not None:
            return (0 if may_try else 3), 0
        load = self.in_flight + self.recent_failures(now)
        return (1 if self.paused_until <= now else 2), load


@dataclass(slots=True)
class _Pin:
    """The server of a session."""

    server: Server
    calls: int = 0
    """Calls under way."""

    began: bool = False
    """The server may have executed a call, so the session cannot move to another server."""


class Servers:
    """All servers of a client, at least one; `timeout_s` is the deadline of a call."""

    def __init__(self, urls: Sequence[str], timeout_s: float, clock: Callable[[], float]) -> None:
        self.all = [Server(url) for url in urls]
        self._clock = clock
        self._pins: OrderedDict[str, _Pin] = OrderedDict()
        """Session -> its server, the session that was used last at the end."""

        self._max_request_s = timeout_s / 4
        self._mean_request_s: float | None = None

    @property
    def request_s(self) -> float:
        """Time to reserve for a request: twice the mean of answered requests, or less."""
        if self._mean_request_s is None:
            return self._max_request_s
        return min(self._max_request_s, 2 * self._mean_request_s)

    def check(self, call: ToolCall) -> None:
        """Check that a server may be asked: for a call of a session, the session's server.

        Raises:
            ToolUnavailable: all breakers are open, or that of the session's server is.
        """
        now = self._clock()
        pin = self._pins.get(call.session)
        servers = self.all if pin is None else [pin.server]
        if any(server.may_ask(now) for server in servers):
            return
        faults = [
            f"not calling {server.url} for tool={call.tool!r}: its last "
            f"{server.failures_in_a_row} requests failed; trying again after {BREAKER_OPEN_S} s"
            for server in servers
        ]
        if pin is not None:
            faults.append(
                f"session={call.session!r} began there, and no other server has its state"
            )
        raise ToolUnavailable("; ".join(faults), tool=call.tool)

    def choose(self, call: ToolCall, tried: Collection[Server] = ()) -> Server:
        """The server to ask now; the caller says with `release` when the request has ended.

        A call of a session gets the session's server. Servers in `tried` failed this call; they are
        chosen again only if there is no other.

        Raises:
            ToolUnavailable: see `check`.
        """
        self.check(call)
        now = self._clock()
        if len(self.all) == 1:
            chosen = self.all[0]
        elif call.session:
            chosen = self._pinned(call.session, tried, now)
        else:
            may_try = call.idempotent
            fresh = self._fresh(tried, now)
            chosen = min(fresh, key=lambda server: server.rank(now, may_try))
        if chosen.opened_at is not None:
            chosen.opened_at = now  # this call is the trial request; others wait for its answer
        return chosen

    def _fresh(self, tried: Collection[Server], now: float) -> list[Server]:
        """Servers that may be asked, without those in `tried` if there are others."""
        ready = [server for server in self.all if server.may_ask(now)]
        return [server for server in ready if server not in tried] or ready

    def _pinned(self, session: str, tried: Collection[Server], now: float) -> Server:
        """The server of a session. A new session gets a healthy server with few sessions."""
        pin = self._pins.get(session)
        if pin is None:
            fresh = self._fresh(tried, now)
            # Among equals the hash decides: the many processes of a run, which do not know of each
            # other's sessions, would otherwise all begin with the first server.
            first = zlib.crc32(session.encode()) % len(fresh)
            server = min(
                fresh[first:] + fresh[:first],
                key=lambda s: (s.rank(now, False)[0], s.recent_failures(now) > 0, s.sessions),
            )
            server.sessions += 1
            pin = self._pins[session] = _Pin(server)
            if len(self._pins) > MAX_PINS:
                self.forget(next(iter(self._pins)))
        self._pins.move_to_end(session)
        pin.calls += 1
        return pin.server

    def release(self, call: ToolCall, *, was_executed: bool) -> None:
        """A request has ended; `was_executed`: the server may have executed it.

        A session whose server has certainly executed nothing may begin at another server.
        """
        if (pin := self._pins.get(call.session)) is not None:
            pin.calls -= 1
            pin.began |= was_executed
            if not pin.began and not pin.calls:
                self.forget(call.session)

    def forget(self, session: str) -> None:
        """The session has ended."""
        if (pin := self._pins.pop(session, None)) is not None:
            pin.server.sessions -= 1

    def has_other(self, tried: Collection[Server]) -> bool:
        """Whether a healthy server remains that is not in `tried`."""
        if len(self.all) == 1:
            return False
        now = self._clock()
        return any(
            server.opened_at is None and server.paused_until <= now and server not in tried
            for server in self.all
        )

    def note_failure(self, server: Server) -> None:
        server.failures_in_a_row += 1
        server.failed_at = self._clock()
        if server.failures_in_a_row >= BREAKER_FAILURES:
            server.opened_at = server.failed_at

    def note_answer(self, server: Server, request_s: float, tool: str, origin: str) -> None:
        server.origins[tool] = origin
        mean_s = request_s if self._mean_request_s is None else self._mean_request_s
        self._mean_request_s = mean_s + (request_s - mean_s) / 8
        server.close_breaker()

    def origins(self, tool: str) -> list[str]:
        """What would answer a call of this tool now: one or several origins, none if unknown."""
        return list(dict.fromkeys(s.origins[tool] for s in self.all if tool in s.origins))

    def pause(self, server: Server, pause_s: float) -> None:
        """Send the server no requests for `pause_s` while another server is healthy."""
        server.paused_until = max(server.paused_until, self._clock() + pause_s)
