"""Cuts the folder of a real run to one that is small enough to be committed.

    python -m tests.recorded.views_cut runs/mixed_demo tests/recorded/run_of_1_1_0

The first steps stay, with some trajectories of each source that call a tool, and some rows of the
first and the last validation. Names of the machine, of its user and of its folders are replaced.
"""

import getpass
import json
import re
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

STEPS = 2
TRAJECTORIES = 2
"""Of each source and step."""

VALIDATED = 4
"""Rows of each source."""


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _some(records: Iterable[dict[str, Any]], most: int) -> Iterator[dict[str, Any]]:
    """The first records of each source; those with a tool call come first."""
    taken = Counter[str]()
    for record in sorted(records, key=lambda record: not record.get("calls")):
        taken[record["source"]] += 1
        if taken[record["source"]] <= most:
            yield record


def cut(run: Path, to: Path) -> None:
    """Write the small folder; a folder that is there is replaced."""
    shutil.rmtree(to, ignore_errors=True)
    config = (run / "config.yaml").read_text(encoding="utf-8")
    found = re.search(r"^  run_dir: (.+)/runs/", config, re.MULTILINE)
    checkout = found[1] if found else str(run.absolute().parent.parent)
    words = {checkout: "/checkout", socket.gethostname(): "laptop", str(Path.home()): "/home/me"}

    def write(name: str, text: str) -> None:
        for given, word in sorted(words.items(), key=lambda pair: -len(pair[0])):
            text = text.replace(given, word)
        user = getpass.getuser()
        text = text.replace(f'"{user}"', '"me"')
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_text(text, encoding="utf-8")

    def write_lines(name: str, records: Iterable[dict[str, Any]]) -> None:
        write(name, "".join(json.dumps(record) + "\n" for record in records))

    for name in ("config.yaml", "command.txt", "versions.jsonl"):
        write(name, (run / name).read_text(encoding="utf-8"))
    for name in ("metrics.jsonl", "ledger.jsonl"):
        kept = [each for each in _lines(run / name) if each.get("step", 0) <= STEPS]
        write_lines(name, kept)
    for step in range(1, STEPS + 1):
        name = f"trajectories/{step}.jsonl"
        write_lines(name, _some(_lines(run / name), TRAJECTORIES))
    validations = sorted((run / "validation").glob("*.jsonl"), key=lambda path: int(path.stem))
    rows: set[tuple[str, str]] = set()
    for path in validations[:1] + validations[1:][-1:]:
        records = _lines(path)
        if not rows:
            rows = {(one["source"], one["row_id"]) for one in _some(records, VALIDATED)}
        own = [one for one in records if (one["source"], one["row_id"]) in rows]
        write_lines(f"validation/{path.name}", own)
    write("checkpoints/latest_checkpointed_iteration.txt", str(STEPS))


if __name__ == "__main__":
    cut(Path(sys.argv[1]), Path(sys.argv[2]))
