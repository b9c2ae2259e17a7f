"""Training over two hosts, started by run_mixed_training.sh from the jumphost, or by Slurm.

One run goes through what happens to runs; each fixture is the next thing that happens to it.
"""

import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.nodes.scripts import (
    Operator,
    left_on,
    operator_of,
    raylets,
    run_settings,
    sessions,
    workers_of_training,
)
from tests.nodes.site import PATH, REPOSITORY, Machine, Site, wait_until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.nodes,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]

STEPS = 100
"""More than pass while things happen to the run; at the end it is told to be content with fewer."""

DEADLINE_S = 600.0
TRAIN = "run_mixed_training.sh"
SMALL = (
    "trainer.save_freq=1 trainer.test_freq=-1 trainer.val_before_train=false "
    # an untrained model earns nothing, so this is what moves the weights
    "actor_rollout_ref.actor.entropy_coeff=0.01"
)


@dataclass(kw_only=True)
class Run:
    """The run's folder, which all hosts share, and who types the commands."""

    operator: Operator
    name: str = "two_hosts"

    @property
    def folder(self) -> Path:
        return self.operator.site.hosts[0].path(REPOSITORY / "runs" / self.name)

    def ledger(self) -> list[dict]:
        path = self.folder / "ledger.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def step(self) -> int:
        return max((line.get("step", 0) for line in self.ledger()), default=0)

    def saved(self) -> int:
        tracker = self.folder / "checkpoints/latest_checkpointed_iteration.txt"
        return int(tracker.read_text() or 0) if tracker.exists() else 0

    def pane(self) -> str:
        """What the run's tmux session on the head shows."""
        head = self.operator.site.hosts[0]
        return head.run(
            f"tmux capture-pane -p -J -S - -t =verl_training_{self.name}:", check=False
        ).stdout

    def wait(self, condition: Callable[[], object], what: str) -> None:
        try:
            wait_until(condition, what, deadline_s=DEADLINE_S)
        except TimeoutError as error:
            raise AssertionError(f"{error}; the run's screen:\n{self.pane()[-3000:]}") from error

    def has_ended(self) -> bool:
        head = self.operator.site.hosts[0]
        pane = f"tmux display -p -t =verl_training_{self.name}: '#{{pane_dead}}'"
        return head.run(pane).stdout.strip() == "1"


@pytest.fixture(scope="module")
def run(site_with_demo: Site) -> Run:
    operator = operator_of(site_with_demo, hosts=2)
    operator.settings |= run_settings(STEPS)
    operator.run("setup_cluster.sh setup")
    return Run(operator=operator)


@dataclass(frozen=True, kw_only=True)
class Started:
    workers: list[int]
    second: "subprocess.CompletedProcess[str]"
    restart: "subprocess.CompletedProcess[str]"


@pytest.fixture(scope="module")
def started(run: Run) -> Started:
    """A run that was started, a second time as well, and whose cluster was to be restarted."""
    # as the README's quick start: the head was said to setup_cluster.sh only
    run.operator.run(f"{TRAIN} start {SMALL}", MASTER_IP="", WORKER_NODES="")
    run.wait(lambda: run.saved() >= 1, "the first checkpoint")
    return Started(
        workers=[workers_of_training(host) for host in run.operator.site.hosts],
        second=run.operator.run(f"{TRAIN} start {SMALL}", expected=2),
        restart=run.operator.run("setup_cluster.sh restart --yes", expected=1),
    )


@dataclass(frozen=True, kw_only=True)
class Stopped:
    said: str
    step: int
    saved: int
    status: str
    workers: list[int]


@pytest.fixture(scope="module")
def stopped(run: Run, started: Started) -> Stopped:
    """The same run after `stop`."""
    done = run.operator.run(f"{TRAIN} stop", timeout=DEADLINE_S)
    return Stopped(
        said=done.stdout + done.stderr,
        step=run.step(),
        saved=run.saved(),
        status=run.operator.run(f"{TRAIN} status").stdout,
        workers=[workers_of_training(host) for host in run.operator.site.hosts],
    )


