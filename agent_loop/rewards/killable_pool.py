"""Two killable processes that judge answers with libraries which may hang or fill the memory.

Each check has a limit of CPU time, which does not depend on other load: an answer is judged the
same every time. Python code is interrupted; a process that hangs in C code is killed by the kernel,
and pebble starts another. A check also has a limit of wall time, which only an overloaded machine
reaches.

The processes start when first needed and end with this process. They do not import this process's
`__main__`, because in a Ray worker they would import Ray, and a script without a guard would run
again.
"""

import asyncio
import importlib
import math
import os
import resource
import signal
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from types import FrameType
from typing import Any, TypeVar

from pebble import ProcessExpired, ProcessPool

from agent_loop.calls.spawned import SpawnWithoutMain
from tool_server.wire.protocol import ToolTimeout

T = TypeVar("T")

WORKERS = 2
CPU_S = 2.0
"""CPU seconds of one answer, after which Python code is interrupted."""

KILLED_AFTER_CPU_S = 3
"""CPU seconds of one answer, after which the kernel kills the process; a whole number."""

WALL_S = 20.0
"""Wall seconds of one answer; reached only on an overloaded machine."""

MEMORY_BYTES = 2 << 30
"""Address space of a process."""

MOST_CHECKS = 5000
"""Checks after which a process is replaced, because caches of the libraries grow."""


class KillablePool:
    """Processes with one library, which start with the first check.

    Args:
        tool: name of the judge in faults of the infrastructure.
        checks: what is checked, for messages: "answers by math-verify".
        imports: the library. It is imported before the first answer, whose time it would take.
        prepare: called in each new process after the import, with its limits set; a function
            of a module.
    """

    def __init__(
        self, *, tool: str, checks: str, imports: str, prepare: Callable[[], None] | None = None
    ) -> None:
        self._tool, self._checks = tool, checks
        self._begin = (imports, prepare)
        self._lock = threading.Lock()
        self._pool: ProcessPool | None = None
        _every.add(self)

    async def run(self, function: Callable[..., T], *arguments: Any) -> T | None:
        """What a function of a module returns in a process; None if the CPU time was used up.

        Raises:
            ToolTimeout: the limit of wall time was reached: the machine is overloaded, which says
                nothing about the answer.
            RuntimeError: the processes do not start, or break twice for reasons of their own.
        """
        fault = None
        for _ in range(2):
            pool = self.pool()
            try:
                task = pool.schedule(within_limits, args=[function, *arguments], timeout=WALL_S)
                return await asyncio.wrap_future(task)
            except FutureTimeoutError as error:
                raise ToolTimeout(
                    f"no verdict on an answer within {WALL_S:g} s, and less than {CPU_S:g} s of "
                    "CPU time used: the machine is overloaded; give it more cores, or fewer agent "
                    "loop workers (rollout.agent.num_workers)",
                    tool=self._tool,
                ) from error
            except ProcessExpired as error:
                if error.exitcode == -signal.SIGXCPU:
                    return None
                fault = error
            except (BrokenProcessPool, RuntimeError) as error:
                fault = error
                self._forget(pool)
        raise RuntimeError(
            f"cannot check {self._checks}: its processes ended twice ({fault!r}); see whether "
            f"`python -c 'import {self._begin[0]}'` works and how much memory is left"
        ) from fault

    def pool(self) -> ProcessPool:
        with self._lock:
            if self._pool is None:
                context: Any = SpawnWithoutMain()
                self._pool = ProcessPool(
                    WORKERS, MOST_CHECKS, initializer=_begin, initargs=self._begin, context=context
                )
            return self._pool

    def _forget(self, pool: ProcessPool) -> None:
        """Forget a broken pool; the next caller makes a new one."""
        with self._lock:
            if self._pool is pool:
                self._pool = None
                pool.stop()

    def forget_after_fork(self) -> None:
        """In a forked child, whose pool's threads and processes belong to the parent."""
        self._lock = threading.Lock()
        self._pool = None


_every: "weakref.WeakSet[KillablePool]" = weakref.WeakSet()


def _after_fork() -> None:
    for each in list(_every):
        each.forget_after_fork()


os.register_at_fork(after_in_child=_after_fork)


# --- in the processes -----------------------------------------------------------------------------


class TooSlow(BaseException):
    """The CPU time is used up. It is no `Exception`, because the libraries would catch it and
    continue."""


def _begin(imports: str, prepare: Callable[[], None] | None) -> None:
    """Import the library and set the limits."""
    importlib.import_module(imports)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # pebble's own handler waits for C code
    signal.signal(signal.SIGPROF, _interrupt)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if prepare is not None:
        prepare()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise TooSlow


def within_limits(function: Callable[..., T], *arguments: Any) -> T | None:
    """Call a function; None if it took too long."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    kill_at = math.ceil(used.ru_utime + used.ru_stime) + KILLED_AFTER_CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (kill_at, resource.RLIM_INFINITY))
    try:
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        try:
            return function(*arguments)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
    except TooSlow:
        return None
