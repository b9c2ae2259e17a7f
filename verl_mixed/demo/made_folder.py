"""Makes a folder all at once, and recognises it later by a note (a JSON file) in the folder."""

import json
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def read_note(path: Path) -> dict[str, Any]:
    """The JSON object in a note; an empty one if the note is missing or broken."""
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


@contextmanager
def made_whole(folder: Path, note: str) -> Generator[Path]:
    """Yield an empty folder to fill, with the file `note`, which replaces `folder`
    if the block raises nothing.

    Raises:
        FileExistsError: the folder holds something else, and is left as it is.
        OSError: the folder cannot be made.
    """
    folder = folder.resolve()  # otherwise a link would be replaced by a folder
    _refuse_other_content(folder, note)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{folder.name}-", dir=folder.parent, ignore_cleanup_errors=True
    ) as room:
        draft = Path(room) / folder.name
        draft.mkdir()
        yield draft
        _refuse_other_content(folder, note)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(draft, folder)


def _refuse_other_content(folder: Path, note: str) -> None:
    is_ours = (folder / note).is_file() or (folder.is_dir() and not any(folder.iterdir()))
    if folder.exists() and not is_ours:
        raise FileExistsError(
            f"cannot write {folder}: it is there and holds no {note}, so it was not made by this "
            "command and is left as it is; move it away"
        )
