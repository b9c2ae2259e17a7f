"""Environments with pinned packages of others, which tests install when they need them.

They lie in the cache, in a folder whose name changes with the pins. A test is skipped if the
packages cannot be installed.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def cache_of(pins: Sequence[Path], name: str) -> Path:
    """The folder for what the files of pins install."""
    text = b"".join(path.read_bytes() for path in sorted(pins))
    home = Path(os.environ.get("XDG_CACHE_HOME") or ROOT / ".cache")
    folder = home / name / hashlib.sha256(text).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def install(command: Sequence[str | Path], folder: Path) -> None:
    """Run an installer in this folder."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        pytest.skip(f"cannot install the packages: {done.stderr[-300:]}")


def python_with(requirements: Path, folder: Path) -> Path:
    """The interpreter of an environment in this folder with these packages."""
    interpreter = folder / "venv/bin/python"
    mark = folder / "python.installed"
    if not mark.exists():
        install([sys.executable, "-m", "venv", folder / "venv"], folder)
        pip = [interpreter, "-m", "pip", "install", "--quiet"]
        install([*pip, "-r", requirements], folder)
        mark.touch()
    return interpreter


def npm_packages(pins: Path, folder: Path) -> Path:
    """`node_modules` in this folder, with the packages of a package.json."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    mark = folder / "npm.installed"
    if not mark.exists():
        shutil.copy(pins, folder)
        install(["npm", "install", "--no-fund", "--no-audit", "--ignore-scripts"], folder)
        mark.touch()
    return folder / "node_modules"


def python_beside(requirements: Path, folder: Path) -> Path:
    """The interpreter of an environment with these packages and all of this environment's."""
    interpreter = folder / "venv/bin/python"
    mark = folder / "python.installed"
    if not mark.exists():
        install([sys.executable, "-m", "venv", folder / "venv"], folder)
        ours = [path for path in sys.path if path.endswith("-packages")]
        (here,) = (folder / "venv/lib").glob("python*/site-packages")
        (here / "beside.pth").write_text("\n".join(ours) + "\n")
        install([interpreter, "-m", "pip", "install", "--quiet", "-r", requirements], folder)
        mark.touch()
    return interpreter