@dataclass(frozen=True, kw_only=True)
class Lost:
    resumed: str
    screen: str
    saved: int
    head_before: set[int]
    head_after: set[int]


@pytest.fixture(scope="module")
def lost(run: Run, stopped: Stopped) -> Lost:
    """The same run, resumed, after one of its hosts died in mid-run."""
    resumed = run.operator.run(f"{TRAIN} resume {SMALL}")
    run.wait(lambda: run.saved() > stopped.saved, "a checkpoint after the resume")
    head, worker, _ = run.operator.site.hosts
    before = raylets(head)
    run.operator.site.kill(worker)
    run.wait(run.has_ended, "the run to notice that a host is gone")
    return Lost(
        resumed=resumed.stderr,
        screen=run.pane(),
        saved=run.saved(),
        head_before=before,
        head_after=raylets(head),
    )


@pytest.fixture(scope="module")
def restarted(run: Run, lost: Lost) -> list[set[int]]:
    """The host is back, the run goes on, and the cluster is restarted under it by force."""
    site = run.operator.site
    site.boot(site.hosts[1])
    run.operator.run("setup_cluster.sh setup")
    run.operator.run(f"{TRAIN} start {SMALL}")
    run.wait(lambda: run.saved() > lost.saved, "a checkpoint after the host was lost")
    before = [raylets(host) for host in site.hosts[:2]]
    run.operator.run("setup_cluster.sh restart --yes --force", timeout=DEADLINE_S)
    return before


@pytest.fixture(scope="module")
def finished(run: Run, restarted: list[set[int]]) -> Generator[Run]:
    """The same run at its end."""
    run.operator.settings["TOTAL_TRAINING_STEPS"] = str(run.saved() + 2)
    run.operator.run(f"{TRAIN} start {SMALL}")
    run.wait(run.has_ended, "the run's end")
    yield run


def test_both_hosts_train(started: Started):
    assert started.workers == [1, 1, 0]


def test_a_second_start_is_refused_and_names_the_first(started: Started):
    assert "runs/two_hosts is running already" in started.second.stderr


def test_a_restart_is_refused_while_a_run_goes_on(started: Started):
    assert "a run goes on" in started.restart.stderr
    assert "--force" in started.restart.stderr


def test_stop_saves_a_checkpoint_of_the_last_step_and_says_so(stopped: Stopped):
    assert 1 <= stopped.saved == stopped.step < STEPS
    assert f"last step {stopped.step}, last checkpoint" in stopped.said
    assert f"global_step_{stopped.saved}" in stopped.status
    assert stopped.workers == [0, 0, 0]


def test_resume_goes_on_from_the_checkpoint(stopped: Stopped, lost: Lost):
    assert f"global_step_{stopped.saved}" in lost.resumed
    assert lost.saved > stopped.saved


def test_a_run_whose_host_dies_ends_and_names_the_host(run: Run, lost: Lost):
    assert "failed:" in lost.screen
    host = run.operator.site.hosts[1]
    assert re.search(rf"lost node.*({host.address}|{host.name}|node0)", lost.screen)
    assert "ended with exit 1" in lost.screen


def test_a_run_whose_host_dies_leaves_the_cluster_of_the_others_up(lost: Lost):
    assert lost.head_before
    assert lost.head_after == lost.head_before


def test_a_restart_by_force_ends_the_run_and_brings_every_node_up_again(
    run: Run, restarted: list[set[int]]
):
    after = [raylets(host) for host in run.operator.site.hosts[:2]]
    assert all(len(new) == 1 and not new & old for new, old in zip(after, restarted, strict=True))


def test_a_run_that_was_stopped_and_lost_a_host_is_complete_and_trained_nothing_twice(
    finished: Run,
):
    assert (finished.folder / "done").exists(), finished.pane()[-3000:]
    steps = finished.operator.settings["TOTAL_TRAINING_STEPS"]
    assert f"all {steps} steps" in finished.operator.run(f"{TRAIN} status").stdout
    assert finished.saved() == int(steps)
    audit = f"cd {REPOSITORY} && verl-mixed audit runs/{finished.name}"
    env = f". ~/.verl_mixed/{finished.operator.settings['MASTER_IP']}/env"
    finished.operator.site.hosts[0].run(f"{env}; {audit}")


