"""The kinds of data that come with the project, and how to find one of your own."""

from pathlib import Path

from samplers.kind import Kind
from samplers.module_file import module_of
from samplers.rows.sources import json_qa, math, nq, reasoning_gym, seeds, taco

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        *(taco.KIND, nq.KIND, math.KIND, json_qa.KIND),
        *(reasoning_gym.KIND, seeds.KIND),
    )
}


def makes_records(kind: str | None) -> bool:
    """Whether this is the name of a kind that makes its records and reads no files."""
    try:
        return kind is not None and kind_of(kind).records is not None
    except ValueError:
        return False


def kind_of(name_or_path: str) -> Kind:
    """A kind by its name, or from the Python file that holds it as `KIND`.

    Raises:
        ValueError: there is no such kind, or the file holds none.
    """
    if name_or_path in KINDS:
        return KINDS[name_or_path]
    path = Path(name_or_path)
    failed = f"no kind of data in {name_or_path!r}"
    if path.suffix != ".py":
        raise ValueError(
            f"{failed}: known are {', '.join(KINDS)}; name one of them, or a file NAME.py with a "
            "KIND"
        )
    if not path.is_file():
        raise ValueError(f"{failed}: no such file; correct the name")
    try:
        module = module_of(path, "kind")
    except ImportError as error:
        last = " ".join(str(error).split())
        raise ValueError(f"{failed}: it cannot be imported ({last}); correct it") from error
    kind = getattr(module, "KIND", None)
    if not isinstance(kind, Kind):
        found = "it has no KIND" if kind is None else f"its KIND is a {type(kind).__name__}"
        raise ValueError(f"{failed}: {found}; give it a samplers.kind.Kind of that name")
    return kind
