"""Build the search index of a corpus, with a progress bar and a summary on the screen."""

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agent_loop.tools.search import CorpusProgress, PassageIndex
from agent_loop.tools.search.index import index_beside
from verl_mixed.prepare.rows import reading_bar


def prepare_corpus(
    corpus: Path,
    folder: Path | None = None,
    *,
    skip_bad: bool = False,
    limit: int | None = None,
    console: Console | None = None,
) -> PassageIndex:
    """Build the index, unless there is an index of the corpus in its present state.

    Args:
        corpus: JSON lines, plain or gzip.
        folder: folder of the index; None is `<corpus>.index`, where the tool server looks.
        skip_bad: leave out lines that are not passages.
        limit: how many passages to take.
        console: shows the summary; the bar goes to stderr.

    Raises:
        ValueError, OSError: as `PassageIndex.build`.
    """
    console = console or Console(highlight=False)
    folder = folder or index_beside(corpus.absolute())
    index = None if limit is not None else _up_to_date(corpus, folder)
    if index is not None:
        console.print(escape(f"{folder} holds {corpus} already"), soft_wrap=True)
    else:
        index = _build(corpus, folder, skip_bad, limit)
        console.print(escape(f"wrote {folder}"), soft_wrap=True)
    console.print(_summary(index))
    return index


def _up_to_date(corpus: Path, folder: Path) -> PassageIndex | None:
    """The index in a folder, if it is of the corpus in its present state."""
    try:
        index = PassageIndex.open(folder)
    except (FileNotFoundError, ValueError):  # the build replaces or refuses what is there
        return None
    return index if corpus.is_file() and index.is_of(corpus) else None


def _build(corpus: Path, folder: Path, skip_bad: bool, limit: int | None) -> PassageIndex:
    with reading_bar("passages") as bar:
        task = bar.add_task(escape(corpus.name), kept=0)

        def show(progress: CorpusProgress) -> None:
            bar.update(
                task,
                total=progress.size_bytes,
                completed=progress.read_bytes,
                kept=progress.kept,
            )

        return PassageIndex.build(corpus, folder, progress=show, skip_bad=skip_bad, limit=limit)


def _summary(index: PassageIndex) -> Table:
    manifest = index.manifest
    table = Table("rows", "count")
    table.columns[1].justify = "right"
    table.add_row("read", f"{manifest.rows:,}")
    table.add_row("kept", f"{manifest.passages:,}")
    for reason, count in sorted(manifest.dropped.items()):
        table.add_row(f"dropped: {reason}", f"{count:,}")
    table.add_row("index, MB", f"{sum(manifest.files.values()) / 1e6:,.1f}")
    return table
