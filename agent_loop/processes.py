"""Processes for trusted work that may have to be killed: functions of users, checks of answers.

pebble starts the processes, kills one whose call is cancelled or out of time, and starts another.
They start with the first call and end with this process, and what calls have started ends with
them, unless they crash. They do not import its `__main__`, because
in a Ray worker that would import Ray, and a script without a guard would run again.
"""

import asyncio
import inspect
import itertools
import multiprocessing.context
import pickle
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from pebble import ProcessExpired, ProcessPool

from rate_limit.forks import after_fork
from samplers.module_file import module_of
from tool_server.isolation.guard import adopt_orphans, kill_children
from tool_server.isolation.proc import kill_family
from tool_server.wire.protocol import ToolRejected

T = TypeVar("T")

LOOK_S = 2.0
"""Time between two looks of a waiting call at its pool, because pebble answers no call that a pool
still had in its queue when it broke."""

BOARD = 4096
"""Calls whose beginning is remembered; far more than begin while one is under way."""


class ProcessDied(RuntimeError):
    """A call has no result, because its process ended, or because none lived until it began."""

    def __init__(self, message: str, exitcode: int | None = None) -> None:
        super().__init__(message)
        self.exitcode = exitcode


class CallTimedOut(Exception):
    """A call was not over in its time, and its process was killed. It is no `TimeoutError`, which
    the function itself may raise."""


class KillablePool:
    """Some processes, for calls from all threads and event loops of this process.

    No call is executed twice. pebble gives up a pool if an idle process is killed. Then all of its
    processes are killed and new ones started, which get the calls that had not begun.

    Args:
        processes: most calls at once.
        prepare: called in each new process; it is pickled.
        most_calls: calls after which a process is replaced; 0: never.
    """

    def __init__(
        self, processes: int, prepare: Callable[[], object] | None = None, most_calls: int = 0
    ) -> None:
        self._processes, self._prepare, self._most_calls = processes, prepare, most_calls
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._started: tuple[ProcessPool, Any] | None = None
        _pools.add(self)

    async def run(
        self, function: Callable[..., T], *arguments: Any, timeout_s: float | None = None
    ) -> T:
        """What a function returns or raises in a process.

        Args:
            timeout_s: longest time from the beginning of the call.

        Raises:
            CallTimedOut: the time was over, and the process was killed.
            ProcessDied: the process ended during the call, or all ended twice before it began.
        """
        answer = await self._answer(pickle.dumps((function, arguments)), timeout_s)
        value, error, trace = pickle.loads(answer)
        if error is not None:
            raise error from RuntimeError(f"in its process:\n{trace}")
        return value

    async def _answer(self, call: bytes, timeout_s: float | None) -> bytes:
        broken: RuntimeError | None = None
        for _ in range(2):
            pool, board = self._started or await asyncio.to_thread(self._start)
            number = next(self._numbers)
            try:
                task = pool.schedule(_called, args=[number, call], timeout=timeout_s)
                return await _result(task, pool)
            except asyncio.TimeoutError as error:  # pebble's; also in 3.10, by `wrap_future`
                raise CallTimedOut(f"not over in {timeout_s} s") from error
            except ProcessExpired as error:
                code = error.exitcode
                raise ProcessDied(f"its process ended with exit code {code}", code) from error
            except RuntimeError as error:
                broken = error
            await asyncio.to_thread(self._end, pool)
            if board[number % BOARD] >= number:  # for certain, because no process is left
                raise ProcessDied("its process ended") from broken
        raise ProcessDied("its processes ended twice before it began") from broken

    def _start(self) -> tuple[ProcessPool, Any]:
        with self._lock:
            if self._started is None:
                context: Any = _SpawnWithoutMain()
                board = context.RawArray("Q", BOARD)
                begin = (board, self._prepare)
                pool = ProcessPool(self._processes, self._most_calls, _begin, begin, context)
                try:
                    assert pool.active  # starts the processes here and not in the event loop
                except BrokenProcessPool as error:
                    raise ProcessDied(f"no process can be started: {error.__cause__!r}") from error
                self._started = pool, board
            return self._started

    def _end(self, pool: ProcessPool) -> None:
        with self._lock:
            if self._started is not None and self._started[0] is pool:
                self._started = None
            pool.stop()
            pool.join()  # kills the processes; `stop` does not, if the pool is broken

    async def close(self) -> None:
        """Kill the processes."""
        if self._started is not None:
            await asyncio.to_thread(self._end, self._started[0])


async def _result(task: "Future[T]", pool: ProcessPool) -> T:
    future = asyncio.wrap_future(task)
    try:
        while not future.done():
            await asyncio.wait([future], timeout=LOOK_S)
            if not future.done() and not pool.active:
                raise BrokenProcessPool("the pool broke before it took the call")
        return future.result()
    finally:
        task.cancel()  # kills its process if the call is under way


def _forget(pool: KillablePool) -> None:
    """In a forked child: threads and processes of the pool are the parent's."""
    pool._lock, pool._started = threading.Lock(), None
    _Process.starting = threading.Lock()


_pools = after_fork(_forget)


class _Process(multiprocessing.context.SpawnProcess):
    starting = threading.Lock()

    @property
    def daemon(self) -> bool:
        """Always true. This process may be a child of multiprocessing, which waits at its exit for
        its processes that are no daemons, while they wait for it."""
        return True

    @daemon.setter
    def daemon(self, value: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        pass

    def terminate(self) -> None:
        """Kill it with what its calls have started, also if they hang or ignore SIGTERM."""
        if self.pid is not None and self.is_alive():
            kill_family(self.pid)

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        with _Process.starting:
            main = sys.modules["__main__"]
            # spawn has no other way to leave `__main__` out
            sys.modules["__main__"] = ModuleType("__main__")
            try:
                return multiprocessing.context.SpawnProcess._Popen(process_obj)  # pyright: ignore[reportAttributeAccessIssue]
            finally:
                sys.modules["__main__"] = main


class _SpawnWithoutMain(multiprocessing.context.SpawnContext):
    """Spawns processes, because ours has threads."""

    Process = _Process


# --- in the processes -----------------------------------------------------------------------------

_board: Any = None
"""Shared with the parent: at `number % BOARD`, the number of a call that has begun."""


def _begin(board: Any, prepare: Callable[[], object] | None) -> None:
    global _board
    _board = board
    adopt_orphans()
    Finalize(None, _end_children, exitpriority=100)
    if prepare is not None:
        prepare()


def _end_children() -> None:
    """Kill what the calls have started, daemons too."""
    with suppress(OSError):  # a process that gave up rights sees no others, and has none
        kill_children()


def _called(number: int, call: bytes) -> bytes:
    """What a function returned or raised, pickled, because pebble breaks if it cannot load it."""
    _board[number % BOARD] = number
    try:
        function, arguments = pickle.loads(call)
        return pickle.dumps((function(*arguments), None, ""))
    except BaseException as error:
        trace = traceback.format_exc()
        with suppress(Exception):
            answer = pickle.dumps((None, error, trace))
            pickle.loads(answer)  # many errors cannot be made from their `args`
            if isinstance(error, Exception | SystemExit):  # a cancellation is not the caller's
                return answer
        return pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}"), trace))


def call_in_file(path: str, name: str, arguments: dict[str, Any]) -> Any:
    """Call a function of a user's file, which may be async."""
    try:
        value = getattr(module_of(Path(path), "tool"), name)(**arguments)
        return asyncio.run(value) if inspect.iscoroutine(value) else value
    except ToolRejected as error:
        raise ToolRejected(str(error)) from error  # also where a class of the file derives from it
