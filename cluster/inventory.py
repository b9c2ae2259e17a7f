"""The hosts of a cluster and the settings of each host.

Settings come from a hosts file, a script's block and the environment. The hosts file is Ansible's
INI subset: groups `[head]` and `[workers]`, `[all:vars]`, `[head:vars]`, `[workers:vars]`, and
lines `ADDRESS key=value ...`. Standard library only: this runs on the jumphost, and
cluster/lib/remote.sh reads what it prints:

    python3 -m cluster.inventory REPO_ROOT RECORDS < given
"""

import ipaddress
import os
import re
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from config.environment import ENV_FORWARD

# key in a hosts file -> the setting that gives it to every host
HOST_KEYS = {
    "ssh_user": "SSH_USER",
    "ssh_port": "SSH_PORT",
    "ssh_key": "SSH_KEY",
    "ssh_jump": "SSH_JUMP",
    "num_cpus": "NUM_CPUS",
    "num_gpus": "NUM_GPUS",
    "conda_env": "CONDA_ENV",
    "conda_path": "CONDA_PATH",
    "venv": "VENV",
    "repo": "REMOTE_REPO",
    "ray_temp_dir": "RAY_TEMP_DIR",
    "env": "HOST_ENV",
    "setup_commands": "SETUP_COMMANDS",
    "container_image": "CONTAINER_IMAGE",
    "container_engine": "CONTAINER_ENGINE",
    "container_options": "CONTAINER_OPTIONS",
}
_OF_ONE_HOST = ("ssh_host", "ip")
_ANSIBLE_KEYS = {
    "ansible_host": "ssh_host",
    "ansible_user": "ssh_user",
    "ansible_port": "ssh_port",
    "ansible_ssh_private_key_file": "ssh_key",
}
_GROUPS = ("head", "workers")
_SECTIONS = (*_GROUPS, "all:vars", "head:vars", "workers:vars")

# settings of the whole cluster
_CLUSTER_DEFAULTS = {
    "WANDB_DIR": "",
    "RAY_PORT": "6379",
    "RAY_DASHBOARD_PORT": "8265",
    "RAY_DASHBOARD_HOST": "127.0.0.1",
    "RAY_AUTH_MODE": "token",
    "SSH_OPTIONS": "",
    "SHARED_DIRS": "",
    "OBJECT_STORE_MEMORY": "",
    "ENV_FORWARD": ENV_FORWARD,
    "RAY_WORKER_PORTS": "",
}

EQUAL_ON_NODES = (
    *("torch", "verl", "vllm", "ray", "transformers", "TransferQueue", "tensordict"),
    "verl-mixed-agent-loop",
)
"""Packages whose version must be the same on every node, because the nodes exchange objects."""

CONTAINER_ENGINES = ("docker", "podman", "apptainer")

NODE_PORTS = 7
"""Ports after RAY_WORKER_PORTS that a node's own services have; see `ray_ports` of node.sh."""

LEAST_WORKER_PORTS = 64

SPARE_PORTS = 32
"""Ports for processes without a CPU of their own: agent loop workers, drivers, Ray's own tasks."""

# The first character is no dash, because ssh would read the word as an option.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:%-]*")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*")
_JUMP = re.compile(r"[A-Za-z0-9_\[][A-Za-z0-9_.:@,%\[\]-]*")

# Ray appends this text, and the path of a unix socket has at most 107 bytes.
_LONGEST_TEMP_DIR = 107 - len("/session_2026-01-31_23-59-59_123456_1234567/sockets/plasma_store")


