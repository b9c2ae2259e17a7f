"""Pool of algebra processes; a process that takes too long is killed and replaced.

Each worker has its own pipe. The library pebble is not used: its pool breaks when an idle worker is
killed, its time limit starts only when a worker takes the task, and it first sends SIGTERM to a
stuck worker.
"""

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress

from config import child
from config.compat import timeout
from tool_server.algebra.worker import time_limit

START_S = 60.0
"""Seconds that a worker may take to import sympy."""


WALL_FACTOR = 4
"""Wall time of an expression, in limits of its CPU time. Only an overloaded machine reaches it."""


OWN_CRASHES = (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGFPE, -signal.SIGILL)
"""Exit codes of a worker that the expression itself ended, beside those above 0."""


class WorkerCrashed(Exception):
    """The process ended before it answered; `args` has its exit code."""


class WorkerLost(Exception):
    """A worker did not start or was killed from outside, which says nothing about an expression."""


class Overloaded(Exception):
    """An expression got too little CPU time for an answer, which says nothing about it."""


class AlgebraPool:
    """Answers expressions in worker processes, which start when they are needed.

    The pool has as many workers as calls at once; the caller must limit these. `timeout_s` is for
    the CPU time of one expression, `memory_mb` is the address space of a worker.
    """

    def __init__(self, timeout_s: float, memory_mb: int = 1024) -> None:
        self._timeout_s, self._memory_mb = timeout_s, memory_mb
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()

    @property
    def workers(self) -> int:
        """Number of worker processes."""
        return len(self._all)

    async def answer(self, expression: str) -> dict[str, str]:
        """`{"result": text}` or `{"error": text}`; if the worker dies, the call is tried once
        more.

        Raises:
            Overloaded: no answer within `WALL_FACTOR` times the time limit.
            WorkerLost: the worker died twice, and not by the expression; or it did not start.
        """
        try:
            try:
                return await self._ask(expression)
            except WorkerCrashed as crash:
                if crash.args == (-signal.SIGXCPU,):  # C code that did not end
                    return time_limit(self._timeout_s)
                return await self._ask(expression)
        except WorkerCrashed as crash:
            if crash.args[0] > 0 or crash.args[0] in OWN_CRASHES:
                return {"error": "the calculation crashed twice"}
            raise WorkerLost(
                f"an algebra worker was killed twice (exit code {crash}): see whether the machine "
                "has memory left; give the server fewer algebra_workers"
            ) from crash
        except TimeoutError as error:
            raise Overloaded(
                f"no answer within {WALL_FACTOR * self._timeout_s:g} s, and less than "
                f"{self._timeout_s:g} s of CPU time used: the machine is overloaded; give the "
                "server fewer algebra_workers, or more cores"
            ) from error

    async def close(self) -> None:
        """Kill all workers and wait for their ends."""
        await asyncio.gather(*(self._drop(worker) for worker in tuple(self._all)))

    async def _ask(self, expression: str) -> dict[str, str]:
        worker = self._idle.pop() if self._idle else await self._start()
        keep = False
        try:
            async with timeout(WALL_FACTOR * self._timeout_s):
                answer, last = await worker.ask(expression)
            keep = not last
            return answer
        finally:
            if keep:
                self._idle.append(worker)
            else:  # it still calculates, or it is dead
                await asyncio.shield(asyncio.ensure_future(self._drop(worker)))

    async def _start(self) -> "_Worker":
        worker = await _Worker.start(self._timeout_s, self._memory_mb)
        self._all.add(worker)
        try:
            async with timeout(START_S):
                await worker.line()  # "ready"
        except BaseException as error:
            await asyncio.shield(asyncio.ensure_future(self._drop(worker)))
            if isinstance(error, WorkerCrashed):
                raise WorkerLost(
                    f"an algebra worker does not start (exit code {error}): see whether the "
                    "machine has memory left, and whether `python -c 'import sympy'` works"
                ) from error
            raise
        return worker

    async def _drop(self, worker: "_Worker") -> None:
        if worker in self._idle:
            self._idle.remove(worker)
        await worker.kill()
        self._all.discard(worker)


class _Worker:
    """One process and its pipes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, timeout_s: float, memory_mb: int) -> "_Worker":
        # The worker gets only the import path of the environment, because the rest may hold
        # secrets. It has a session of its own, so that Ctrl-C in a terminal reaches only the
        # server.
        environ = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        process = await asyncio.create_subprocess_exec(
            *child.command(
                "tool_server.algebra.worker",
                str(timeout_s),
                str(WALL_FACTOR * timeout_s),
                str(memory_mb),
            ),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environ,
            start_new_session=True,
        )
        return cls(process)

    async def ask(self, expression: str) -> tuple[dict[str, str], bool]:
        """The answer, and whether the worker ends after this answer; see `line`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(expression).encode() + b"\n")
            await self._process.stdin.drain()
        except OSError as error:
            raise WorkerCrashed(await self._process.wait()) from error
        answer, last = json.loads(await self.line())
        return answer, last

    async def kill(self) -> None:
        """Kill and reap the process."""
        if self._process.returncode is None:
            # `Process.kill` might reap the process before asyncio does.
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    async def line(self) -> bytes:
        """The next line of its answers.

        Raises:
            WorkerCrashed: the process has ended.
        """
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise WorkerCrashed(await self._process.wait())
        return line
