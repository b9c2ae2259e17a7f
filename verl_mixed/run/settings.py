"""The environment variables of `run_mixed_training.sh` as Hydra overrides.

Checks numbers; the values themselves are checked with the whole config. An empty variable counts as
unset. An override on the command line wins over the variable for the same key.
"""

import math
import os
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from cluster.ray_cluster import THIS_MACHINE, address_of, recorded_address
from config.schema import TOOL_CONFIG, ConfigError

SERVER_URL_KEY = f"{TOOL_CONFIG}.server_url"
NODES_KEY = "trainer.nnodes"
_ACTOR = "actor_rollout_ref.actor"


def _number(text: str) -> str:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("want a finite number")
    return repr(value)


def _whole(text: str) -> str:
    return str(int(text))


def _quoted(text: str) -> str:
    return "'" + text.replace("'", r"\'") + "'"


def absolute_if_local(text: str) -> str:
    """Make the path of a local file absolute, because workers run in other folders.

    A text that is not a local file, such as a model's name on a hub, is returned unchanged.
    """
    return os.path.abspath(text) if os.path.exists(text) else text


def _path(text: str) -> str:
    return _quoted(absolute_if_local(text))


def _files(text: str) -> str:
    """The files that a text names: `a b`, `a,b`, `[a, b]`, or one file whose name has spaces.

    With a comma, spaces belong to the names; without one, quotes keep a name together.
    """
    text = text.strip("[]")
    if os.path.exists(text):
        names = [text]
    elif "," in text:
        names = [name.strip().strip("'\"") for name in text.split(",")]
    else:
        names = shlex.split(text)
    names = filter(None, names)
    return "[" + ",".join(_quoted(os.path.abspath(name)) for name in names) + "]"


@dataclass(frozen=True, slots=True)
class Setting:
    """What one environment variable sets."""

    key: str
    """Dotted key of the run config, or a config group."""

    render: Callable[[str], str]
    """The variable's text -> the value in Hydra's syntax; raises ValueError for a wrong text."""

    wants: str
    """Description of the accepted values, for messages."""

    prefix: str = ""
    """`++` for a key that some profiles lack."""

    switch: str = ""
    """Dotted key that becomes true if the number is above 0, and false if it is 0."""


SETTINGS: Mapping[str, Setting] = {
    "PROFILE": Setting("profile", str, "a file name of config/profile"),
    "EXPERIMENT_NAME": Setting("mixed.experiment", _quoted, "a name"),
    "MODEL_PATH": Setting("actor_rollout_ref.model.path", _path, "a model folder"),
    "TRAIN_FILES": Setting("data.train_files", _files, "parquet files, comma separated"),
    "VAL_FILES": Setting("data.val_files", _files, "parquet files, comma separated"),
    "TACO_RATIO": Setting("mixed.sources.taco.ratio", _number, "a number >= 0"),
    "NQ_RATIO": Setting("mixed.sources.nq.ratio", _number, "a number >= 0"),
    "MATH_RATIO": Setting("mixed.sources.math.ratio", _number, "a number >= 0"),
    "LEARNING_RATE": Setting(f"{_ACTOR}.optim.lr", _number, "a number >= 0"),
    "TRAIN_BATCH_SIZE": Setting("data.train_batch_size", _whole, "a whole number >= 1"),
    "ROLLOUT_N": Setting("actor_rollout_ref.rollout.n", _whole, "a whole number >= 2"),
    "MAX_RESPONSE_LENGTH": Setting("data.max_response_length", _whole, "a whole number >= 1"),
    "KL_COEF": Setting(
        f"{_ACTOR}.kl_loss_coef", _number, "a number >= 0", switch=f"{_ACTOR}.use_kl_loss"
    ),
    "TOTAL_TRAINING_STEPS": Setting("trainer.total_training_steps", _whole, "a whole number >= 1"),
    "TOOL_SERVER_URL": Setting(SERVER_URL_KEY, _quoted, "a URL"),
    "TOOL_MAX_WORKERS": Setting(f"{TOOL_CONFIG}.max_workers", _whole, "a whole number >= 1"),
    "TOOL_REQUEST_INTERVAL": Setting(f"{TOOL_CONFIG}.request_interval", _number, "seconds >= 0"),
    "RATE_LIMIT_PER_MINUTE": Setting(
        f"{TOOL_CONFIG}.rate_limit_per_minute", _number, "a number > 0"
    ),
    "N_GPUS_PER_NODE": Setting("trainer.n_gpus_per_node", _whole, "a whole number >= 1"),
    "NNODES": Setting(NODES_KEY, _whole, "a whole number >= 1"),
    "RAY_DASHBOARD_PORT": Setting(
        "ray_kwargs.ray_init.dashboard_port", _whole, "a port number", "++"
    ),
    "RAY_TEMP_DIR": Setting("ray_kwargs.ray_init._temp_dir", _quoted, "a folder", "++"),
}

