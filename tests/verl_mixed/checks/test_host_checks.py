"""What makes a host good, worth a warning or bad."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.inventory import EQUAL_ON_NODES
from verl_mixed.checks.hosts import check_host, clock_skew_s, main, parse_probe, report

GIB_KB = 1024 * 1024
HERE = {"commit": "c" * 40, "dirty": "0", "content": ""}


def probe_of(**changed: str) -> dict[str, str]:
    """A host with nothing wrong, but for what is changed."""
    good = {
        "node": "node0",
        "before_ns": "1000000000",
        "epoch_ns": "1500000000",
        "after_ns": "2000000000",
        "tmux": "3.3a",
        "session": "none",
        "ip": "10.0.0.2",
        "ip_here": "1",
        "python": "/repo/.venv/bin/python",
        "python_version": "3.11.7",
        "repo": "/repo",
        "repo_kb": str(50 * GIB_KB),
        "gpus": "8",
        "ports_held": "",
        "temp_dir": "/tmp/ray",
        "temp_dir_kb": str(50 * GIB_KB),
        "temp_dir_state": "none",
        "memory_kb": str(64 * GIB_KB),
        "shm_kb": str(32 * GIB_KB),
        "foreign_ray": "",
        "probe": "complete",
        **HERE,
        **{f"version.{name}": "1.0" for name in EQUAL_ON_NODES},
    }
    return {**good, **{key.replace("__", "."): value for key, value in changed.items()}}


def verdicts(probe: dict[str, str], head: dict[str, str] | None = None) -> dict[str, str]:
    """Check -> status, words and remedy of every finding that is not ok."""
    checks = check_host(probe, probe_of() if head is None else head, HERE)
    return {
        found.check: f"{found.status}: {found.words}; {found.remedy}"
        for found in checks
        if found.status != "ok"
    }


def test_a_good_host_is_ok_throughout() -> None:
    assert verdicts(probe_of()) == {}


@pytest.mark.parametrize(
    ("changed", "name", "said"),
    [
        ({"tmux": ""}, "tmux", "bad: no tmux; install it"),
        ({"session": "foreign"}, "session", "bad: a tmux session 'node0' that is not of this"),
        ({"session": "ours_dead"}, "session", "warning: Ray has ended"),
        ({"ip": ""}, "address", "bad: this machine cannot resolve its name"),
        ({"ip_here": "0"}, "address", "bad: 10.0.0.2 is no address of the host itself"),
        ({"python_version": "3.12.1"}, "python", "bad: Python 3.12.1, the head has 3.11.7"),
        ({"version__verl": ""}, "packages", "bad: verl missing in /repo/.venv/bin/python"),
        ({"version__ray": "2.9"}, "packages", "bad: ray 2.9 (head: 1.0): versions must be equal"),
        ({"version__vllm": ""}, "packages", "bad: vllm missing (head: 1.0)"),
        ({"commit": "d" * 40}, "commit", "bad: ddddddddd, the head has ccccccccc"),
        ({"dirty": "1"}, "commit", "bad: ccccccccc+, the head has ccccccccc"),
        ({"commit": ""}, "commit", "warning: the commit of /repo is unknown"),
        ({"ports_held": "6379 8265"}, "ports", "bad: port 6379 and 8265 held"),
        ({"temp_dir_state": "foreign"}, "disk", "bad: RAY_TEMP_DIR=/tmp/ray exists and is not of"),
        ({"temp_dir_kb": "5000"}, "disk", "bad: 0 GiB free"),
        ({"temp_dir_kb": str(5 * GIB_KB)}, "disk", "warning: 5 GiB free"),
        ({"shm_kb": "65536"}, "memory", "warning: 0.1 GiB of /dev/shm"),
        ({"memory_kb": "65536"}, "memory", "warning: 0 GiB of memory"),
        ({"epoch_ns": "7000000000"}, "clock", "warning: its clock is 5.0 s ahead of"),
        ({"before_ns": "61000000000"}, "clock", "bad: its clock is 59.5 s behind"),
        ({"shared_error": "/mnt/runs is not"}, "shared", "bad: /mnt/runs is not; mount it"),
        ({"foreign_ray": "77"}, "other ray", "warning: a Ray that is not of this cluster"),
    ],
)
def test_each_fault_is_named_with_its_remedy_and_alone(
    changed: dict[str, str], name: str, said: str
) -> None:
    found = verdicts(probe_of(**changed))

    assert list(found) == [name]
    assert found[name].startswith(said)


def test_a_host_without_a_repository_is_told_to_sync() -> None:
    probe = probe_of(commit="")
    del probe["repo_kb"]

    assert "run setup_cluster.sh sync" in verdicts(probe)["commit"]


def test_a_host_without_python_is_bad_in_python_and_packages_only() -> None:
    probe = {key: value for key, value in probe_of().items() if not key.startswith("version.")}
    del probe["python_version"]

    assert list(verdicts(probe)) == ["python", "packages"]


def test_all_hosts_older_than_this_machine_get_a_warning_only() -> None:
    probe = probe_of(commit="d" * 40)

    assert verdicts(probe, head=probe)["commit"].startswith("warning: ddddddddd, this machine has")


def test_no_vllm_anywhere_is_ok() -> None:
    probe = probe_of(version__vllm="")
    unsaid = {key: value for key, value in probe.items() if key != "version.vllm"}

    assert verdicts(probe, head=probe) == {}
    assert verdicts(unsaid, head=probe) == {}
    assert verdicts(probe, head=unsaid) == {}


def test_a_host_that_did_not_answer_is_one_check_with_the_command_to_try() -> None:
    probe = {"ssh_error": "Connection refused", "ssh_command": "ssh -J jump me@host"}

    assert list(verdicts(probe)) == ["ssh"]
    assert "Connection refused; try `ssh -J jump me@host true`" in verdicts(probe)["ssh"]


times = st.integers(0, 10**11)


@given(before=times, now=times, took=times)
def test_a_clock_is_wrong_by_as_much_as_no_delay_explains(before: int, now: int, took: int) -> None:
    after = before + took
    probe = {"before_ns": str(before), "epoch_ns": str(now), "after_ns": str(after)}
    skew_ns = clock_skew_s(probe) * 1e9

    assert before - 1e3 <= now - skew_ns <= after + 1e3
    assert (skew_ns == 0) == (before <= now <= after)


def test_the_report_names_every_host_and_lists_the_good_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def text(probe: dict[str, str]) -> str:
        return "".join(f"{key}={value}\n" for key, value in probe.items())

    (tmp_path / "0.probe").write_text(text(probe_of(node="head")))
    (tmp_path / "1.probe").write_text(text(probe_of(tmux="")))
    (tmp_path / "5.probe").write_text("node=node1\nssh_error=no route\n")
    (tmp_path / "here.probe").write_text(text(HERE))

    status = main([str(tmp_path), "0=10.0.0.1", "1=10.0.0.2", "5=10.0.0.3"])

    assert status == 1
    assert (tmp_path / "good").read_text() == "10.0.0.1\n"
    printed = capsys.readouterr().out
    assert "bad: 10.0.0.2: tmux: no tmux" in printed
    assert "bad: 10.0.0.3: ssh: no probe from it: no route" in printed


def test_a_head_that_is_silent_leaves_the_workers_to_be_judged_alone() -> None:
    _, good = report({"head": {"ssh_error": "x"}, "worker": probe_of()}, HERE)

    assert good == {"head": False, "worker": True}


def test_a_probe_is_its_key_value_lines() -> None:
    assert parse_probe("a=1\nmotd without sign\nb=x=y\na=2\n") == {"a": "2", "b": "x=y"}
