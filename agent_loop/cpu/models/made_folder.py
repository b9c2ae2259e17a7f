"""A folder that is made once, is there whole or not at all, and is found again by a note in it.

Decides what may be replaced: what has such a note, and an empty folder. Standard library only.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def read_note(path: Path) -> dict[str, Any]:
    """The object in a note; an empty one where it is missing or broken."""
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


@contextmanager
def made_whole(folder: Path, note: str) -> Generator[Path]:
    """Yield an empty folder to fill, which takes the place of `folder` when the block ends well.

    Args:
        folder: what is there is replaced if it holds the note.
        note: name of the file that the block writes into the folder.

    Raises:
        FileExistsError: something else is there; it is left as it is.
        OSError: the folder cannot be made.
    """
    folder = folder.resolve()  # a link stays one
    _refuse_strangers(folder, note)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{folder.name}-", dir=folder.parent, ignore_cleanup_errors=True
    ) as room:
        draft = Path(room) / folder.name
        draft.mkdir()
        yield draft
        _refuse_strangers(folder, note)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(draft, folder)


def _refuse_strangers(folder: Path, note: str) -> None:
    is_ours = (folder / note).is_file() or (folder.is_dir() and not any(folder.iterdir()))
    if folder.exists() and not is_ours:
        raise FileExistsError(
            f"cannot write {folder}: it is there and holds no {note}, so it was not made by this "
            "command and is left alone; move it away"
        )
