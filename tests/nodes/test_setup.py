"""setup_cluster.sh on real machines: sshd, tmux and Ray, from a jumphost through a gateway."""

import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.nodes.scripts import Operator, left_on, operator_of, ray_of, raylets, sessions
from tests.nodes.site import PREFIXES, REPOSITORY, Site, wait_until

pytestmark = [
    pytest.mark.nodes,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]


@contextmanager
def site_up() -> Iterator[Site]:
    site = Site()
    try:
        yield site
    finally:
        site.close()


@pytest.fixture(scope="module")
def joined(can_have_sites: None) -> Generator[Operator]:
    """Three hosts that `setup` has joined; tests leave them so."""
    with site_up() as site:
        operator = operator_of(site)
        print(operator.run("setup_cluster.sh setup").stdout.splitlines()[-1])
        yield operator


def table(text: str) -> dict[str, list[str]]:
    """The lines of the last table by their first word, as words."""
    lines = [line.split() for line in text.splitlines() if re.match(r"10\.20\.0\.\d+ ", line)]
    return {line[0]: line[1:] for line in lines}


def test_setup_joins_all_hosts_and_status_shows_them(joined: Operator):
    shown = joined.run("setup_cluster.sh status").stdout
    for number, host in enumerate(joined.site.hosts):
        role, session = ("head", "head") if number == 0 else ("worker", f"node{number - 1}")
        assert table(shown)[host.address][:3] == [role, session, "alive"]
        assert sessions(host) == {session}
        assert len(raylets(host)) == 1
    assert f"-L 8265:127.0.0.1:8265 -J {joined.site.gateway.address}" in shown


@pytest.mark.nightly
def test_the_dashboard_is_where_status_says(joined: Operator):
    shown = joined.run("setup_cluster.sh status").stdout
    (tunnel,) = re.findall(r"through: (ssh -N .*)", shown)
    fetch = f"{tunnel} & trap 'kill $!' EXIT; for i in $(seq 50); do sleep 0.1; "
    fetch += "exec 3<>/dev/tcp/127.0.0.1/8265 && break; done 2>/dev/null; "
    fetch += "printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3; timeout 5 head -c 15 <&3"
    assert joined.site.jumphost.run(fetch).stdout.startswith("HTTP/1.")


def test_a_second_setup_leaves_all_alone(joined: Operator):
    before = [raylets(host) for host in joined.site.hosts]
    again = joined.run("setup_cluster.sh setup")
    assert again.stderr.count("up already") == 3
    assert [raylets(host) for host in joined.site.hosts] == before


@pytest.mark.nightly
def test_what_setup_recorded_need_not_be_said_again(joined: Operator):
    silent = Operator(site=joined.site)
    shown = silent.run("setup_cluster.sh status", MASTER_IP=joined.settings["MASTER_IP"]).stdout
    assert len(table(shown)) == 3


@pytest.mark.parametrize("mode", ["disabled", "token"])
def test_a_join_without_the_token_is_refused(joined: Operator, mode: str):
    head, host = joined.site.hosts[0], joined.site.hosts[2]
    join = f"ray start --block --address {head.address}:6379 --node-ip-address {host.address}"
    env = {"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": "guessed"}
    # it tries for long; the first answer is enough
    stranger = host.popen(f"exec {PREFIXES[0]}/bin/{join} --temp-dir /tmp/stranger", env=env)
    with stranger:
        assert stranger.stdout is not None
        said = next((line for line in stranger.stdout if "Auth" in line or "started" in line), "")
        stranger.kill()
    assert "InvalidAuthToken" in said
    shown = joined.run("setup_cluster.sh status").stdout
    assert [words[2] for words in table(shown).values()] == ["alive"] * 3


@pytest.mark.nightly
def test_the_token_is_for_its_owner_alone_and_in_no_command_line(joined: Operator):
    record = REPOSITORY / ".cluster" / joined.settings["MASTER_IP"] / "token"
    token = joined.site.jumphost.path(record).read_text()
    assert joined.site.jumphost.path(record).stat().st_mode & 0o777 == 0o600
    for host in joined.site.hosts:
        find = "find /root /tmp /etc /srv /run -xdev -type f -print0"
        files = host.run(f"{find} | xargs -0 grep -lsF {token} || true").stdout.split()
        assert files
        for file in files:
            assert host.path(file).stat().st_mode & 0o077 == 0, file
        assert not any(token in line for line in host.processes().values())


