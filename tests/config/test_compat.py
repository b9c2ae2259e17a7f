"""What stands in for a newer Python does as that one; its branch for 3.10 is run here too."""

import asyncio
import importlib.util
import sys
from types import ModuleType

import pytest

from config.compat import gather_all
from tests.fakes.virtual_loop import run_virtual


def fresh(name: str) -> ModuleType:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=[sys.version_info[:2], (3, 10)], ids=["as here", "as in 3.10"])
def compat(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module as that Python has it."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "version_info", request.param)
        patch.setitem(sys.modules, "async_timeout", fresh("async_timeout"))
        return fresh("config.compat")


@pytest.mark.parametrize(
    ("delay", "takes_s", "fault", "is_late", "expired"),
    [
        (1.0, 2.0, None, True, True),
        (2.0, 1.0, None, False, False),
        (None, 1e6, None, False, False),
        (2.0, 1.0, TimeoutError("its own"), True, False),
        (2.0, 1.0, asyncio.TimeoutError("its own"), True, False),
    ],
)
def test_a_deadline_tells_whether_it_was_the_one_that_came(
    compat, delay, takes_s, fault, is_late, expired
):
    async def work() -> tuple[bool, bool]:
        limit = compat.timeout(delay)
        try:
            async with limit as deadline:
                assert deadline is limit
                await asyncio.sleep(takes_s)
                if fault is not None:
                    raise fault
        except TimeoutError:
            return True, limit.expired()
        return False, limit.expired()

    assert run_virtual(work())[0] == (is_late, expired)


def test_a_cancellation_from_outside_is_no_deadline(compat):
    async def work() -> None:
        async with compat.timeout(5.0):
            await asyncio.sleep(10)

    async def cancels() -> bool:
        task = asyncio.ensure_future(work())
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert run_virtual(cancels()) == (True, 1.0)


def test_members_of_an_enum_of_strings_print_as_their_values(compat):
    assert f"{compat.StrEnum('Colour', {'RED': 'red'})('red')}" == "red"


async def value(number: int, after_s: float) -> int:
    await asyncio.sleep(after_s)
    return number


def test_results_come_in_the_order_of_the_work():
    assert run_virtual(gather_all([value(1, 2.0), value(2, 1.0)])) == ([1, 2], 2.0)
    assert run_virtual(gather_all([value(1, 2.0)])) == ([1], 2.0)
    assert run_virtual(gather_all(list["asyncio.Future[int]"]())) == ([], 0.0)


def test_the_first_fault_ends_the_other_work_and_leaves_after_it():
    async def ends_slowly() -> int:
        try:
            return await value(1, 100.0)
        finally:
            await asyncio.sleep(3)

    async def faulty() -> int:
        await asyncio.sleep(1)
        raise ValueError("first")

    async def fails() -> float:
        with pytest.raises(ValueError, match="first"):
            await gather_all([ends_slowly(), faulty()])
        return asyncio.get_running_loop().time()

    assert run_virtual(fails()) == (4.0, 4.0)