VARIABLES = {setting.key: name for name, setting in SETTINGS.items()}
"""Key of the run config -> the environment variable that sets it."""

ADDRESS_KEY = "ray_kwargs.ray_init.address"
"""Address of the Ray cluster that a run joins. Without it, a run starts its own Ray."""


def override_key(override: str) -> str:
    """The key of a Hydra override, without its prefix `+`, `++` or `~` and its `@package`."""
    return override.lstrip("+~").split("=", 1)[0].split("@", 1)[0]


def overrides_from(environ: Mapping[str, str], given: Sequence[str] = ()) -> list[str]:
    """Hydra overrides: those of the variables that are set, then those `given` on the command line.

    Raises:
        ConfigError: variables with a wrong text, a line each.
    """
    taken = {override_key(override) for override in given}
    overrides, problems = [], []
    for name, setting in SETTINGS.items():
        text = environ.get(name, "").strip()
        if not text or setting.key in taken:
            continue
        try:
            value = setting.render(text)
        except ValueError:
            problems.append(f"{name}={text!r}: want {setting.wants}; correct it or unset it")
            continue
        overrides.append(f"{setting.prefix}{setting.key}={value}")
        if setting.switch and setting.switch not in taken:
            overrides.append(f"{setting.switch}={str(float(value) > 0).lower()}")
    of_cluster, cluster_problems = _cluster_overrides(environ, taken)
    if problems := problems + cluster_problems:
        raise ConfigError(problems)
    return [*overrides, *of_cluster, *given]


def _cluster_overrides(
    environ: Mapping[str, str], taken: Collection[str]
) -> tuple[list[str], list[str]]:
    """Overrides from the settings of a cluster, and the mistakes in these settings."""
    workers = environ.get("WORKER_NODES", "").replace(",", " ").split()
    address = address_of(environ)
    if address is None:
        problem = (
            f"WORKER_NODES={' '.join(workers)!r}: there is no MASTER_IP; name the head, or unset it"
        )
        return [], [problem] if workers else []
    head = environ.get("MASTER_IP", "").strip()
    head = "" if head == THIS_MACHINE else head
    if problem := _contradiction(environ, address, workers, taken):
        return [], [problem]
    if address == "auto":
        address = recorded_address(environ, environ.get("RAY_TEMP_DIR", "").strip() or None)
        if address is None:
            return [], [
                "RAY_ADDRESS='auto': no Ray was started on this machine (`ray start --head` "
                "starts one); name the head (RAY_ADDRESS=<ip>:6379), or unset it"
            ]
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit() or not 0 < int(port) < 65536:
        wrong = f"RAY_PORT={port!r}: want a port number"
        if not head:
            wrong = f"RAY_ADDRESS={address!r}: want <ip>:<port> of Ray's head, or auto"
        return [], [f"{wrong}; correct it or unset it"]
    wanted = {f"++{ADDRESS_KEY}": _quoted(address)}
    if (head or workers) and not environ.get("NNODES", "").strip():
        wanted[NODES_KEY] = str(1 + len(workers))
    return [f"{key}={value}" for key, value in wanted.items() if override_key(key) not in taken], []


def _contradiction(
    environ: Mapping[str, str], address: str, workers: Sequence[str], taken: Collection[str]
) -> str | None:
    """The settings of a cluster that contradict each other, or None."""
    head, other = (environ.get(name, "").strip() for name in ("MASTER_IP", "RAY_ADDRESS"))
    if other not in ("", "auto") and _plain(other) != _plain(address):
        return (
            f"MASTER_IP={head!r} ({address}) and RAY_ADDRESS={other!r} name two Rays: unset one "
            "of them"
        )
    nodes = environ.get("NNODES", "").strip()
    if workers and nodes.isdigit() and int(nodes) != 1 + len(workers) and NODES_KEY not in taken:
        return (
            f"NNODES={nodes}, and WORKER_NODES={' '.join(workers)!r} and the head are "
            f"{1 + len(workers)}: unset one of them"
        )
    return None


def _plain(address: str) -> str:
    return address.replace("[", "").replace("]", "")


def is_own_tool_server(server_url: str) -> bool:
    """Whether a run starts its own tool server. Port 0 in the URL asks for one."""
    try:
        return urlsplit(server_url).port == 0
    except ValueError:  # a port that is not a number is reported by the check of the given server
        return False
