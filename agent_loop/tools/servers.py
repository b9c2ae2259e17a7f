"""Choice of the tool server for a request (the least loaded one that answers), and breakers.

Each server has a circuit breaker. Many failures in a row open the breaker: then the server gets
only one trial request every few seconds, until one succeeds. (The library purgatory is not used:
its open breaker lets all requests try at once, it counts cancelled requests as failures, and it
uses the wall clock.) No input or output happens here; time comes in as `clock`.
"""

import hashlib
import math
import zlib
from collections.abc import Callable, Collection, Sequence

from agent_loop.tools.protocol import ToolCall, ToolUnavailable

BREAKER_FAILURES = 20
"""Failed requests in a row that open the breaker."""

BREAKER_OPEN_S = 5.0
"""Seconds between two trial requests while a breaker is open."""


class Server:
    """State of one server, shared by the clients of all sources of an event loop."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.url_origin = "url:" + hashlib.sha256(url.encode()).hexdigest()[:32]
        """`ToolResult.origin` of a server that gives no fingerprint."""

        self.in_flight = 0
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

    def rank(self, now: float, may_try: bool) -> tuple[int, float]:
        """Sort key: the server with the lowest rank gets the request.

        First comes a server that is due for a trial request, then servers by load, then paused
        servers. Recent failures count as load. A trial request can be lost: `may_try` allows it.
        """
        if self.opened_at is not None:
            return (0 if may_try else 3), 0
        is_fresh = now - self.failed_at < BREAKER_OPEN_S  # after that the server may have recovered
        load = self.in_flight + (self.failures_in_a_row if is_fresh else 0)
        return (1 if self.paused_until <= now else 2), load


class Servers:
    """All servers of a client, at least one; `timeout_s` is the deadline of a call."""

    def __init__(self, urls: Sequence[str], timeout_s: float, clock: Callable[[], float]) -> None:
        self.all = [Server(url) for url in urls]
        self._clock = clock
        self._max_request_s = timeout_s / 4
        self._mean_request_s: float | None = None

    @property
    def request_s(self) -> float:
        """Time to reserve for a request: twice the mean of answered requests, or less."""
        if self._mean_request_s is None:
            return self._max_request_s
        return min(self._max_request_s, 2 * self._mean_request_s)

    def check(self, call: ToolCall) -> None:
        """Check that at least one server may be asked.

        Raises:
            ToolUnavailable: all breakers are open.
        """
        now = self._clock()
        if any(server.may_ask(now) for server in self.all):
            return
        raise ToolUnavailable(
            "; ".join(
                f"not calling {server.url} for tool={call.tool!r}: its last "
                f"{server.failures_in_a_row} requests failed; trying again after {BREAKER_OPEN_S} s"
                for server in self.all
            ),
            tool=call.tool,
        )

    def choose(self, call: ToolCall, tried: Collection[Server] = ()) -> Server:
        """The server to ask now. A call of a session always gets the same server.

        Servers in `tried` failed this call; they are chosen again only if there is no other.

        Raises:
            ToolUnavailable: all breakers are open.
        """
        self.check(call)
        now = self._clock()
        if len(self.all) == 1:
            chosen = self.all[0]
        elif call.session:
            chosen = self.all[zlib.crc32(call.session.encode()) % len(self.all)]
        else:
            ready = [server for server in self.all if server.may_ask(now)]
            fresh = [server for server in ready if server not in tried] or ready
            may_try = call.idempotent
            chosen = min(fresh, key=lambda server: server.rank(now, may_try))
        if chosen.opened_at is not None:
            chosen.opened_at = now  # this call is the trial request; others wait for its answer
        return chosen

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