def test_cleanup_after_a_run_leaves_the_run_and_nothing_else(finished: Run):
    site = finished.operator.site
    finished.operator.run("setup_cluster.sh cleanup --yes")
    for host in site.hosts[:2]:
        wait_until(
            lambda h=host: all(
                line.startswith(("/usr/bin/bwrap", "sshd:")) for line in h.processes().values()
            ),
            f"{host.name}'s processes to end",
        )
        assert sessions(host) <= {f"verl_training_{finished.name}"}
        files = left_on(host)[2]
        assert not [path for path in files if path.startswith(("/root/.verl", "/tmp/verl"))]
    assert (finished.folder / "done").exists()


@contextmanager
def popen(machine: Machine, script: str, env: dict[str, str]) -> Iterator["subprocess.Popen[str]"]:
    """A process on a machine, ended at the end."""
    with machine.popen(script, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def slurm(site_with_demo: Site, run: Run) -> Site:
    """Hosts with `srun` and `scontrol`, on which nothing runs."""
    run.operator.run("setup_cluster.sh cleanup --yes --force")
    site = site_with_demo
    for host in site.hosts[:2]:
        if host.run("true", check=False).returncode:
            site.boot(host)
        for name in ("id_ed25519", "known_hosts"):
            shutil.copy(site.jumphost.path(f"/root/.ssh/{name}"), host.path("/root/.ssh"))
        host.path("/root/.ssh/id_ed25519").chmod(0o600)
    programs = site.hosts[0].path("/root/slurm")
    programs.mkdir(exist_ok=True)
    shutil.copy(Path(__file__).parent / "fake_srun.sh", programs / "srun")
    (programs / "scontrol").write_text("#!/bin/sh\necho host1\necho host2\n")
    (programs / "scontrol").chmod(0o755)
    return site


def test_slurm_saves_before_the_time_is_over_and_the_next_job_completes_the_run(
    slurm: Site, run: Run
):
    head = slurm.hosts[0]
    before = [left_on(host) for host in slurm.hosts[:2]]
    job = Run(operator=run.operator, name="slurm")
    env = {name: run.operator.settings[name] for name in ("VENV", "NUM_CPUS", "NUM_GPUS")}
    env |= run_settings(STEPS) | {
        "EXPERIMENT_NAME": job.name,
        "PATH": f"/root/slurm:{PATH}",
        "SLURM_JOB_NODELIST": "host[1-2]",
        "SLURM_SUBMIT_DIR": str(REPOSITORY),
    }
    # `exec`, so that the signal reaches it as Slurm's does
    batch = f"cd {REPOSITORY} && exec bash cluster/slurm/mixed_training.sbatch {SMALL}"

    with popen(head, batch, env | {"SLURM_JOB_ID": "7"}) as first:
        job.wait(lambda: job.saved() >= 1 or first.poll() is not None, "a checkpoint")
        training = [workers_of_training(host) for host in slurm.hosts]
        head.run("pkill -USR1 -f '^bash cluster/slurm/mixed_training.sbatch'", check=False)
        said = first.communicate(timeout=DEADLINE_S)[0]
    assert training == [1, 1, 0], said
    assert first.returncode == 130, said
    assert 1 <= job.saved() < STEPS

    steps = job.saved() + 2
    env["TOTAL_TRAINING_STEPS"] = str(steps)
    with popen(head, batch, env | {"SLURM_JOB_ID": "8"}) as second:
        said = second.communicate(timeout=2 * DEADLINE_S)[0]
    assert second.returncode == 0, said
    assert job.saved() == steps
    trained = Counter(line["step"] for line in job.ledger() if line.get("outcome") == "trained")
    assert trained == dict.fromkeys(range(1, steps + 1), 10)

    for host, (processes, names, files) in zip(slurm.hosts, before, strict=False):
        wait_until(lambda h=host, p=processes: left_on(h)[0] == p, f"{host.name}'s processes")
        assert left_on(host)[1] == names
        new = {path for path in left_on(host)[2] - files if path.startswith("/tmp/")}
        assert new == set()
