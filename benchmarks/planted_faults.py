"""Plants old faults in a copy of the checkout, and names those that no test notices.

`tests/recorded/faults.toml` has the faults: a few lines of today's code, and what stood there
before a bug was fixed. The tests that a fault names must pass without it, and one must fail with
it. A snippet is searched in its own file, and in the whole product if the code has moved.

    killed           a test fails, as it should
    SURVIVED         all tests pass with the fault
    does not apply   the snippet is nowhere, or in several places
    test is gone     a named test does not exist
    not tested       a test fails without the fault, or pytest stops before it runs a test

Run: python -m benchmarks.planted_faults [--only ID ...] [--list] [--check-only]
Exit: 0 all are killed, 1 one is not
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ROOT / "tests" / "recorded" / "faults.toml"
PACKAGES = (
    *("agent_loop", "cluster", "config", "cpu_engine"),
    *("rate_limit", "samplers", "tool_server", "verl_mixed"),
)
NOT_PRODUCT = ("tests", "benchmarks", "docs")
"""Folders that are not searched for code that has moved."""

LONGEST_S = 900.0
"""Time limit of one run of tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One table of the file; the file's first lines explain the fields."""

    id: str
    fixed_by: str
    file: str
    today: str
    fault: str
    breaks: str
    tests: list[str]
    lane: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run of tests ended."""

    end: str
    """`passed`, `failed`, `test is gone` or `not tested`."""

    test: str = ""
    """The first test that failed."""

    output: str = ""


def read_faults(only: Sequence[str] = ()) -> list[Fault]:
    """The faults of the file, or those with these ids.

    Raises:
        ValueError: an id is unknown, or two faults have the same.
    """
    faults = msgspec.toml.decode(FAULTS.read_bytes(), type=dict[str, list[Fault]])["fault"]
    by_id = {fault.id: fault for fault in faults}
    if len(by_id) < len(faults):
        raise ValueError(f"two faults of {FAULTS} have the same id; rename one")
    if unknown := set(only) - by_id.keys():
        raise ValueError(f"no fault {', '.join(sorted(unknown))} in {FAULTS}; see --list")
    return [by_id[name] for name in only] or faults


def tracked_files() -> list[str]:
    """Files of the checkout that git knows, relative to its root."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [name for name in done.stdout.split("\0") if (ROOT / name).is_file()]


def place_of(fault: Fault, names: Sequence[str]) -> str | None:
    """The file with the snippet: its own, or the only other file of the product.

    None if the snippet is nowhere, or in several places.
    """
    own = ROOT / fault.file
    if own.is_file() and (count := own.read_text().count(fault.today)):
        return fault.file if count == 1 else None
    product = [name for name in names if name.endswith((".py", ".sh"))]
    product = [name for name in product if name.split("/")[0] not in NOT_PRODUCT]
    found = [name for name in product for _ in range((ROOT / name).read_text().count(fault.today))]
    return found[0] if len(found) == 1 else None


def environment_of(copy: Path) -> dict[str, str]:
    """The environment for tests of a copy, in which its code comes before an editable install.

    Raises:
        RuntimeError: a process that is started in another folder imports other code.
    """
    environ = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(copy)}
    environ.pop("PYTEST_ADDOPTS", None)
    names = ", ".join(name for name in PACKAGES if (copy / name).is_dir())
    program = f"import {names}\nfor package in ({names},): print(package.__file__)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd="/", env=environ, capture_output=True, text=True)
    files = done.stdout.splitlines()
    if not files or any(copy not in Path(file).parents for file in files):
        raise RuntimeError(f"tests of {copy} would import other code: {done.stdout}{done.stderr}")
    return environ


