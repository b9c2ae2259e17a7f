"""`verl-mixed prepare smollm`: a pretrained model, and generated rows to train it on.

Decides where both are kept. The model is made by `agent_loop.cpu.models.pretrained`, the rows are
those of the laptop demo, without its model: nothing is trained here.
"""

import argparse
import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from agent_loop.cpu.models.made_folder import made_whole, read_note
from agent_loop.cpu.models.pretrained import PretrainedError, prepare_smollm
from verl_mixed.exit_codes import GOOD, NOT_GOOD, USAGE
from verl_mixed.run.text import printable

VALIDATION_ROWS = 8
"""Of each source: on a CPU this model takes a minute for two dozen trajectories."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "--gguf",
        type=Path,
        metavar="FILE",
        help="a copy of the package's GGUF file, where there is no network",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the generated rows (default 0)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Make model and rows, or find them made."""
    gguf: Path | None = arguments.gguf
    if gguf is not None and not gguf.is_file():
        reason = "a folder; name the file in it" if gguf.is_dir() else "no such file; correct it"
        print(f"error: --gguf {printable(str(gguf))}: {reason}", file=sys.stderr)
        return USAGE

    def say(line: str) -> None:
        print(line, flush=True)

    rows = rows_folder(arguments.seed)
    try:
        prepare_smollm(gguf=gguf, progress=say)
        prepare_rows(rows, arguments.seed)
    except (PretrainedError, OSError) as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return NOT_GOOD
    say(f"rows are in {rows}")
    return GOOD


def rows_folder(seed: int) -> Path:
    """Where the generated rows of a seed are kept, from the folder that runs start in."""
    return Path("data") / "demo" / f"rows_seed{seed}"


def prepare_rows(folder: Path, seed: int) -> None:
    """Write the generated sources and the corpus, or find them; the folder is whole or absent.

    Raises:
        OSError: a file cannot be written, or something else is in the folder.
    """
    from samplers.rows.sources import demo

    made = {
        "seed": seed,
        "validation": VALIDATION_ROWS,
        "generator": hashlib.sha256(_source_of(demo)).hexdigest()[:16],
    }
    note = "demo.json"
    if read_note(folder / note) == made:
        return
    with made_whole(folder, note) as draft:
        data = demo.make_demo(seed)
        few = {name: tasks[:VALIDATION_ROWS] for name, tasks in data.validation.items()}
        demo.write_demo(replace(data, validation=few), draft)
        (draft / note).write_text(json.dumps(made, indent=2) + "\n")


def _source_of(module: ModuleType) -> bytes:
    """A module's own text: rows made by another are made again."""
    assert module.__file__ is not None
    return Path(module.__file__).read_bytes()
