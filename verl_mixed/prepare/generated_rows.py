"""Generated rows for a pretrained model: the sources and corpus of the laptop demo, no model."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from verl_mixed.demo.made_folder import made_whole, read_note

VALIDATION_ROWS = 8
"""Rows per source: on a CPU, SmolLM2-135M needs a minute for two dozen trajectories."""


def rows_folder(seed: int) -> Path:
    """The folder of the generated rows of a seed, relative to the folder that runs start in."""
    return Path("data") / "demo" / f"rows_seed{seed}"


def prepare_rows(folder: Path, seed: int) -> None:
    """Write the generated sources and the corpus, unless the same rows are there already.

    The folder appears only when it is complete.

    Raises:
        OSError: a file cannot be written, or the folder holds something else.
    """
    from samplers.rows.sources import demo

    assert demo.__file__ is not None
    made = {
        "seed": seed,
        "validation": VALIDATION_ROWS,
        # rows that another version of the generator wrote are made again
        "generator": hashlib.sha256(Path(demo.__file__).read_bytes()).hexdigest()[:16],
    }
    note = "demo.json"
    if read_note(folder / note) == made:
        return
    with made_whole(folder, note) as draft:
        data = demo.make_demo(seed)
        few = {name: tasks[:VALIDATION_ROWS] for name, tasks in data.validation.items()}
        demo.write_demo(replace(data, validation=few), draft)
        (draft / note).write_text(json.dumps(made, indent=2) + "\n")
