"""What the benchmarks of the tests name exists: files, tests and snippets of code."""

import pytest

from benchmarks.mutants import TARGETS
from benchmarks.planted_faults import ROOT, Fault, place_of, read_faults

FAULTS = read_faults()


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.id for fault in FAULTS])
def test_an_old_fault_can_still_be_planted(fault: Fault) -> None:
    assert place_of(fault, ()) == fault.file, "the code has moved: correct `file` or `today`"
    for test in fault.tests:
        file, _, name = test.removeprefix("bats:").partition(":")
        name = name.removeprefix(":").partition("[")[0]
        assert name in (ROOT / file).read_text(encoding="utf-8"), test


def test_every_file_of_the_mutants_exists() -> None:
    named = {name for target in TARGETS.values() for name in (target.module, *target.tests)}
    assert {name for name in named if not (ROOT / name).is_file()} == set()