class InventoryError(ValueError):
    """All mistakes in the hosts and settings, one per line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host with its settings from its line and groups; an empty field was not given."""

    name: str
    """The address as written, unique in the cluster."""

    ssh_host: str = ""
    """The address for ssh, if it is not `name`."""

    ip: str = ""
    """The address for Ray, as the other hosts reach it."""

    ssh_user: str = ""
    ssh_port: str = ""
    ssh_key: str = ""
    ssh_jump: str = ""
    num_cpus: str = ""
    num_gpus: str = ""
    conda_env: str = ""
    conda_path: str = ""
    venv: str = ""
    repo: str = ""
    ray_temp_dir: str = ""
    env: str = ""
    """Variables for everything on this host, as shell words `NAME=VALUE`."""

    setup_commands: str = ""
    """Shell commands that come first: modules, another conda."""

    container_image: str = ""
    """Image in which Ray and the run are started; empty: no container."""

    container_engine: str = ""
    """docker, podman or apptainer; empty: the first of them on the host."""

    container_options: str = ""
    """More words for the engine, before the image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The hosts, head first, with all their settings, and the settings of the cluster."""

    hosts: tuple[Host, ...]
    settings: dict[str, str]

    recorded_workers: tuple[str, ...] = ()
    """The workers at the last `setup`."""

    @property
    def cluster_id(self) -> str:
        """The head's name with only characters that are safe in a file name and in a shell."""
        return safe_id(self.hosts[0].name)


def safe_id(name: str) -> str:
    """`name` with every unsafe character replaced."""
    return re.sub(r"[^A-Za-z0-9.-]", "_", name)


def session(index: int) -> str:
    """Name of the tmux session and of the Ray node of the host at this place in the list."""
    return "head" if index == 0 else f"node{index - 1}"


def _rule(key: str, value: str) -> str | None:
    """The rule that this value breaks, or None."""
    if not value.isprintable():
        return "must be one line without control characters"
    if not value:
        return None
    match key:
        case "name" | "ssh_host" if not _NAME.fullmatch(value):
            return "is no address: one name or IP a line (ranges like node[1:9] are not read)"
        case "ssh_user" if not _USER.fullmatch(value):
            return "is no user name"
        case "ssh_jump" if not _JUMP.fullmatch(value):
            return "must be [user@]host[:port], several with commas"
        case "ssh_port" | "ray_port" | "ray_dashboard_port":
            if not (value.isascii() and value.isdigit() and 1 <= int(value) <= 65535):
                return "must be a port from 1 to 65535"
        case "num_cpus" | "num_gpus" | "object_store_memory":
            if not (value.isascii() and value.isdigit()):
                return "must be a whole number"
        case "ip" | "ray_dashboard_host":
            if not _is_ip(value):
                return "must be an IP address"
        case "venv" | "repo" | "conda_path" | "ray_temp_dir" | "wandb_dir" | "shared_dirs":
            if not value.startswith("/"):
                return "must be an absolute path on the host"
            if key == "ray_temp_dir" and len(value.encode()) > _LONGEST_TEMP_DIR:
                return (
                    f"must be at most {_LONGEST_TEMP_DIR} bytes: a unix socket's path ends at 107"
                )
            if key == "ray_temp_dir" and len(Path(value).parts) < 3:
                return "must be a folder of its own below another: cleanup removes it"
        case "env":
            return _wrong_variables(value)
        case "container_image" if value.startswith("-") or " " in value:
            return "must be the name of an image, or the path of a .sif file"
        case "container_engine" if value not in CONTAINER_ENGINES:
            return f"must be one of {', '.join(CONTAINER_ENGINES)}"
        case "container_options":
            return _wrong_words(value)
        case "ray_worker_ports":
            return _wrong_range(value)
        case "ray_auth_mode" if value not in ("token", "disabled"):
            return "must be token or disabled"
    return None


def _wrong_variables(value: str) -> str | None:
    if problem := _wrong_words(value):
        return problem
    wrong = [word for word in shlex.split(value) if not re.match(r"[A-Za-z_][A-Za-z0-9_]*=", word)]
    return f"has {wrong[0]!r}, which is no NAME=VALUE" if wrong else None


def _wrong_words(value: str) -> str | None:
    try:
        shlex.split(value)
    except ValueError as error:
        return f"cannot be read as words: {error}"
    return None


def _wrong_range(value: str) -> str | None:
    match = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", value)
    if match is None:
        return "must be two ports, as in 20000-20999"
    first, last = map(int, match.groups())
    if first < 1024 or last + NODE_PORTS > 65535:
        most = 65535 - NODE_PORTS
        return f"must be from 1024 to {most}: the {NODE_PORTS} ports after it are used too"
    if last - first + 1 < LEAST_WORKER_PORTS:
        return f"must hold {LEAST_WORKER_PORTS} ports at least: every process on a node has one"
    return None


