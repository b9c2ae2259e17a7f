"""The packages that a run needs, and their installed versions. Standard library only.

This is the only list of packages besides the ranges in pyproject.toml. The checks of a machine, of
the hosts of a cluster and of Ray's nodes use it, and so does the record of a run's versions.
"""

from importlib.metadata import PackageNotFoundError, version

PROJECT = "verl-mixed-agent-loop"

VERL_VERSION = "0.9.1"

NEEDED = (
    "torch",
    "verl",
    "ray",
    "transformers",
    "TransferQueue",
    "tensordict",
    "torchdata",
    "hydra-core",
    "omegaconf",
    "pydantic",
    "numpy",
    "pyarrow",
    "aiohttp",
    "filelock",
    "prometheus-client",
    "tantivy",
    "math-verify",
    "pebble",
    "psutil",
    "rich",
    "tensorboard",
    "wandb",
)
"""Packages of every run."""

OPTIONAL = ("vllm", "sglang", "accelerate", "peft", "tokenizers", "datasets")
"""Packages that some profiles use."""

EQUAL_ON_NODES = (
    "torch",
    "verl",
    "vllm",
    "ray",
    "transformers",
    "TransferQueue",
    "tensordict",
    PROJECT,
)
"""Packages whose version must be the same on every node, because the nodes exchange objects."""


def versions() -> dict[str, str | None]:
    """Needed package -> installed version, None if the package is not installed."""
    return {name: version_of(name) for name in NEEDED}


def version_of(name: str) -> str | None:
    """The installed version of a package, None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
