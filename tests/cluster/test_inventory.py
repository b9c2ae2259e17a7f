"""Hosts files and the order in which settings decide."""

import shlex
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.inventory import (
    Host,
    InventoryError,
    parse_hosts,
    render_hosts,
    resolve,
    shell_lines,
)

EXAMPLE = Path(__file__).parents[2] / "config/cluster/hosts.example"

names = st.from_regex(r"[a-z0-9_][a-z0-9_.-]{0,12}", fullmatch=True)
ports = st.integers(1, 65535).map(str)
counts = st.integers(0, 512).map(str)
users = st.from_regex(r"[a-z_][a-z0-9_-]{0,8}", fullmatch=True)
paths = st.text(string.ascii_letters + string.digits + " '\"#;$=_-é", max_size=12).map(
    lambda name: f"/data/{name.strip()}x"
)


def maybe(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.just("") | values


hosts = st.builds(
    Host,
    name=names,
    ssh_host=maybe(names),
    ip=maybe(st.ip_addresses().map(str)),
    ssh_user=maybe(users),
    ssh_port=maybe(ports),
    ssh_key=maybe(paths),
    ssh_jump=maybe(users.map(lambda user: f"{user}@bastion:22")),
    num_cpus=maybe(counts),
    num_gpus=maybe(counts),
    conda_env=maybe(users),
    conda_path=maybe(paths),
    venv=maybe(paths),
    repo=maybe(paths),
    ray_temp_dir=maybe(paths),
    env=maybe(st.sampled_from(["A=1", "A='x y' B=2"])),
    setup_commands=maybe(paths),
    container_image=maybe(
        st.sampled_from(["mixed:1", "registry.example/mixed@sha256:00", "/a.sif"])
    ),
    container_engine=maybe(st.sampled_from(["docker", "podman", "apptainer"])),
    container_options=maybe(paths.map(lambda path: f"-v {shlex.quote(path)}:/data")),
)
inventories = st.lists(hosts, min_size=1, max_size=5, unique_by=lambda host: host.name)


@given(inventories)
def test_what_is_rendered_is_read_back(hosts: list[Host]) -> None:
    assert parse_hosts(render_hosts(hosts)) == tuple(hosts)


@given(inventories)
def test_variables_of_all_are_those_of_every_host_that_says_nothing_else(hosts: list[Host]) -> None:
    text = render_hosts(hosts) + "\n[all:vars]\nssh_user = everyone\n"

    assert [host.ssh_user for host in parse_hosts(text)] == [
        host.ssh_user or "everyone" for host in hosts
    ]


@given(st.text())
def test_any_text_is_read_or_refused_with_line_numbers(text: str) -> None:
    try:
        parse_hosts(text, "hosts")
    except InventoryError as error:
        assert all(line.startswith("hosts:") for line in str(error).split("\n"))


def test_a_line_wins_over_its_group_and_the_group_over_all() -> None:
    text = """
[head]
a
[workers]
b
c num_gpus=1
[all:vars]
num_gpus=8
[workers:vars]
num_gpus=4
"""
    assert [host.num_gpus for host in parse_hosts(text)] == ["8", "4", "1"]


def test_ansibles_own_keys_are_read() -> None:
    text = "[head]\na ansible_host=10.0.0.1 ansible_user=me ansible_port=22 ; the head\n".replace(
        ";", "#"
    )
    (head,) = parse_hosts(text + "[all:vars]\nansible_ssh_private_key_file='/my keys/id'\n")

    assert (head.ssh_host, head.ssh_user, head.ssh_port) == ("10.0.0.1", "me", "22")
    assert head.ssh_key == "/my keys/id"


def test_every_mistake_is_named_with_its_line_at_once() -> None:
    text = """lost
[head]
a colour=red ssh_port=0
b
[wrokers]
c
[workers]
a
-oProxyCommand=evil
node[1:3]
d num_cpus=1 num_cpus=2
[all:vars]
num_gpus=many
venv=relative
unclosed='
"""
    with pytest.raises(InventoryError) as error:
        parse_hosts(text, "hosts")

    expected = [
        (1, "before any group"),
        (3, "ssh_port=0 must be a port"),
        (3, "unknown key 'colour'"),
        (4, "second head"),
        (5, "unknown group [wrokers]"),
        (8, "a again (first on line 3)"),
        (9, "is no address"),
        (10, "ranges like node[1:9] are not read"),
        (11, "num_cpus is given twice"),
        (13, "num_gpus=many must be a whole number"),
        (14, "venv=relative must be an absolute path"),
        (15, "No closing quotation"),
    ]
    lines = str(error.value).split("\n")
    assert len(lines) == len(expected)
    for line, (number, said) in zip(lines, expected, strict=True):
        assert line.startswith(f"hosts:{number}: ")
        assert said in line


def test_a_file_without_a_head_is_refused() -> None:
    with pytest.raises(InventoryError, match=r"hosts:1: group \[head\] has no host"):
        parse_hosts("[workers]\na\n")


def test_the_example_can_be_used_as_it_is() -> None:
    head, *workers = parse_hosts(EXAMPLE.read_text())

    assert head.ssh_jump and len(workers) == 3
    assert workers[0].ray_temp_dir and not head.ray_temp_dir


def test_the_environment_wins_over_the_file_the_file_over_the_block_and_all_over_the_record(
    tmp_path: Path,
) -> None:
    hosts_file = tmp_path / "hosts"
    hosts_file.write_text("[head]\n10.0.0.1 ssh_user=file num_cpus=3 ray_temp_dir=/file/ray\n")
    record = tmp_path / ".cluster" / "10.0.0.1"
    record.mkdir(parents=True)
    (record / "hosts").write_text("[head]\n10.0.0.1 ssh_user=r num_gpus=7 ssh_jump=r num_cpus=9\n")
    (record / "settings.env").write_text("RAY_PORT=7000\nRAY_AUTH_MODE=disabled\nWANDB_DIR=''\n")

    cluster = resolve(
        {"SSH_USER": "environment", "HOSTS_FILE": str(hosts_file)},
        {"SSH_USER": "block", "NUM_CPUS": "5", "SSH_JUMP": "block", "RAY_AUTH_MODE": "token"},
        repo_root="/repo",
        records=tmp_path / ".cluster",
    )

    (head,) = cluster.hosts
    assert head.ssh_user == "environment"
    assert (head.num_cpus, head.ray_temp_dir) == ("3", "/file/ray")
    assert head.ssh_jump == "block"
    assert head.num_gpus == "7"
    assert head.venv == "/repo/.venv"
    assert cluster.settings["RAY_AUTH_MODE"] == "token"
    assert cluster.settings["RAY_PORT"] == "7000"
    assert cluster.settings["RAY_DASHBOARD_PORT"] == "8265"


def test_the_one_recorded_cluster_is_found_without_any_setting(tmp_path: Path) -> None:
    record = tmp_path / "10.0.0.1"
    record.mkdir()
    (record / "hosts").write_text(render_hosts([Host(name="10.0.0.1"), Host(name="10.0.0.2")]))
    (record / "settings.env").write_text("RAY_PORT=7000\n")

    cluster = resolve({}, {}, repo_root="/repo", records=tmp_path)

    assert [host.name for host in cluster.hosts] == ["10.0.0.1", "10.0.0.2"]


def test_no_head_is_refused_with_the_records_named(tmp_path: Path) -> None:
    for name in ("10.0.0.1", "10.0.0.9"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "hosts").write_text(f"[head]\n{name}\n")

    with pytest.raises(InventoryError, match=r"MASTER_IP is empty.*10\.0\.0\.1, 10\.0\.0\.9"):
        resolve({}, {}, repo_root="/repo", records=tmp_path)


def test_every_wrong_setting_is_named_at_once() -> None:
    with pytest.raises(InventoryError) as error:
        resolve(
            {"WORKER_NODES": "10.0.0.1 10.0.0.2 -x", "RAY_PORT": "0", "SSH_PORT": "ssh"},
            {
                "MASTER_IP": "10.0.0.1",
                "RAY_AUTH_MODE": "maybe",
                "RAY_TEMP_DIR": "/tmp/" + "x" * 60,
                "SHARED_DIRS": "runs '/mnt/my models'",
                "SSH_OPTIONS": "-o 'open",
            },
            repo_root="/repo",
        )
    for said in (
        "10.0.0.1 is in the list twice",
        "'-x' is no address",
        "RAY_PORT=0 must be a port",
        "SSH_PORT=ssh (environment) must be a port",
        "RAY_AUTH_MODE=maybe must be token or disabled",
        "a unix socket's path ends at 107",
        "SHARED_DIRS=runs must be an absolute path",
        "SSH_OPTIONS=-o 'open: cannot read it as words",
    ):
        assert said in str(error.value)
    assert len(str(error.value).split("\n")) == 8


@pytest.mark.parametrize(
    ("head", "workers", "said"),
    [("127.0.0.1", "10.0.0.2", "each of them itself"), ("::1", "::1", "twice")],
)
def test_hosts_that_cannot_make_a_cluster_are_refused(head: str, workers: str, said: str) -> None:
    with pytest.raises(InventoryError, match=said):
        resolve({"MASTER_IP": head, "WORKER_NODES": workers}, {}, repo_root="/repo")


def test_a_master_ip_that_is_not_the_files_head_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("[head]\n10.0.0.1\n")

    with pytest.raises(InventoryError, match=r"MASTER_IP=10\.0\.0\.7.*unset one of the two"):
        resolve(
            {"MASTER_IP": "10.0.0.7", "HOSTS_FILE": str(tmp_path / "hosts")}, {}, repo_root="/r"
        )


@given(paths, paths)
def test_shell_words_survive_whatever_the_settings_hold(folder: str, key: str) -> None:
    cluster = resolve(
        {"MASTER_IP": "10.0.0.1", "SSH_KEY": key, "WANDB_DIR": folder}, {}, repo_root="/repo"
    )
    lines = shlex.split(shell_lines(cluster, "/repo"))

    assert f"WANDB_DIR={folder}" in lines
    assert f"SSH_KEY={key}" in lines


def refused(**environment: str) -> str:
    settings = {"MASTER_IP": "10.0.0.1", **environment}
    with pytest.raises(InventoryError) as error:
        resolve(settings, {}, repo_root="/repo")
    return str(error.value)


@pytest.mark.parametrize(
    ("ports", "words"),
    [
        ("20000", "must be two ports"),
        ("20000-2000000", "must be two ports"),
        ("80-999", "must be from 1024 to"),
        ("65000-65530", "must be from 1024 to"),
        ("20000-20062", "must hold 64 ports at least"),
        ("20999-20000", "must hold 64 ports at least"),
    ],
)
def test_a_range_of_ports_that_ray_cannot_use_is_refused(ports: str, words: str) -> None:
    assert words in refused(RAY_WORKER_PORTS=ports)


@given(first=st.integers(1024, 65000), count=st.integers(64, 4000), cpus=st.integers(0, 300))
def test_a_range_of_ports_is_for_every_cpu_and_none_is_used_twice(
    first: int, count: int, cpus: int
) -> None:
    last = first + count - 1
    settings = {
        "MASTER_IP": "10.0.0.1",
        "RAY_WORKER_PORTS": f"{first}-{last}",
        "NUM_CPUS": str(cpus),
        "RAY_PORT": "6379",
        "RAY_DASHBOARD_PORT": "8265",
    }
    fits = (
        last + 7 <= 65535
        and count >= cpus + 32
        and not any(first <= port <= last + 7 for port in (6379, 8265))
    )
    if fits:
        resolve(settings, {}, repo_root="/repo")
    else:
        with pytest.raises(InventoryError, match="RAY_WORKER_PORTS"):
            resolve(settings, {}, repo_root="/repo")


def test_the_python_of_an_image_is_its_own_unless_venv_names_one(tmp_path: Path) -> None:
    given = {"MASTER_IP": "10.0.0.1", "CONTAINER_IMAGE": "mixed:1"}
    assert resolve(given, {}, repo_root="/repo").hosts[0].venv == ""
    assert resolve({**given, "VENV": "/opt/v"}, {}, repo_root="/repo").hosts[0].venv == "/opt/v"
    # a record of a time without a container has the default of then
    (tmp_path / "10.0.0.1").mkdir()
    (tmp_path / "10.0.0.1/hosts").write_text("[head]\n10.0.0.1 venv=/repo/.venv\n")
    (tmp_path / "10.0.0.1/settings.env").write_text("")
    assert resolve(given, {}, repo_root="/repo", records=tmp_path).hosts[0].venv == ""


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"CONDA_ENV": "mixed"}, "CONDA_ENV=mixed and CONTAINER_IMAGE=mixed:1 of 10.0.0.1"),
        ({"REMOTE_REPO": "/a:b"}, "REMOTE_REPO=/a:b of 10.0.0.1 cannot be mounted"),
        ({"CONTAINER_ENGINE": "lxc"}, "must be one of docker, podman, apptainer"),
        ({"CONTAINER_OPTIONS": "-v 'a"}, "cannot be read as words"),
        ({"CONTAINER_IMAGE": "-v"}, "must be the name of an image"),
    ],
)
def test_settings_that_no_container_can_have_are_refused(
    settings: dict[str, str], words: str
) -> None:
    assert words in refused(**{"CONTAINER_IMAGE": "mixed:1", **settings})