def port_problems(settings: Mapping[str, str], hosts: Sequence[Host]) -> list[str]:
    """What is wrong with RAY_WORKER_PORTS in view of the other ports and of the hosts' CPUs."""
    value = settings["RAY_WORKER_PORTS"]
    if not value or _wrong_range(value):
        return []  # `_rule` has said it
    first, last = map(int, value.split("-"))
    problems = [
        f"{name}={settings[name]} is within RAY_WORKER_PORTS={value} or the {NODE_PORTS} ports "
        "after it: choose another"
        for name in ("RAY_PORT", "RAY_DASHBOARD_PORT")
        if settings[name].isdigit() and first <= int(settings[name]) <= last + NODE_PORTS
    ]
    for host in hosts:
        if host.num_cpus.isdigit() and last - first + 1 < int(host.num_cpus) + SPARE_PORTS:
            problems.append(
                f"RAY_WORKER_PORTS={value} holds {last - first + 1} ports and {host.name} has "
                f"NUM_CPUS={host.num_cpus}: {int(host.num_cpus) + SPARE_PORTS} are needed, one for "
                f"each CPU and {SPARE_PORTS} for processes without one"
            )
    return problems


def container_problems(hosts: Sequence[Host]) -> list[str]:
    """Settings that a host with CONTAINER_IMAGE cannot have."""
    problems = []
    for host in hosts:
        if not host.container_image:
            continue
        if host.conda_env:
            problems.append(
                f"CONDA_ENV={host.conda_env} and CONTAINER_IMAGE={host.container_image} of "
                f"{host.name}: the environment is in the image; unset CONDA_ENV, and name its "
                "folder in VENV if it is not first on the image's PATH"
            )
        for setting, path in (("REMOTE_REPO", host.repo), ("RAY_TEMP_DIR", host.ray_temp_dir)):
            if ":" in path or "," in path:
                problems.append(
                    f"{setting}={path} of {host.name} cannot be mounted into a container: it must "
                    "have no colon and no comma"
                )
    return problems


def _is_ip(value: str) -> bool:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return False
    return True


def parse_hosts(text: str, place: str = "hosts") -> tuple[Host, ...]:
    """The head of a hosts file, then its workers, with the groups' variables filled in.

    Raises:
        InventoryError: lists every mistake with its line number; `place` is the file's name.
    """
    problems: list[tuple[int, str]] = []
    sections = _sections(text, problems)
    variables = {name: _variables(sections[name], problems) for name in _SECTIONS[2:]}
    hosts: list[Host] = []
    lines: dict[str, int] = {}
    for group in _GROUPS:
        for number, (name, *words) in sections[group]:
            if broken := _rule("name", name):
                problems.append((number, f"{name!r} {broken}"))
            if name in lines:
                problems.append((number, f"{name} again (first on line {lines[name]})"))
            lines.setdefault(name, number)
            own = _variables([(number, words)], problems)
            given = {**variables["all:vars"], **variables[f"{group}:vars"], **own}
            hosts.append(Host(name=name, **given))
    if not sections["head"]:
        problems.append((1, "group [head] has no host: give the head's address below [head]"))
    problems += [
        (number, f"{words[0]} is a second head: group [head] has exactly one host")
        for number, words in sections["head"][1:]
    ]
    if problems:
        raise InventoryError(
            "\n".join(f"{place}:{line}: {said}" for line, said in sorted(problems))
        )
    return tuple(hosts)


def _read_hosts(path: Path, place: str = "") -> tuple[Host, ...]:
    place = place or str(path)
    try:
        return parse_hosts(path.read_text(encoding="utf-8"), place)
    except UnicodeDecodeError as error:
        raise InventoryError(
            f"{place}: no text in UTF-8 ({error.reason}); name a hosts file"
        ) from error


