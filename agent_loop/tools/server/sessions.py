"""Persistent interpreters by name, limited in number and idle time."""

import asyncio
import time
from collections import OrderedDict
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from agent_loop.tools.sandbox import CellResult, Limits, Sandbox, SandboxUnavailable, Session


@dataclass(slots=True)
class _Entry:
    session: Session
    exit_stack: AsyncExitStack
    """Closing it ends the session."""

    used_at: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class SessionsFull(SandboxUnavailable):
    """All sessions are at work, so the cell of a further session did not begin."""


class Sessions:
    """Sessions of one sandbox.

    A session that is unused for `idle_s` is ended. Above `max_sessions`, a new session ends the one
    that is unused for the longest time.
    """

    def __init__(self, sandbox: Sandbox, max_sessions: int, idle_s: float) -> None:
        self._sandbox, self._max_sessions, self._idle_s = sandbox, max_sessions, idle_s
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    async def run_cell(
        self, name: str, code: str, stdin: str, files: dict[str, bytes], limits: Limits
    ) -> tuple[CellResult, dict[str, bool]]:
        """Run a cell in the session of this name; a session that does not exist is started.

        Cells of one session run one after the other. A new session gets the `files` and `limits`;
        the limits of time and output hold for each cell.

        Returns:
            The result, and about the session: `new`; and `ended_by_program`, whether it is new
            because a cell ended the one before.

        Raises:
            NotSupported: a path leads out of the session's folder.
            SessionsFull: no place for a new session; the cell did not begin.
            SandboxUnavailable: the sandbox failed; the session is gone.
        """
        entry = self._entries.get(name)
        is_new = entry is None or not entry.session.is_alive
        about = {"new": is_new, "ended_by_program": is_new and entry is not None}
        if entry is None or is_new:
            entry = await self._begin(name, files, limits)
        self._entries.move_to_end(name)
        entry.used_at = time.monotonic()
        try:
            async with entry.lock:
                return await entry.session.run_cell(code, stdin, limits.wall_s), about
        except (asyncio.CancelledError, SandboxUnavailable):  # the session's state is unknown
            await self._end(name, entry)
            raise
        finally:
            entry.used_at = time.monotonic()

    async def end(self, name: str) -> bool:
        """End a session; False if it does not exist."""
        entry = self._entries.get(name)
        if entry is not None:
            await self._end(name, entry)
        return entry is not None

    async def end_idle(self) -> None:
        used_before = time.monotonic() - self._idle_s
        for name, entry in list(self._entries.items()):
            if entry.used_at < used_before and not entry.lock.locked():
                await self._end(name, entry)

    async def close(self) -> None:
        for name, entry in list(self._entries.items()):
            await self._end(name, entry)

    async def _begin(self, name: str, files: dict[str, bytes], limits: Limits) -> _Entry:
        await self.end(name)
        while len(self._entries) >= self._max_sessions:
            oldest = next((n for n, e in self._entries.items() if not e.lock.locked()), None)
            if oldest is None:
                raise SessionsFull(
                    f"cannot start session={name!r}: all max_sessions={self._max_sessions} are at "
                    "work; raise max_sessions, or call again"
                )
            await self.end(oldest)
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(self._sandbox.session(limits, files))
            entry = self._entries[name] = _Entry(session, stack.pop_all())
        return entry

    async def _end(self, name: str, entry: _Entry) -> None:
        if self._entries.get(name) is entry:
            del self._entries[name]
        await asyncio.shield(entry.exit_stack.aclose())
