"""The README of the jumphost, as typed: the two scripts, their settings and their commands."""

import os
import re
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from config.lookup import at
from tests.guides.table import SCRIPT_SETTINGS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SETUP, RUN = "setup_cluster.sh", "run_mixed_training.sh"

CLUSTER = {
    # the README's settings of setup_cluster.sh
    "MASTER_IP": '"172.26.81.88"',
    "WORKER_NODES": '(\n    "172.26.81.89"\n    "172.26.81.90" \n    "172.26.81.91"\n)',
    "CONDA_ENV": '"verl"',
    "WANDB_DIR": '"/logs/wandb"',
    "CONDA_PATH": '"/opt/conda/bin/activate"',
    "RAY_TEMP_DIR": '"/tmp/ray_of_verl"',
    "RAY_DASHBOARD_PORT": '"8266"',
}
COMMANDS = ("setup", "status", "restart", "cleanup")


class Checkout:
    """A checkout whose scripts can be edited; everything else is this repository's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for entry in ROOT.iterdir():
            if entry.name in (SETUP, RUN):
                shutil.copy(entry, folder)
            elif not entry.name.startswith(".") and entry.name not in ("runs", "data", "logs"):
                (folder / entry.name).symlink_to(entry)
        self.sent = folder / "sent"
        ssh = folder / "bin" / "ssh"
        ssh.parent.mkdir()
        ssh.write_text(
            f'#!/usr/bin/env bash\necho "ssh $*" >>{self.sent}\ncat >>{self.sent}\nexit 255\n'
        )
        ssh.chmod(0o755)

    def edit(self, script: str, name: str, text: str) -> None:
        """Write another value into the settings block, as an editor would."""
        path = self.folder / script
        old = path.read_text()
        new, count = re.subn(rf'^  {name}=(""|\(\))', lambda _: f"  {name}={text}", old, flags=re.M)
        assert count == 1, f"{name} is no line of the block of {script}"
        path.write_text(new)

    def type(self, command: str, **environ: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        clean = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
        return subprocess.run(
            command,
            shell=True,
            cwd=self.folder,
            env={**clean, "PATH": path, "VENV": sys.prefix, **environ},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run config after all settings of the README were edited into the block."""
    checkout = Checkout(tmp_path_factory.mktemp("checkout"))
    for name, value, _ in SCRIPT_SETTINGS:
        checkout.edit(RUN, name, value)
    checkout.edit(RUN, "TRAIN_FILES", "(data/one.parquet data/two.parquet)")
    checkout.edit(RUN, "VAL_FILES", "(data/val.parquet)")
    checkout.edit(RUN, "OVERRIDES", "(trainer.save_freq=7)")
    done = checkout.type(f"./{RUN} dry-run", PROFILE="gpu")
    text = done.stdout + done.stderr
    assert "model_engine: dp" in done.stdout, text
    config = done.stdout[done.stdout.index("model_engine: dp") :].partition("\n---")[0]
    return {"text": text, **yaml.safe_load(config)}


@pytest.mark.parametrize(("name", "value", "sets"), SCRIPT_SETTINGS)
def test_a_setting_of_the_training_script_reaches_the_run(
    resolved: dict[str, Any], name: str, value: str, sets: dict[str, Any]
) -> None:
    assert {key: at(resolved, key) for key in sets} == sets


def test_the_files_and_overrides_of_the_block_reach_the_run(resolved: dict[str, Any]) -> None:
    assert [Path(file).name for file in at(resolved, "data.train_files")] == [
        "one.parquet",
        "two.parquet",
    ]
    assert [Path(file).name for file in at(resolved, "data.val_files")] == ["val.parquet"]
    assert at(resolved, "trainer.save_freq") == 7


def test_a_rate_that_the_interval_cannot_reach_is_said(resolved: dict[str, Any]) -> None:
    assert "12,000" in resolved["text"] or "12000" in resolved["text"]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_cluster_script_name_every_host(
    checkout: Checkout, command: str
) -> None:
    for name, text in CLUSTER.items():
        checkout.edit(SETUP, name, text)

    done = checkout.type(f"./{SETUP} {command} --dry-run --yes")

    assert done.returncode == 0, done.stderr
    for ip in re.findall(r"172[0-9.]+", CLUSTER["MASTER_IP"] + CLUSTER["WORKER_NODES"]):
        assert ip in done.stdout + done.stderr


@lru_cache(maxsize=1)
def _sent(folder: str) -> str:
    checkout = Checkout(Path(folder))
    for name, text in CLUSTER.items():
        checkout.edit(SETUP, name, text)
    checkout.type(f"./{SETUP} setup")
    return checkout.sent.read_text()


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What `setup` sends to the hosts; the ssh of this test reaches none."""
    return _sent(str(tmp_path_factory.mktemp("sent")))


@pytest.mark.parametrize("name", sorted(CLUSTER.keys() - {"WORKER_NODES", "MASTER_IP"}))
def test_a_setting_of_the_cluster_script_reaches_the_hosts(sent: str, name: str) -> None:
    value = CLUSTER[name].strip('"')

    assert re.search(rf"\b{name}=['\"]?{re.escape(value)}", sent), sent[:2000]


@pytest.mark.parametrize("command", ["attach", "logs", "status", "stop"])
def test_the_training_scripts_commands_go_to_the_head(checkout: Checkout, command: str) -> None:
    done = checkout.type(f"./{RUN} {command}", MASTER_IP="172.26.81.88")

    assert done.returncode != 2, done.stderr
    assert "172.26.81.88" in checkout.sent.read_text()