def _sections(text: str, problems: list[tuple[int, str]]) -> dict[str, list[tuple[int, list[str]]]]:
    """Section -> (line number, words) of each of its lines."""
    sections: dict[str, list[tuple[int, list[str]]]] = {name: [] for name in _SECTIONS}
    current = ""
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if not stripped or stripped[0] in "#;":
            continue
        header = re.fullmatch(r"\[([^\]]*)\]\s*(?:[#;].*)?", stripped)
        if header:
            current = header[1].strip()
            if current not in _SECTIONS:
                known = ", ".join(f"[{name}]" for name in _SECTIONS)
                problems.append((number, f"unknown group [{current}]: give one of {known}"))
            continue
        try:
            words = shlex.split(stripped, comments=True)
        except ValueError as error:
            problems.append((number, f"cannot read the line: {error}"))
            continue
        if not current:
            problems.append((number, f"{words[0]!r} stands before any group: begin with [head]"))
        elif current in sections:
            if current.endswith(":vars"):  # the one place where Ansible has spaces around `=`
                words = [" ".join(words)]
            sections[current].append((number, words))
    return sections


def _variables(
    lines: Sequence[tuple[int, Sequence[str]]], problems: list[tuple[int, str]]
) -> dict[str, str]:
    """Field -> value, from words `key=value`."""
    found: dict[str, str] = {}
    for number, words in lines:
        for word in words:
            given, equals, value = (part.strip() for part in word.partition("="))
            key = _ANSIBLE_KEYS.get(given, given)
            if not equals:
                problem = f"'{word}' is not key=value"
            elif key not in HOST_KEYS and key not in _OF_ONE_HOST:
                known = ", ".join([*_OF_ONE_HOST[1:], *HOST_KEYS])
                problem = f"unknown key {given!r}: give one of {known}"
            elif broken := _rule(key, value):
                problem = f"{given}={value} {broken}"
            elif key in found:
                problem = f"{key} is given twice"
            else:
                found[key] = value
                continue
            problems.append((number, problem))
    return found


def render_hosts(hosts: Sequence[Host]) -> str:
    """A hosts file that `parse_hosts` reads back as these hosts."""
    lines = ["[head]"]
    for index, host in enumerate(hosts):
        if index == 1:
            lines += ["", "[workers]"]
        given = [(field.name, getattr(host, field.name)) for field in fields(host)[1:]]
        to_ansible = {"ssh_host": "ansible_host"}
        words = [f"{to_ansible.get(key, key)}={value}" for key, value in given if value]
        lines.append(shlex.join([host.name, *words]))
    return "\n".join(lines) + "\n"


