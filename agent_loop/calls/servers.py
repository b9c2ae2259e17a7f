"""Choice of the server for an attempt: the least loaded one that answers. Pure arithmetic.

A server at which nobody answers is away. Its callers wait together: one of them tries every few
seconds, with a growing pause, and the first answer lets all go on. Nobody fails while it has time.
A server with failures in a row, or one that asked for a pause, gets calls if the others are worse.

A session stays at the server that began it, because no other server has its state.
"""

import math
import random
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from config.tool_entries import without_secrets
from tool_server.wire.protocol import Fault, ToolCall

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 2.0
"""Seconds between two attempts at a server that is away. The longest is also how late its callers
may learn that it is back."""

OVERDUE_S = 5.0
"""A call that must not run twice tries a server that is away only if no other call has tried it for
so long, because such a call may be lost."""

FAILED_LATELY_S = 30.0
"""For so long, failures in a row count like requests under way."""

MAX_PINS = 16_384
"""Sessions whose server is remembered. Above this, the session that was unused for the longest time
is forgotten, for example one whose trajectory was cancelled and never ended its session."""


def backoff_s(failures: int, first_s: float, longest_s: float, rng: random.Random) -> float:
    """A pause after so many earlier failures in a row: full jitter below a bound that doubles.

    Source: Brooker, "Exponential Backoff and Jitter", AWS Architecture Blog 2015.
    """
    return rng.uniform(0.0, min(longest_s, first_s * 2 ** min(failures, 16)))


class Server:
    """State of one server, shared by the clients of all sources of an event loop."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.name = without_secrets(url)
        """In messages."""

        self.in_flight = self.sessions = 0
        self.failures_in_a_row = 0
        self.failed_at = -math.inf
        self.away_since: float | None = None
        self.last_fault = ""
        """Why it is away."""

        self.ask_at = -math.inf
        """When the next request may be sent, while the server is away or asked for a pause
        (`Retry-After`)."""

        self._pause_s = FIRST_PAUSE_S

    def rank(self, now: float, call: ToolCall, tries: "Server | None") -> tuple[int, float]:
        """Sort key: the lowest gets the request of a call that tries the server `tries`."""
        if self.away_since is not None:
            is_due = tries is None and now >= self.ask_at + (0 if call.idempotent else OVERDUE_S)
            return (0 if self is tries or is_due else 3), self.ask_at
        lately = now - self.failed_at < FAILED_LATELY_S
        load = self.in_flight + (self.failures_in_a_row if lately else 0)
        return (1 if self.ask_at <= now else 2), load

    def take_turn(self, now: float) -> float:
        """Seconds until a caller may ask; 0: now. While the server is away, that caller tries it,
        and the others wait for a pause that doubles."""
        if self.away_since is None:
            return 0.0
        if now < self.ask_at:
            return self.ask_at - now
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
        self.ask_at = now + self._pause_s
        return 0.0

    def note_failure(self, now: float, fault: Fault | None = None) -> None:
        """A request failed; without a fault it had no answer in its time."""
        self.failures_in_a_row += 1
        self.failed_at = now
        if fault is not None and fault.is_away:
            self.last_fault = str(fault)
            if self.away_since is None:
                self.away_since, self._pause_s = now, FIRST_PAUSE_S
                self.ask_at = now + FIRST_PAUSE_S
            self.ask_at = max(self.ask_at, now + (fault.retry_after_s or 0.0))

    def note_answer(self) -> None:
        """The server answered, so it works; a refusal is an answer too."""
        self.failures_in_a_row, self.away_since = 0, None


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

        self.origins: dict[str, str] = {}
        """Tool -> `ToolResult.origin` of its last answer."""

        self._max_request_s = timeout_s / 4
        self._mean_request_s: float | None = None

    @property
    def is_one_away(self) -> bool:
        return any(server.away_since is not None for server in self.all)

    @property
    def request_s(self) -> float:
        """Time to reserve for a request: twice the mean of answered requests, or less."""
        if self._mean_request_s is None:
            return self._max_request_s
        return min(self._max_request_s, 2 * self._mean_request_s)

    def choose(
        self, call: ToolCall, tried: Collection[Server] = (), tries: Server | None = None
    ) -> Server:
        """The server for the next request of a call.

        A call of a session gets the session's server. Servers in `tried` failed this call; they are
        chosen again only if no other answers. `tries` is away, and this caller is to try it.
        """
        now = self._clock()
        if len(self.all) == 1:
            return self.all[0]
        if (pin := self._pins.get(call.session)) is not None:
            return pin.server
        fresh = self._fresh(tried)
        if not call.session:
            return min(fresh, key=lambda server: server.rank(now, call, tries))
        # Among equals the hash decides: the many processes of a run, which do not know of each
        # other's sessions, would otherwise all begin with the first server.
        first = zlib.crc32(call.session.encode()) % len(fresh)
        return min(
            fresh[first:] + fresh[:first],
            key=lambda s: (s.rank(now, call, tries)[0], s.failures_in_a_row > 0, s.sessions),
        )

    def _fresh(self, tried: Collection[Server]) -> list[Server]:
        """The servers without those in `tried`, if another one is there."""
        fresh = [server for server in self.all if server not in tried]
        return fresh if any(server.away_since is None for server in fresh) else self.all

    def begin(self, server: Server, call: ToolCall) -> None:
        """A request is sent to a server, where its session stays from now on."""
        server.in_flight += 1
        if call.session and len(self.all) > 1:
            if call.session not in self._pins:
                server.sessions += 1
                self._pins[call.session] = _Pin(server)
                if len(self._pins) > MAX_PINS:
                    self.forget(next(iter(self._pins)))
            self._pins.move_to_end(call.session)
            self._pins[call.session].calls += 1

    def end(self, server: Server, call: ToolCall, *, was_executed: bool) -> None:
        """A request has ended; `was_executed`: the server may have executed it.

        A session whose server has certainly executed nothing may begin at another server.
        """
        server.in_flight -= 1
        if (pin := self._pins.get(call.session)) is not None:
            pin.calls -= 1
            pin.began |= was_executed
            if not pin.began and not pin.calls:
                self.forget(call.session)

    def forget(self, session: str) -> None:
        """The session has ended."""
        if (pin := self._pins.pop(session, None)) is not None:
            pin.server.sessions -= 1

    def has_other(self, call: ToolCall, tried: Collection[Server]) -> bool:
        """Whether a healthy server that is not in `tried` may get the call."""
        if len(self.all) == 1 or call.session:
            return False
        now = self._clock()
        return any(
            server.away_since is None and server.ask_at <= now and server not in tried
            for server in self.all
        )

    def note_answer(self, server: Server, request_s: float, tool: str, origin: str) -> None:
        self.origins[tool] = origin
        mean_s = request_s if self._mean_request_s is None else self._mean_request_s
        self._mean_request_s = mean_s + (request_s - mean_s) / 8
        server.note_answer()
