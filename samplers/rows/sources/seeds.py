"""Rows that hold a seed, for agent loops that build the state of an environment from it.

`extras.seed` of a row is its seed, and its ground truth is empty, because the environment computes
the score. The validation rows have the first seeds and the training rows those after them, so that
another number of training rows leaves the validation rows as they are.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from samplers.kind import Kind, Option
from samplers.rows.schema import Row, row_id

SOURCE = "seeds"
AGENT = "environment"
SIZE, VAL_SIZE = 256, 16


def records(
    *, split: str, size: int = SIZE, val_size: int = VAL_SIZE, first: int = 0, question: str = ""
) -> Iterator[Mapping[str, Any]]:
    """Make `{"seed"}` of each row; see `samplers.kind.Maker`."""
    for name, number, least in (("size", size, 1), ("val_size", val_size, 1), ("first", first, 0)):
        whole = isinstance(number, int) and not isinstance(number, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not whole or number < least:
            raise ValueError(f"{name}={number!r} of kind='seeds': it is a whole number >= {least}")
    if not isinstance(question, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"question={question!r} of kind='seeds': it is a text")
    start, end = first + val_size, first + val_size + size
    for seed in range(first, start) if split == "validation" else range(start, end):
        yield {"seed": seed}


def to_row(
    record: Mapping[str, Any],
    *,
    split: str,
    index: int,
    source: str = SOURCE,
    agent: str = AGENT,
    question: str = "",
    **_: Any,
) -> Row:
    """Turn one seed into a row.

    Args:
        question: the prompt of every row; empty: `episode <seed>`.
    """
    seed = int(record["seed"])
    return Row(
        data_source=source,
        agent_name=agent,
        question=question or f"episode {seed}",
        ability="environment",
        ground_truth={},
        split=split,
        index=index,
        row_id=row_id(source, {"seed": seed}),
        extras={"seed": seed},
    )


KIND = Kind(
    name=SOURCE,
    agent=AGENT,
    to_row=to_row,
    help="Seeds of environments, made and not read: a row for each seed",
    records=records,
    options=(
        Option(name="size", type=int, default=SIZE, help="training rows"),
        Option(name="val_size", type=int, default=VAL_SIZE, help="validation rows"),
        Option(name="first", type=int, default=0, help="first seed, of the validation rows"),
        Option(name="question", type=str, default="", help="prompt of every row"),
    ),
)
