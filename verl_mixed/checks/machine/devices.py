"""GPUs, the driver and torch's build against what the run trains on. Imports no torch.

The driver is asked through `nvidia-smi`; torch's build is read from its `version.py`.
"""

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from config.lookup import at
from verl_mixed.checks.finding import Finding, bad, ok, warning

SMI_S = 15.0

BUSY_SHARE = 0.1
"""Of a GPU's memory in use: above it somebody else is there."""

_FIELDS = "index,name,memory.total,memory.used,driver_version"
_INSTALL = "install torch's CUDA build into this environment, or train with PROFILE=laptop"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One line of nvidia-smi."""

    index: str
    name: str
    memory_mb: float
    used_mb: float
    driver: str


def torch_build() -> tuple[str, str | None] | None:
    """torch's version and the CUDA it was built for, None for a CPU build; None without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        number = version("torch")
        text = (Path(spec.origin).parent / "version.py").read_text()
    except (OSError, PackageNotFoundError):
        return None
    found = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return number, found.group(1) if found else None


def devices(config: Mapping[str, Any] | None) -> list[Finding]:
    """What the run trains on; `config` is None where it could not be composed."""
    build = torch_build()
    if build is None:
        return []  # the check of packages reports it
    number, cuda = build
    shown = f"torch {number} ({f'CUDA {cuda}' if cuda else 'CPU build'})"
    on_cpu = config is not None and at(config, "trainer.device") == "cpu"
    if shutil.which("nvidia-smi") is None:
        if on_cpu or config is None:
            return [ok("gpu", f"none here: laptop profile, it trains on the CPU; {shown}")]
        remedy = "install NVIDIA's driver, or train on the CPU (PROFILE=laptop)"
        return [bad("gpu", f"trainer.device=cuda and no nvidia-smi on PATH; {shown}", remedy)]
    try:
        gpus, driver_cuda = _gpus(), _driver_cuda()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        words, remedy = f"nvidia-smi fails: {_last(error)}", "look at the driver (dmesg), reboot"
        return [warning("gpu", words, remedy) if on_cpu else bad("gpu", words, remedy)]
    return _judged(gpus, driver_cuda, cuda, shown, on_cpu)


def _judged(
    gpus: list[Gpu], driver_cuda: str | None, cuda: str | None, shown: str, on_cpu: bool
) -> list[Finding]:
    if not gpus:
        return [bad("gpu", f"the driver shows no GPU; {shown}", "look at the driver (dmesg)")]
    names = ", ".join(dict.fromkeys(gpu.name for gpu in gpus))
    words = f"{len(gpus)} x {names}, driver {gpus[0].driver}, {shown}"
    if on_cpu:
        remedy = "choose a profile for GPUs (PROFILE) if they are yours to use"
        return [warning("gpu", f"{words}: not used, trainer.device=cpu", remedy)]
    if cuda is None:
        return [bad("gpu", f"{words}: torch cannot use them", _INSTALL)]
    if driver_cuda is not None and _major(driver_cuda) < _major(cuda):
        remedy = f"install a driver for CUDA {_major(cuda)}, or torch for CUDA {driver_cuda}"
        return [bad("gpu", f"{words}: the driver is for CUDA {driver_cuda} at most", remedy)]
    busy = [gpu for gpu in gpus if gpu.used_mb > BUSY_SHARE * gpu.memory_mb]
    if busy:
        used = ", ".join(f"{gpu.index}: {gpu.used_mb / 1024:.0f} GB" for gpu in busy)
        remedy = "see `nvidia-smi` for whose they are; choose others with CUDA_VISIBLE_DEVICES"
        return [warning("gpu", f"{words}: memory in use ({used})", remedy)]
    return [ok("gpu", words)]


def _major(cuda: str) -> int:
    return int(cuda.partition(".")[0])


def _gpus() -> list[Gpu]:
    gpus = []
    for line in _ask(f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits").splitlines():
        index, name, total, used, driver = (part.strip() for part in line.split(","))
        gpus.append(Gpu(index, name, _mb(total), _mb(used), driver))
    return gpus


def _mb(text: str) -> float:
    """Megabytes; a MIG device or a GPU that shares the machine's memory says `[N/A]`."""
    return float(text) if text.replace(".", "", 1).isdigit() else 0.0


def _driver_cuda() -> str | None:
    """The newest CUDA that the driver can run."""
    found = re.search(r"CUDA Version\s*:\s*(\d[\d.]*)", _ask())
    return found.group(1) if found else None


def _ask(*words: str) -> str:
    return subprocess.run(
        ["nvidia-smi", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        timeout=SMI_S,
    ).stdout


def _last(error: Exception) -> str:
    said = (getattr(error, "stderr", "") or getattr(error, "stdout", "") or str(error)).strip()
    return said.splitlines()[-1] if said else type(error).__name__
