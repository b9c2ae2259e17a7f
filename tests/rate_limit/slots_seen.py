"""What a further process sees of a slots file: how many slots are held, and who waits."""

import os

from rate_limit.queues import ByteLocks
from rate_limit.slots import FileSlots

FIRST_PLACE, END = 1 << 40, 2**63 - 1


def in_use(slots: FileSlots) -> int:
    """Slots that are held now by all processes."""
    return _locked(slots, 0, slots.slots)


def waiting_in(slots: FileSlots) -> int:
    """Processes in the queue now."""
    return _locked(slots, FIRST_PLACE, END)


def _locked(slots: FileSlots, start: int, end: int) -> int:
    try:
        locks = ByteLocks(os.open(slots.path, os.O_RDWR))
    except FileNotFoundError:
        return 0
    return locks.count(start, end)
