"""Build the search index of a corpus, with a progress bar and a summary on the screen."""

from pathlib import Path

from rich.console import Console
from rich.markup import escape

from tool_server.search import PassageIndex
from tool_server.search.index import index_beside
from verl_mixed.prepare.rows import counts_table, reading_bar


def prepare_corpus(
    corpus: Path,
    folder: Path | None = None,
    *,
    skip_bad: bool = False,
    limit: int | None = None,
) -> None:
    """Build the index, unless there is an index of the corpus in its present state.

    Args:
        folder: folder of the index; None is `<corpus>.index`, where the tool server looks.

    The other arguments, and the errors, are those of `PassageIndex.build`.
    """
    console = Console(highlight=False)
    folder = folder or index_beside(corpus.absolute())
    index = None if limit is not None else _up_to_date(corpus, folder)
    if index is not None:
        held = f"{folder} holds {corpus} already: {index.size:,} passages"
        console.print(escape(held), soft_wrap=True)
        return
    with reading_bar(corpus.name, "passages") as show:
        index = PassageIndex.build(corpus, folder, progress=show, skip_bad=skip_bad, limit=limit)
    console.print(escape(f"wrote {folder}"), soft_wrap=True)
    assert index.read is not None
    dropped = dict(sorted(index.read.dropped.items()))
    table = counts_table("rows", index.read.rows, index.size, dropped)
    size_bytes = sum(path.stat().st_size for path in folder.iterdir())
    table.add_row("index, MB", f"{size_bytes / 1e6:,.1f}")
    console.print(table)


def _up_to_date(corpus: Path, folder: Path) -> PassageIndex | None:
    """The index in a folder, if it is of the corpus in its present state."""
    try:
        index = PassageIndex.open(folder)
    except (FileNotFoundError, ValueError):  # the build replaces or refuses what is there
        return None
    return index if corpus.is_file() and index.is_of(corpus) else None
