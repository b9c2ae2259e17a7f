"""Requests to `POST /completions` of an OpenAI-compatible server, with retries. No verl.

A server that is overloaded or not reached is asked again as long as there is time, one that fails
`ATTEMPTS` times; after a capped exponential backoff with full jitter, or the pause of its
`Retry-After`.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from agent_loop.calls.servers import backoff_s
from config.tool_entries import without_secrets
from tool_server.wire.http import Peer, plain_session, post, unreadable
from tool_server.wire.protocol import Again, ToolUnavailable
from tool_server.wire.responses import dumps

ATTEMPTS = 8
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
REQUEST_S = 1800.0
"""Deadline of a completion, with all attempts. That of its trajectory is usually shorter."""

MOST_BYTES = 64 << 20

logger = logging.getLogger(__name__)


class CompletionsApi:
    """One server; made inside the event loop that uses it.

    Args:
        base_url: ends with the version, as `http://10.0.0.4:8000/v1`.
        key: sent as a bearer token; empty for none.
        most: requests at once.
    """

    def __init__(
        self,
        base_url: str,
        key: str = "",
        most: int = 64,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._url = f"{base_url.rstrip('/')}/completions"
        self._sleep, self._clock, self._rng = sleep, clock, rng or random.Random()
        self._slots, self._has_warned = asyncio.Semaphore(most), False
        remedy = "has this server the model, and the key in OPENAI_API_KEY?"
        self._peer = Peer(
            name=without_secrets(self._url),
            address_key="--base-url",
            remedy=remedy,
            refused=remedy,
            secret=key,
        )
        self._session = plain_session(limit=0)

    async def close(self) -> None:
        await self._session.close()

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """The first choice of the answer.

        Raises:
            ToolUnavailable: the server refuses the request, the key or the model (`Again.NEVER`),
                or gave no completion in its time.
        """
        data, attempts, failures = dumps(body), 0, 0
        async with self._slots:
            ends_at = self._clock() + REQUEST_S
            while True:
                try:
                    return await self._once(data, ends_at - self._clock())
                except ToolUnavailable as fault:
                    if fault.again is Again.NEVER:
                        raise
                    if fault.is_away and not self._has_warned:
                        self._has_warned = True
                        logger.warning(
                            "%s does not answer (%s); it is asked again for %g s: does it run, and "
                            "is --base-url its address?",
                            *(self._peer.name, fault, REQUEST_S),
                        )
                    own_s = backoff_s(attempts, FIRST_PAUSE_S, LONGEST_PAUSE_S, self._rng)
                    pause_s = max(own_s, fault.retry_after_s or 0.0)
                    attempts += 1
                    failures += fault.again is Again.COUNTED
                    if failures == ATTEMPTS or self._clock() + pause_s >= ends_at:
                        raise ToolUnavailable(
                            f"no completion from {self._peer.name}: {attempts} attempts, the last: "
                            f"{fault}; look at the log of that server",
                            again=fault.again,
                        ) from fault
                await self._sleep(pause_s)

    async def _once(self, data: bytes, timeout_s: float) -> dict[str, Any]:
        raw, _ = await post(
            self._session, self._url, data, self._peer, limit=MOST_BYTES, timeout_s=timeout_s
        )
        try:
            return dict(msgspec.json.decode(raw)["choices"][0])
        except (ValueError, LookupError, TypeError) as error:
            raise unreadable(error, self._peer) from error
