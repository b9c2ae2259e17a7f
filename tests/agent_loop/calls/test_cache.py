"""Single flight: equal work once at a time, and none that nobody waits for."""

import asyncio
from collections import Counter
from contextvars import ContextVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.calls.cache import SingleFlight, content_key
from tests.fakes.virtual_loop import run_virtual
from tool_server.wire.protocol import ToolCall


def never(error: BaseException, left_s: float) -> bool:
    return False


class Work:
    """Makes values by hand: each piece of work under way waits to be finished or failed."""

    def __init__(self) -> None:
        self.under_way: dict[str, list[asyncio.Future[int]]] = {}
        self.made = Counter[str]()
        self.cancelled = 0

    async def make(self, key: str) -> int:
        self.made[key] += 1
        number = self.made[key]
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        futures = self.under_way.setdefault(key, [])
        futures.append(future)
        try:
            await future
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            futures.remove(future)
        return number

    def end(self, key: str, error: Exception | None = None) -> None:
        """End what is under way for a key."""
        for future in self.under_way.get(key, []):
            if not future.done():
                future.set_exception(error) if error else future.set_result(0)


async def settle() -> None:
    """Let all that can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)


def caller(cache: SingleFlight[int], work: Work, key: str) -> "asyncio.Task[tuple[int, bool]]":
    return asyncio.create_task(cache.get(key, lambda: work.make(key), 60.0))


async def test_work_goes_on_while_somebody_waits_and_ends_with_the_last_one():
    cache, work = SingleFlight[int](never), Work()
    first, second = caller(cache, work, "a"), caller(cache, work, "a")
    await settle()
    first.cancel()
    await settle()
    assert (len(work.under_way["a"]), work.cancelled) == (1, 0)
    second.cancel()
    await asyncio.wait([first, second])
    assert (len(work.under_way["a"]), work.cancelled) == (0, 1)
    assert first.cancelled() and second.cancelled()


async def test_who_comes_while_cancelled_work_still_ends_has_work_of_his_own():
    cache, work = SingleFlight[int](never), Work()
    ends = asyncio.Event()

    async def make_and_end_slowly() -> int:
        try:
            return await work.make("a")
        finally:
            await ends.wait()

    first = asyncio.create_task(cache.get("a", make_and_end_slowly, 60.0))
    await settle()
    first.cancel()
    await settle()
    assert not first.done()  # it leaves when its work has ended
    second = caller(cache, work, "a")
    await settle()
    ends.set()
    await asyncio.wait([first])
    third = caller(cache, work, "a")
    await settle()
    work.end("a")
    assert await asyncio.gather(second, third) == [(2, False), (2, True)]
    assert work.made["a"] == 2


async def test_who_joins_before_the_last_one_has_left_keeps_the_work():
    cache, work = SingleFlight[int](never), Work()
    first = caller(cache, work, "a")
    await settle()
    second = caller(cache, work, "a")  # runs before the cancellation arrives
    first.cancel()
    await settle()
    work.end("a")
    assert await second == (1, True)
    assert work.cancelled == 0


async def test_a_caller_that_is_cancelled_twice_leaves_at_once():
    cache = SingleFlight[int](never)
    ends = asyncio.Event()

    async def stubborn() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            await ends.wait()
        return 0

    first = asyncio.create_task(cache.get("a", stubborn, 60.0))
    await settle()
    first.cancel()
    await settle()
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()
    ends.set()
    await settle()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("call"), st.sampled_from("ab")),
        st.tuples(st.just("cancel"), st.integers(0, 7)),
        st.tuples(st.just("finish"), st.sampled_from("ab")),
        st.tuples(st.just("fail"), st.sampled_from("ab")),
        st.tuples(st.just("tick"), st.integers(1, 4)),
    ),
    max_size=30,
)


@given(steps=STEPS)
def test_in_every_order_of_events_callers_get_values_and_work_has_callers(steps):
    asyncio.run(play(steps))


async def play(steps: list[tuple[str, str | int]]) -> None:
    cache, work = SingleFlight[int](never), Work()
    callers: list[tuple[str, asyncio.Task[tuple[int, bool]]]] = []
    given_up: set[asyncio.Task[tuple[int, bool]]] = set()

    async def check() -> None:
        await settle()
        for key in "ab":
            waits = any(k == key and not task.done() for k, task in callers)
            assert len(work.under_way.get(key, [])) == (1 if waits else 0)
            assert (key in cache._under_way) == waits

    for step, argument in steps:
        if step == "call":
            callers.append((str(argument), caller(cache, work, str(argument))))
        elif step == "cancel" and callers:
            task = callers[int(argument) % len(callers)][1]
            if task.cancel():
                given_up.add(task)
        elif step in ("finish", "fail"):
            work.end(str(argument), ValueError() if step == "fail" else None)
        elif step == "tick":
            for _ in range(int(argument)):
                await asyncio.sleep(0)
        if step == "tick" and argument == 4:
            await check()
    await check()
    for key in "ab":
        work.end(key)
    await check()
    for key, task in callers:
        if task.cancelled():
            assert task in given_up
        elif not isinstance(task.exception(), ValueError):
            assert 1 <= task.result()[0] <= work.made[key]
    assert cache._under_way == {}


async def test_a_failure_is_everybodys_who_waits_and_nobodys_who_comes_later():
    cache, work = SingleFlight[int](never), Work()
    first, second = caller(cache, work, "a"), caller(cache, work, "a")
    await settle()
    work.end("a", ValueError("no"))
    for task in (first, second):
        with pytest.raises(ValueError, match="no"):
            await task
    third = caller(cache, work, "a")
    await settle()
    work.end("a")
    assert await third == (2, False)


async def test_work_has_none_of_the_context_of_the_caller_that_started_it():
    mine: ContextVar[str] = ContextVar("mine", default="nobody's")
    mine.set("the first caller's")

    async def make() -> str:
        return mine.get()

    assert await SingleFlight[str](never).get("a", make, 60.0) == ("nobody's", False)


def test_who_joins_waits_no_longer_than_its_own_time():
    cache = SingleFlight[float](never)

    async def make() -> float:
        await asyncio.sleep(10)
        return 60.0

    async def impatient() -> float:
        with pytest.raises(TimeoutError):
            await cache.get("a", make, 4.0)
        return asyncio.get_running_loop().time()

    async def both() -> tuple[tuple[float, bool], float]:
        first, left_at = await asyncio.gather(cache.get("a", make, 60.0), impatient())
        return first, left_at

    assert run_virtual(both()) == (((60.0, False), 4.0), 10.0)


def test_the_last_one_whose_time_is_over_ends_the_work():
    async def play() -> tuple[bool, int]:
        cache, work = SingleFlight[int](never), Work()
        first = caller(cache, work, "a")
        await asyncio.sleep(1)
        second = caller(cache, work, "a")
        await settle()
        first.cancel()
        await asyncio.wait([first, second])
        return isinstance(second.exception(), TimeoutError), work.cancelled

    assert run_virtual(play()) == ((True, 1), 61.0)


def test_half_a_character_in_a_call_has_a_key_as_any_other():
    half, other = (ToolCall(tool="calculate", payload={"x": x}) for x in ("\ud83d", "\udc00"))
    assert content_key(half) != content_key(other)
