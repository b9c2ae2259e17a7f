"""A TransferQueue for each run: several runs of one Ray cluster do not meet in it.

verl adapter: `transfer_queue/interface.py:119,200` at TransferQueue 0.1.11 finds its controller by
one name in one namespace of the whole cluster, so a second run would read the rows of the first.
"""

import os
from typing import Any

VARIABLE = "VERL_MIXED_QUEUE"
"""The namespace of this run's TransferQueue, for all its processes; unset: TransferQueue's own."""


def give_own_namespace(interface: Any) -> None:
    """Let `transfer_queue.interface` find and make its controller in this run's namespace."""
    if namespace := os.environ.get(VARIABLE):
        interface.ray = _InNamespace(interface.ray, "get_actor", namespace)
        interface.TransferQueueController = _InNamespace(
            interface.TransferQueueController, "options", namespace
        )


class _InNamespace:
    """Another object, one method of which gets this namespace whatever the caller says."""

    def __init__(self, other: Any, method: str, namespace: str) -> None:
        self._other, self._method, self._namespace = other, method, namespace

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._other, name)
        if name != self._method:
            return found
        return lambda *args, **options: found(*args, **{**options, "namespace": self._namespace})


def has_own_namespace(interface: Any) -> bool:
    """Whether `give_own_namespace` has run where it is needed."""
    return VARIABLE not in os.environ or isinstance(interface.ray, _InNamespace)