@pytest.mark.nightly
def test_a_dry_run_changes_nothing_anywhere(can_have_sites: None):
    with site_up() as site:
        before = [left_on(machine) for machine in site.machines]
        operator = operator_of(site)
        for command in ("setup", "restart", "cleanup", "sync", "status"):
            operator.run(f"setup_cluster.sh {command} --yes --dry-run")
        assert [left_on(machine) for machine in site.machines] == before


@pytest.mark.nightly
def test_logs_are_those_of_the_host(joined: Operator):
    for word in ("node1", joined.site.hosts[2].address):
        shown = joined.run(f"setup_cluster.sh logs {word}").stdout
        assert "Ray runtime started" in shown
        assert "raylet." in shown


@pytest.mark.nightly
def test_attach_shows_the_session(joined: Operator):
    attach = f"cd {REPOSITORY} && timeout 5 script -qc './setup_cluster.sh attach node0' /dev/null"
    shown = joined.site.jumphost.run(attach, env=joined.settings, check=False).stdout
    assert "[node0]" in shown  # the left end of tmux's status line
    assert raylets(joined.site.hosts[1])


@pytest.mark.cluster
def test_a_worker_that_dies_is_named_and_comes_back_with_setup(joined: Operator):
    site, doomed = joined.site, joined.site.hosts[2]
    others = [raylets(host) for host in site.hosts[:2]]
    site.kill(doomed)
    try:
        shown = joined.run("setup_cluster.sh status", expected=1)
        assert f"error: {doomed.address}: no" in shown.stderr
        failed = joined.run("setup_cluster.sh setup", expected=1)
        assert f"error: {doomed.address}: left out" in failed.stderr
        assert "2 of 3 nodes joined" in failed.stdout
    finally:
        site.boot(doomed)
    joined.run("setup_cluster.sh setup")
    assert [raylets(host) for host in site.hosts[:2]] == others
    shown = joined.run("setup_cluster.sh status").stdout
    assert table(shown)[doomed.address][:3] == ["worker", "node1", "alive"]


@pytest.mark.cluster
def test_restart_starts_every_node_anew(joined: Operator):
    before = [raylets(host) for host in joined.site.hosts]
    joined.run("setup_cluster.sh restart --yes")
    after = [raylets(host) for host in joined.site.hosts]
    assert all(len(new) == 1 and not new & old for new, old in zip(after, before, strict=True))
    shown = joined.run("setup_cluster.sh status").stdout
    assert [words[2] for words in table(shown).values()] == ["alive"] * 3


@pytest.mark.nightly
def test_a_dead_worker_does_not_stop_the_others(can_have_sites: None):
    with site_up() as site:
        site.kill(site.hosts[1])
        failed = operator_of(site, hosts=2).run("setup_cluster.sh setup", expected=1)
        assert f"error: {site.hosts[1].address}: left out" in failed.stderr
        assert "1 of 2 nodes joined" in failed.stdout
        assert len(raylets(site.hosts[0])) == 1


@pytest.mark.nightly
def test_a_session_of_somebody_else_is_left_alone_and_named(can_have_sites: None):
    with site_up() as site:
        site.hosts[0].run("tmux new -d -s head 'sleep 1000'")
        failed = operator_of(site).run("setup_cluster.sh setup", expected=1)
        assert re.search(rf"{site.hosts[0].address}: session: .*'head'", failed.stdout)
        assert "nothing was started" in failed.stderr
        assert "sleep 1000" in site.hosts[0].processes().values()


@pytest.mark.nightly
def test_without_the_gateway_no_host_is_reached(can_have_sites: None):
    with site_up() as site:
        failed = operator_of(site).run("setup_cluster.sh setup", expected=1, SSH_JUMP="")
        assert failed.stdout.count("Network is unreachable") == 3
        assert "nothing was started" in failed.stderr


