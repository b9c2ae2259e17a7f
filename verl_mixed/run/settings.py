"""The environment variables of the scripts as Hydra overrides.

Decides what each variable sets and whether its text is a number where one is due. An empty variable
is an unset one. An override given on the command line wins over the variable for the same key.
"""

import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from cluster.ray_cluster import address_of
from config.schema import TOOL_CONFIG, ConfigError

SERVER_URL_KEY = f"{TOOL_CONFIG}.server_url"


def _number(text: str) -> str:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("want a finite number")
    return repr(value)


def _whole(text: str) -> str:
    return str(int(text))


def _quoted(text: str) -> str:
    return "'" + text.replace("'", r"\'") + "'"


def _path(text: str) -> str:
    """A local file or folder made absolute, because workers run elsewhere; else left as it is."""
    return _quoted(os.path.abspath(text) if os.path.exists(text) else text)


def _files(text: str) -> str:
    names = [name for name in re.split(r"[,\s\[\]'\"]+", text) if name]
    return "[" + ",".join(_quoted(os.path.abspath(name)) for name in names) + "]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What one environment variable sets."""

    key: str
    """Dotted key of the run config, or a config group."""

    render: Callable[[str], str]
    """Text of the variable -> Hydra's text of the value; ValueError where it is none."""

    wants: str
    """The values it takes, for the message."""

    prefix: str = ""
    """`++` for a key that not every profile has."""


def _setting(key: str, render: Callable[[str], str], wants: str, prefix: str = "") -> Setting:
    return Setting(key=key, render=render, wants=wants, prefix=prefix)


SETTINGS: Mapping[str, Setting] = {
    "PROFILE": _setting("profile", str, "a file name of config/profile"),
    "EXPERIMENT_NAME": _setting("mixed.experiment", _quoted, "a name"),
    "MODEL_PATH": _setting("actor_rollout_ref.model.path", _path, "a model folder"),
    "TRAIN_FILES": _setting("data.train_files", _files, "parquet files, comma separated"),
    "VAL_FILES": _setting("data.val_files", _files, "parquet files, comma separated"),
    "TACO_RATIO": _setting("mixed.sources.taco.ratio", _number, "a number >= 0"),
    "NQ_RATIO": _setting("mixed.sources.nq.ratio", _number, "a number >= 0"),
    "MATH_RATIO": _setting("mixed.sources.math.ratio", _number, "a number >= 0"),
    "LEARNING_RATE": _setting("actor_rollout_ref.actor.optim.lr", _number, "a number >= 0"),
    "TRAIN_BATCH_SIZE": _setting("data.train_batch_size", _whole, "a whole number >= 1"),
    "ROLLOUT_N": _setting("actor_rollout_ref.rollout.n", _whole, "a whole number >= 2"),
    "TOTAL_TRAINING_STEPS": _setting("trainer.total_training_steps", _whole, "a whole number >= 1"),
    "TOOL_SERVER_URL": _setting(SERVER_URL_KEY, _quoted, "a URL"),
    "TOOL_MAX_WORKERS": _setting(f"{TOOL_CONFIG}.max_workers", _whole, "a whole number >= 1"),
    "TOOL_REQUEST_INTERVAL": _setting(f"{TOOL_CONFIG}.request_interval", _number, "seconds >= 0"),
    "RATE_LIMIT_PER_MINUTE": _setting(
        f"{TOOL_CONFIG}.rate_limit_per_minute", _number, "a number > 0"
    ),
    "RAY_DASHBOARD_PORT": _setting(
        "ray_kwargs.ray_init.dashboard_port", _whole, "a port number", "++"
    ),
    "RAY_TEMP_DIR": _setting("ray_kwargs.ray_init._temp_dir", _quoted, "a folder", "++"),
}

ADDRESS_KEY = "ray_kwargs.ray_init.address"
"""Of the Ray cluster that a run joins; without it, a run starts one of its own."""


def override_key(override: str) -> str:
    """The key of a Hydra override, without `+`, `++` or `~` before it and `@package` after it."""
    return override.lstrip("+~").split("=", 1)[0].split("@", 1)[0]


def overrides_from(environ: Mapping[str, str], given: Sequence[str] = ()) -> list[str]:
    """Hydra overrides of the variables that are set, then those of the command line.

    Args:
        environ: the environment.
        given: overrides of the command line.

    Raises:
        ConfigError: every variable whose text is not what it wants.
    """
    taken = {override_key(override) for override in given}
    overrides, problems = [], []
    for name, setting in SETTINGS.items():
        text = environ.get(name, "").strip()
        if not text or setting.key in taken:
            continue
        try:
            overrides.append(f"{setting.prefix}{setting.key}={setting.render(text)}")
        except ValueError:
            problems.append(f"{name}={text!r}: want {setting.wants}; correct it or unset it")
    of_cluster, cluster_problems = _cluster_overrides(environ, taken)
    if problems := problems + cluster_problems:
        raise ConfigError(problems)
    return [*overrides, *of_cluster, *given]


def _cluster_overrides(
    environ: Mapping[str, str], taken: Collection[str]
) -> tuple[list[str], list[str]]:
    """Overrides of a run on a cluster of several machines, and what is wrong with its settings."""
    workers = environ.get("WORKER_NODES", "").replace(",", " ").split()
    address = address_of(environ)
    if address is None:
        problem = (
            f"WORKER_NODES={' '.join(workers)!r}: there is no MASTER_IP; name the head, or unset it"
        )
        return [], [problem] if workers else []
    port = address.rpartition(":")[2]
    if not port.isdigit() or not 0 < int(port) < 65536:
        return [], [f"RAY_PORT={port!r}: want a port number; correct it or unset it"]
    wanted = {f"++{ADDRESS_KEY}": _quoted(address), "trainer.nnodes": str(1 + len(workers))}
    return [f"{key}={value}" for key, value in wanted.items() if override_key(key) not in taken], []


def is_own_tool_server(server_url: str) -> bool:
    """Whether a run starts its tool server: the URL has port 0, and so names none that runs."""
    try:
        return urlsplit(server_url).port == 0
    except ValueError:  # no port number at all: the check of the given server says so
        return False