def resolve(
    environment: Mapping[str, str],
    block: Mapping[str, str],
    *,
    repo_root: str,
    records: Path | None = None,
) -> Cluster:
    """Decide every setting: environment > hosts file > block > what `setup` recorded > default.

    Args:
        environment: setting -> value from the environment; lists as shell words.
        block: setting -> value from the script's block.
        repo_root: this checkout, which is the default of REMOTE_REPO.
        records: the folder with a record per cluster, or None.

    Raises:
        InventoryError: lists every mistake.
        OSError: the hosts file cannot be read.
    """
    problems: list[str] = []
    hosts_file = environment.get("HOSTS_FILE") or block.get("HOSTS_FILE", "")
    from_file: tuple[Host, ...] = ()
    if hosts_file:
        from_file = _read_hosts(Path(hosts_file).expanduser(), hosts_file)
    master = environment.get("MASTER_IP") or (from_file[0].name if from_file else "")
    master = master or block.get("MASTER_IP", "")
    if from_file and master != from_file[0].name:
        raise InventoryError(
            f"MASTER_IP={master} of the environment is not the head of {hosts_file} "
            f"({from_file[0].name}): unset one of the two"
        )
    if master == "local":
        raise InventoryError(
            "MASTER_IP=local is a run on this machine alone (run_mixed_training.sh): a cluster "
            "needs the address of its head"
        )
    if not master:
        master = _only_record(records)
    recorded_hosts, recorded = _record(records, master)

    in_block = "" if from_file else block.get("WORKER_NODES", "")
    if workers := environment.get("WORKER_NODES") or in_block:
        names = [master, *_words("WORKER_NODES", workers, problems)]
    else:
        names = [master, *(host.name for host in (from_file or recorded_hosts)[1:])]
    for index, name in enumerate(names):
        if broken := _rule("name", name):
            problems.append(f"{'MASTER_IP' if index == 0 else 'WORKER_NODES'}: {name!r} {broken}")
        if name in names[:index]:
            problems.append(f"{name} is in the list twice: a host has one role")

    in_file = {host.name: host for host in from_file}
    in_record = {host.name: host for host in recorded_hosts}
    for key, setting in HOST_KEYS.items():
        for values, place in ((environment, "environment"), (block, "block")):
            if broken := _rule(key, values.get(setting, "")):
                problems.append(f"{setting}={values[setting]} ({place}) {broken}")

    def decided(name: str) -> Host:
        of_file = in_file.get(name, Host(name=name))
        of_record = in_record.get(name, Host(name=name))
        values = {key: getattr(of_file, key) or getattr(of_record, key) for key in _OF_ONE_HOST}
        for key, setting in HOST_KEYS.items():
            values[key] = (
                environment.get(setting)
                or getattr(of_file, key)
                or block.get(setting)
                or getattr(of_record, key)
            )
        host = Host(name=name, **values)
        repo = host.repo or repo_root
        own = f"{repo}/.venv"
        if host.container_image:
            # the Python of the image; the record may have the default of a time without one
            venv = "" if host.venv == own == of_record.venv else host.venv
        else:
            venv = host.venv or own
        ip = host.ip or _resolved(host.ssh_host or name)
        return replace(host, ip=ip, repo=repo, venv=venv)

    settings = {}
    for name, default in _CLUSTER_DEFAULTS.items():
        value = environment.get(name) or block.get(name) or recorded.get(name) or default
        if name in ("SSH_OPTIONS", "SHARED_DIRS"):
            values = _words(name, value, problems)
            value = shlex.join(values)
        else:
            values = [value]
        settings[name] = value
        for one in values:
            if broken := _rule(name.lower(), one):
                problems.append(f"{name}={one} {broken}")
    hosts = tuple(decided(name) for name in names)
    problems += port_problems(settings, hosts) + container_problems(hosts)
    if len(hosts) > 1 and hosts[0].ip.startswith("127."):
        problems.append(
            f"the head {master} is {hosts[0].ip} for the workers, which is each of them itself: "
            "give an address that every host reaches (in a hosts file: ip=)"
        )
    ips = [host.ip for host in hosts]
    for index, host in enumerate(hosts):
        if host.ip and host.ip in ips[:index] and host.name not in names[:index]:
            first = names[ips.index(host.ip)]
            problems.append(f"{host.name} and {first} are the same host ({host.ip}): name it once")
    if problems:
        raise InventoryError("\n".join(problems))
    return Cluster(
        hosts=hosts,
        settings=settings,
        recorded_workers=tuple(host.name for host in recorded_hosts[1:]),
    )


def _words(name: str, value: str, problems: list[str]) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError as error:
        problems.append(f"{name}={value}: cannot read it as words: {error}")
        return []


def _only_record(records: Path | None) -> str:
    """The head of the one recorded cluster."""
    found = sorted(records.glob("*/hosts")) if records and records.is_dir() else []
    if len(found) == 1:
        return _read_hosts(found[0])[0].name
    known = f" (recorded here: {', '.join(path.parent.name for path in found)})" if found else ""
    raise InventoryError(
        f"MASTER_IP is empty: set it in the block at the top of the script, in the environment, "
        f"or give --hosts FILE{known}"
    )


def _record(records: Path | None, master: str) -> tuple[tuple[Host, ...], dict[str, str]]:
    """The hosts and settings that `setup` recorded for this head."""
    folder = records / safe_id(master) if records else None
    if folder is None or not (folder / "hosts").is_file():
        return (), {}
    hosts = _read_hosts(folder / "hosts")
    words = shlex.split((folder / "settings.env").read_text(), comments=True)
    return hosts, {name: value for name, _, value in (word.partition("=") for word in words)}


