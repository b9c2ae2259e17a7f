"""A place in verl's source that ours stands on."""

import gc
import inspect
import pkgutil
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Hook:
    """A place in verl, and what must be so there."""

    place: str
    """`module:name`, without the leading `verl.`; a module alone means all of its source."""

    ours: str
    """What of ours stands on it."""

    says: tuple[str, ...] = ()
    """Lines that its source holds, in this order."""

    takes: tuple[str, ...] = ()
    """Parameters that it can be called with."""

    def problem(self) -> str | None:
        """What is no longer so, None where all is."""
        what = self._difference()
        return what and (
            f"verl.{self.place} {what}: {self.ours} stands on it; read the new source, adapt ours "
            "and then tests/verl_hooks"
        )

    def _difference(self) -> str | None:
        try:
            found = pkgutil.resolve_name(f"verl.{self.place}")
        except (ImportError, AttributeError) as error:
            return f"is gone ({error})"
        if self.takes:
            parameters = inspect.signature(found).parameters
            takes_any = any(one.kind == one.VAR_KEYWORD for one in parameters.values())
            if lacking := [name for name in self.takes if name not in parameters and not takes_any]:
                return f"does not take {lacking}"
        if not self.says:
            return None
        source, at = source_of(found), 0
        for line in self.says:
            at = source.find(line, at)
            if at < 0:
                return f"no longer says {line!r}, or in another order"
        return None


def source_of(found: Any) -> str:
    """The source of a class, function or module.

    For a class, Python parses its module. Before 3.11.8 the parser fails if a garbage collection in
    the middle of it runs code that parses too, such as the printing of a traceback
    (github.com/python/cpython/issues/106905).
    """
    gc.disable()
    try:
        return inspect.getsource(found)
    finally:
        gc.enable()
