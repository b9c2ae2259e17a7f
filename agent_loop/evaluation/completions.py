"""Requests to `POST /completions` of an OpenAI-compatible server, with retries. No verl.

A server that is overloaded, broken or not reached is asked again, after a capped exponential
backoff with full jitter, or the pause of its `Retry-After`. The caller has the deadline.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec

from tool_server.wire.bounded_read import plain_session, read_bounded
from tool_server.wire.responses import replace_surrogates, retry_after_s, text_of

ATTEMPTS = 8
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
REQUEST_S = 1800.0
"""Deadline of one request. That of its trajectory is usually shorter."""

MOST_BYTES = 64 << 20
ERROR_BYTES = 4096


class Refused(ValueError):
    """The server refuses the request itself, so the same request would be refused again."""


class NoAnswer(ConnectionError):
    """The server gave no completion in all attempts."""


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
        rng: random.Random | None = None,
    ) -> None:
        self._url, self._key = f"{base_url.rstrip('/')}/completions", key
        self._sleep, self._rng = sleep, rng or random.Random()
        self._slots = asyncio.Semaphore(most)
        headers = {"Content-Type": "application/json", "User-Agent": "verl-mixed"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        self._session = plain_session(
            headers=headers, timeout=aiohttp.ClientTimeout(total=REQUEST_S), limit=0
        )

    async def close(self) -> None:
        await self._session.close()

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """The first choice of the answer.

        Raises:
            Refused: the server refuses the request, the key or the model.
            NoAnswer: it gave no completion in `ATTEMPTS` attempts.
        """
        async with self._slots:
            for attempt in range(ATTEMPTS):
                try:
                    return await self._once(body)
                except _TryAgain as failed:
                    if attempt + 1 == ATTEMPTS:
                        raise NoAnswer(
                            f"no completion from {self._url}: {ATTEMPTS} attempts, the last: "
                            f"{failed}; look at the log of that server"
                        ) from failed
                    longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**attempt)
                    pause_s = self._rng.uniform(0, longest)
                    await self._sleep(max(pause_s, failed.retry_after_s or 0.0))
        raise AssertionError("the last attempt returns or raises")

    async def _once(self, body: dict[str, Any]) -> dict[str, Any]:
        try:
            async with self._session.post(
                self._url, data=msgspec.json.encode(body), allow_redirects=False
            ) as response:
                if response.status != 200:
                    raw = await read_bounded(response, ERROR_BYTES)
                    raise self._refusal(response, raw)
                raw = await read_bounded(response, MOST_BYTES)
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            raise _TryAgain(f"{type(error).__name__}: {error}") from error
        try:
            return dict(msgspec.json.decode(raw)["choices"][0])
        except (ValueError, LookupError, TypeError) as error:
            raise _TryAgain(f"the answer is no completion: {error}") from error

    def _refusal(self, response: aiohttp.ClientResponse, raw: bytes) -> Exception:
        words = replace_surrogates(text_of(raw, response.charset))
        words = (words.replace(self._key, "***") if self._key else words)[:300]
        status = response.status
        if status in (408, 409, 425, 429) or status >= 500:
            return _TryAgain(f"HTTP {status} {words}", retry_after_s(response.headers))
        return Refused(f"{self._url} refuses the request (HTTP {status}): {words}")


class _TryAgain(Exception):
    def __init__(self, words: str, retry_after_s: float | None = None) -> None:
        super().__init__(words)
        self.retry_after_s = retry_after_s