def run_tests(tests: Sequence[str], copy: Path, environ: Mapping[str, str]) -> Outcome:
    """Run tests until one fails."""
    of_pytest = [name for name in tests if not name.startswith("bats:")]
    commands = [[sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", *of_pytest]]
    for _, file, words in (name.split(":", 2) for name in tests if name.startswith("bats:")):
        pattern = re.sub(r"([][.{}()*+?^$|\\])", r"\\\1", words)
        commands.append(["bats", "--filter", f"^{pattern}$", file])
    for command in commands if of_pytest else commands[1:]:
        try:
            done = subprocess.run(
                command, cwd=copy, env=environ, capture_output=True, text=True, timeout=LONGEST_S
            )
        except subprocess.TimeoutExpired:
            return Outcome(end="not tested", output=f"no end after {LONGEST_S:g} s")
        output = done.stdout + done.stderr
        # pytest's codes: 1 a test failed, 4 a name is unknown, 5 no test ran
        if done.returncode in (4, 5) or output.startswith("1..0"):
            return Outcome(end="test is gone", output=output)
        if done.returncode == 1:
            failed = re.search(r"^(?:FAILED (?:.*?::)?|not ok \d+ )(.*?)(?: - |$)", output, re.M)
            return Outcome(end="failed", test=failed[1] if failed else "", output=output)
        if done.returncode:
            return Outcome(end="not tested", output=output)
    return Outcome(end="passed")


def ends_without_fault(
    faults: Sequence[Fault], copy: Path, environ: Mapping[str, str]
) -> dict[str, Outcome]:
    """Test -> its end without a fault. One run has all tests; if it fails, each has its own."""
    tests = list(dict.fromkeys(name for fault in faults for name in fault.tests))
    together = run_tests(tests, copy, environ)
    if together.end == "passed":
        return dict.fromkeys(tests, together)
    return {name: run_tests([name], copy, environ) for name in tests}


def verdict_on(
    fault: Fault, name: str, copy: Path, environ: Mapping[str, str], before: Mapping[str, Outcome]
) -> tuple[str, Outcome]:
    """What the tests say of a fault that is planted in this file.

    Args:
        before: `ends_without_fault`.
    """
    for test in fault.tests:
        if before[test].end != "passed":
            is_gone = before[test].end == "test is gone"
            return "test is gone" if is_gone else "not tested", before[test]
    path = copy / name
    path.write_text(path.read_text().replace(fault.today, fault.fault))
    try:
        found = run_tests(fault.tests, copy, environ)
    finally:
        # copy2 keeps the time of the file, else Python might run the compiled fault again
        shutil.copy2(ROOT / name, path)
    return {"failed": "killed", "passed": "SURVIVED"}.get(found.end, found.end), found


def plant_all(faults: Sequence[Fault]) -> list[str]:
    """Plant each fault, print what becomes of it and a table; returns the verdicts."""
    names = tracked_files()
    verdicts, rows = list[str](), list[str]()
    with TemporaryDirectory(prefix="planted_faults_") as folder:
        copy = Path(folder).resolve()
        for name in names:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
        environ = environment_of(copy)
        before = ends_without_fault(faults, copy, environ)
        for fault in faults:
            started = time.monotonic()
            if (name := place_of(fault, names)) is None:
                verdict, found = "does not apply", Outcome(end="not tested")
            else:
                verdict, found = verdict_on(fault, name, copy, environ, before)
            seconds = time.monotonic() - started
            verdicts.append(verdict)
            rows.append(f"| {fault.id} | {name} | {found.test} | {seconds:.1f} | {verdict} |")
            print(f"{verdict}: {fault.id}", flush=True)
            if verdict != "killed":
                print(found.output[-2000:])
    print("\n| fault | file | test that failed | seconds | |", "|---|---|---|---:|---|", sep="\n")
    print(*rows, sep="\n")
    return verdicts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Plant old faults; each must fail a test.")
    parser.add_argument("--only", nargs="+", default=[], metavar="ID", help="only these faults")
    parser.add_argument("--list", action="store_true", help="print the faults and what they break")
    parser.add_argument("--check-only", action="store_true", help="only look for the snippets")
    arguments = parser.parse_args(argv)
    faults = read_faults(arguments.only)
    if arguments.list:
        print(*(f"{own.id} ({own.lane}, {own.fixed_by}): {own.breaks}" for own in faults), sep="\n")
        return 0
    if arguments.check_only:
        names = tracked_files()
        lost = [fault.id for fault in faults if place_of(fault, names) is None]
        print(f"{len(faults) - len(lost)} of {len(faults)} apply", *lost, sep="\ndoes not apply: ")
        return 1 if lost else 0
    verdicts = plant_all(faults)
    print(f"\n{verdicts.count('killed')} of {len(verdicts)} killed")
    return 0 if set(verdicts) == {"killed"} else 1


if __name__ == "__main__":
    sys.exit(main())
