"""Which tool server a request goes to: the least loaded one that answers. Pure but for its clock.

Each server has a breaker, which opens after many failures in a row: it is then left alone, but for
one request every few seconds that tries. (purgatory, looked at for this, lets all requests try at
once, counts cancelled ones as failures and goes by the wall clock.)
"""

import math
import zlib
from collections.abc import Callable, Collection, Sequence

from agent_loop.tools.protocol import ToolCall, ToolUnavailable

BREAKER_FAILURES = 20
"""Failed requests in a row that open the breaker."""

BREAKER_OPEN_S = 5.0
"""How long an open breaker lets nobody pass between two requests that try."""


class Server:
    """One server, as the clients of all sources of an event loop know it.

    Args:
        url: its base URL.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.in_flight = 0
        self.failures_in_a_row = 0
        self.failed_at = -math.inf
        self.opened_at: float | None = None
        """When its breaker opened, or last let a request try; None while it is closed."""

        self.paused_until = -math.inf
        """It asked to be left alone until then."""

    def may_ask(self, now: float) -> bool:
        return self.opened_at is None or now - self.opened_at >= BREAKER_OPEN_S

    def rank(self, now: float, may_try: bool) -> tuple[int, float]:
        """The lowest is asked: one whose time to be tried has come, then by load; one that just
        failed counts as loaded.

        Args:
            now: the time.
            may_try: whether the request may be lost with the server.
        """
        if self.opened_at is not None:
            return (0 if may_try else 3), 0
        is_fresh = now - self.failed_at < BREAKER_OPEN_S  # later it may be well again
        load = self.in_flight + (self.failures_in_a_row if is_fresh else 0)
        return (1 if self.paused_until <= now else 2), load


class Servers:
    """All servers of a client.

    Args:
        urls: their base URLs, one at least.
        timeout_s: of a call.
        clock: monotonic seconds.
    """

    def __init__(self, urls: Sequence[str], timeout_s: float, clock: Callable[[], float]) -> None:
        self.all = [Server(url) for url in urls]
        self._clock = clock
        self._most_request_s = timeout_s / 4
        self._mean_request_s: float | None = None

    @property
    def request_s(self) -> float:
        """What a request needs before its deadline: twice the mean of those that were answered."""
        if self._mean_request_s is None:
            return self._most_request_s
        return min(self._most_request_s, 2 * self._mean_request_s)

    def check(self, call: ToolCall) -> None:
        """Whether some server may be asked.

        Raises:
            ToolUnavailable: all breakers are open.
        """
        now = self._clock()
        for server in self.all:
            if server.may_ask(now):
                return
        raise ToolUnavailable(
            "; ".join(
                f"not calling {server.url} for tool={call.tool!r}: its last "
                f"{server.failures_in_a_row} requests failed; trying again after {BREAKER_OPEN_S} s"
                for server in self.all
            ),
            tool=call.tool,
            server=self.all[0].url,
        )

    def choose(self, call: ToolCall, tried: Collection[Server] = ()) -> Server:
        """The server to ask now. One with an open breaker is not chosen again for a while.

        Args:
            call: what it is for.
            tried: servers that failed it; asked again only where there is no other.

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
            chosen.opened_at = now  # this one tries, the others wait for its answer
        return chosen

    def has_other(self, tried: Collection[Server]) -> bool:
        """Whether a server that did not fail a call yet is in good health."""
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

    def note_answer(self, server: Server, request_s: float) -> None:
        mean_s = request_s if self._mean_request_s is None else self._mean_request_s
        self._mean_request_s = mean_s + (request_s - mean_s) / 8
        self.note_refusal(server)

    def note_refusal(self, server: Server) -> None:
        """It answered, and so is well."""
        server.failures_in_a_row, server.opened_at = 0, None

    def pause(self, server: Server, pause_s: float) -> None:
        """It asked for it."""
        server.paused_until = max(server.paused_until, self._clock() + pause_s)
