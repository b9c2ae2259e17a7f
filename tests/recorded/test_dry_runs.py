"""The scripts print and refuse what is recorded: some calls always, all of them at night."""

import pytest

from tests.recorded.compare import changed, recorded_blocks
from tests.recorded.dry_runs import FILE, blocks, compact, expanded

SAMPLE = (
    "setup_cluster: refused: explode",
    "setup_cluster: hosts file with every mistake",
    "setup_cluster: setup",
    "setup_cluster: setup by a file with all keys",
    "setup_cluster: setup with container",
    "run_mixed_training: refused: start stop",
    "run_mixed_training: every setting",
    "run_mixed_training: settings, secrets and variables on a cluster",
    "slurm: a container and conda",
)


def test_some_calls_print_what_is_recorded() -> None:
    found = changed(FILE, expanded(recorded_blocks(FILE)), blocks(SAMPLE))
    assert not found, found


@pytest.mark.nightly
def test_every_call_prints_what_is_recorded() -> None:
    found = changed(FILE, expanded(recorded_blocks(FILE)), blocks())
    assert not found, found


def test_no_recorded_call_reaches_a_host_or_shows_a_secret() -> None:
    for name, body in recorded_blocks(FILE).items():
        printed = [line for line in body.split("\n") if not line.startswith(("$ ", "# "))]
        assert not [line for line in printed if line.startswith("called: ")], name
        assert not [line for line in printed if "hidden" in line], name


def test_long_lines_are_found_again() -> None:
    whole = expanded(recorded_blocks(FILE))

    assert expanded(compact(whole)) == whole
