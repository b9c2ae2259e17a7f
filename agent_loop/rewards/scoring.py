"""Checks of answers by a library that may hang or fill the memory, in two killable processes.

Each check has a limit of CPU time, which does not depend on other load: an answer is judged the
same every time. Python code is interrupted; a process that hangs in C code is killed by the kernel.
A check also has a limit of wall time, which only an overloaded machine reaches.
"""

import importlib
import math
import resource
import signal
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, TypeVar

from agent_loop.processes import CallTimedOut, KillablePool, ProcessDied
from tool_server.wire.protocol import ToolTimeout

T = TypeVar("T")

PROCESSES = 2
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


class Scorer:
    """The processes of one library.

    Args:
        library: the module. Each process imports it before its first answer, whose time it would
            take.
        prepare: called in each new process with the limits set; a function of a module.
    """

    def __init__(self, library: str, prepare: Callable[[], None]) -> None:
        self._library = library
        self.pool = KillablePool(PROCESSES, partial(_begin, library, prepare), MOST_CHECKS)

    async def run(self, function: Callable[..., T], *arguments: Any) -> T | None:
        """What a function of a module returns in a process; None if the CPU time was used up.

        Raises:
            ToolTimeout: the limit of wall time was reached: the machine is overloaded, which says
                nothing about the answer.
            RuntimeError: the processes do not start, or end twice for reasons of their own.
        """
        died: ProcessDied | None = None
        for _ in range(2):
            try:
                return await self.pool.run(within_limits, function, *arguments, timeout_s=WALL_S)
            except CallTimedOut as error:
                raise ToolTimeout(
                    f"no verdict on an answer within {WALL_S:g} s, and less than {CPU_S:g} s of "
                    "CPU time used: the machine is overloaded; give it more cores, or fewer agent "
                    "loop workers (rollout.agent.num_workers)",
                    tool=self._library,
                ) from error
            except ProcessDied as error:
                if error.exitcode == -signal.SIGXCPU:
                    return None
                died = error
        raise RuntimeError(
            f"cannot check answers by {self._library}: {died}, twice; see whether "
            f"`python -c 'import {self._library}'` works and how much memory is left"
        ) from died


# --- in the processes -----------------------------------------------------------------------------


class TooSlow(BaseException):
    """The CPU time is used up. It is no `Exception`, because the libraries would catch it and
    continue."""


def _begin(library: str, prepare: Callable[[], None]) -> None:
    """Import the library and set the limits."""
    importlib.import_module(library)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # pebble's own handler waits for C code
    signal.signal(signal.SIGPROF, _interrupt)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
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
