"""Files of a run: the limiter's, the data, the model. Looks at their ends, reads no rows."""

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent_loop.calls.limiter import state_path
from config.lookup import at, files_at
from config.schema import TOOL_CONFIG, MixedConfig, ToolConfig
from verl_mixed.checks.finding import Finding, bad, ok, warning
from verl_mixed.checks.machine.machine import GB, existing
from verl_mixed.run.compose import unset_keys
from verl_mixed.run.sections import section_of
from verl_mixed.run.settings import VARIABLES

MOUNTS = Path("/proc/self/mounts")

NETWORK_KINDS = {
    "9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4",
    "orangefs", "smb3", "smbfs", "wekafs",
}  # fmt: skip
"""Kinds of file system that a server on another machine keeps."""

LOCK_S = 15.0

MODEL_KEY = "actor_rollout_ref.model.path"
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")

_TRY = "import fcntl, sys; fcntl.flock(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
"""Program that fails if it cannot lock a file."""


def filesystem_of(path: Path) -> str:
    """The kind of file system that a path is on, by the longest mount point above it."""
    path = existing(path).resolve()
    kind, longest = "unknown", -1
    for line in MOUNTS.read_text(errors="replace").splitlines():
        _, point, this_kind, *_ = line.split(" ")
        point = point.encode().decode("unicode_escape")  # a space is \\040
        if path.is_relative_to(point) and len(point) >= longest:
            kind, longest = this_kind, len(point)
    return kind


def limiter(config: Mapping[str, Any], *, cluster: bool) -> list[Finding]:
    """Where the rate limit is kept, and whether locks work there.

    With `cluster`, the run joins a cluster, which may have several nodes.
    """
    mixed, _ = section_of(MixedConfig, at(config, "mixed", {}), "mixed")
    tools, _ = section_of(ToolConfig, at(config, TOOL_CONFIG, {}), TOOL_CONFIG)
    if mixed is None or tools is None:
        return []  # the check of config reports it
    if not tools.enable_global_rate_limit:
        return [ok("limiter", f"off ({TOOL_CONFIG}.enable_global_rate_limit=false)")]
    backend = mixed.rate_limit.backend
    if backend == "ray" or (backend == "auto" and cluster):
        return [ok("limiter", "an actor of Ray keeps it")]
    folder = existing(state_path(tools, mixed).parent)
    kind = filesystem_of(folder)
    is_network = kind in NETWORK_KINDS or kind.startswith("fuse.")  # a FUSE may be anything
    words = f"a file on {folder} ({kind}, {'network' if is_network else 'local'})"
    fault = lock_fault(folder)
    if fault is not None:
        remedy = "put the run or tool_config.rate_limit_file on another disk, or use "
        return [bad("limiter", f"{words}: {fault}", remedy + "mixed.rate_limit.backend=ray")]
    if is_network:
        remedy = "use mixed.rate_limit.backend=ray, or a local folder (EXPERIMENT_NAME's disk)"
        words += ": locks exclude processes of this machine; of others only where it passes them on"
        return [warning("limiter", words, remedy)]
    return [ok("limiter", f"{words}: locks exclude other processes")]


def lock_fault(folder: Path) -> str | None:
    """What goes wrong when two processes lock a file there; None where all is well."""
    try:
        handle, name = tempfile.mkstemp(prefix=".lock-probe-", dir=folder)
    except OSError as error:
        return f"cannot write there: {error.strerror}"
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _other_can_lock(name):
            return "two processes hold one lock at once"
        fcntl.flock(handle, fcntl.LOCK_UN)
        return None if _other_can_lock(name) else "a lock that was given back cannot be had"
    except subprocess.TimeoutExpired:
        return f"a lock that was given back cannot be had within {LOCK_S:g} s"
    except OSError as error:
        return f"it takes no locks: {error.strerror}"
    finally:
        os.close(handle)
        os.unlink(name)


def _other_can_lock(file: str) -> bool:
    """Whether another process gets the lock of a file, without waiting for it."""
    command = [sys.executable, "-S", "-c", _TRY, file]
    done = subprocess.run(command, stderr=subprocess.DEVNULL, check=False, timeout=LOCK_S)
    return done.returncode == 0


def data(config: Mapping[str, Any]) -> list[Finding]:
    """Whether the data files are there and are parquet, by their last bytes."""
    findings = []
    for key in ("data.train_files", "data.val_files"):
        if key in unset_keys(config):
            findings.append(bad("data", f"{key}: no value", f"set {VARIABLES[key]}"))
            continue
        files = files_at(config, key)
        faults = {file: fault for file in files if (fault := _file_fault(Path(file)))}
        findings += [
            bad("data", f"{key}: {file}: {fault}", "correct the name, or prepare it again")
            for file, fault in faults.items()
        ]
        if not faults:
            size = sum(os.path.getsize(file) for file in files) / 2**20
            findings.append(ok("data", f"{key}: {len(files)} files, {size:.1f} MB"))
    return findings


def _file_fault(file: Path) -> str:
    """Why it cannot be a data file of a run; empty where it may."""
    try:
        with file.open("rb") as opened:
            opened.seek(-4, os.SEEK_END)
            end = opened.read()
    except FileNotFoundError:
        return "no such file"
    except OSError as error:
        return error.strerror or str(error)
    return "" if end == b"PAR1" else "not parquet, or cut off"


def model(config: Mapping[str, Any]) -> list[Finding]:
    """Whether the model's folder has what is loaded."""
    if MODEL_KEY in unset_keys(config):
        return [bad("model", f"{MODEL_KEY}: no value", "set MODEL_PATH")]
    name = str(at(config, MODEL_KEY))
    folder = Path(name).expanduser()
    if not folder.is_absolute():
        remedy = "without a network name a folder (MODEL_PATH)"
        return [warning("model", f"{name}: a hub's name, fetched when the run starts", remedy)]
    remedy = "set MODEL_PATH to a model's folder"
    if not (folder / "config.json").is_file():
        return [bad("model", f"{folder}: no config.json there", remedy)]
    files = [file for pattern in _WEIGHTS for file in folder.glob(pattern)]
    if not files:
        return [bad("model", f"{folder}: no weights there ({', '.join(_WEIGHTS)})", remedy)]
    unreadable = [file.name for file in files if not os.access(file, os.R_OK)]
    if unreadable:
        return [bad("model", f"{folder}: cannot read {', '.join(unreadable)}", "change its mode")]
    size = sum(file.stat().st_size for file in files)
    return [ok("model", f"{folder}: {size / GB:.2f} GB of weights")]
