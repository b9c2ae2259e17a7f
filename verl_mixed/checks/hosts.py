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

from cluster.node_table import render_table
from cluster.packages import EQUAL_ON_NODES, OPTIONAL
from verl_mixed.checks.finding import Status

_GIB_KB = 1024 * 1024
_CLOCK_WARNING_S, _CLOCK_BAD_S = 2.0, 30.0
_TEMP_BAD_KB, _TEMP_WARNING_KB = 1 * _GIB_KB, 10 * _GIB_KB
_SHM_WARNING_KB = 1 * _GIB_KB
_MEMORY_WARNING_KB = 2 * _GIB_KB

_SYNC = "run setup_cluster.sh sync"

Probe = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one check of a host."""

    status: Status
    words: str = ""
    remedy: str = ""
    value: str = ""
    """Shown in the table, if it says more than the status."""


def _ok(value: str = "") -> Verdict:
    return Verdict("ok", value=value)


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


def check_host(probe: Probe, head: Probe, here: Probe) -> dict[str, Verdict]:
    """Judge one host.

    Args:
        probe: of this host.
        head: of the head; the same mapping for the head itself.
        here: of the jumphost: `commit`, `dirty` and `content` of its checkout.

    Returns:
        Column of the table -> verdict; only `ssh` when the host did not answer.
    """
    if "probe" not in probe:
        words = f"no probe from it: {probe.get('ssh_error') or 'it ended before it was complete'}"
        command = probe.get("ssh_command", "ssh")
        remedy = f"try `{command} true`, see SSH_USER, SSH_KEY, SSH_JUMP, SSH_OPTIONS"
        return {"ssh": Verdict("bad", words, remedy)}
    return {
        "ssh": _ok(),
        "tmux": _check_tmux(probe),
        "session": _check_session(probe),
        "address": _check_address(probe),
        "python": _check_python(probe, head),
        "packages": _check_packages(probe, head),
        "commit": _check_commit(probe, head, here),
        "gpus": _ok(probe.get("gpus") or "0"),
        "ports": _check_ports(probe),
        "disk": _check_temp_dir(probe),
        "memory": _check_memory(probe),
        "clock": _check_clock(probe),
        "shared": _check_shared(probe),
        "other ray": _check_other_ray(probe),
    }


def _check_tmux(probe: Probe) -> Verdict:
    if not probe.get("tmux"):
        return Verdict("bad", "no tmux", "install it (Debian: apt-get install tmux)")
    return _ok(probe["tmux"])


def _check_session(probe: Probe) -> Verdict:
    match probe.get("session"):
        case "foreign":
            name = probe.get("node", "head")
            return Verdict(
                "bad",
                f"a tmux session '{name}' that is not of this cluster",
                "rename it with "
                f"`tmux rename-session -t {name} other`, or run cleanup of the cluster it is of",
            )
        case "ours_alive":
            return _ok("up")
        case "ours_dead":
            return Verdict("warning", "Ray has ended in its tmux session", "setup starts it again")
    if other := probe.get("other_role"):
        return Verdict(
            "bad",
            f"Ray of this cluster is up here as {other}, and the list of hosts makes it "
            f"{probe.get('node')}",
            "give the old list, or run restart",
        )
    return _ok("-")


def _check_address(probe: Probe) -> Verdict:
    remedy = "give ip= on its line of the hosts file"
    if not probe.get("ip"):
        words = "this machine cannot resolve its name to an IP address (an alias of ssh?)"
        return Verdict("bad", words, remedy)
    if probe.get("ip_here") == "0":
        needed = "Ray needs the address that the other hosts reach"
        return Verdict("bad", f"{probe['ip']} is no address of the host itself: {needed}", remedy)
    return _ok()


def _check_python(probe: Probe, head: Probe) -> Verdict:
    version = probe.get("python_version")
    if not version:
        words = f"no Python environment at {probe.get('python')}"
        return Verdict("bad", words, f"{_SYNC}, or set VENV or CONDA_ENV and CONDA_PATH")
    of_head = head.get("python_version", version)
    if version.split(".")[:2] != of_head.split(".")[:2]:
        remedy = "use the same minor version on all hosts, because Ray needs it"
        return Verdict("bad", f"Python {version}, the head has {of_head}", remedy)
    return _ok(version)


def _check_packages(probe: Probe, head: Probe) -> Verdict:
    if not probe.get("python_version"):
        return Verdict("bad", "unknown without Python", "see python")
    missing = [
        name for name in EQUAL_ON_NODES if not probe.get(f"version.{name}") and name not in OPTIONAL
    ]
    if missing:
        words = f"{', '.join(missing)} missing in {probe.get('python')}"
        return Verdict("bad", words, f"{_SYNC}, or install requirements/ there")
    other = [
        f"{name} {probe.get(key) or 'missing'} (head: {head.get(key) or 'missing'})"
        for name in EQUAL_ON_NODES
        if probe.get(key := f"version.{name}", "") != head.get(key, "")
    ]
    if other and head.get("python_version"):
        words = f"{', '.join(other)}: versions must be equal on all hosts"
        return Verdict("bad", words, "install the head's versions")
    return _ok()


def _check_commit(probe: Probe, head: Probe, here: Probe) -> Verdict:
    found = _short_commit(probe)
    if "repo_kb" not in probe:
        return Verdict("bad", f"no repository at {probe.get('repo')}", _SYNC)
    if not probe.get("commit"):
        words = f"the commit of {probe.get('repo')} is unknown"
        remedy = f"{_SYNC} to be sure that every host runs the same code"
        return Verdict("warning", words, remedy, "?")
    if head.get("commit") and _state(probe) != _state(head):
        return Verdict("bad", f"{found}, the head has {_short_commit(head)}", _SYNC)
    if here.get("commit") and _state(probe)[:2] != _state(here)[:2]:
        words = f"{found}, this machine has {_short_commit(here)}"
        return Verdict("warning", words, _SYNC, found)
    return _ok(found)


def _state(probe: Probe) -> tuple[str, ...]:
    return tuple(probe.get(key, "") for key in ("commit", "dirty", "content"))


def _short_commit(probe: Probe) -> str:
    return probe.get("commit", "")[:9] + "+" * (probe.get("dirty") == "1")


def _check_ports(probe: Probe) -> Verdict:
    if held := probe.get("ports_held", "").split():
        words = f"port {' and '.join(held)} held by another program"
        return Verdict("bad", words, "choose another RAY_PORT or RAY_DASHBOARD_PORT")
    return _ok()


def _check_temp_dir(probe: Probe) -> Verdict:
    folder = probe.get("temp_dir", "RAY_TEMP_DIR")
    if probe.get("temp_dir_state") == "foreign":
        return Verdict(
            "bad",
            f"RAY_TEMP_DIR={folder} exists and is not of this cluster",
            "choose another folder, or run cleanup of the cluster it is of",
        )
    free_kb = int(probe.get("temp_dir_kb") or 0)
    found = f"{free_kb / _GIB_KB:.0f} GiB"
    words = f"{found} free for RAY_TEMP_DIR={folder}"
    if free_kb < _TEMP_BAD_KB:
        remedy = "free some space, or choose another folder"
        return Verdict("bad", f"{words}: Ray needs 1 GiB at least", remedy)
    if free_kb < _TEMP_WARNING_KB:
        remedy = "choose another folder for long runs"
        return Verdict("warning", f"{words}: logs and spilled objects go there", remedy, found)
    return _ok(found)


def _check_memory(probe: Probe) -> Verdict:
    memory_kb, shm_kb = int(probe.get("memory_kb") or 0), int(probe.get("shm_kb") or 0)
    found = f"{memory_kb / _GIB_KB:.0f} GiB"
    if shm_kb < _SHM_WARNING_KB:
        shm = f"{shm_kb / _GIB_KB:.1f} GiB of /dev/shm"
        words = f"{shm}: Ray's object store uses slow files instead"
        return Verdict("warning", words, "in a container raise --shm-size", found)
    if memory_kb < _MEMORY_WARNING_KB:
        return Verdict("warning", f"{found} of memory available", "end other programs", found)
    return _ok(found)


def _check_clock(probe: Probe) -> Verdict:
    skew_s = clock_skew_s(probe)
    where = "ahead of" if skew_s > 0 else "behind"
    words = f"its clock is {abs(skew_s):.1f} s {where} this machine's"
    remedy = "set it by NTP (timedatectl set-ntp true)"
    if abs(skew_s) > _CLOCK_BAD_S:
        return Verdict("bad", words, remedy)
    if abs(skew_s) > _CLOCK_WARNING_S:
        return Verdict("warning", words, remedy, f"{skew_s:+.1f} s")
    return _ok()


def _check_shared(probe: Probe) -> Verdict:
    if probe.get("shared_error"):
        return Verdict("bad", probe["shared_error"], "mount it, or take it out of SHARED_DIRS")
    return _ok("ok" if probe.get("shared") else "-")


def _check_other_ray(probe: Probe) -> Verdict:
    if pids := probe.get("foreign_ray", "").split():
        return Verdict(
            "warning",
            f"a Ray that is not of this cluster runs here (raylet {', '.join(pids)}): both count "
            "the same CPUs and GPUs",
            "end it if it is yours; setup leaves it alone",
            "runs",
        )
    return _ok("-")


def report(probes: Mapping[str, Probe], here: Probe) -> tuple[str, dict[str, bool]]:
    """The table and its remedies, and host -> whether nothing is bad; the head's probe is first."""
    head = next(iter(probes.values()))
    verdicts = {name: check_host(probe, head, here) for name, probe in probes.items()}
    columns = list(dict.fromkeys(column for row in verdicts.values() for column in row))
    rows = [
        [name, *(_cell(row[column]) if column in row else "" for column in columns)]
        for name, row in verdicts.items()
    ]
    lines = [render_table(["host", *columns], rows)]
    for name, row in verdicts.items():
        lines += [
            f"{found.status}: {name}: {column}: {found.words}; {found.remedy}"
            for column, found in row.items()
            if found.status != "ok"
        ]
    good = {
        name: all(found.status != "bad" for found in row.values()) for name, row in verdicts.items()
    }
    return "\n".join(lines), good


def _cell(found: Verdict) -> str:
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
