"""Every check of the doctor, made to fail, and the lines, JSON and exit codes around them."""

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import cache
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.ray_head import ray_head
from tests.verl_mixed.conftest import REPO_ROOT, RunEnviron
from verl_mixed.checks import packages
from verl_mixed.checks.finding import Check, Finding, as_json, bad, ok, report, warning
from verl_mixed.checks.machine import devices, machine, ray_cluster, services, storage
from verl_mixed.cli import main
from verl_mixed.run.compose import compose_config, resolve

Config = dict[str, Any]

GB = machine.GB

NO_TOKEN = {**os.environ, "RAY_AUTH_MODE": "disabled"}

Usage = namedtuple("Usage", "total used free")


@cache
def laptop() -> Config:
    return resolve(compose_config(["mixed.run_dir=/somewhere"]), complete=False)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """The laptop profile with a run in `tmp_path`."""
    config = deepcopy(laptop())
    config["mixed"]["run_dir"] = str(tmp_path / "run")
    return config


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


def statuses(findings: list[Finding]) -> list[str]:
    return [finding.status for finding in findings]


# --- checks and lines -----------------------------------------------------------------------------


def test_a_check_that_hangs_is_bad_at_its_deadline():
    let_go = threading.Event()

    check = Check("slow", lambda: [ok("slow", str(let_go.wait()))], deadline_s=0.05)
    finding = only(check.findings())
    let_go.set()

    assert (finding.status, finding.check) == ("bad", "slow")
    assert "no answer within 0.05 s" in finding.words


def test_a_check_that_raises_is_a_finding():
    def look() -> list[Finding]:
        raise KeyError("surprise")

    finding = only(Check("odd", look).findings())

    assert finding.status == "bad" and "KeyError: 'surprise'" in finding.words


def test_the_report_has_a_line_for_each_finding_and_the_totals():
    lines: list[str] = []

    report([ok("cpus", "2"), warning("memory", "low", "end others")], lines.append)

    assert lines == [
        "ok       cpus    2",
        "warning  memory  low; end others",
        "1 ok, 1 warnings, 0 bad",
    ]


def test_json_is_one_object_of_findings_and_totals():
    answer = json.loads(as_json([ok("cpus", "2"), bad("disk", "full", "free some")]))

    assert answer == {
        "findings": [
            {"status": "ok", "check": "cpus", "words": "2", "remedy": ""},
            {"status": "bad", "check": "disk", "words": "full", "remedy": "free some"},
        ],
        "totals": {"ok": 1, "warning": 0, "bad": 1},
    }


# --- Python and packages --------------------------------------------------------------------------


def test_another_python_is_bad(monkeypatch: pytest.MonkeyPatch):
    assert only(packages.python()).status == "ok"

    monkeypatch.setattr(sys, "version_info", (3, 13, 0))

    assert only(packages.python()).status == "bad"


