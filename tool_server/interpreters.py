"""Persistent interpreters by name, limited in number and idle time."""

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from tool_server.sandbox import Interpreter, Limits, RunResult, Sandbox

IDLE_S = 900.0
"""After this time an unused interpreter ends."""

SPARED_S = 300.0
"""A session that was used in this time is not ended for a new one. Longer than a model takes to
write its next cell; shorter than `IDLE_S`, so that the sessions of clients that were killed
do not keep new ones out for long."""

CLEAN_EVERY_S = 30.0
"""Time between two looks for sessions that nobody uses."""


class InterpreterGone(RuntimeError):
    """The caller's interpreter exists no more, and nothing was run in its place."""


class InterpretersFull(RuntimeError):
    """No session can be started now; nothing was run."""


@dataclass(slots=True)
class _Entry:
    exit_stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    """Closing it ends the session."""

    interpreter: Interpreter | None = None
    """None until the first cell has started it."""

    used_at: float = field(default_factory=time.monotonic)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Interpreters:
    """The named interpreters of one sandbox; a caller knows each as its session.

    A session that is unused for `idle_s` is ended. If there are `max_sessions`, a new one ends the
    one that is unused for the longest time, provided that this time is over `spared_s`. Otherwise
    the new one is refused, because another trajectory would lose its state.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        max_sessions: int,
        idle_s: float = IDLE_S,
        spared_s: float = SPARED_S,
    ) -> None:
        self.sandbox, self._max_sessions = sandbox, max_sessions
        self._idle_s, self._spared_s = idle_s, spared_s
        self._entries: dict[str, _Entry] = {}
        self._cleaner: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._entries)

    async def run_cell(
        self,
        name: str,
        code: str,
        stdin: str,
        files: dict[str, bytes],
        limits: Limits,
        *,
        began: bool = False,
    ) -> tuple[RunResult, dict[str, bool]]:
        """Run a cell in the session of this name; a session that does not exist is started.

        Cells of one session run one after the other. A new session gets the `files` and `limits`;
        the limits of time and output hold for each cell.

        Args:
            began: an earlier cell of the session was answered, so it must exist. If that cell has
                ended its interpreter, a new one is started.

        Returns:
            The result, and about the session: `new`; and `ended_by_program`, whether it is new
            because a cell ended the one before.

        Raises:
            InterpreterGone: `began`, and the session does not exist; or it was ended meanwhile.
            InterpretersFull: there are `max_sessions`.
            NotSupported: a path leads out of the session's folder.
            SandboxUnavailable: the sandbox failed; the session is gone.
        """
        entry, evicted = self._entries.get(name), None
        if entry is None:
            if began:
                raise _gone(name)
            evicted = self._evict_for(name)
            entry = self._entries[name] = _Entry()
            self._cleaner = self._cleaner or asyncio.create_task(self._clean())
        async with entry.lock:
            try:
                if evicted is not None:
                    await asyncio.shield(evicted.aclose())
                before = entry.interpreter
                if before is None or not before.is_alive:
                    await entry.exit_stack.aclose()
                    entry.interpreter = await entry.exit_stack.enter_async_context(
                        self.sandbox.interpreter(limits, files)
                    )
                if self._entries.get(name) is not entry:  # it was ended in the meantime
                    raise _gone(name)
                assert entry.interpreter is not None
                is_new = entry.interpreter is not before
                about = {"new": is_new, "ended_by_program": is_new and before is not None}
                return await entry.interpreter.run_cell(code, stdin, limits.wall_s), about
            except BaseException:  # the session's state is unknown
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

    async def _clean(self) -> None:
        while True:
            await asyncio.sleep(CLEAN_EVERY_S)
            await self.end_idle()

    async def end_idle(self) -> None:
        used_before = time.monotonic() - self._idle_s
        for name, entry in list(self._entries.items()):
            if entry.used_at < used_before and not entry.lock.locked():
                await self._end(name, entry)

    async def close(self) -> None:
        if self._cleaner is not None:
            self._cleaner.cancel()
            self._cleaner = None
        for name, entry in list(self._entries.items()):
            await self._end(name, entry)

    def _evict_for(self, name: str) -> AsyncExitStack | None:
        """Forget the session that must end before a new one starts; None if there is room."""
        if len(self._entries) < self._max_sessions:
            return None
        used_before = time.monotonic() - self._spared_s
        for oldest, entry in sorted(self._entries.items(), key=lambda each: each[1].used_at):
            if entry.used_at <= used_before and not entry.lock.locked():
                del self._entries[oldest]
                return entry.exit_stack
        raise InterpretersFull(
            f"cannot start session={name!r}: each of max_sessions={self._max_sessions} was used in "
            f"the last {self._spared_s:g} s; raise max_sessions, or call again"
        )

    async def _end(self, name: str, entry: _Entry) -> None:
        if self._entries.get(name) is entry:
            del self._entries[name]
        await asyncio.shield(entry.exit_stack.aclose())


def _gone(name: str) -> InterpreterGone:
    return InterpreterGone(f"session={name!r} does not exist any more, and its state is lost")
