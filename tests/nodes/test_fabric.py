"""`doctor --fabric` and a shared runs/ on three hosts: slow link, closed port, local folder."""

import json
from collections.abc import Generator

import pytest

from tests.nodes.scripts import Operator, operator_of, run_settings
from tests.nodes.site import REPOSITORY, Site, which

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.nodes,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]

PORTS = "20000-20999"
"""Of Ray's workers; the node manager's is the next."""


@pytest.fixture(scope="module")
def joined(site_with_demo: Site) -> Generator[Operator]:
    operator = operator_of(site_with_demo)
    operator.settings |= {"RAY_WORKER_PORTS": PORTS, **run_settings(1)}
    operator.settings["TRAIN_BATCH_SIZE"] = "12"  # for three training processes
    operator.run("setup_cluster.sh sync")
    operator.run("setup_cluster.sh setup")
    yield operator


def measured(operator: Operator, expected: int) -> list[dict[str, str]]:
    """The findings of the fabric, as the head's doctor gives them to a program."""
    head = operator.site.hosts[0]
    doctor = f". ~/.verl_mixed/*/env; cd {REPOSITORY}; verl-mixed doctor --fabric --json"
    done = head.run(f"bash -c '{doctor}'", env={"PROFILE": "laptop"}, check=False)
    findings = json.loads(done.stdout.splitlines()[-1])["findings"]
    assert done.returncode == expected, findings
    return [one for one in findings if one["check"] in ("fabric", "all-reduce")]


def words(findings: list[dict[str, str]], status: str) -> list[str]:
    return [f"{one['words']}; {one['remedy']}" for one in findings if one["status"] == status]


def test_all_pairs_and_an_all_reduce_are_measured(joined: Operator):
    shown = joined.run("setup_cluster.sh doctor --fabric", PROFILE="laptop").stdout
    addresses = [host.address for host in joined.site.hosts]
    for source in addresses:
        for target in addresses:
            assert (f"{source} > {target}  " in shown) == (source != target)
    assert "gloo over 3 nodes" in shown


def test_the_slow_link_is_named(joined: Operator):
    first, slow, last = joined.site.hosts
    tc = f"{which('tc')} qdisc"
    slow.run(f"{tc} add dev eth0 root tbf rate 50mbit burst 64kb latency 400ms")  # what it sends
    try:
        found = measured(joined, 0)
    finally:
        slow.run(f"{tc} delete dev eth0 root")
    warned = [line for line in words(found, "warning") if line.startswith("slow pair 10.")]
    pairs = {line.split("  ")[0] for line in warned}
    assert pairs == {f"slow pair {slow.address} > {host.address}" for host in (first, last)}
    assert not words(found, "bad")


def test_a_closed_port_is_named_with_its_pair_and_remedy(joined: Operator):
    source, target = joined.site.hosts[1:]
    source.ip(f"rule add to {target.address} ipproto tcp dport 21000-21007 unreachable")
    try:
        found = measured(joined, 1)
    finally:
        source.ip(f"rule delete to {target.address} ipproto tcp dport 21000-21007 unreachable")
    (line,) = words(found, "bad")
    pair = f"{source.address} > {target.address}"
    assert line.startswith(f"{pair}: port 21000 (Ray's node manager): ")
    assert f"open it in the firewall from {source.address} to {target.address}" in line


def test_a_run_whose_folder_is_not_on_every_node_does_not_start(joined: Operator):
    apart = joined.site.hosts[2]
    apart.run(f"mount -t tmpfs apart {REPOSITORY}/runs")
    try:
        refused = joined.run("run_mixed_training.sh start --no-sync", expected=2)
        looked = joined.run("setup_cluster.sh doctor", expected=1, PROFILE="laptop")
    finally:
        apart.run(f"umount {REPOSITORY}/runs")
    said = refused.stdout + refused.stderr
    assert "is not the same folder on every node" in " ".join(said.split())
    assert apart.address in said
    (line,) = [line for line in looked.stdout.splitlines() if line.startswith("bad      shared")]
    assert apart.address in line and joined.site.hosts[1].address not in line
