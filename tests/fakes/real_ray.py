"""The end of a Ray that a test started in its own process."""

from typing import Any

import ray
from ray._private import worker


def shut_down() -> None:
    """Shut Ray down and wait until its processes have ended.

    Ray waits a second for each of them, and then forgets it. On a busy machine one may live longer,
    and Python warns of it in the test that runs when it is forgotten.
    """
    node: Any = worker._global_node
    started = [] if node is None else [one for kind in node.all_processes.values() for one in kind]
    ray.shutdown()
    for each in started:
        each.process.wait(60.0)
