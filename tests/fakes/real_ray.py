"""A Ray that a test starts in its own process, and its end."""

import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
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


@contextmanager
def own_ray(num_cpus: int, **settings: Any) -> Generator[str]:
    """A Ray of the test's own, whatever else runs on this machine; its address."""
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    with pytest.MonkeyPatch.context() as patch:
        if "RAY_AUTH_MODE" not in os.environ:  # Ray reads it when it is imported too
            patch.setenv("RAY_AUTH_MODE", "disabled")
        ray.init(address="local", num_cpus=num_cpus, **{**quiet, **settings})
        yield ray.get_runtime_context().gcs_address
        shut_down()
