"""For Python 3.10: `StrEnum`, `timeout`, and `gather_all` in place of task groups."""

import asyncio
import sys
from collections.abc import Awaitable, Sequence
from types import TracebackType
from typing import TypeVar

from typing_extensions import Self

T = TypeVar("T")

if sys.version_info >= (3, 11):
    from asyncio import timeout
    from enum import StrEnum
else:
    from enum import Enum

    import async_timeout

    class StrEnum(str, Enum):
        """Members are strings and print as their values."""

        __str__ = str.__str__

    class timeout:
        """As `asyncio.timeout`. In 3.10 `asyncio.TimeoutError` is not the built-in class."""

        def __init__(self, delay: float | None) -> None:
            self._timeout = async_timeout.timeout(delay)

        def expired(self) -> bool:
            return self._timeout.expired

        async def __aenter__(self) -> Self:
            await self._timeout.__aenter__()
            return self

        async def __aexit__(
            self,
            kind: type[BaseException] | None,
            error: BaseException | None,
            traceback: TracebackType | None,
        ) -> None:
            try:
                await self._timeout.__aexit__(kind, error, traceback)
                if isinstance(error, asyncio.TimeoutError):
                    raise error
            except asyncio.TimeoutError as late:
                raise TimeoutError(*late.args) from late


async def gather_all(work: Sequence[Awaitable[T]]) -> list[T]:
    """All results in order.

    The first error cancels the other tasks, and is raised when they have ended. A task group would
    raise it inside an `ExceptionGroup`.
    """
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


__all__ = ["StrEnum", "gather_all", "timeout"]
