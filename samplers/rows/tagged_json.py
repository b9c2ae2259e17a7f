"""JSON that keeps tuples and keys that are no text.

`json.loads(json.dumps(x))` turns tuples into lists and keys into text. `tagged` marks them first,
and `untagged` gives back an equal value.
"""

from collections.abc import Mapping
from typing import Any, cast

TUPLE, ITEMS = "__tuple__", "__items__"


def tagged(value: Any) -> Any:
    """A value of JSON's types alone; numpy's numbers and arrays become numbers and lists.

    Raises:
        TypeError: the value holds an object of a type that JSON cannot hold.
    """
    if value is None or isinstance(value, bool):
        return value
    for plain in (str, int, float):  # also their subclasses, as numpy's float64
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, Mapping):
        entries = cast(Mapping[Any, Any], value)
        if all(isinstance(key, str) for key in entries) and not {TUPLE, ITEMS} & entries.keys():
            return {str(key): tagged(each) for key, each in entries.items()}
        return {ITEMS: [[tagged(key), tagged(each)] for key, each in entries.items()]}
    if isinstance(value, tuple):
        return {TUPLE: [tagged(each) for each in cast("tuple[Any, ...]", value)]}
    if isinstance(value, list):
        return [tagged(each) for each in cast("list[Any]", value)]
    if hasattr(value, "tolist"):  # numpy
        return tagged(value.tolist())
    raise TypeError(f"JSON cannot hold a {type(value).__name__}: {value!r:.80}")


def untagged(value: Any) -> Any:
    """The value that `tagged` was given."""
    if isinstance(value, list):
        return [untagged(each) for each in cast("list[Any]", value)]
    if isinstance(value, dict):
        entries = cast("dict[str, Any]", value)
        if entries.keys() == {TUPLE}:
            return tuple(untagged(each) for each in entries[TUPLE])
        if entries.keys() == {ITEMS}:
            return {untagged(key): untagged(each) for key, each in entries[ITEMS]}
        return {key: untagged(each) for key, each in entries.items()}
    return value