def install(folder: Path, name: str, *wants: str) -> None:
    """A package's metadata, as an installer leaves it."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    needs = "".join(f"Requires-Dist: {wanted}\n" for wanted in wants)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}")


def test_versions_that_exclude_each_other_are_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(
        tmp_path,
        "vllm",
        "torch==0.1; python_version >= '3'",
        "numpy==0.1; python_version < '3'",
        "pyarrow==0.1; extra == 'arrow'",
        "pydantic>=1",
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    found = [finding for finding in packages.packages() if "vllm" in finding.words]

    assert only(found).status == "bad"
    assert "vllm 1.0 wants torch==0.1, there is" in only(found).words
    assert only(found).remedy == "pip install 'torch==0.1'"


def test_a_package_that_another_wants_and_that_is_missing_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    install(tmp_path, "sglang", "there-is-no-such-package>=2")
    monkeypatch.syspath_prepend(str(tmp_path))

    found = [finding for finding in packages.packages() if "sglang" in finding.words]

    assert only(found).status == "warning"
    assert "there-is-no-such-package" in only(found).remedy


def test_a_package_of_ours_that_is_missing_is_bad(monkeypatch: pytest.MonkeyPatch):
    version_of = packages.version_of
    monkeypatch.setattr(
        packages, "version_of", lambda name: None if name == "tantivy" else version_of(name)
    )

    assert [finding.words for finding in packages.missing()] == ["tantivy is not installed"]


def test_a_plugin_that_is_switched_off_is_bad(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "another")

    finding = only(packages.plugin())

    assert finding.status == "bad" and "VERL_USE_EXTERNAL_PLUGINS" in finding.words


@pytest.mark.parametrize(
    ("program", "words"),
    [("raise SystemExit(1)", "no message"), ("raise OSError('torn')", "torn")],
)
def test_a_plugin_that_does_not_load_is_bad_with_the_last_line(
    program: str, words: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(packages, "_PLUGIN", program)

    finding = only(packages.plugin())

    assert finding.status == "bad" and words in finding.words


def test_an_import_that_does_not_end_is_bad(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packages, "_PLUGIN", "import threading; threading.Event().wait()")
    monkeypatch.setattr(packages, "PLUGIN_S", 0.5)

    assert "more than 0.5 s" in only(packages.plugin()).words


# --- GPUs -----------------------------------------------------------------------------------------

SMI = """#!/bin/sh
if [ $# -eq 0 ]; then
  echo '| NVIDIA-SMI 570.1  Driver Version: 570.1  CUDA Version: 12.8 |'
else
  printf '0, NVIDIA H100, 81559, %s, 570.1\\n1, NVIDIA H100, 81559, 4, 570.1\\n'
fi
"""


def put_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def of_gpus(
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    *,
    cuda: str | None = "12.8",
    device: str = "cuda",
) -> Finding:
    monkeypatch.setattr(devices, "torch_build", lambda: ("2.11.0", cuda))
    config["trainer"]["device"] = device
    return only(devices.devices(config))


def test_gpus_that_are_free_are_ok(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put_smi(tmp_path, monkeypatch, SMI % 3)

    finding = of_gpus(config, monkeypatch)

    assert finding.status == "ok"
    assert "2 x NVIDIA H100, driver 570.1, torch 2.11.0 (CUDA 12.8)" in finding.words


@pytest.mark.parametrize(
    ("smi", "cuda", "device", "status", "words"),
    [
        (SMI % 3, "13.0", "cuda", "bad", "the driver is for CUDA 12.8 at most"),
        (SMI % 3, None, "cuda", "bad", "torch cannot use them"),
        (SMI % 70000, "12.6", "cuda", "warning", "memory in use (0: 68 GB)"),
        (SMI % 3, None, "cpu", "warning", "not used, trainer.device=cpu"),
        ("#!/bin/sh\necho lost >&2; exit 9\n", "12.8", "cuda", "bad", "nvidia-smi fails: lost"),
        ("#!/bin/sh\necho lost; exit 9\n", None, "cpu", "warning", "nvidia-smi fails: lost"),
        ("#!/bin/sh\n", "12.8", "cuda", "bad", "the driver shows no GPU"),
    ],
)
def test_gpus_that_a_run_cannot_use_are_named(
    smi: str,
    cuda: str | None,
    device: str,
    status: str,
    words: str,
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    put_smi(tmp_path, monkeypatch, smi)

    finding = of_gpus(config, monkeypatch, cuda=cuda, device=device)

    assert finding.status == status
    assert words in finding.words


def test_no_driver_is_the_laptop_profile_or_bad(config: Config, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")

    assert "laptop profile" in of_gpus(config, monkeypatch, device="cpu").words
    assert of_gpus(config, monkeypatch, device="cuda").status == "bad"


@pytest.mark.slow
def test_torchs_build_is_read_without_importing_it():
    number, cuda = devices.torch_build() or ("", "")

    import torch

    assert (number, cuda) == (torch.__version__, torch.version.cuda)


# --- machine --------------------------------------------------------------------------------------


def test_a_containers_share_of_cpus_and_memory_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    (tmp_path / "memory.max").write_text(f"{2 * GB}\n")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)

    assert "the container may use 1" in only(machine.cpus()).words
    assert only(machine.cpus()).status == "bad"
    assert "2.0 GB (container's limit)" in only(machine.memory()).words
    assert only(machine.memory()).status == "bad"


def test_without_a_containers_limits_the_machine_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})

    assert only(machine.cpus()).status == "bad"
    assert "container" not in only(machine.memory()).words


def test_memory_that_others_have_is_a_warning(monkeypatch: pytest.MonkeyPatch):
    state = SimpleNamespace(total=64 * GB, available=2 * GB)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: state)

    assert only(machine.memory()).status == "warning"


@pytest.mark.parametrize(("limit", "status"), [(1024, "bad"), (8192, "ok")])
def test_a_low_limit_on_open_files_is_bad(limit: int, status: str):
    program = (
        "from verl_mixed.checks.machine.machine import open_files; print(open_files()[0].status)"
    )

    done = subprocess.run(
        ["sh", "-c", f'ulimit -n {limit} && exec "$0" -c "$1"', sys.executable, program],
        cwd=REPO_ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.strip() == status


def of_disk(
    monkeypatch: pytest.MonkeyPatch, *, used: float, free: float, inodes: int = 10**9
) -> list[Finding]:
    monkeypatch.setenv("RAY_TEMP_DIR", "/tmp")
    usage = Usage(int((used + free) * GB), int(used * GB), int(free * GB))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    table = SimpleNamespace(f_files=10**9, f_favail=inodes)
    monkeypatch.setattr(os, "statvfs", lambda path: table)
    return machine.disks(Path("/tmp/runs"))


def test_a_full_disk_is_bad_and_a_disk_that_ray_finds_full_a_warning(
    monkeypatch: pytest.MonkeyPatch,
):
    assert statuses(of_disk(monkeypatch, used=10, free=90)) == ["ok", "ok"]
    assert statuses(of_disk(monkeypatch, used=10, free=3)) == ["bad", "ok"]
    assert statuses(of_disk(monkeypatch, used=10, free=1)) == ["bad", "bad"]
    assert statuses(of_disk(monkeypatch, used=970, free=30)) == ["ok", "warning"]
    findings = of_disk(monkeypatch, used=10, free=90, inodes=5)
    assert statuses(findings) == ["bad", "bad"] and "5 inodes" in findings[0].words


def test_a_folder_that_may_not_be_written_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)

    assert "not writable" in machine.disks(tmp_path)[0].words


def test_a_temporary_folder_too_long_for_a_socket_is_bad(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_TEMP_DIR", "/tmp/" + "long" * 20)

    finding = machine.disks(Path("/tmp"))[-1]

    assert finding.status == "bad" and "socket" in finding.words


def test_shared_memory_below_the_object_store_is_a_warning(
    config: Config, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(GB, GB, 2**26))

    assert only(machine.shared_memory(config)).status == "warning"

    config["ray_kwargs"]["ray_init"]["object_store_memory"] = 2**25
    assert only(machine.shared_memory(config)).status == "ok"


def test_a_port_that_is_held_is_bad_and_says_by_whom(config: Config):
    with socket.create_server(("127.0.0.1", 0)) as held:
        config["ray_kwargs"]["ray_init"]["dashboard_port"] = held.getsockname()[1]
        finding = only(machine.ports(config))
        assert finding.status == "bad" and f"(pid {os.getpid()})" in finding.words

    assert only(machine.ports(config)).status == "ok"


# --- files ----------------------------------------------------------------------------------------


def test_the_longest_mount_point_names_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shared = tmp_path / "of all nodes"
    shared.mkdir()
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"/dev/sda / ext4 rw 0 0\nhost:/x {str(shared).replace(' ', chr(92) + '040')} nfs4 rw 0 0\n"
    )
    monkeypatch.setattr(storage, "MOUNTS", mounts)

    assert storage.filesystem_of(shared / "runs" / "new") == "nfs4"
    assert storage.filesystem_of(tmp_path) == "ext4"


def test_a_limiter_on_a_local_folder_is_ok_and_leaves_nothing(config: Config, tmp_path: Path):
    finding = only(storage.limiter(config, cluster=False))

    assert finding.status == "ok" and "locks exclude other processes" in finding.words
    assert list(tmp_path.iterdir()) == []


def test_a_limiter_on_a_network_file_system_is_a_warning(
    config: Config, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(storage, "filesystem_of", lambda path: "nfs4")

    assert only(storage.limiter(config, cluster=False)).status == "warning"


def test_an_actor_that_keeps_the_limit_needs_no_folder(config: Config):
    assert "actor" in only(storage.limiter(config, cluster=True)).words


def test_a_folder_whose_locks_exclude_nobody_is_bad(
    config: Config, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(storage.fcntl, "flock", lambda handle, operation: None)

    finding = only(storage.limiter(config, cluster=False))

    assert finding.status == "bad" and "two processes hold one lock" in finding.words


def test_a_lock_that_does_not_come_back_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = fcntl.flock

    def keep(handle: int, operation: int) -> None:
        if operation != fcntl.LOCK_UN:
            real(handle, operation)

    monkeypatch.setattr(storage.fcntl, "flock", keep)

    assert storage.lock_fault(tmp_path) == "a lock that was given back cannot be had"


def test_a_folder_that_cannot_be_written_or_locked_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert "cannot write there" in (storage.lock_fault(tmp_path / "missing") or "")

    def refuse(handle: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(storage.fcntl, "flock", refuse)
    assert storage.lock_fault(tmp_path) == "it takes no locks: Function not implemented"


def test_data_files_are_looked_at_by_their_ends(config: Config, tmp_path: Path):
    good, cut = tmp_path / "good.parquet", tmp_path / "cut.parquet"
    good.write_bytes(b"PAR1 rows PAR1")
    cut.write_bytes(b"PAR1 rows")
    config["data"]["train_files"] = [str(good)]
    config["data"]["val_files"] = [str(cut), str(tmp_path / "none.parquet")]

    findings = storage.data(config)

    assert statuses(findings) == ["ok", "bad", "bad"]
    assert "not parquet, or cut off" in findings[1].words
    assert "no such file" in findings[2].words


def test_data_and_model_that_are_not_set_are_bad(config: Config):
    assert statuses(storage.data(config)) == ["bad", "bad"]
    assert "MODEL_PATH" in only(storage.model(config)).remedy


def test_a_models_folder_has_config_and_weights(config: Config, tmp_path: Path):
    config["actor_rollout_ref"]["model"]["path"] = str(tmp_path)
    assert "no config.json" in only(storage.model(config)).words

    (tmp_path / "config.json").write_text("{}")
    assert "no weights" in only(storage.model(config)).words

    (tmp_path / "model.safetensors").write_bytes(b"1234")
    assert only(storage.model(config)).status == "ok"

    config["actor_rollout_ref"]["model"]["path"] = "someone/some-model"
    assert only(storage.model(config)).status == "warning"


# --- tools and Weights & Biases -------------------------------------------------------------------


@pytest.fixture
def serve_health() -> Iterator[Callable[[int, Mapping[str, Any]], str]]:
    """Starts a server that answers so, and returns its URL."""
    servers: list[tuple[HTTPServer, threading.Thread]] = []

    def start(status: int, health: Mapping[str, Any]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps(health).encode()
                self.send_response(status)
                if "location" in health:
                    self.send_header("Location", health["location"])
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None: ...

        server = HTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def of_server(config: Config, url: str) -> Finding:
    config["actor_rollout_ref"]["rollout"]["multi_turn"]["tool_config"]["server_url"] = url
    return only(services.tools(config, own_server=False))


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        ((200, {"tools": {}, "sandbox": "bubblewrap", "passages": 7}), "ok", "bubblewrap, 7"),
        ((200, {"tools": {}, "sandbox": None, "sandbox_why": "no"}), "bad", "runs no programs: no"),
        ((200, {"status": "ok"}), "warning", "without its token"),
        ((503, {"status": "draining"}), "bad", "about to end"),
        ((200, {"tools": "x" * services.MOST_HEALTH_BYTES}), "bad", "more than 1 MB"),
    ],
)
def test_a_given_tool_server_is_asked_for_its_isolation(
    answer: tuple[int, dict[str, Any]],
    status: str,
    words: str,
    config: Config,
    serve_health: Callable[[int, Mapping[str, Any]], str],
):
    finding = of_server(config, serve_health(*answer))

    assert finding.status == status
    assert words in finding.words


def test_no_redirect_is_followed_and_no_proxy_asked_because_they_would_get_the_token(
    config: Config,
    serve_health: Callable[[int, Mapping[str, Any]], str],
    monkeypatch: pytest.MonkeyPatch,
):
    other = serve_health(200, {"tools": {}, "sandbox": "bubblewrap"})
    assert "answers 302" in of_server(config, serve_health(302, {"location": other})).words

    monkeypatch.setenv("http_proxy", other)
    own = serve_health(200, {"tools": {}, "sandbox": "landlock"})
    assert "landlock" in of_server(config, own).words


def test_a_tool_server_that_is_not_there_is_bad(config: Config):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]

    assert of_server(config, f"http://127.0.0.1:{port}").status == "bad"


def test_no_isolation_is_bad_where_programs_run(config: Config, monkeypatch: pytest.MonkeyPatch):
    from tool_server.sandbox import SandboxUnavailable

    def refuse(kind: str) -> None:
        raise SandboxUnavailable("no namespaces")

    monkeypatch.setattr("tool_server.sandbox.choose_sandbox", refuse)
    assert only(services.tools(config, own_server=True)).status == "bad"

    for source in config["mixed"]["sources"].values():
        source["agent"], source["reward"] = "search_agent", "search"
    assert only(services.tools(config, own_server=True)).status == "warning"


def test_a_sandbox_that_does_not_exist_is_named(config: Config):
    config["mixed"]["tool_server"] = {"sandbox": "castle"}

    assert "castle" in only(services.tools(config, own_server=True)).words


GOOD_KEY = "local-" + "0123456789" * 4


@pytest.mark.parametrize(
    ("environ", "netrc", "words"),
    [
        ({"WANDB_API_KEY": "your_wandb_key"}, "", "WANDB_API_KEY: API key must have 40+"),
        ({"WANDB_API_KEY": f"{GOOD_KEY} "}, "", "cannot start or end with whitespace"),
        ({"WANDB_API_KEY": f"{GOOD_KEY}!"}, "", "may only contain the letters"),
        ({"WANDB_API_KEY": GOOD_KEY}, "", ""),
        ({"WANDB_API_KEY": "header.payload.signature"}, "", ""),
        ({"WANDB_API_KEY": GOOD_KEY, "WANDB_BASE_URL": "https://wandb.mine.org"}, "", ""),
        ({"WANDB_API_KEY": GOOD_KEY, "WANDB_BASE_URL": "mine"}, "", "WANDB_BASE_URL='mine': "),
        ({"WANDB_API_KEY": GOOD_KEY, "WANDB_MODE": "on"}, "", "WANDB_MODE='on': Input should be"),
        ({"WANDB_API_KEY": "no", "WANDB_MODE": "offline"}, "", ""),
        ({"WANDB_API_KEY": "no", "WANDB_MODE": "disabled"}, "", ""),
        ({"WANDB_API_KEY": "no", "WANDB_CONFIG_DIR": "settings"}, "", ""),
        ({"WANDB_API_KEY": "", "WANDB_MODE": ""}, "short", ""),  # offline, and a warning
        ({"WANDB_MODE": "online"}, "", "WANDB_MODE=online: there is no key for https://w.org"),
        ({"WANDB_MODE": "online"}, "short", "the key of `wandb login`: API key must have 40+"),
        ({"WANDB_MODE": "shared"}, GOOD_KEY, ""),
    ],
)
def test_a_login_that_wandb_would_refuse_is_bad_before_a_start(
    environ: dict[str, str],
    netrc: str,
    words: str,
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name, value in ({"HOME": ".", "WANDB_BASE_URL": "https://w.org"} | environ).items():
        monkeypatch.setenv(name, value)
    Path("settings").mkdir()
    Path("settings/settings").write_text("[default]\nmode = offline\n")
    Path(".netrc").write_text(f"machine w.org login user password {netrc}\n" if netrc else "")
    Path(".netrc").chmod(0o600)
    before = sorted(tmp_path.rglob("*"))

    finding = only(services.wandb(config))

    assert (finding.status == "bad", words in finding.words) == (bool(words), True), finding
    if words:
        assert environ.get("WANDB_API_KEY", GOOD_KEY).strip() not in finding.words
        assert "WANDB_MODE=offline" in finding.remedy
    assert sorted(tmp_path.rglob("*")) == before


def test_wandb_without_a_key_stays_here_and_a_key_that_is_not_read_is_a_warning(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    finding = only(services.wandb(config))
    assert finding.status == "ok" and "offline" in finding.words

    netrc = tmp_path / ".netrc"
    netrc.write_text("machine api.wandb.ai login user password key\n")
    netrc.chmod(0o600)
    finding = only(services.wandb(config))
    assert finding.status == "warning" and "wandb login" in str(finding.remedy)

    monkeypatch.setenv("WANDB_MODE", "offline")
    assert only(services.wandb(config)).status == "ok"
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert only(services.wandb(config)).status == "ok"

    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert only(services.wandb(config)).status == "bad"


# --- Ray ------------------------------------------------------------------------------------------


def test_a_run_that_does_not_fit_on_its_own_ray_is_bad(config: Config):
    assert statuses(ray_cluster.own(config)) == ["ok", "ok"]

    config["ray_kwargs"]["ray_init"]["num_cpus"] = 4
    placement = ray_cluster.own(config)[1]

    assert placement.status == "bad"
    assert "5 CPUs in all" in placement.words and "num_cpus" in placement.remedy


def node(ip: str, **changed: Any) -> dict[str, Any]:
    return {
        "node_id": ip,
        "ip": ip,
        "hostname": f"host-{ip}",
        "alive": True,
        "is_head": ip == "10.0.0.1",
        "why_dead": "",
        "cpus": 16.0,
        "gpus": 1.0,
    } | changed


def fact(ip: str, **changed: Any) -> dict[str, Any]:
    return {
        "stage": "facts",
        "ip": ip,
        "skew_s": 0.0,
        "python": "3.11.7",
        "executable": "python",
        "packages": {"torch": "2.11.0"},
        "ours": True,
        "unseen": [],
        "unwritable": [],
        "free_bytes": {"/runs": 100 * GB},
    } | changed


def of_cluster(
    monkeypatch: pytest.MonkeyPatch,
    config: Config | None,
    answers: list[dict[str, Any]],
    *,
    late_s: float = 0.0,
    locks: Path | None = None,
) -> list[Finding]:
    monkeypatch.setattr(ray_cluster, "_ask", lambda question, environ: (answers, late_s))
    return ray_cluster.joined("10.0.0.1:6379", config, {}, locks=locks)


def nodes_of(*nodes: dict[str, Any], jobs: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"stage": "nodes", "nodes": list(nodes), "jobs": list(jobs)}


FREE = {"10.0.0.1": {"CPU": 16.0, "GPU": 1.0}, "10.0.0.2": {"CPU": 16.0, "GPU": 1.0}}


def test_a_cluster_that_is_well_is_ok(config: Config, monkeypatch: pytest.MonkeyPatch):
    findings = of_cluster(
        monkeypatch,
        config,
        [
            nodes_of(node("10.0.0.1"), node("10.0.0.2")),
            {"stage": "free", "nodes": FREE},
            fact("10.0.0.1"),
            fact("10.0.0.2"),
            {"stage": "locks", "problems": [], "nodes": 2},
        ],
        locks=Path("/shared"),
    )

    assert [(finding.status, finding.check) for finding in findings] == [
        ("ok", "ray"),
        ("ok", "node"),
        ("ok", "node"),
        ("ok", "placement"),
        ("ok", "on nodes"),
        ("ok", "locks"),
    ]


def test_a_dead_node_is_a_warning_and_a_run_beside_is_not(monkeypatch: pytest.MonkeyPatch):
    dead = node("10.0.0.2", alive=False, why_dead="missed heartbeats")

    findings = of_cluster(monkeypatch, None, [nodes_of(node("10.0.0.1"), dead, jobs=("train",))])

    warnings = [finding.words for finding in findings if finding.status == "warning"]
    (words,) = warnings
    assert "missed heartbeats" in words


def test_a_node_that_came_back_is_not_dead(monkeypatch: pytest.MonkeyPatch):
    before = node("10.0.0.1", alive=False)

    findings = of_cluster(monkeypatch, None, [nodes_of(node("10.0.0.1"), before)])

    assert "warning" not in statuses(findings)


def test_a_run_too_large_for_the_cluster_is_bad_and_one_that_must_wait_a_warning(
    config: Config, monkeypatch: pytest.MonkeyPatch
):
    two = nodes_of(node("10.0.0.1"), node("10.0.0.2"))
    config["trainer"]["nnodes"] = 2
    busy = {"stage": "free", "nodes": FREE | {"10.0.0.2": {"CPU": 16.0}}}

    def placement(answers: list[dict[str, Any]]) -> Finding:
        found = of_cluster(monkeypatch, config, answers)
        return only([finding for finding in found if finding.check == "placement"])

    assert placement([two, {"stage": "free", "nodes": FREE}]).status == "ok"
    assert placement([two, busy]).status == "warning"
    config["trainer"]["nnodes"] = 3
    assert placement([two, busy]).status == "bad"


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        (fact("a", unseen=["/data/x.parquet"]), "bad", "a: cannot read /data/x.parquet"),
        (fact("a", unwritable=["/runs"]), "bad", "a: cannot write to /runs"),
        (fact("a", free_bytes={"/runs": GB}), "bad", "a: 1.0 GB free for /runs"),
        (fact("a", ours=False), "bad", "a: this project is not importable"),
        (fact("a", packages={"torch": "2.10.0"}), "bad", "torch differs: a 2.10.0, b 2.11.0"),
        (fact("a", skew_s=4.0), "warning", "a: 4.0 s apart"),
        ({"stage": "silent", "ip": "a", "words": "no answer"}, "bad", "a: no answer"),
        ({"stage": "not joined", "words": "no raylet"}, "warning", "no raylet"),
    ],
)
def test_what_a_node_lacks_is_named_with_the_node(
    answer: dict[str, Any], status: str, words: str, monkeypatch: pytest.MonkeyPatch
):
    findings = of_cluster(monkeypatch, None, [nodes_of(), answer, fact("b")])

    found = [finding for finding in findings if finding.status != "ok"]
    assert only(found).status == status
    assert words in only(found).words


def test_locks_that_do_not_reach_all_nodes_are_bad(monkeypatch: pytest.MonkeyPatch):
    locks = {"stage": "locks", "problems": ["nodes a and b: both hold it; use ray"], "nodes": 2}

    finding = of_cluster(monkeypatch, None, [nodes_of(), locks], locks=Path("/shared"))[-1]

    assert (finding.status, finding.words) == ("bad", "nodes a and b: both hold it")
    assert finding.remedy == "use ray"


def test_another_ray_or_python_is_bad(monkeypatch: pytest.MonkeyPatch):
    metadata = {"stage": "metadata", "ray_version": "1.0", "python_version": "2.7"}

    findings = of_cluster(monkeypatch, None, [metadata, nodes_of()])

    assert statuses(findings)[:2] == ["bad", "bad"]
    assert "the cluster has ray 1.0, this shell" in findings[0].words


def test_a_head_that_goes_silent_is_bad(monkeypatch: pytest.MonkeyPatch):
    assert "no answer within 9 s" in only(of_cluster(monkeypatch, None, [], late_s=9.0)).words
    findings = of_cluster(monkeypatch, None, [nodes_of()], late_s=9.0)
    assert findings[-1].status == "bad" and "not all was asked" in findings[-1].words


def test_token_mode_without_a_token_is_said_without_asking(tmp_path: Path):
    environ = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")}

    finding = only(ray_cluster.joined("10.0.0.1:6379", None, environ))

    assert finding.status == "bad" and "no token in" in finding.words


def test_an_address_where_nothing_listens_is_bad():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]

    finding = only(ray_cluster.joined(f"127.0.0.1:{port}", None, NO_TOKEN))

    assert finding.status == "bad" and "refused" in finding.words


@pytest.mark.slow
def test_a_server_that_is_no_ray_is_told_from_one(tool_server_url: str):
    address = tool_server_url.removeprefix("http://")

    finding = only(ray_cluster.joined(address, None, NO_TOKEN))

    assert finding.status == "bad" and "answers, and not as Ray" in finding.words


@pytest.fixture(scope="module")
def token_cluster() -> Iterator[tuple[str, Path]]:
    """A Ray in token mode with 5 logical CPUs and a GPU: its address and its token's file."""
    folder = Path(tempfile.mkdtemp(prefix="vm", dir="/tmp"))  # short: Ray makes sockets below it
    token = folder / "token"
    token.write_text("a" * 64)
    words = [f"--temp-dir={folder / 'ray'}", "--num-cpus=5", "--num-gpus=1"]
    secrets = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    with ray_head(*words, environ=secrets, until="Ray runtime started") as address:
        yield address, token
    shutil.rmtree(folder)


def in_token_mode(token: Path) -> dict[str, str]:
    secrets = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    return {**os.environ, **secrets}


@pytest.mark.ray
@pytest.mark.slow
def test_a_real_cluster_is_looked_at_from_its_nodes(
    token_cluster: tuple[str, Path], config: Config, tmp_path: Path
):
    address, token = token_cluster
    file = tmp_path / "rows.parquet"
    file.write_bytes(b"PAR1")
    config["data"]["train_files"] = config["data"]["val_files"] = [str(file)]
    config["actor_rollout_ref"]["model"]["path"] = str(tmp_path / "no-model")

    findings = ray_cluster.joined(address, config, in_token_mode(token), locks=tmp_path)

    assert [(finding.status, finding.check) for finding in findings] == [
        ("ok", "ray"),
        ("ok", "node"),
        ("ok", "placement"),
        ("bad", "on nodes"),
        ("ok", "locks"),
    ]
    assert "0 of 5 CPUs, 0 of 1 GPUs in use" in findings[1].words
    assert findings[3].words.endswith(f"cannot read {tmp_path}/no-model/config.json")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["token", "disabled"])
