"""Checks of the hosts of a cluster, from what `probe` of cluster/lib/node.sh found on each.

Standard library only, because it runs on the jumphost. `python3 -m verl_mixed.checks.hosts FOLDER
I=NAME...` reads FOLDER/<I>.probe of each host and FOLDER/here.probe of this machine. It prints a
table, and a line for every warning and bad finding. It writes the hosts without a bad finding to
FOLDER/good.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.inventory import EQUAL_ON_NODES, SPARE_PORTS
from config.text_table import text_table
from verl_mixed.checks.finding import Finding

_GIB_KB = 1024 * 1024
_CLOCK_WARNING_S, _CLOCK_BAD_S = 2.0, 30.0
_TEMP_BAD_KB, _TEMP_WARNING_KB = 1 * _GIB_KB, 10 * _GIB_KB
_SHM_WARNING_KB = 1 * _GIB_KB
_MEMORY_WARNING_KB = 2 * _GIB_KB

_SYNC = "run setup_cluster.sh sync"

Probe = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFinding(Finding):
    """A finding on one host; `check` is the column of the table."""

    value: str = ""
    """Shown in the table, if it says more than the status."""


def _ok(check: str, value: str = "") -> HostFinding:
    return HostFinding(status="ok", check=check, words="", value=value)


def _bad(check: str, words: str, remedy: str) -> HostFinding:
    return HostFinding(status="bad", check=check, words=words, remedy=remedy)


def _warning(check: str, words: str, remedy: str, value: str = "") -> HostFinding:
    return HostFinding(status="warning", check=check, words=words, remedy=remedy, value=value)


def parse_probe(text: str) -> dict[str, str]:
    """The `key=value` lines of a probe; if a key comes twice, the last one counts."""
    lines = (line.partition("=") for line in text.splitlines())
    return {key: value for key, equals, value in lines if equals}


def clock_skew_s(probe: Probe) -> float:
    """The least difference of the clocks that explains the host's time; positive if it is ahead.

    The host read its clock between `before_ns` and `after_ns` of this machine. A reading between
    the two is no difference, so a slow connection never looks like a wrong clock. Example: before
    1.0 s, host 7.0 s, after 2.0 s gives 5.0 s.
    """
    before, now, after = (int(probe[key]) / 1e9 for key in ("before_ns", "epoch_ns", "after_ns"))
    return min(0.0, now - before) or max(0.0, now - after)


def check_host(probe: Probe, head: Probe, here: Probe) -> list[HostFinding]:
    """Judge one host.

    Args:
        probe: of this host.
        head: of the head; the same mapping for the head itself.
        here: of the jumphost: `commit`, `dirty` and `content` of its checkout.

    Returns:
        A check per column of the table; only `ssh` when the host did not answer.
    """
    if "probe" not in probe:
        words = probe.get("ssh_error") or "it ended before it was complete"
        return [
            _bad(
                "ssh",
                f"no probe from it: {words}",
                f"try `{probe.get('ssh_command', 'ssh')} true`, see SSH_USER, SSH_KEY, SSH_JUMP, "
                "SSH_OPTIONS",
            )
        ]
    is_head = probe is head
    return [
        _ok("ssh"),
        _check_tmux(probe),
        _check_session(probe),
        _check_address(probe),
        *_check_container(probe, head),
        _check_python(probe, head),
        _check_packages(probe, head),
        _check_commit(probe, head, here, is_head=is_head),
        _ok("gpus", probe.get("gpus") or "0"),
        _check_ports(probe),
        *_check_worker_ports(probe),
        _check_temp_dir(probe),
        _check_memory(probe),
        _check_clock(probe),
        _check_shared(probe),
        _check_other_ray(probe),
    ]


def _check_tmux(probe: Probe) -> HostFinding:
    if not probe.get("tmux"):
        return _bad("tmux", "no tmux", "install it (Debian: apt-get install tmux)")
    return _ok("tmux", probe["tmux"])


def _check_session(probe: Probe) -> HostFinding:
    match probe.get("session"):
        case "foreign":
            name = probe.get("node", "head")
            return _bad(
                "session",
                f"a tmux session '{name}' that is not of this cluster",
                "rename it with "
                f"`tmux rename-session -t {name} other`, or run cleanup of the cluster it is of",
            )
        case "ours_alive":
            return _ok("session", "up")
        case "ours_dead":
            return _warning("session", "Ray has ended in its tmux session", "setup starts it again")
    if other := probe.get("other_role"):
        return _bad(
            "session",
            f"Ray of this cluster is up here as {other}, and the list of hosts makes it "
            f"{probe.get('node')}",
            "give the old list, or run restart",
        )
    return _ok("session", "-")


def _check_address(probe: Probe) -> HostFinding:
    if not probe.get("ip"):
        return _bad(
            "address",
            "this machine cannot resolve its name to an IP address (an alias of ssh?)",
            "give ip= on its line of the hosts file",
        )
    if probe.get("ip_here") == "0":
        return _bad(
            "address",
            f"{probe['ip']} is no address of the host itself: Ray needs the address that the other "
            "hosts reach",
            "give ip= on its line of the hosts file",
        )
    return _ok("address")


def _check_container(probe: Probe, head: Probe) -> list[HostFinding]:
    """The engine and the image; no column where no container is asked for."""
    image, engine = probe.get("container_image"), probe.get("container_engine", "")
    if not image:
        return []
    if error := probe.get("container_error"):
        remedy = "install or repair it, or choose another in CONTAINER_ENGINE"
        return [_bad("container", f"CONTAINER_IMAGE={image}: {error}", remedy)]
    if probe.get("container_missing"):
        get = (
            f"apptainer pull {image} docker://IMAGE" if engine == "apptainer" else f"{engine} pull"
        )
        return [
            _bad(
                "container",
                f"{engine} has no CONTAINER_IMAGE={image} here",
                f"get it on this host (`{get}`), or load it from a file; setup does not pull",
            )
        ]
    ours, of_head = probe.get("container_id", ""), head.get("container_id", "")
    if ours != of_head and ours and of_head:
        return [
            _warning(
                "container",
                f"{image} is another image than on the head ({ours[:19]}, {of_head[:19]})",
                "pull the same tag on both, or name it by its digest",
                engine,
            )
        ]
    return [_ok("container", engine)]


def _check_python(probe: Probe, head: Probe) -> HostFinding:
    version = probe.get("python_version")
    if not version and probe.get("container_image"):
        return _bad(
            "python",
            f"no Python answers in {probe['container_image']}: "
            f"{probe.get('container_said') or 'see container and commit'}",
            "the image must have `python` on its PATH, or VENV names its environment in the image",
        )
    if not version:
        return _bad(
            "python",
            f"no Python environment at {probe.get('python')}",
            f"{_SYNC}, or set VENV or CONDA_ENV and CONDA_PATH",
        )
    of_head = head.get("python_version", version)
    if version.split(".")[:2] != of_head.split(".")[:2]:
        return _bad(
            "python",
            f"Python {version}, the head has {of_head}",
            "use the same minor version on all hosts, because Ray needs it",
        )
    return _ok("python", version)


def _check_packages(probe: Probe, head: Probe) -> HostFinding:
    if not probe.get("python_version"):
        return _bad("packages", "unknown without Python", "see python")
    missing = [
        name for name in EQUAL_ON_NODES if not probe.get(f"version.{name}") and name != "vllm"
    ]
    if missing:
        return _bad(
            "packages",
            f"{', '.join(missing)} missing in {probe.get('python')}",
            "build the image with them (docs/cluster.md)"
            if probe.get("container_image")
            else f"{_SYNC}, or install requirements/ there",
        )
    other = [
        f"{name} {probe.get(key) or 'missing'} (head: {head.get(key) or 'missing'})"
        for name in EQUAL_ON_NODES
        if probe.get(key := f"version.{name}", "") != head.get(key, "")
    ]
    if other and head.get("python_version"):
        return _bad(
            "packages",
            f"{', '.join(other)}: versions must be equal on all hosts",
            "install the head's versions",
        )
    return _ok("packages")


def _state(probe: Probe) -> tuple[str, ...]:
    return tuple(probe.get(key, "") for key in ("commit", "dirty", "content"))


def _check_commit(probe: Probe, head: Probe, here: Probe, *, is_head: bool) -> HostFinding:
    commit = probe.get("commit", "")
    short = commit[:9] + "+" * (probe.get("dirty") == "1")
    if "repo_kb" not in probe:
        return _bad("commit", f"no repository at {probe.get('repo')}", _SYNC)
    if not commit:
        return _warning(
            "commit",
            f"the commit of {probe.get('repo')} is unknown",
            f"{_SYNC} to be sure that every host runs the same code",
            "?",
        )
    if not is_head and _state(probe) != _state(head) and head.get("commit"):
        return _bad(
            "commit",
            f"{short}, the head has {head['commit'][:9] + '+' * (head.get('dirty') == '1')}",
            _SYNC,
        )
    if here.get("commit") and _state(probe)[:2] != _state(here)[:2]:
        ours = here["commit"][:9] + "+" * (here.get("dirty") == "1")
        return _warning("commit", f"{short}, this machine has {ours}", _SYNC, short)
    return _ok("commit", short)


def _check_ports(probe: Probe) -> HostFinding:
    held = probe.get("ports_held", "").split()
    if held:
        return _bad(
            "ports",
            f"port {' and '.join(held)} held by another program",
            "choose another RAY_PORT or RAY_DASHBOARD_PORT",
        )
    return _ok("ports")


def _check_worker_ports(probe: Probe) -> list[HostFinding]:
    """Whether RAY_WORKER_PORTS has enough ports for the processes of this host."""
    words = probe.get("worker_ports", "")
    first, dash, last = words.partition("-")
    if not dash or probe.get("num_cpus"):  # a given NUM_CPUS was looked at with the settings
        return []
    cpus = int(probe.get("cpus") or 0)
    if int(last) - int(first) + 1 < cpus + SPARE_PORTS:
        return [
            _bad(
                "worker ports",
                f"RAY_WORKER_PORTS={words} holds {int(last) - int(first) + 1} ports, and the host "
                f"has {cpus} CPUs: {cpus + SPARE_PORTS} are needed",
                "give a longer range, or a smaller NUM_CPUS",
            )
        ]
    return [_ok("worker ports")]


def _check_temp_dir(probe: Probe) -> HostFinding:
    folder = probe.get("temp_dir", "RAY_TEMP_DIR")
    if probe.get("temp_dir_state") == "foreign":
        return _bad(
            "disk",
            f"RAY_TEMP_DIR={folder} exists and is not of this cluster, or others can replace it",
            "choose another folder, or run cleanup of the cluster it is of",
        )
    free_kb = int(probe.get("temp_dir_kb") or 0)
    found = f"{free_kb / _GIB_KB:.0f} GiB"
    if free_kb < _TEMP_BAD_KB:
        return _bad(
            "disk",
            f"{found} free for RAY_TEMP_DIR={folder}: Ray needs 1 GiB at least",
            "free some space, or choose another folder",
        )
    if free_kb < _TEMP_WARNING_KB:
        return _warning(
            "disk",
            f"{found} free for RAY_TEMP_DIR={folder}: logs and spilled objects go there",
            "choose another folder for long runs",
            found,
        )
    return _ok("disk", found)


def _check_memory(probe: Probe) -> HostFinding:
    memory_kb, shm_kb = int(probe.get("memory_kb") or 0), int(probe.get("shm_kb") or 0)
    found = f"{memory_kb / _GIB_KB:.0f} GiB"
    if shm_kb < _SHM_WARNING_KB:
        return _warning(
            "memory",
            f"{shm_kb / _GIB_KB:.1f} GiB of /dev/shm: Ray's object store uses slow files instead",
            "in a container raise --shm-size",
            found,
        )
    if memory_kb < _MEMORY_WARNING_KB:
        return _warning("memory", f"{found} of memory available", "end other programs", found)
    return _ok("memory", found)


def _check_clock(probe: Probe) -> HostFinding:
    skew_s = clock_skew_s(probe)
    where = "ahead of" if skew_s > 0 else "behind"
    words = f"its clock is {abs(skew_s):.1f} s {where} this machine's"
    remedy = "set it by NTP (timedatectl set-ntp true)"
    if abs(skew_s) > _CLOCK_BAD_S:
        return _bad("clock", words, remedy)
    if abs(skew_s) > _CLOCK_WARNING_S:
        return _warning("clock", words, remedy, f"{skew_s:+.1f} s")
    return _ok("clock")


def _check_shared(probe: Probe) -> HostFinding:
    if probe.get("shared_error"):
        return _bad("shared", probe["shared_error"], "mount it, or take it out of SHARED_DIRS")
    return _ok("shared", "ok" if probe.get("shared") else "-")


def _check_other_ray(probe: Probe) -> HostFinding:
    pids = probe.get("foreign_ray", "").split()
    if pids:
        return _warning(
            "other ray",
            f"a Ray that is not of this cluster runs here (raylet {', '.join(pids)}): both count "
            "the same CPUs and GPUs",
            "end it if it is yours; setup leaves it alone",
            "runs",
        )
    return _ok("other ray", "-")


def report(probes: Mapping[str, Probe], here: Probe) -> tuple[str, dict[str, bool]]:
    """The table and its remedies, and for every host whether nothing is bad.

    Args:
        probes: host -> probe, the head first.
        here: of the jumphost.
    """
    head = next(iter(probes.values()))
    findings = {name: check_host(probe, head, here) for name, probe in probes.items()}
    columns = list(dict.fromkeys(found.check for row in findings.values() for found in row))
    rows = []
    for name, row in findings.items():
        cells = {found.check: _cell(found) for found in row}
        rows.append([name, *(cells.get(column, "") for column in columns)])
    lines = text_table([["host", *columns], *rows])
    for name, row in findings.items():
        lines += [
            f"{found.status}: {name}: {found.check}: {found.words}; {found.remedy}"
            for found in row
            if found.status != "ok"
        ]
    good = {name: all(found.status != "bad" for found in row) for name, row in findings.items()}
    return "\n".join(lines), good


def _cell(found: HostFinding) -> str:
    if found.status == "ok":
        return found.value or "ok"
    return f"{found.value} ({found.status})" if found.value else found.status


def main(arguments: Sequence[str]) -> int:
    """Print the report; exit 1 when any host has anything bad."""
    folder, *hosts = arguments
    probes = {
        name: parse_probe((Path(folder) / f"{index}.probe").read_text(errors="replace"))
        for index, name in (host.split("=", 1) for host in hosts)
    }
    here = parse_probe((Path(folder) / "here.probe").read_text(errors="replace"))
    text, good = report(probes, here)
    print(text)
    (Path(folder) / "good").write_text("".join(f"{name}\n" for name in probes if good[name]))
    return 0 if all(good.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
