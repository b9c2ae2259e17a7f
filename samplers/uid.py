"""The uid of one prompt's group of trajectories. It holds the prompt's source and draw number."""

import uuid
from functools import lru_cache
from urllib.parse import quote, unquote


def make_uid(source: str, draw: int) -> str:
    """A unique uid for the group of the `draw`-th prompt of `source`.

    verl keeps the uid with every row of the group, also over a restart. verl cuts its keys
    (`<uid>_<session>_<index>`) at "_", so the uid holds none.
    """
    return f"{uuid.uuid4().hex}.{draw}.{quote(source, safe='').replace('_', '%5F')}"


def group_of(key: str) -> str:
    """uid of the group of a row; verl's keys are `<uid>_<session>_<index>`."""
    return key.split("_", 1)[0]


def session_of(key: str) -> str:
    """`<uid>_<session>` of a row, which all rows of its session share."""
    return key.rsplit("_", 1)[0]


@lru_cache(maxsize=2**16)
def prompt_of(uid: str) -> tuple[str, int]:
    """(source, draw) of a group; raises ValueError for a uid that `make_uid` did not make."""
    _, draw, source = uid.split(".", 2)
    return unquote(source), int(draw)
