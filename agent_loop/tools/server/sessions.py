"""Persistent interpreters by name, so many, for so long."""

import asyncio
import time
from collections import OrderedDict
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from agent_loop.tools.sandbox import CellResult, Limits, Sandbox, SandboxUnavailable, Session


@dataclass(slots=True)
class _Kept:
    session: Session
    ends: AsyncExitStack
    used_at: float = 0.0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class Sessions:
    """Sessions of one sandbox.

    Args:
        sandbox: where they run.
        most: kept at once; the one unused for longest makes room.
        idle_s: one unused for so long is ended.
    """

    def __init__(self, sandbox: Sandbox, most: int, idle_s: float) -> None:
        self._sandbox, self._most, self._idle_s = sandbox, most, idle_s
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    async def run_cell(
        self, name: str, code: str, stdin: str, files: dict[str, bytes], limits: Limits
    ) -> tuple[CellResult, bool]:
        """Run a cell in the session of this name; begun where there is none.

        Cells of one session run one after the other.

        Args:
            name: of the session.
            code: Python.
            stdin: of the cell.
            files: there from the beginning of a new session.
            limits: of a new session; time and output are each cell's.

        Returns:
            (what it did, whether the session is new).

        Raises:
            NotSupported: a path leads out of the session's folder.
            SandboxUnavailable: the sandbox failed; the session is gone.
        """
        kept = self._kept.get(name)
        is_new = kept is None or not kept.session.is_alive
        if kept is None or is_new:
            kept = await self._begin(name, files, limits)
        self._kept.move_to_end(name)
        kept.used_at = time.monotonic()
        try:
            async with kept.turn:
                return await kept.session.run_cell(code, stdin, limits.wall_s), is_new
        except (asyncio.CancelledError, SandboxUnavailable):  # nobody knows how far it came
            await self._end(name, kept)
            raise
        finally:
            kept.used_at = time.monotonic()

    async def end(self, name: str) -> bool:
        """End a session; False where there is none."""
        kept = self._kept.get(name)
        if kept is None:
            return False
        await self._end(name, kept)
        return True

    async def end_idle(self) -> None:
        """End those that nobody has used for long."""
        then = time.monotonic() - self._idle_s
        for name, kept in list(self._kept.items()):
            if kept.used_at < then and not kept.turn.locked():
                await self._end(name, kept)

    async def close(self) -> None:
        """End all."""
        for name, kept in list(self._kept.items()):
            await self._end(name, kept)

    async def _begin(self, name: str, files: dict[str, bytes], limits: Limits) -> _Kept:
        await self.end(name)
        while len(self._kept) >= self._most:
            oldest = next((n for n, k in self._kept.items() if not k.turn.locked()), None)
            if oldest is None:
                raise SandboxUnavailable(
                    f"all {self._most} sessions are at work: raise max_sessions, or call again"
                )
            await self.end(oldest)
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(self._sandbox.session(limits, files))
            kept = self._kept[name] = _Kept(session, stack.pop_all())
        return kept

    async def _end(self, name: str, kept: _Kept) -> None:
        if self._kept.get(name) is kept:
            del self._kept[name]
        await asyncio.shield(kept.ends.aclose())
