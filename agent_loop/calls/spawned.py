"""Child processes that do not import the `__main__` of this process.

In a Ray worker `__main__` would import Ray, and a script without a guard would run again.
"""

import multiprocessing.context
import sys
from types import ModuleType
from typing import Any


class _Process(multiprocessing.context.SpawnProcess):
    @property
    def daemon(self) -> bool:
        """Always true. This process may be a child of multiprocessing, which waits at its exit for
        its processes that are no daemons, while they wait for it."""
        return True

    @daemon.setter
    def daemon(self, value: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        pass

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        main = sys.modules["__main__"]
        # spawn has no other way to leave `__main__` out
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            return multiprocessing.context.SpawnProcess._Popen(process_obj)  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            sys.modules["__main__"] = main


class SpawnWithoutMain(multiprocessing.context.SpawnContext):
    """Spawns processes, because ours has threads; they do not import the
    `__main__` of this process."""

    Process = _Process
