"""Whether hosts can carry the cluster: what `probe` of cluster/lib/node.sh found, judged.

Standard library only: it runs on the jumphost. `python3 -m verl_mixed.checks.hosts FOLDER
I=NAME...` reads FOLDER/<I>.probe of each host and FOLDER/here.probe of this machine, prints a table
and a line for everything that is not ok, and writes the hosts without anything bad to FOLDER/good.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster.node_table import render_table

PACKAGES = ("torch", "verl", "vllm", "ray", "transformers", "verl-mixed-agent-loop")
_OPTIONAL = ("vllm",)

_GIB_KB = 1024 * 1024
_CLOCK_WARNING_S, _CLOCK_BAD_S = 2.0, 30.0
_TEMP_BAD_KB, _TEMP_WARNING_KB = 1 * _GIB_KB, 10 * _GIB_KB
_SHM_WARNING_KB = 1 * _GIB_KB
_MEMORY_WARNING_KB = 2 * _GIB_KB

Probe = Mapping[str, str]


Verdict = Literal["ok", "warning", "bad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing looked at on one host."""

    name: str
    verdict: Verdict
    found: str = ""
    """For the table, where it says more than `ok`."""

    message: str = ""
    """The rule or cause and the remedy, where the verdict is not ok."""


def _ok(name: str, found: str = "") -> Check:
    return Check(name=name, verdict="ok", found=found)


def _bad(name: str, message: str) -> Check:
    return Check(name=name, verdict="bad", message=message)


def _warning(name: str, message: str, found: str = "") -> Check:
    return Check(name=name, verdict="warning", message=message, found=found)


def parse_probe(text: str) -> dict[str, str]:
    """The `key=value` lines of a probe; of a key that comes twice the last counts."""
    lines = (line.partition("=") for line in text.splitlines())
    return {key: value for key, equals, value in lines if equals}


def clock_skew_s(probe: Probe) -> float:
    """The least skew that explains the host's clock, from this machine's time before and after.

    The host read its clock between the two, so a reading between them is no skew at all: a slow
    connection never looks like a wrong clock. Positive: the host is ahead.
    """
    before, now, after = (int(probe[key]) / 1e9 for key in ("before_ns", "epoch_ns", "after_ns"))
    return min(0.0, now - before) or max(0.0, now - after)


def check_host(probe: Probe, head: Probe, here: Probe) -> list[Check]:
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
                f"no probe from it: {words}; try `{probe.get('ssh_command', 'ssh')} true`, "
                "see SSH_USER, SSH_KEY, SSH_JUMP, SSH_OPTIONS",
            )
        ]
    is_head = probe is head
    return [
        _ok("ssh"),
        _check_tmux(probe),
        _check_session(probe),
        _check_address(probe),
        _check_python(probe, head),
        _check_packages(probe, head),
        _check_commit(probe, head, here, is_head=is_head),
        _ok("gpus", probe.get("gpus") or "0"),
        _check_ports(probe),
        _check_temp_dir(probe),
        _check_memory(probe),
        _check_clock(probe),
        _check_shared(probe),
        _check_other_ray(probe),
    ]


def _check_tmux(probe: Probe) -> Check:
    if not probe.get("tmux"):
        return _bad("tmux", "no tmux: install it (Debian: apt-get install tmux)")
    return _ok("tmux", probe["tmux"])


def _check_session(probe: Probe) -> Check:
    match probe.get("session"):
        case "foreign":
            name = probe.get("node", "head")
            return _bad(
                "session",
                f"a tmux session '{name}' that is not of this cluster: rename it with "
                f"`tmux rename-session -t {name} other`, or run cleanup of the cluster it is of",
            )
        case "ours_alive":
            return _ok("session", "up")
        case "ours_dead":
            return _warning("session", "Ray has ended in its tmux session: setup starts it again")
    if other := probe.get("other_role"):
        return _bad(
            "session",
            f"Ray of this cluster is up here as {other}, and the list of hosts makes it "
            f"{probe.get('node')}: give the old list, or run restart",
        )
    return _ok("session", "-")


def _check_address(probe: Probe) -> Check:
    if not probe.get("ip"):
        return _bad(
            "address",
            "this machine cannot resolve its name to an IP address (an alias of ssh?): give ip= on "
            "its line of the hosts file",
        )
    if probe.get("ip_here") == "0":
        return _bad(
            "address",
            f"{probe['ip']} is no address of the host itself: Ray needs the one that the other "
            "hosts reach; give ip= on its line of the hosts file",
        )
    return _ok("address")


def _check_python(probe: Probe, head: Probe) -> Check:
    version = probe.get("python_version")
    if not version:
        return _bad(
            "python",
            f"no Python environment at {probe.get('python')}: run setup_cluster.sh sync, or set "
            "VENV or CONDA_ENV and CONDA_PATH",
        )
    of_head = head.get("python_version", version)
    if version.split(".")[:2] != of_head.split(".")[:2]:
        return _bad(
            "python",
            f"Python {version}, the head has {of_head}: Ray needs the same minor version on all",
        )
    return _ok("python", version)


def _check_packages(probe: Probe, head: Probe) -> Check:
    if not probe.get("python_version"):
        return _bad("packages", "unknown without Python")
    missing = [
        name for name in PACKAGES if not probe.get(f"version.{name}") and name not in _OPTIONAL
    ]
    if missing:
        return _bad(
            "packages",
            f"{', '.join(missing)} missing in {probe.get('python')}: run setup_cluster.sh sync, or "
            "install requirements/ there",
        )
    other = [
        f"{name} {probe.get(key) or 'missing'} (head: {head.get(key) or 'missing'})"
        for name in PACKAGES
        if probe.get(key := f"version.{name}", "") != head.get(key, "")
    ]
    if other and head.get("python_version"):
        return _bad(
            "packages", f"{', '.join(other)}: versions must be equal everywhere; install the head's"
        )
    return _ok("packages")


