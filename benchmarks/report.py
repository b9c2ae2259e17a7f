"""What a report of a long run costs: seconds, peak memory, size of the files.

    python -m benchmarks.report [--steps 1000] [--batch-size 128] [--runs 2]

Writes the folder of a run that never was (three sources, about 160 metrics a step, a ledger with a
line a prompt), and lets `verl-mixed report` write each file of it in a process of its own.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.diagnose import measure
from tests.fakes.run_folder import write_run

_COMMAND = "import sys; from verl_mixed.cli import main; sys.exit(main(sys.argv[1:]))"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--runs", type=int, default=2, help="in the comparison")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = [folder / f"run{number}" for number in range(max(1, arguments.runs))]
        written = [
            write_run(run, arguments.steps, batch_size=arguments.batch_size, seed=seed)
            for seed, run in enumerate(runs)
        ]
        sizes = ", ".join(
            f"{file} {(runs[0] / file).stat().st_size / 1e6:.1f} MB"
            for file in ("metrics.jsonl", "ledger.jsonl")
        )
        print(
            f"{len(written[0])} lines of {len(written[0][-1]['metrics'])} metrics; {sizes}",
            flush=True,
        )
        for what, words, file in (
            ("page", [str(runs[0])], "report.html"),
            ("page and table", [str(runs[0]), "--csv"], "report.csv"),
            ("page and image", [str(runs[0]), "--png"], "report.png"),
            (f"page of {len(runs)} runs", [*map(str, runs)], "comparison.html"),
        ):
            command = [sys.executable, "-c", _COMMAND, "report", *words]
            seconds, _, megabytes = measure(command, folder)
            size = (runs[0] / file).stat().st_size / 1e6
            print(
                f"{what:<18} {seconds:5.1f} s, peak {megabytes:4.0f} MB, {file} {size:.2f} MB",
                flush=True,
            )


if __name__ == "__main__":
    main()
