"""What Python 3.10 lacks: `enum.StrEnum` and `asyncio.timeout`."""

import sys

if sys.version_info >= (3, 11):
    from asyncio import timeout
    from enum import StrEnum
else:
    import asyncio
    from collections.abc import AsyncIterator
    from contextlib import asynccontextmanager
    from enum import Enum

    import async_timeout

    class StrEnum(str, Enum):
        """Members are strings and print as their values."""

        __str__ = str.__str__

    @asynccontextmanager
    async def timeout(delay: float | None) -> AsyncIterator[None]:
        """As `asyncio.timeout`; 3.10's `asyncio.TimeoutError` is not yet the built-in one."""
        try:
            async with async_timeout.timeout(delay):
                yield
        except asyncio.TimeoutError as error:
            raise TimeoutError from error


__all__ = ["StrEnum", "timeout"]
