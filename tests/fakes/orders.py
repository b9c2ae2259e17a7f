"""Python functions as a user writes them, named by `tools: [tests/fakes/orders.py:...]`."""

import asyncio
import os
import time
from typing import Literal

from tool_server.wire.protocol import ToolRejected

ORDERS = {"A1": 3, "B2": 0}


def look_up(order: str, unit: Literal["pieces", "boxes"] = "pieces") -> dict:
    """Find an order.

    Args:
        order: its number, as A1
        unit: what is counted
    """
    if order not in ORDERS:
        raise ToolRejected(f"no order {order!r}")
    return {"order": order, unit: ORDERS[order]}


async def later(text: str) -> str:
    """Say a text later.

    Args:
        text: what to say
    """
    await asyncio.sleep(0)
    return text.upper()


def breaks(how: str) -> str:
    """Break.

    Args:
        how: in which way
    """
    if how == "timeout":
        raise TimeoutError("the database did not answer")
    if how == "exit":
        raise SystemExit(3)
    if how == "die":
        os._exit(7)
    if how == "large":
        return "x" * (2 << 20)
    return {"none": None}[how]  # type: ignore[return-value]


def hangs(seconds: float) -> str:
    """Wait.

    Args:
        seconds: how long
    """
    time.sleep(seconds)
    return str(os.getpid())


def sums(numbers: list[float], scale: float | None = None) -> float:
    """Add numbers.

    Args:
        numbers: to add
        scale: factor of the sum
    """
    return sum(numbers) * (1.0 if scale is None else scale)


class Cart:
    """A shopping cart that lives as long as the trajectory."""

    ended: list[str] = []  # noqa: RUF012

    def start(self, row: dict) -> None:
        self.owner = row["row_id"]
        if row["extras"].get("shop") == "closed":
            raise OSError("the shop is closed")
        self.items: list[str] = []

    async def call(self, item: str) -> list[str]:
        """Put an item into the cart.

        Args:
            item: its name
        """
        self.items.append(item)
        return self.items

    def close(self) -> None:
        self.ended.append(getattr(self, "owner", "none"))


def no_hints(order):
    """Find an order.

    Args:
        order: its number
    """


def no_docstring(order: str) -> str:
    return order


def any_number(*orders: str) -> str:
    """Find orders."""
    return ""


async def stays(text: str) -> str:
    """Ignore a cancellation.

    Args:
        text: what to say
    """
    event = asyncio.Event()
    asyncio.get_running_loop().call_later(0.5, event.set)
    while not event.is_set():
        try:
            await event.wait()
        except asyncio.CancelledError:
            continue
    return text