def test_a_wrong_token_is_named_and_not_tried_again(
    token_cluster: tuple[str, Path], mode: str, tmp_path: Path
):
    address, _ = token_cluster
    wrong = tmp_path / "token"
    wrong.write_text("b" * 64)

    finding = only(
        ray_cluster.joined(address, None, in_token_mode(wrong) | {"RAY_AUTH_MODE": mode})
    )

    assert finding.status == "bad"
    assert f"RAY_AUTH_MODE={mode}" in finding.words and "InvalidAuthToken" in finding.words


# --- command line ---------------------------------------------------------------------------------


@pytest.fixture
def quick(run_environ: RunEnviron, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that passes, and no `import verl`."""
    for name in ("MASTER_IP", "WORKER_NODES", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in run_environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(packages, "plugin", lambda: [ok("plugin", "loaded")])
    monkeypatch.setattr(machine, "memory", lambda: [ok("memory", "enough")])


@pytest.mark.usefixtures("quick")
def test_a_machine_that_has_all_is_exit_0(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith("0 bad")
    for check in ("python", "plugin", "disk", "config", "gpu", "ray", "placement", "limiter"):
        assert any(line.split()[1] == check for line in lines), check


@pytest.mark.usefixtures("quick")
def test_a_run_that_cannot_be_placed_is_exit_1_and_in_the_json(
    capsys: pytest.CaptureFixture[str],
):
    assert main(["doctor", "--json", "ray_kwargs.ray_init.num_cpus=3"]) == 1

    answer = json.loads(capsys.readouterr().out)
    found = [finding for finding in answer["findings"] if finding["status"] == "bad"]
    assert [finding["check"] for finding in found] == ["placement"]
    assert answer["totals"]["bad"] == 1


@pytest.mark.usefixtures("quick")
def test_a_config_that_does_not_compose_is_one_bad_finding(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--json", "no.such.key=1"]) == 1

    answer = json.loads(capsys.readouterr().out)
    found = [finding for finding in answer["findings"] if finding["status"] == "bad"]
    assert [finding["check"] for finding in found] == ["config"]


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_a_cluster_that_is_named_is_the_one_that_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    asked: list[str] = []

    def joined(address: str, *_: Any, **__: Any) -> list[Finding]:
        asked.append(address)
        return []

    monkeypatch.setattr(ray_cluster, "joined", joined)
    monkeypatch.setattr(packages, "packages", lambda: [])
    monkeypatch.setattr(services, "tools", lambda config, own_server: [])
    main(["doctor", "--locks", "/shared"])
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.3:6379")
    main(["doctor"])
    monkeypatch.setenv("MASTER_IP", "10.0.0.2")
    main(["doctor"])
    main(["doctor", "--ray", "10.0.0.1:7000"])

    assert asked == ["auto", "10.0.0.3:6379", "10.0.0.2:6379", "10.0.0.1:7000"]
    assert capsys.readouterr().out


@pytest.mark.parametrize("address", ["ray://10.0.0.1:1", "10.0.0.1", "head:x"])
def test_an_address_that_is_none_is_exit_2(address: str):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--ray", address])

    assert ended.value.code == 2


def test_a_folder_of_configs_that_is_not_there_is_exit_2(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--config-dir", "/no/such/folder"]) == 2
    assert "no such folder" in capsys.readouterr().err


@pytest.mark.slow
def test_verl_loads_the_plugin():
    assert only(packages.plugin()).status == "ok"


@pytest.mark.slow
def test_a_plugin_that_only_we_import_is_bad(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packages, "entry_point", list)
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "another")

    assert "verl has not registered it" in only(packages.plugin()).words
