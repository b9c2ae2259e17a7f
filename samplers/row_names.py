"""The name of a row, made from its content. Standard library only."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast


def row_id(source: str, record: Mapping[str, Any]) -> str:
    """Name a raw record by its content, so that the name does not depend on order or file names.

    The order of keys does not matter. numpy's values count as the lists and numbers that they hold;
    values that JSON does not have (bytes, dates, decimals) count as their printed text, and images
    as their pixels.
    """
    try:
        text = _CANONICAL.encode(record)
    except (TypeError, ValueError, RecursionError):  # keys that are no text, or nested too deeply
        text = _flat(record)
    digest = hashlib.sha1(text.encode("utf-8", "surrogatepass"))  # a lone surrogate is no UTF-8
    return f"{source}:{digest.hexdigest()[:16]}"


def _printed(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy; its own text is cut in the middle
        return value.tolist()
    if hasattr(value, "getbands"):  # an image of PIL, whose own text is its address
        return [value.mode, *value.size, hashlib.sha1(value.tobytes()).hexdigest()]
    if isinstance(value, Mapping):
        return dict(cast(Mapping[Any, Any], value))
    if isinstance(value, set | frozenset):  # in another order in each process
        return sorted(map(str, cast(frozenset[Any], value)))
    return str(value)


_CANONICAL = json.JSONEncoder(sort_keys=True, ensure_ascii=False, default=_printed)


def _flat(record: Any) -> str:
    """A text that identifies a record of any depth, with any keys."""
    parts: list[str] = []
    waiting: list[Any] = [record]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            entries = cast(Mapping[Any, Any], value)
            named = sorted(((repr(key), entries[key]) for key in entries), key=lambda pair: pair[0])
            parts.append(f"{len(named)} entries")
            waiting.extend(part for pair in reversed(named) for part in reversed(pair))
        elif isinstance(value, list | tuple):
            items = cast(Sequence[Any], value)
            parts.append(f"{len(items)} items")
            waiting.extend(reversed(items))
        elif hasattr(value, "tolist"):
            waiting.append(value.tolist())
        else:
            parts.append(repr(value if isinstance(value, str | float) else _printed(value)))
    return "\0".join(parts)
