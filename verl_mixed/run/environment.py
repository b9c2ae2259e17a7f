"""Which packages this Python has, and whether verl will find our plugin. Standard library only.

`python -m verl_mixed.run.environment` names what is missing, for an environment that the scripts do
not install into (CONDA_ENV).
"""

import os
import sys
from importlib.metadata import PackageNotFoundError, entry_points, version

PACKAGES = (
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

VERL_VERSION = "0.9.1"

PLUGIN_NAME, PLUGIN_MODULE = "mixed_agent_loop", "agent_loop.plugin"


def versions() -> dict[str, str | None]:
    """Package -> its version, None where it is not installed."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def package_problems() -> list[str]:
    """What is missing, or of a version that cannot work."""
    found = versions()
    problems = [f"{name} is not installed" for name, number in found.items() if number is None]
    if found["verl"] not in (None, VERL_VERSION):
        problems.append(f"verl is {found['verl']}; this project is written for {VERL_VERSION}")
    return problems


def plugin_problems() -> list[str]:
    """Why `import verl` would pass our plugin by; verl itself says nothing about that."""
    problems = []
    registered = {point.name: point.value for point in entry_points(group="verl.plugins")}
    if registered.get(PLUGIN_NAME) != PLUGIN_MODULE:
        problems.append(
            f"no entry point verl.plugins {PLUGIN_NAME} -> {PLUGIN_MODULE}: verl would train "
            "without this project; install the checkout with `pip install --no-deps -e .`"
        )
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    if policy != "auto" and PLUGIN_NAME not in [name.strip() for name in policy.split(",")]:
        problems.append(
            f"VERL_USE_EXTERNAL_PLUGINS={policy!r} switches {PLUGIN_NAME} off; unset it"
        )
    return problems


if __name__ == "__main__":
    found_problems = [*package_problems(), *plugin_problems()]
    print("\n".join(found_problems), file=sys.stderr)
    sys.exit(bool(found_problems))
