"""`verl-mixed prepare KIND`: write the files of a source, and say what came of it."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from samplers.rows.kind import Kind
from samplers.rows.prepare import Prepared, PrepareProgress, Tokenizer, prepare

DESCRIPTION = """\
Turn files of a dataset into the parquet files of rows that a run trains on.

Inputs are .parquet, .arrow, .jsonl, .json (array or lines), .csv or .tsv, the texts also as .gz;
they are read one after another, in constant memory. Copies of a record are left out. A preparation
that is killed or interrupted goes on where it was when the same command is given again; one that is
done already does nothing. Files appear whole or not at all.
"""

EXAMPLES = """\
examples:
  verl-mixed prepare math --input train-*.parquet --output data/math.parquet \\
      --validation 500 --validation-output data/math_val.parquet
  verl-mixed prepare taco --input TACO.jsonl.gz --output data/taco.parquet --skip-bad
  verl-mixed prepare json --source chem --input chem.json --output data/chem.parquet
  verl-mixed prepare my_kind.py --input raw.csv --output data/mine.parquet

exit codes: 0 good, 1 the data or the disk are not, 2 usage error, 130 interrupted
"""


def add_options(command: argparse.ArgumentParser, kind: Kind) -> None:
    """The words of the command line for one kind; the kind's own come last.

    Raises:
        ValueError: an option of the kind has the name of one that every kind has.
    """
    files = command.add_argument_group("files")
    files.add_argument("--input", type=Path, nargs="+", required=True, metavar="FILE")
    files.add_argument("--output", type=Path, required=True, metavar="FILE", help=".parquet")
    files.add_argument(
        "--split",
        choices=("train", "validation"),
        default="train",
        help="of the rows of --output (default train)",
    )
    files.add_argument(
        "--validation",
        type=share_or_count,
        metavar="SHARE|COUNT",
        help="rows that go to --validation-output instead, by a hash of their id: 0.05 or 500",
    )
    files.add_argument("--validation-output", type=Path, metavar="FILE", help=".parquet")

    rows = command.add_argument_group("rows")
    rows.add_argument("--limit", type=int, metavar="N", help="stop when N rows are kept")
    rows.add_argument(
        "--sample",
        type=int,
        metavar="N",
        help="draw N of the rows by a hash of their id, whatever their order",
    )
    rows.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of --sample and --validation (default 0)"
    )
    rows.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="measure prompts with this Hugging Face folder or name (default: in characters)",
    )
    rows.add_argument(
        "--max-prompt-tokens",
        type=int,
        metavar="N",
        help="leave out longer prompts; the source's template is not counted",
    )
    rows.add_argument(
        "--skip-bad",
        action="store_true",
        help="leave out, and count, records that are not of their schema (default: stop at one)",
    )
    rows.add_argument("--source", metavar="NAME", help=f"of the rows (default {kind.name})")
    rows.add_argument("--agent", metavar="NAME", help=f"of the rows (default {kind.agent})")

    if kind.options:
        own = command.add_argument_group(f"of {kind.name}")
        for option in kind.options:
            default = "" if option.default in (None, (), "") else f" (default {option.default})"
            try:
                own.add_argument(
                    f"--{option.name.replace('_', '-')}",
                    dest=f"option_{option.name}",
                    type=option.type,
                    default=option.default,
                    metavar="VALUE",
                    help=f"{option.help}{default}".replace("%", "%%"),
                )
            except argparse.ArgumentError as error:
                raise ValueError(
                    f"no option {option.name!r} for kind={kind.name!r}: {error.message}, every "
                    "kind has it; rename the kind's own"
                ) from error


def options_of(kind: Kind, arguments: argparse.Namespace) -> dict[str, Any]:
    """The values of a kind's own options."""
    return {option.name: getattr(arguments, f"option_{option.name}") for option in kind.options}


def prepare_files(
    kind: Kind,
    inputs: Sequence[Path],
    output: Path,
    *,
    console: Console | None = None,
    again: bool = True,
    **words: Any,
) -> Prepared:
    """`samplers.rows.prepare.prepare` with a progress bar and a summary.

    Args:
        kind, inputs, output: as there.
        console: for the summary; the bar goes to the standard error.
        again: give the summary of files that hold this already, too.
        words: as there, by keyword.

    Raises:
        ValueError, OSError: as there.
    """
    console = console or Console(highlight=False)
    with reading_bar("rows") as bar:
        task = bar.add_task(escape(kind.name), total=None, kept=0)

        def show(progress: PrepareProgress) -> None:
            bar.update(
                task,
                total=progress.size_bytes,
                completed=progress.read_bytes,
                kept=progress.kept,
            )

        done = prepare(kind, inputs, output, progress=show, **words)
    if done.was_there and not again:
        return done
    for path, rows in done.files.items():
        held = f"{path} holds this already" if done.was_there else f"wrote {path}"
        console.print(escape(f"{held}: {rows:,} rows"), soft_wrap=True)
    console.print(_summary(done))
    return done


def reading_bar(kept: str) -> Progress:
    """A bar on the standard error over the bytes that are read, with a count of what is kept.

    Args:
        kept: what its tasks' field `kept` counts.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn(f"{{task.fields[kept]:,}} {kept}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def tokenizer_of(name: str) -> Tokenizer:
    """How a model's tokenizer measures prompts.

    Args:
        name: folder, or name on the Hugging Face Hub.

    Raises:
        ValueError: there is no tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"cannot load --tokenizer {name}: {error}; give a model's folder or name"
        ) from error

    def lengths(texts: list[str]) -> list[int]:
        if not texts:
            return []
        ids = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [len(each) for each in ids["input_ids"]]

    return Tokenizer(name=name, lengths=lengths)


def share_or_count(word: str) -> float | int:
    """What `--validation` is given; the name is in argparse's message."""
    return int(word) if word.isdigit() else float(word)


def _summary(done: Prepared) -> Table:
    table = Table("records", "count")
    table.columns[1].justify = "right"
    table.add_row("read", f"{done.read:,}")
    table.add_row("kept", f"{sum(done.files.values()):,}")
    for reason, count in sorted(done.dropped.items(), key=lambda each: (-each[1], each[0])):
        table.add_row(escape(f"dropped: {reason}"), f"{count:,}")
    for name, length in done.lengths.items():
        table.add_row(f"prompt {done.unit}, {name}", f"{length:,}")
    return table
