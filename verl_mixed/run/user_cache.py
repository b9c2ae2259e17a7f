"""The user's folder for files that can be made again."""

import os
from pathlib import Path


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/verl-mixed`, or `~/.cache/verl-mixed`; created if it is missing.

    Raises:
        OSError: it cannot be created.
    """
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(home) / "verl-mixed"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
