"""The machines that the other tests here run on are apart, and leave nothing behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterable
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.nodes.site import PREFIXES, REPOSITORY, ROOT, Machine, Site, wait_until

pytestmark = [pytest.mark.nodes]

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=30"
"""A loaded machine needs seconds for two connections, one in the other."""


SPACES = ("net", "mnt", "pid", "uts", "ipc")


@contextmanager
def namespaces_of(machines: Iterable[Machine]) -> Generator[set[str]]:
    """The names of the machines' namespaces. They are held open meanwhile, so that the kernel gives
    none of their numbers to a namespace that some other test makes.
    """
    with ExitStack() as held:
        names = set[str]()
        for machine in machines:
            for kind in SPACES:
                path = f"/proc/{machine.init}/ns/{kind}"
                held.callback(os.close, os.open(path, os.O_RDONLY))
                names.add(os.readlink(path))
        yield names


def in_use(namespaces: set[str]) -> set[str]:
    """Those of the namespaces that a process of this machine is in."""
    found = set()
    for pid in psutil.pids():
        for kind in SPACES:
            with suppress(OSError):
                found.add(os.readlink(f"/proc/{pid}/ns/{kind}"))
    return found & namespaces


def has_network(machine: Machine, of: Machine) -> bool:
    """Whether a machine can connect to another's sshd."""
    connect = f"timeout 1 bash -c '</dev/tcp/{machine.address}/22'"
    return of.run(connect, check=False).returncode == 0


@pytest.mark.nightly
def test_the_jumphost_reaches_the_hosts_through_the_gateway_only(site: Site):
    for host in site.hosts:
        through = site.jumphost.run(f"{SSH} -J {site.gateway.address} {host.address} hostname")
        assert through.stdout.strip() == host.name
        straight = site.jumphost.run(f"{SSH} {host.address} hostname", check=False)
        assert straight.returncode == 255
        assert "Network is unreachable" in straight.stderr


@pytest.mark.nightly
def test_a_machine_has_files_processes_and_a_name_of_its_own(site: Site):
    one, other = site.hosts[0], site.hosts[1]
    one.run("touch /root/a /tmp/b /dev/shm/c /etc/d; tmux new -d -s mine")
    assert not {"/root/a", "/tmp/b", "/dev/shm/c", "/etc/d"} & other.files()
    assert {"/root/a", "/tmp/b", "/dev/shm/c", "/etc/d"} <= one.files()
    assert not any(Path(path).exists() for path in ("/root/a", "/tmp/b", "/dev/shm/c", "/etc/d"))
    assert any("tmux new -d -s mine" in line for line in one.processes().values())
    assert not any("tmux" in line for line in other.processes().values())
    assert (one.run("hostname").stdout, other.run("hostname").stdout) == ("host1\n", "host2\n")


@pytest.mark.nightly
def test_runs_are_one_folder_on_all_hosts(site: Site):
    site.hosts[0].run(f"echo here > {REPOSITORY}/runs/file")
    assert site.hosts[2].path(REPOSITORY / "runs/file").read_text() == "here\n"
    assert not site.jumphost.path(REPOSITORY / "runs/file").exists()


@pytest.mark.nightly
def test_a_machine_sees_the_python_environment_and_no_other_file_of_this_one(site: Site):
    host = site.hosts[0]
    assert (
        host.run(f"{sys.executable} -c 'import sys; print(sys.prefix)'").stdout.strip()
        == (PREFIXES[0])
    )
    assert host.run(f"touch {PREFIXES[0]}/a", check=False).returncode != 0
    if not PREFIXES[0].startswith(str(ROOT)):
        assert not host.path(ROOT).exists()
    assert not {"home", "opt", "mnt"} & set(host.run("ls /").stdout.split())


@pytest.mark.nightly
def test_a_machine_that_died_starts_again_with_its_disk(site: Site):
    host = site.hosts[1]
    host.run("echo kept > /root/a; echo lost > /tmp/b; sync")
    site.kill(host)
    assert not has_network(host, of=site.gateway)
    site.boot(host)
    assert {"/root/a"} <= host.files()
    assert "/tmp/b" not in host.files()
    jump = site.gateway.address
    assert site.jumphost.run(f"{SSH} -J {jump} host2 cat a").stdout == "kept\n"


@pytest.mark.nightly
def test_a_machine_without_network_goes_on_alone(site: Site):
    host = site.hosts[1]
    assert has_network(host, of=site.gateway)
    host.stop_network()
    assert not has_network(host, of=site.gateway)
    assert host.run("hostname").stdout == "host2\n"
    host.start_network()
    assert has_network(host, of=site.gateway)


@pytest.mark.nightly
def test_two_sites_do_not_see_each_other(site: Site):
    other = Site()
    try:
        site.hosts[0].run(f"echo here > {REPOSITORY}/runs/file")
        assert not other.hosts[0].path(REPOSITORY / "runs/file").exists()
        # the same addresses, another key
        assert other.jumphost.run(f"{SSH} -J gateway host1 hostname").stdout == "host1\n"
        key = site.jumphost.path("/root/.ssh/id_ed25519").read_text()
        other.jumphost.path("/root/.ssh/id_ed25519").write_text(key)
        assert other.jumphost.run(f"{SSH} gateway true", check=False).returncode == 255
    finally:
        other.close()


def test_a_closed_site_leaves_nothing(can_have_sites: None):
    site = Site()
    with closing(site), namespaces_of(site.machines) as namespaces:
        site.hosts[0].run("sleep 1000 >/dev/null 2>&1 & tmux new -d")
        assert len(in_use(namespaces)) == len(SPACES) * len(site.machines)
        here = subprocess.run(["ip", "-br", "link"], check=True, capture_output=True, text=True)
        assert "host1" not in here.stdout
        assert "site " not in Path("/proc/mounts").read_text()
        site.close()
        assert not in_use(namespaces)


@pytest.mark.nightly
def test_a_site_goes_with_the_process_that_made_it_however_that_ends(can_have_sites: None):
    program = "from tests.nodes.site import Site; print(Site().state(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        site = Site.at(process.stdout.readline().decode())
        with namespaces_of(site.machines) as namespaces:
            process.send_signal(signal.SIGKILL)
            wait_until(lambda: not in_use(namespaces), "all of the site's processes to end")
