"""`prepare` beside the Hub's datasets: time and memory from raw files to parquet, as markdown.

    python -m benchmarks.prepare [--rounds 3] [--short-rows 1000000]

Two inputs, generated: as many rows as MATH has, of its lengths (`problem` of about 200 characters,
`solution` of about 550), and many short questions. `load_dataset("json").map().to_parquet()` makes
the same rows of them with the same reader, in one process too; it does not look for copies, choose,
resume, or say where a bad record is. The two take turns in every round, each in a fresh process.
Memory is the peak over what the process held after its imports; caches are empty at each start.
"""

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MATH_ROWS = 12_500
_WORDS = [
    "let",
    "find",
    "the",
    "value",
    "of",
    "sum",
    "such",
    "that",
    "where",
    "integer",
    "positive",
    "real",
    "number",
    "x",
    "y",
    "n",
]


@dataclass(frozen=True, slots=True)
class Work:
    """One table row's input."""

    name: str
    kind: str
    rows: int


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--short-rows", type=int, default=1_000_000)
    parser.add_argument(
        "--one", nargs=3, metavar=("WHICH", "KIND", "INPUT"), help=argparse.SUPPRESS
    )
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(_measure(*arguments.one)))
        return
    works = [
        Work("MATH-sized", "math", MATH_ROWS),
        Work("short questions", "nq", arguments.short_rows // 10),
        Work("short questions", "nq", arguments.short_rows),
    ]
    found: dict[tuple[Work, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, work in enumerate(works):
            raw = Path(folder) / f"{number}.jsonl"
            with raw.open("w") as file:
                file.writelines(json.dumps(record) + "\n" for record in _records(work))
            for _ in range(arguments.rounds):
                for which in WAYS:
                    found.setdefault((work, which), []).append(_fresh(which, work.kind, raw))
    print("| input | rows | by | s | rows/s | memory, MB |")
    print("|---|---:|---|---:|---:|---:|")
    for (work, which), figures in found.items():
        took_s, memory_mb = (
            statistics.median(each[name] for each in figures) for name in ("took_s", "memory_mb")
        )
        speed = work.rows / took_s
        print(
            f"| {work.name} | {work.rows:,} | {which} | {took_s:.1f} | {speed:,.0f} "
            f"| {memory_mb:,.0f} |"
        )


def _records(work: Work) -> Iterator[dict[str, Any]]:
    draw = random.Random(0)
    for number in range(work.rows):
        if work.kind == "nq":
            yield {"question": f"who was number {number} in {number * 7}?", "answer": [f"{number}"]}
        else:
            yield {
                "problem": f"{number}: " + " ".join(draw.choices(_WORDS, k=45)),
                "level": f"Level {1 + number % 5}",
                "type": "Algebra",
                "solution": " ".join(draw.choices(_WORDS, k=120)) + rf" $\boxed{{{number}}}$.",
            }


def _fresh(which: str, kind: str, raw: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.prepare", "--one", which, kind, str(raw)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


# --- in a process of its own ---------------------------------------------------------------------


def _measure(which: str, kind: str, raw: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        work = WAYS[which](kind, Path(raw), Path(folder))
        before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = time.perf_counter()
        work()
        took_s = time.perf_counter() - began
    after_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"took_s": took_s, "memory_mb": (after_kb - before_kb) / 1e3}


def _ours(kind: str, raw: Path, folder: Path) -> Callable[[], object]:
    from samplers.rows.prepare import prepare
    from samplers.rows.sources import KINDS

    return lambda: prepare(KINDS[kind], [raw], folder / "out.parquet")


def _datasets(kind: str, raw: Path, folder: Path) -> Callable[[], object]:
    import datasets

    from samplers.rows.schema import SCHEMA, columns_of
    from samplers.rows.sources import KINDS

    datasets.disable_progress_bars()
    features = datasets.Features.from_arrow_schema(SCHEMA)

    def rows_of(records: dict[str, list[Any]], indices: list[int]) -> Any:
        each = [
            dict(zip(records, cells, strict=True)) for cells in zip(*records.values(), strict=True)
        ]
        return columns_of(
            [
                KINDS[kind].to_row(record, split="train", index=index)
                for record, index in zip(each, indices, strict=True)
            ]
        )

    def work() -> None:
        read = datasets.load_dataset(
            "json", data_files=str(raw), split="train", cache_dir=str(folder / "cache")
        )
        rows = read.map(
            rows_of,
            with_indices=True,
            batched=True,
            features=features,
            remove_columns=read.column_names,
        )
        rows.to_parquet(str(folder / "out.parquet"))

    return work


WAYS: dict[str, Callable[[str, Path, Path], Callable[[], object]]] = {
    "`prepare`": _ours,
    "`datasets`": _datasets,
}


if __name__ == "__main__":
    main()
