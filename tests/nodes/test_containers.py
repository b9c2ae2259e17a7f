"""Ray and a run in containers of a real podman on three hosts.

The image holds nothing but links into /usr, which CONTAINER_OPTIONS mount from the host.
"""

from collections.abc import Generator
from pathlib import Path
from shutil import which

import pytest

from tests.nodes.scripts import Operator, left_on, operator_of, raylets, run_settings, sessions
from tests.nodes.site import PREFIXES, REPOSITORY, Machine, Site, wait_until

pytestmark = [
    pytest.mark.nodes,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
]

IMAGE = "localhost/mixed:test"

CGROUPS = "cpu cpuacct memory devices freezer pids blkio cpuset"
"""Mounted one by one, because podman takes no mixture of both versions of cgroups."""

_PODMAN = f"""
set -e
mkdir -p /etc/containers /tmp/image/{{tmp,etc,usr,root,proc,sys,dev,run,var,srv}}
echo '{{"default": [{{"type": "insecureAcceptAnything"}}]}}' >/etc/containers/policy.json
cat >/etc/containers/containers.conf <<END
[containers]
cgroups = "no-conmon"
default_ulimits = ["nofile=$(ulimit -Hn):$(ulimit -Hn)", "nproc=4000:4000"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
END
mount -t tmpfs cgroup /sys/fs/cgroup
for name in {CGROUPS}; do
  mkdir /sys/fs/cgroup/$name
  mount -t cgroup -o $name cgroup /sys/fs/cgroup/$name
done
cp -a /etc/passwd /etc/group /etc/nsswitch.conf /etc/ssl /etc/hosts /tmp/image/etc/
for name in bin sbin lib lib64; do [ ! -L /$name ] || cp -a /$name /tmp/image/$name; done
tar -C /tmp/image -cf - . | podman import - {IMAGE}
rm -r /tmp/image
podman run --rm --network host --ipc host --pid host -v /usr:/usr:ro {IMAGE} true
"""


@pytest.fixture(scope="module")
def site_with_podman(site_with_demo: Site) -> Generator[Site]:
    if not which("podman"):
        pytest.skip("no podman here (Debian: apt-get install podman)")
    for host in site_with_demo.hosts:
        made = host.run(_PODMAN, check=False)
        if made.returncode:
            pytest.skip(f"podman runs no container here: {made.stderr[-300:]}")
    yield site_with_demo
    for host in site_with_demo.hosts:  # the hierarchies are this machine's
        host.run(
            "find /sys/fs/cgroup -depth -path '*libpod_parent*' -type d -exec rmdir {} +",
            check=False,
        )


@pytest.fixture(scope="module")
def before(site_with_podman: Site) -> list[tuple[list[str], set[str], set[str]]]:
    return [left_on(host) for host in site_with_podman.hosts]


@pytest.fixture(scope="module")
def joined(site_with_podman: Site, before: object) -> Generator[Operator]:
    operator = operator_of(site_with_podman)
    folders = {"/usr", *PREFIXES}
    operator.settings |= run_settings(1) | {
        "TRAIN_BATCH_SIZE": "12",  # for three training processes
        "CONTAINER_IMAGE": IMAGE,
        "CONTAINER_ENGINE": "podman",
        "CONTAINER_OPTIONS": " ".join(f"-v {folder}:{folder}:ro" for folder in sorted(folders)),
        "RAY_WORKER_PORTS": "20000-20999",
    }
    operator.run("setup_cluster.sh sync")
    operator.run("setup_cluster.sh setup")
    yield operator


def containers(host: Machine) -> set[str]:
    return set(host.run("podman ps --format '{{.Names}}'").stdout.split())


def mounts_of(host: Machine, pid: int) -> str:
    return host.run(f"readlink /proc/{pid}/ns/mnt").stdout.strip()


def test_ray_is_in_a_container_of_every_host_and_status_finds_it(joined: Operator):
    shown = joined.run("setup_cluster.sh status").stdout
    assert shown.count(" alive ") == 3
    head = joined.settings["MASTER_IP"]
    for host, name in zip(joined.site.hosts, ("head", "node0", "node1"), strict=True):
        assert containers(host) == {f"verl_mixed_{head}_{name}"}
        assert sessions(host) == {name}
        (raylet,) = raylets(host)
        assert mounts_of(host, raylet) != host.run("readlink /proc/self/ns/mnt").stdout.strip()


def test_every_port_of_ray_is_one_of_the_table(joined: Operator):
    """The table is in docs/cluster.md."""
    for host in joined.site.hosts:
        lines = host.run("ss -Hltn 'sport >= 1024'").stdout.splitlines()
        ports = {int(line.split()[3].rpartition(":")[2]) for line in lines}
        assert ports - {6379, 8265, 44217, 44227} <= set(range(20000, 21007))
        assert {21000, 21001, 21002, 21003, 21004, 21005} <= ports


def test_a_run_trains_in_a_container_over_all_hosts(joined: Operator):
    head = joined.site.hosts[0]
    small = "trainer.test_freq=-1 trainer.val_before_train=false"
    joined.run(f"run_mixed_training.sh start {small}")
    session = next(name for name in sessions(head) if name.startswith("verl_training"))
    assert f"verl_mixed_{head.address}_{session}" in containers(head)

    def has_ended() -> bool:
        return head.run(f"tmux display -p -t {session}: '#{{pane_dead}}'").stdout.strip() == "1"

    wait_until(has_ended, "the end of the run", deadline_s=900)
    shown = joined.run("run_mixed_training.sh status").stdout
    assert "complete     all 1 steps" in shown
    assert head.path(REPOSITORY / "runs/two_hosts/checkpoints/global_step_1").is_dir()


def test_cleanup_ends_the_containers_and_leaves_nothing(
    joined: Operator, before: list[tuple[list[str], set[str], set[str]]]
):
    joined.run("setup_cluster.sh cleanup --yes")
    for host, (processes, names, _) in zip(joined.site.hosts, before, strict=True):
        assert containers(host) == set()
        assert (sorted(host.processes().values()), sessions(host)) == (processes, names | set())
        assert not host.path("/root/.verl_mixed").exists()
        assert not list(Path(host.path("/tmp")).glob("verl_mixed_*"))
