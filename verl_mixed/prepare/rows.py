"""Prepare the rows of a source with a progress bar and a summary on the screen."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from samplers.kind import Kind
from samplers.rows.prepare import Prepared, PrepareProgress, Tokenizer, prepare

if TYPE_CHECKING:  # importing search takes longer than everything else here
    from tool_server.search.corpus import CorpusReader


def prepare_files(
    kind: Kind,
    inputs: Sequence[Path],
    output: Path,
    *,
    console: Console | None = None,
    again: bool = True,
    **options: Any,
) -> Prepared:
    """`samplers.rows.prepare.prepare` with a progress bar and a summary.

    Args:
        console: shows the summary; the bar goes to stderr.
        again: show the summary even if the files were complete already.
    """
    console = console or Console(highlight=False)
    with reading_bar(kind.name, "rows") as show:
        done = prepare(kind, inputs, output, progress=show, **options)
    if done.was_there and not again:
        return done
    for path, rows in done.files.items():
        held = f"{path} holds this already" if done.was_there else f"wrote {path}"
        console.print(escape(f"{held}: {rows:,} rows"), soft_wrap=True)
    console.print(_summary(done))
    return done


@contextmanager
def reading_bar(
    name: str, items: str
) -> "Generator[Callable[[PrepareProgress | CorpusReader], None]]":
    """A progress bar on stderr over the bytes read of `name`, with a count of the `items` kept."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn(f"{{task.fields[kept]:,}} {items}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(escape(name), total=None, kept=0)

        def show(progress: "PrepareProgress | CorpusReader") -> None:
            bar.update(
                task,
                total=progress.size_bytes or None,  # unknown if the records are made
                completed=progress.read_bytes,
                kept=progress.kept,
            )

        yield show


def tokenizer_of(name: str) -> Tokenizer:
    """The tokenizer of a model, given its folder or its name on the Hugging Face Hub.

    Raises:
        ValueError: the tokenizer cannot be loaded.
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


def _summary(done: Prepared) -> Table:
    dropped = dict(sorted(done.dropped.items(), key=lambda each: (-each[1], each[0])))
    table = counts_table("records", done.read, sum(done.files.values()), dropped)
    for name, length in done.lengths.items():
        table.add_row(f"prompt {done.unit}, {name}", f"{length:,}")
    return table


def counts_table(items: str, read: int, kept: int, dropped: Mapping[str, int]) -> Table:
    """A table of how many items were read, kept, and dropped for each reason."""
    table = Table(items, "count")
    table.columns[1].justify = "right"
    table.add_row("read", f"{read:,}")
    table.add_row("kept", f"{kept:,}")
    for reason, count in dropped.items():
        table.add_row(escape(f"dropped: {reason}"), f"{count:,}")
    return table
