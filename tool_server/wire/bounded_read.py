"""Reads the body of an HTTP answer up to a bound; compressed bodies are never decompressed.

For the sessions of the tool client and of the tool server's search engines. A small compressed
answer may be large when it is decompressed, so such an answer is refused.
"""

from typing import Any

import aiohttp


def plain_session(
    *, headers: dict[str, str], timeout: aiohttp.ClientTimeout, **connector: Any
) -> aiohttp.ClientSession:
    """A session that asks for uncompressed answers, decompresses none and keeps no cookies.

    Args:
        headers: sent with each request.
        timeout: of each request.
        connector: options of the `TCPConnector`.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(**connector),
        timeout=timeout,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        headers={"Accept-Encoding": "identity"} | headers,
    )


async def read_bounded(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """The body; of a longer one the beginning, with at least one byte more than `limit`."""
    chunks, size = list[bytes](), 0
    while size <= limit and (chunk := await response.content.readany()):
        chunks.append(chunk)
        size += len(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def compression_of(response: aiohttp.ClientResponse) -> str:
    """The body's `Content-Encoding`, shortened; "" if the body is as it is."""
    encoding = response.headers.get("Content-Encoding", "identity")
    return "" if encoding.lower() == "identity" else encoding[:40]
