"""What is released: a source distribution that is a checkout, and a wheel that runs without one."""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from docs.tree import PACKAGES

ROOT = Path(__file__).parents[2]
FOR_A_CHECKOUT = (
    "cluster/README.md", "cluster/kuberay/", "cluster/lib/", "cluster/ray_job/",
    "cluster/skypilot/", "cluster/slurm/", "config/cluster/",
)  # fmt: skip
"""What the two scripts need, which are not in a wheel."""

NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv*", "runs", "logs", "data", "artefacts", "build", "dist", "*.egg-info",
    "__pycache__", ".cache", ".*_cache", ".hypothesis", ".cluster", "outputs", ".synced_*",
    ".mypy_cache",
)  # fmt: skip

BUILD = """
import sys
from setuptools import build_meta
out = sys.argv[1]  # setuptools writes its own words there
sys.stdout = sys.stderr
build_meta.build_sdist(out)
build_meta.build_wheel(out)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    checkout: Path
    sdist: Path
    wheel: Path

    def files(self, folder: str = "") -> set[str]:
        """Of the checkout it was built from."""
        return {
            path.relative_to(self.checkout).as_posix()
            for path in (self.checkout / folder).rglob("*")
            if path.is_file()
        }


def _built(checkout: Path, out: Path) -> Release:
    out.mkdir()
    subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=checkout, check=True)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return Release(checkout=checkout, sdist=sdist, wheel=wheel)


def _names(wheel: Path) -> set[str]:
    """Files in a wheel, without those that say what it is."""
    with zipfile.ZipFile(wheel) as file:
        return {name for name in file.namelist() if ".dist-info/" not in name}


def _unpacked(sdist: Path, to: Path) -> Path:
    to.mkdir()
    subprocess.run(["tar", "-xf", str(sdist), "-C", str(to)], check=True)
    (folder,) = to.iterdir()
    return folder


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    folder = tmp_path_factory.mktemp("release")
    checkout = folder / "checkout"
    shutil.copytree(ROOT, checkout, ignore=NOT_SOURCE)
    built = _built(checkout, folder / "dist")
    for made in ("build", *(path.name for path in checkout.glob("*.egg-info"))):
        shutil.rmtree(checkout / made, ignore_errors=True)
    yield built


@pytest.fixture(scope="module")
def outside(release: Release, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the wheel is unpacked into."""
    folder = tmp_path_factory.mktemp("outside")
    with zipfile.ZipFile(release.wheel) as file:
        file.extractall(folder)
    return folder


def _run(outside: Path, work: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHONPATH": str(outside), "PROFILE": "laptop", "COLUMNS": "100"}
    environ.pop("RAY_ADDRESS", None)
    return subprocess.run(
        [sys.executable, *command], cwd=work, env=environ, capture_output=True, text=True
    )


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_every_file_that_a_module_reads(release: Release) -> None:
    expected = {name for package in PACKAGES for name in release.files(package)}
    expected = {name for name in expected if not name.startswith(FOR_A_CHECKOUT)}
    assert _names(release.wheel) == expected | {"agentfly.py"}


def test_every_package_of_the_wheel_says_that_it_is_typed(release: Release) -> None:
    assert {f"{package}/py.typed" for package in PACKAGES} <= _names(release.wheel)


@pytest.mark.slow
def test_the_source_distribution_is_a_checkout(release: Release, tmp_path: Path) -> None:
    unpacked = _unpacked(release.sdist, tmp_path / "sdist")
    files = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*")}
    missing = {name for name in release.files() if name != ".gitignore"} - files
    assert missing == set()
    assert os.access(unpacked / "run_mixed_training.sh", os.X_OK)


@pytest.mark.slow
def test_the_source_distribution_builds_the_same_wheel(release: Release, tmp_path: Path) -> None:
    again = _built(_unpacked(release.sdist, tmp_path / "sdist"), tmp_path / "dist")
    assert again.wheel.name == release.wheel.name
    assert _names(again.wheel) == _names(release.wheel)


@pytest.mark.slow
@pytest.mark.parametrize("package", ["config", "rate_limit", "samplers"])
def test_every_type_of_the_public_interface_is_known(
    package: str, outside: Path, tmp_path: Path
) -> None:
    if shutil.which("pyright") is None:
        pytest.skip("pyright is not installed")
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    (site_packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    packages = [outside, *(path for path in sys.path if path.endswith("site-packages"))]
    (site_packages / "here.pth").write_text("\n".join(map(str, packages)))
    command = ["pyright", "--outputjson", "--ignoreexternal", "--verifytypes", package]
    path = f"{tmp_path / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    said = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    found = json.loads(said.stdout)["typeCompleteness"]
    unknown = [one["name"] for one in found["symbols"] if not one["isTypeKnown"]]
    assert found["symbols"]
    assert unknown == []


@pytest.fixture(scope="module")
def bare(release: Release, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` of an environment with the wheel and what it requires, without any extra."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=True, symlinks=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--quiet"]
    subprocess.run([*pip, str(release.wheel)], check=True)
    return folder / "bin"


OF_THE_CORE = (
    *("samplers.mixture_plan", "samplers.ledger", "samplers.audit", "samplers.planned"),
    *("samplers.mixture_rows", "rate_limit.file_limiter", "rate_limit.slots"),
)
"""Modules of the core that need no verl; the replay buffers extend verl's."""


@pytest.mark.slow
def test_the_core_works_without_any_extra(bare: Path, tmp_path: Path) -> None:
    words = "; ".join(f"import {name}" for name in OF_THE_CORE)
    subprocess.run([bare / "python", "-c", words], cwd=tmp_path, check=True)
    run = ROOT / "tests" / "recorded" / "run_of_1_1_0"
    audit = subprocess.run(
        [bare / "verl-mixed", "audit", run], cwd=tmp_path, capture_output=True, text=True
    )
    assert "cannot read rows from" in audit.stderr, audit  # whose files are not recorded
    (tmp_path / "recipe").mkdir()
    shutil.copy(run / "ledger.jsonl", tmp_path / "recipe")
    subprocess.run([bare / "verl-mixed", "audit", "recipe"], cwd=tmp_path, check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "extra"),
    {
        **{"train": "train", "check": "train", "plan": "train", "evaluate x": "train"},
        **{"report x": "view", "view x": "view", "watch x": "view", "limiter x": "view"},
        **{"serve-tools": "server", "tools": "train", "stop x": "train", "prepare demo": "train"},
    }.items(),
)
def test_a_command_without_its_extra_names_it_in_one_sentence(
    command: str, extra: str, bare: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [bare / "verl-mixed", *command.split()], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert f"pip install 'verl-mixed-agent-loop[{extra}]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_commands_run_outside_of_a_checkout(outside: Path, tmp_path: Path) -> None:
    said = _run(outside, tmp_path, "-m", "verl_mixed", "--help")
    assert said.returncode == 0, said.stderr
    where = _run(outside, tmp_path, "-c", "import verl_mixed.cli; print(verl_mixed.cli.__file__)")
    assert Path(where.stdout.strip()).is_relative_to(outside)


@pytest.mark.slow
def test_a_config_is_checked_outside_of_a_checkout(outside: Path, tmp_path: Path) -> None:
    checked = _run(outside, tmp_path, "-m", "verl_mixed", "check")
    assert checked.returncode == 0, checked.stderr
    assert f"agent_loop_config_path: {outside}/config/agent_loops.yaml" in checked.stdout
    assert list(tmp_path.iterdir()) == []