def _resolved(address: str) -> str:
    """The IP address of a name on this machine; empty for an alias of ssh."""
    if _is_ip(address):
        return address
    try:
        found = socket.getaddrinfo(address, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return ""
    return str(found[0][4][0])


def shell_lines(cluster: Cluster, records: str) -> str:
    """Assignments for bash with quoted values; cluster/lib/remote.sh describes each one."""
    head, *workers = cluster.hosts
    names = [host.name for host in cluster.hosts]
    shared = {
        "CLUSTER_ID": cluster.cluster_id,
        "MASTER_IP": head.name,
        "WORKER_NODES": " ".join(host.name for host in workers),
        **cluster.settings,
    }
    of_head = {setting: getattr(head, key) for key, setting in HOST_KEYS.items()}
    lines = [f"{name}={shlex.quote(value)}" for name, value in {**shared, **of_head}.items()]
    record = f"{records}/{cluster.cluster_id}"
    recorded = "".join(f"{name}={shlex.quote(value)}\n" for name, value in shared.items())
    lines += [
        f"CLUSTER_RECORD={shlex.quote(record)}",
        f"RECORD_SETTINGS={shlex.quote(recorded)}",
        f"RECORD_HOSTS={shlex.quote(render_hosts(cluster.hosts))}",
        "HOSTS_FILE=''",
        f"HOST_NAMES=({shlex.join(names)})",
        f"RECORDED_WORKERS={shlex.quote(' '.join(cluster.recorded_workers))}",
        f"LEFT_OUT=({shlex.join(name for name in cluster.recorded_workers if name not in names)})",
    ]
    for index, host in enumerate(cluster.hosts):
        user = f"{host.ssh_user}@" if host.ssh_user else ""
        words = shlex.split(cluster.settings["SSH_OPTIONS"])
        words += ["-p", host.ssh_port] * bool(host.ssh_port)
        words += ["-i", os.path.expanduser(host.ssh_key)] * bool(host.ssh_key)
        words += ["-J", host.ssh_jump] * bool(host.ssh_jump)
        lines.append(f"HOST_SSH_{index}=({shlex.join(words)})")
        of_host = {
            "HOST_INDEX": str(index),
            "HOST_SESSION": session(index),
            "HOST_IP": host.ip,
            "HOST_REPO": host.repo,
            "HOST_TARGET": user + (host.ssh_host or host.name),
            "HOST_SETTINGS": node_settings(cluster, index),
        }
        lines += [
            f"{name}[{shlex.quote(host.name)}]={shlex.quote(value)}"
            for name, value in of_host.items()
        ]
    return "\n".join(lines) + "\n"


def node_settings(cluster: Cluster, index: int) -> str:
    """Assignments for cluster/lib/node.sh about the host that it runs on, one per line."""
    head, host = cluster.hosts[0], cluster.hosts[index]
    values = {
        "CLUSTER_ID": cluster.cluster_id,
        "MASTER_IP": head.name,
        "WORKER_NODES": " ".join(other.name for other in cluster.hosts[1:]),
        "NODE_NAME": session(index),
        "NODE_IP": host.ip,
        "HEAD_IP": head.ip,
        "HEAD_ADDRESS": (f"[{head.ip}]" if ":" in head.ip else head.ip)
        + f":{cluster.settings['RAY_PORT']}",
        **{
            name: cluster.settings[name]
            for name in _CLUSTER_DEFAULTS
            if name not in ("SSH_OPTIONS", "SHARED_DIRS")
        },
        **{
            setting: getattr(host, key)
            for key, setting in HOST_KEYS.items()
            if not key.startswith("ssh_")
        },
    }
    lines = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
    lines.append(f"SHARED_DIRS=({cluster.settings['SHARED_DIRS']})")
    lines.append(f"PACKAGES=({shlex.join(EQUAL_ON_NODES)})")
    return "\n".join(lines)


def main() -> int:
    """Read settings from stdin and print the assignments; return 2 with all mistakes on stderr."""
    repo_root, records = sys.argv[1:]
    words = sys.stdin.read().split("\0")[:-1]  # environment NAME VALUE block NAME VALUE ...
    given: dict[str, dict[str, str]] = {"environment": {}, "block": {}}
    for place, name, value in zip(words[0::3], words[1::3], words[2::3], strict=True):
        given[place][name] = value
    try:
        cluster = resolve(**given, repo_root=repo_root, records=Path(records))
    except (InventoryError, OSError) as error:
        print("\n".join(f"error: {line}" for line in str(error).split("\n")), file=sys.stderr)
        return 2
    print(shell_lines(cluster, records), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