def _state(probe: Probe) -> tuple[str, ...]:
    return tuple(probe.get(key, "") for key in ("commit", "dirty", "content"))


def _check_commit(probe: Probe, head: Probe, here: Probe, *, is_head: bool) -> Check:
    commit = probe.get("commit", "")
    short = commit[:9] + "+" * (probe.get("dirty") == "1")
    if "repo_kb" not in probe:
        return _bad("commit", f"no repository at {probe.get('repo')}: run setup_cluster.sh sync")
    if not commit:
        return _warning(
            "commit",
            f"the commit of {probe.get('repo')} is unknown: run setup_cluster.sh sync to be sure "
            "that every host runs the same code",
            "?",
        )
    if not is_head and _state(probe) != _state(head) and head.get("commit"):
        return _bad(
            "commit",
            f"{short}, the head has {head['commit'][:9] + '+' * (head.get('dirty') == '1')}: "
            "run setup_cluster.sh sync",
        )
    if here.get("commit") and _state(probe)[:2] != _state(here)[:2]:
        ours = here["commit"][:9] + "+" * (here.get("dirty") == "1")
        return _warning(
            "commit", f"{short}, this machine has {ours}: run setup_cluster.sh sync", short
        )
    return _ok("commit", short)


def _check_ports(probe: Probe) -> Check:
    held = probe.get("ports_held", "").split()
    if held:
        return _bad(
            "ports",
            f"port {' and '.join(held)} held by another program: choose another RAY_PORT or "
            "RAY_DASHBOARD_PORT",
        )
    return _ok("ports")


def _check_temp_dir(probe: Probe) -> Check:
    folder = probe.get("temp_dir", "RAY_TEMP_DIR")
    if probe.get("temp_dir_state") == "foreign":
        return _bad(
            "disk",
            f"RAY_TEMP_DIR={folder} exists and is not of this cluster: choose another folder, or "
            "run cleanup of the cluster it is of",
        )
    free_kb = int(probe.get("temp_dir_kb") or 0)
    found = f"{free_kb / _GIB_KB:.0f} GiB"
    if free_kb < _TEMP_BAD_KB:
        return _bad("disk", f"{found} free for RAY_TEMP_DIR={folder}: Ray needs 1 GiB at least")
    if free_kb < _TEMP_WARNING_KB:
        return _warning(
            "disk",
            f"{found} free for RAY_TEMP_DIR={folder}: logs and spilled objects go there",
            found,
        )
    return _ok("disk", found)


def _check_memory(probe: Probe) -> Check:
    memory_kb, shm_kb = int(probe.get("memory_kb") or 0), int(probe.get("shm_kb") or 0)
    found = f"{memory_kb / _GIB_KB:.0f} GiB"
    if shm_kb < _SHM_WARNING_KB:
        return _warning(
            "memory",
            f"{shm_kb / _GIB_KB:.1f} GiB of /dev/shm: Ray's object store lives there and falls "
            "back to slow files; in a container raise --shm-size",
            found,
        )
    if memory_kb < _MEMORY_WARNING_KB:
        return _warning("memory", f"{found} of memory available", found)
    return _ok("memory", found)


def _check_clock(probe: Probe) -> Check:
    skew_s = clock_skew_s(probe)
    where = "ahead of" if skew_s > 0 else "behind"
    message = (
        f"its clock is {abs(skew_s):.1f} s {where} this machine's: "
        "set it by NTP (timedatectl set-ntp true)"
    )
    if abs(skew_s) > _CLOCK_BAD_S:
        return _bad("clock", message)
    if abs(skew_s) > _CLOCK_WARNING_S:
        return _warning("clock", message, f"{skew_s:+.1f} s")
    return _ok("clock")


def _check_shared(probe: Probe) -> Check:
    if probe.get("shared_error"):
        return _bad(
            "shared",
            f"{probe['shared_error']}: mount it, or take it out of SHARED_DIRS",
        )
    return _ok("shared", "ok" if probe.get("shared") else "-")


def _check_other_ray(probe: Probe) -> Check:
    pids = probe.get("foreign_ray", "").split()
    if pids:
        return _warning(
            "other ray",
            f"a Ray that is not of this cluster runs here (raylet {', '.join(pids)}): it stays, "
            "and both count the same CPUs and GPUs",
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
    checks = {name: check_host(probe, head, here) for name, probe in probes.items()}
    columns = list(dict.fromkeys(check.name for row in checks.values() for check in row))
    rows = []
    for name, row in checks.items():
        cells = {check.name: _cell(check) for check in row}
        rows.append([name, *(cells.get(column, "") for column in columns)])
    lines = [render_table(["host", *columns], rows)]
    for name, row in checks.items():
        lines += [
            f"{check.verdict}: {name}: {check.name}: {check.message}"
            for check in row
            if check.verdict != "ok"
        ]
    good = {name: all(check.verdict != "bad" for check in row) for name, row in checks.items()}
    return "\n".join(lines), good


def _cell(check: Check) -> str:
    if check.verdict == "ok":
        return check.found or "ok"
    return f"{check.found} ({check.verdict})" if check.found else check.verdict


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
