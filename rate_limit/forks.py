"""Objects that change in a forked child, because their locks and files are the parent's."""

import os
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakSet

T = TypeVar("T")


def after_fork(act: Callable[[T], object]) -> WeakSet[T]:
    """A set of objects; a forked child calls `act` for each of them."""
    objects: WeakSet[T] = WeakSet()

    def act_on_all() -> None:
        for each in list(objects):
            act(each)

    os.register_at_fork(after_in_child=act_on_all)
    return objects
