"""Python functions in processes of their own (`where: process`), which are ended at a deadline.

The processes of a function start when it is first called, and import its file. pebble ends a
process whose call is cancelled, and starts another. They end with the agent loop worker.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pebble import ProcessExpired, ProcessPool

from agent_loop.calls.spawned import SpawnWithoutMain
from samplers.module_file import module_of
from tool_server.wire.protocol import ToolRejected

PROCESSES = 2
"""Processes of a function whose entry has no `slots`."""


class ProcessRun:
    """Runs one function in processes.

    Args:
        processes: most calls at once.
    """

    def __init__(self, path: Path, name: str, processes: int | None) -> None:
        self._path, self._name = path.resolve(), name
        context: Any = SpawnWithoutMain()
        self._make: Callable[[], ProcessPool] = lambda: ProcessPool(
            processes or PROCESSES, context=context
        )
        self._pool: ProcessPool | None = None

    async def __call__(self, arguments: dict[str, Any]) -> Any:
        """Raises what the function raises; a process that dies raises `RuntimeError`."""
        if self._pool is None or not self._pool.active:
            self._pool = self._make()
        task = self._pool.schedule(_called, args=[str(self._path), self._name, arguments])
        try:
            is_mistake, value = await asyncio.wrap_future(task)
        except asyncio.CancelledError:
            task.cancel()  # ends the process
            raise
        except ProcessExpired as error:
            raise RuntimeError(f"its process ended with exit code {error.exitcode}") from error
        if is_mistake:
            raise ToolRejected(value)
        return value

    def close(self) -> None:
        if self._pool is not None:
            self._pool.stop()


def _called(path: str, name: str, arguments: dict[str, Any]) -> tuple[bool, Any]:
    """In the process: (whether the model made a mistake, the value or what the model reads)."""
    function = getattr(module_of(Path(path), "tool"), name)
    try:
        value = function(**arguments)
        return False, asyncio.run(value) if asyncio.iscoroutine(value) else value
    except ToolRejected as error:
        return True, str(error)