@pytest.mark.cluster
def test_a_hosts_file_says_the_same_as_the_settings(can_have_sites: None):
    with site_up() as site:
        head, worker, _ = site.hosts
        hosts = f"[head]\n{head.name} ip={head.address}\n[workers]\n{worker.name} num_cpus=5\n"
        hosts += f"[all:vars]\nssh_jump={site.gateway.address}\nvenv={PREFIXES[0]}\n"
        site.jumphost.path("/root/hosts").write_text(hosts)
        operator = Operator(site=site, settings={"OBJECT_STORE_MEMORY": "100000000"})
        operator.run("setup_cluster.sh setup --hosts /root/hosts")
        shown = operator.run("setup_cluster.sh status --hosts /root/hosts").stdout
        assert re.search(rf"(?m)^{worker.name} .* alive +0 / 5 ", shown)
        operator.run("setup_cluster.sh cleanup --yes --hosts /root/hosts")
        assert not any(raylets(host) for host in site.hosts)


@pytest.mark.nightly
def test_sync_brings_this_checkout_to_every_host(can_have_sites: None):
    with site_up() as site:
        folder = Path("/srv/synced")
        operator = operator_of(site)
        operator.settings["REMOTE_REPO"] = str(folder)
        site.jumphost.path(REPOSITORY / "config/new.yaml").write_text("here: yes\n")
        site.jumphost.path(REPOSITORY / "runs").mkdir()
        site.jumphost.path(REPOSITORY / "runs/file").write_text("the jumphost's")
        operator.run("setup_cluster.sh sync")
        for host in site.hosts:
            assert host.path(folder / "config/new.yaml").read_text() == "here: yes\n"
            assert not host.path(folder / "runs/file").exists()
            host.path(folder / "runs").mkdir(exist_ok=True)
            host.path(folder / "runs/file").write_text("a run's")
        site.jumphost.run(f"cd {REPOSITORY} && rm config/new.yaml && echo more >> README.md")

        operator.run("setup_cluster.sh sync")
        for host in site.hosts:
            assert not host.path(folder / "config/new.yaml").exists()
            assert host.path(folder / "README.md").read_text().endswith("more\n")
            assert host.path(folder / "runs/file").read_text() == "a run's"
        assert "differ" not in operator.run("setup_cluster.sh doctor").stdout


@pytest.mark.nightly
def test_sync_leaves_a_checkout_of_git_alone(can_have_sites: None):
    with site_up() as site:
        changed = REPOSITORY / "README.md"
        for host in site.hosts:
            host.run(f"git init -q {REPOSITORY}")
        site.jumphost.path(changed).write_text("other\n")
        refused = operator_of(site).run("setup_cluster.sh sync", expected=1)
        assert refused.stderr.count("is a git checkout of its own") == 3
        assert not any(host.path(changed).read_text() == "other\n" for host in site.hosts)


def test_cleanup_gives_the_hosts_back_as_they_were(can_have_sites: None):
    with site_up() as site:
        operator = operator_of(site)
        foreign = site.hosts[1]  # who has a Ray and a session of their own there
        start = f"--head --port 6400 --node-ip-address {foreign.address}"
        foreign.run(ray_of(foreign, f"start {start} --num-cpus 1 --include-dashboard false"))
        foreign.run("tmux new -d -s theirs 'sleep 1000'")
        theirs = raylets(foreign)
        before = [left_on(machine) for machine in site.machines]
        current = foreign.path("/tmp/ray/ray_current_cluster").read_text()

        operator.run("setup_cluster.sh setup")
        assert len(raylets(foreign)) == 2
        operator.run("setup_cluster.sh cleanup --yes")

        for machine, (processes, names, files) in zip(site.machines, before, strict=True):
            wait_until(lambda m=machine, p=processes: left_on(m)[0] == p, f"{machine.name}")
            assert left_on(machine)[1] == names
            new = left_on(machine)[2] ^ files
            assert {path for path in new if not path.startswith("/tmp/ray/")} == set()
        assert raylets(foreign) == theirs
        assert foreign.path("/tmp/ray/ray_current_cluster").read_text() == current
        assert "1 node" in foreign.run(ray_of(foreign, "status")).stdout
