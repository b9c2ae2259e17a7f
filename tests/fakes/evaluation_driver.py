"""A stand-in for the driver of an evaluation: makes the records of two sources at once.

`python -m tests.fakes.evaluation_driver FOLDER`. `FAKE_DRIVER=killed` kills it in the middle of a
line, `lost` loses every trajectory. Each start adds a line to `starts` in the folder.
"""

import json
import os
import signal
import sys
from pathlib import Path

from msgspec.structs import replace

from agent_loop.evaluation.main import SAYS, read_job
from agent_loop.records.evaluation_records import RECORDS, SELECTED, RecordsFile
from tests.fakes.records import record

ROWS = [(source, str(row)) for source in ("math", "nq") for row in range(5)]


def main(folder: Path) -> None:
    job, how = read_job(folder), os.environ.get("FAKE_DRIVER", "")
    with (folder / "starts").open("a") as starts:
        starts.write(f"{os.getpid()}\n")
    chosen = job.selection.of(ROWS)
    (folder / SELECTED).write_text(
        json.dumps([[s, f"{s}:{r}"] for s, r in map(ROWS.__getitem__, chosen)])
    )
    file = RecordsFile(folder / RECORDS)
    file.rewrite()
    for place in chosen:
        source, row = ROWS[place]
        for sample in range(job.selection.samples):
            made = record(source, row, sample, float(int(row) % 2), lost=how == "lost")
            if made.key in file.records:
                continue
            file.append([replace(made, step=job.step)])
            print(f"{SAYS}{len(file.records)} trajectories", flush=True)
            if how == "killed" and len(file.records) == 3:
                with (folder / RECORDS).open("a") as torn:
                    torn.write('{"step": 1, "sou')
                os.kill(os.getpid(), signal.SIGKILL)
    file.rewrite()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
