"""The scripts of the repository, as the operator types them on the jumphost."""

import re
import subprocess
from dataclasses import dataclass, field

from tests.nodes.site import PREFIXES, REPOSITORY, Machine, Site

# what Python leaves beside the sources, tmux for its sockets and sshd for itself
_NOT_OURS = re.compile(r"/__pycache__(/|$)|^/tmp/tmux-0(/|$)|^/run/sshd|^/var/log/")

DEMO = REPOSITORY / "data/small_demo"
"""Model and rows of the runs here, on all hosts."""


@dataclass(kw_only=True)
class Operator:
    """Types commands in the repository on the jumphost, with the settings in the environment."""

    site: Site
    settings: dict[str, str] = field(default_factory=dict)

    def run(
        self, command: str, *, expected: int = 0, timeout: float = 600, **settings: str
    ) -> "subprocess.CompletedProcess[str]":
        """Run a script to its end; an empty setting is not set.

        Raises:
            AssertionError: the exit code is another than `expected`.
        """
        script = f"cd {REPOSITORY} && ./{command} </dev/null"
        env = {name: value for name, value in (self.settings | settings).items() if value}
        done = self.site.jumphost.run(script, env=env, check=False, timeout=timeout)
        said = f"./{command}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert done.returncode == expected, said
        return done


def operator_of(site: Site, hosts: int = 3) -> Operator:
    """An operator whose cluster is the first hosts of a site."""
    head, *workers = (host.address for host in site.hosts[:hosts])
    settings = {
        "SSH_JUMP": site.gateway.address,
        "VENV": PREFIXES[0],
        "MASTER_IP": head,
        "WORKER_NODES": " ".join(workers),
        "NUM_CPUS": "8",  # logical: the laptop profile wants more than there are
        "NUM_GPUS": "1",
        "OBJECT_STORE_MEMORY": "100000000",
        "START_TIMEOUT_S": "300",  # other tests have the processors too
    }
    return Operator(site=site, settings=settings)


def ray_of(machine: Machine, ray: str) -> str:
    """A script that runs Ray's program on a host, in a shell that no setup has prepared."""
    env = f"RAY_AUTH_MODE=disabled OMP_NUM_THREADS=1 RAY_ADDRESS={machine.address}:6400"
    return f"PATH={PREFIXES[0]}/bin:$PATH {env} ray {ray}"


def sessions(machine: Machine) -> set[str]:
    return set(machine.run("tmux ls -F '#{session_name}' || true").stdout.split())


def raylets(machine: Machine) -> set[int]:
    return {pid for pid, line in machine.processes().items() if "/raylet " in line}


def left_on(machine: Machine) -> tuple[list[str], set[str], set[str]]:
    """What a clean-up has to give back: processes, tmux sessions, files."""
    files = {path for path in machine.files() if not _NOT_OURS.search(path)}
    return sorted(machine.processes().values()), sessions(machine), files


def workers_of_training(machine: Machine) -> int:
    """Training processes on a host."""
    return sum("ray::WorkerDict" in line for line in machine.processes().values())


def run_settings(steps: int) -> dict[str, str]:
    """Settings of a small run on the demo."""
    files = {
        split: ",".join(f"{DEMO}/{name}_{split}.parquet" for name in ("taco", "nq", "math"))
        for split in ("train", "val")
    }
    return {
        "PROFILE": "laptop",
        "EXPERIMENT_NAME": "two_hosts",
        "MODEL_PATH": f"{DEMO}/model",
        "TRAIN_FILES": files["train"],
        "VAL_FILES": files["val"],
        "TRAIN_BATCH_SIZE": "10",
        "ROLLOUT_N": "4",
        "TOTAL_TRAINING_STEPS": str(steps),
    }
