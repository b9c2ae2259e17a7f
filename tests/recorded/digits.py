"""The demo's numbers, digit for digit: `python -m tests.recorded.digits RUN (--write | --check)`.

RUN is the folder of a finished demo, which these commands make in a clone:

    ./run_mixed_training.sh                                     # PROFILE=laptop, seed 0
    python -m tests.recorded.digits runs/mixed_demo --check

Another type of processor rounds differently, so its warm start ends in another model. `digits.json`
therefore has a section for each type that was seen, under a name made of its vector extensions.
"""

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "digits.json"
COMMAND = "./run_mixed_training.sh"
EXTENSIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd", "sve")
KEPT = re.compile(r"mixed/[^/]+/(val/)?reward/mean|actor/\w+|val-core/.*")
"""Metrics that say what was learnt, and nothing about the machine's speed."""


def processor() -> str:
    """The maker and the vector extensions of this processor, as Linux names them."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    facts = {
        name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    flags = facts.get("flags", facts.get("Features", "")).split()
    maker = facts.get("vendor_id", facts.get("CPU implementer", "unknown"))
    return " ".join([maker, *(name for name in EXTENSIONS if name in flags)])


def digits(run: Path) -> dict[str, Any]:
    """What a run learnt, by its files.

    Args:
        run: folder of the run.

    Returns:
        step -> metric -> value as `repr` writes it; and under `tokens`, step -> a hash over the
        ids, masks and rewards of all its trajectories.
    """
    steps: dict[str, dict[str, str]] = {}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record: Mapping[str, Any] = json.loads(line)
        steps[str(record["step"])] = {
            name: repr(value)
            for name, value in sorted(record["metrics"].items())
            if KEPT.fullmatch(name)
        }
    tokens: dict[str, str] = {}
    for path in sorted((run / "trajectories").glob("*.jsonl"), key=lambda path: int(path.stem)):
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        parts = sorted(
            json.dumps(
                [one.get(key) for key in ("row_id", "response_ids", "response_mask", "reward")]
            )
            for one in records
        )
        tokens[path.stem] = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return {"metrics": steps, "tokens": tokens}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("run", type=Path)
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--write", action="store_true")
    how.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    known: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {"command": COMMAND}
    found, name = digits(arguments.run), processor()
    if arguments.write:
        known[name] = found
        FILE.write_text(json.dumps(known, indent=0) + "\n", encoding="utf-8")
        return 0
    if name not in known:
        print(f"no digits of this type of processor are recorded ({name}); see --write")
        return 1
    wrong = [
        f"{kind} step {step}{' ' + key if key else ''}: recorded {old}, found {new}"
        for kind in ("metrics", "tokens")
        for step, before in known[name][kind].items()
        for key, old, new in _pairs(before, found[kind].get(step))
        if old != new
    ]
    print("\n".join(wrong) or f"all digits are as recorded ({name})")
    return int(bool(wrong))


def _pairs(before: Any, after: Any) -> list[tuple[str, Any, Any]]:
    if not isinstance(before, dict):
        return [("", before, after)]
    after = after or {}
    return [(key, before.get(key), after.get(key)) for key in sorted({*before, *after})]


if __name__ == "__main__":
    sys.exit(main())
