"""What this machine has: CPUs, memory, shared memory, open files, disks and ports."""

import os
import resource
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from config.environment import DASHBOARD_PORT, why_taken
from config.lookup import at
from verl_mixed.checks.finding import Finding, bad, ok, warning

GB = 2**30

LEAST_CPUS = 2
LEAST_MEMORY_GB = 6.0
"""The demo peaks at about 4."""

LEAST_DISK_GB = 5.0
LEAST_TEMP_GB = 2.0
LEAST_INODES = 20_000
LEAST_FILES = 4096
"""Ray says so; the soft limit it raises itself."""

FULLEST = 0.95
"""Ray writes no more objects to a disk that is fuller."""

LONGEST_SOCKET = 107
_SOCKET = "/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"
"""What Ray appends to its folder."""

CGROUPS = Path("/sys/fs/cgroup")
SHM = Path("/dev/shm")


def cpus() -> list[Finding]:
    """CPUs that this process may use, and a container's share of them."""
    count = len(os.sched_getaffinity(0))
    share = _cpu_share()
    words = f"{count}" + (f", of which the container may use {share:g}" if share else "")
    if min(count, share or count) < LEAST_CPUS:
        remedy = f"want {LEAST_CPUS} at least: give the machine or container more"
        return [bad("cpus", words, remedy)]
    return [ok("cpus", words)]


def _cpu_share() -> float | None:
    """CPUs that the cgroup allows, None without a limit."""
    words = _read(CGROUPS / "cpu.max").split()
    if len(words) == 2 and words[0].isdigit():
        return int(words[0]) / int(words[1])
    quota = _read(CGROUPS / "cpu/cpu.cfs_quota_us")
    period = _read(CGROUPS / "cpu/cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def memory() -> list[Finding]:
    """Memory, as far as the cgroup lets this process have it."""
    machine = psutil.virtual_memory()
    limit = _memory_limit()
    total = min(machine.total, limit or machine.total)
    words = f"{total / GB:.1f} GB" + (" (container's limit)" if total < machine.total else "")
    words += f", {min(machine.available, total) / GB:.1f} GB free"
    if total < LEAST_MEMORY_GB * GB:
        return [bad("memory", words, f"want {LEAST_MEMORY_GB:g} GB: give it more")]
    if machine.available < LEAST_MEMORY_GB * GB:
        need = f"the demo needs {LEAST_MEMORY_GB:g} GB, or the OOM killer ends it"
        return [warning("memory", words, f"end other programs; {need}")]
    return [ok("memory", words)]


def _memory_limit() -> int | None:
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        if (text := _read(CGROUPS / name)).isdigit():
            return int(text)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def open_files() -> list[Finding]:
    """The limit on open files; Ray raises the soft one to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    words = f"soft {_limit(soft)}, hard {_limit(hard)}"
    if 0 <= hard < LEAST_FILES:
        remedy = f"ulimit -n {LEAST_FILES * 2} (limits.conf, or LimitNOFILE of the service)"
        return [bad("open files", words, remedy)]
    return [ok("open files", words)]


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else str(number)


def shared_memory(config: Mapping[str, Any]) -> list[Finding]:
    """Room in /dev/shm for Ray's object store, where the run starts its own Ray."""
    if at(config, "ray_kwargs.ray_init.address"):
        return []
    wanted = at(config, "ray_kwargs.ray_init.object_store_memory")
    if not isinstance(wanted, int):  # Ray's own default
        wanted = min(0.3 * (_memory_limit() or psutil.virtual_memory().total), 200 * GB)
    try:
        free = shutil.disk_usage(SHM).free
    except OSError as error:
        return [warning("shared memory", f"no {SHM}: {error}", "mount a tmpfs there")]
    words = f"{free / GB:.1f} GB free in {SHM}, Ray's object store wants {wanted / GB:.1f} GB"
    if free < wanted:
        remedy = "docker run --shm-size=..., or lower ray_kwargs.ray_init.object_store_memory: "
        return [warning("shared memory", words, remedy + "Ray would use /tmp, which is slow")]
    return [ok("shared memory", words)]


def disks(runs: Path) -> list[Finding]:
    """Room for what a run writes, and for what Ray does; checkpoints come on top."""
    temporary = Path(os.environ.get("RAY_TEMP_DIR") or tempfile.gettempdir())
    findings = _disk("disk", runs, LEAST_DISK_GB)
    findings += _disk("temp disk", temporary, LEAST_TEMP_GB)
    if len(str(temporary)) + len(_SOCKET) > LONGEST_SOCKET:
        words = f"RAY_TEMP_DIR={temporary}: a unix socket's path would be too long"
        remedy = f"choose one of {LONGEST_SOCKET - len(_SOCKET)} letters at most"
        findings.append(bad("temp disk", words, remedy))
    return findings


def _disk(check: str, folder: Path, least_gb: float) -> list[Finding]:
    place = existing(folder)
    try:
        usage, inodes = shutil.disk_usage(place), os.statvfs(place)
    except OSError as error:
        return [bad(check, f"cannot look at {place}: {error}", "mount it, or name another")]
    words = f"{usage.free / GB:.1f} GB free at {place}"
    if not os.access(place, os.W_OK):
        return [bad(check, f"{place}: not writable", "change its owner, or name another")]
    if usage.free < least_gb * GB:
        return [bad(check, words, f"want {least_gb:g} GB: delete old runs, or use another disk")]
    if inodes.f_files > 0 and inodes.f_favail < LEAST_INODES:
        words += f", {inodes.f_favail} inodes"
        return [bad(check, words, "it has too many small files: delete some")]
    if check == "temp disk" and usage.used > FULLEST * usage.total:
        words += f", {usage.used / usage.total:.0%} used"
        remedy = f"above {FULLEST:.0%} Ray spills no objects: free some, or set RAY_TEMP_DIR"
        return [warning(check, words, remedy)]
    return [ok(check, words)]


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    path = path.expanduser().absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def ports(config: Mapping[str, Any]) -> list[Finding]:
    """The dashboard's port, where the run starts its own Ray; the own tool server takes any."""
    port = _dashboard_port(config)
    if port is None:
        return []
    host = at(config, "ray_kwargs.ray_init.dashboard_host") or "127.0.0.1"
    if (refusal := why_taken(host, port)) is None:
        return [ok("ports", f"{port} (Ray's dashboard) is free")]
    words = f"ray_kwargs.ray_init.dashboard_port={port}: {refusal}{_holder(port)}"
    if port == DASHBOARD_PORT:
        return [ok("ports", f"{words}; Ray takes the next free one")]
    remedy = "set RAY_DASHBOARD_PORT to a free port, or wait for the run that uses it"
    return [bad("ports", words, remedy)]


def _dashboard_port(config: Mapping[str, Any]) -> int | None:
    """Of a dashboard that the run's own Ray starts at a fixed port."""
    ray_init = at(config, "ray_kwargs.ray_init", {})
    if ray_init.get("address") or not ray_init.get("include_dashboard", True):
        return None
    return int(ray_init.get("dashboard_port") or 0) or None


def _holder(port: int) -> str:
    """Who listens there, as far as this user may know."""
    try:
        for connection in psutil.net_connections("tcp"):
            here = connection.laddr and connection.laddr.port == port
            if here and connection.status == psutil.CONN_LISTEN:
                if connection.pid is None:
                    return ", held by another user's process"
                name = psutil.Process(connection.pid).name()
                return f", held by {name} (pid {connection.pid})"
    except (psutil.Error, OSError):
        return ""
    return ""
