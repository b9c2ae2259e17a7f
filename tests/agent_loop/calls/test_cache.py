"""Equal calls at once are one request, and results in memory have their time and bound."""

import asyncio
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.calls import cache as cache_module
from agent_loop.calls.cache import CACHE_S, Cache, content_key
from agent_loop.calls.routes import local_route
from agent_loop.calls.servers import Server
from agent_loop.deadline import Deadline
from tests.fakes.virtual_loop import run_virtual
from tool_server.wire.protocol import Fault, ToolCall, ToolRejected, ToolResult


async def no_post(call: ToolCall, server: Server) -> ToolResult:
    raise AssertionError("the cache posts nothing")


ROUTE = local_route("here", no_post, key="k", timeout_s=60.0, clock=time.monotonic)


class Work:
    """Answers made by hand: each request under way waits to be finished or failed."""

    def __init__(self) -> None:
        self.cache = Cache(time.monotonic)
        self.under_way: dict[str, list[asyncio.Future[int]]] = {}
        self.made = Counter[str]()

    async def ask(self, tool: str) -> ToolResult:
        self.made[tool] += 1
        number = self.made[tool]
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        futures = self.under_way.setdefault(tool, [])
        futures.append(future)
        try:
            await future
        finally:
            futures.remove(future)
        return ToolResult(body={"result": number}, cacheable=False)

    def end(self, tool: str, error: Exception | None = None) -> None:
        for future in self.under_way.get(tool, []):
            if not future.done():
                future.set_exception(error) if error else future.set_result(0)

    def caller(self, tool: str) -> "asyncio.Task[ToolResult]":
        call, deadline = ToolCall(tool=tool, payload={}), Deadline.after(60.0, "timeout")
        return asyncio.ensure_future(
            self.cache.answer(call, ROUTE, deadline, lambda: self.ask(tool))
        )


async def settle() -> None:
    """Let all that can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)


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
def test_in_every_order_of_events_callers_get_values_and_requests_have_callers(steps):
    asyncio.run(play(steps))


async def play(steps: list[tuple[str, str | int]]) -> None:
    work = Work()
    callers: list[tuple[str, asyncio.Task[ToolResult]]] = []
    given_up: set[asyncio.Task[ToolResult]] = set()

    async def check() -> None:
        await settle()
        for tool in "ab":
            waits = any(of == tool and not task.done() for of, task in callers)
            assert len(work.under_way.get(tool, [])) == waits
        assert len(work.cache._under_way) == sum(map(len, work.under_way.values()))

    for step, argument in steps:
        if step == "call":
            callers.append((str(argument), work.caller(str(argument))))
        elif step == "cancel" and callers:
            task = callers[int(argument) % len(callers)][1]
            if task.cancel():
                given_up.add(task)
        elif step in ("finish", "fail"):
            work.end(str(argument), ToolRejected() if step == "fail" else None)
        elif step == "tick":
            for _ in range(int(argument)):
                await asyncio.sleep(0)
        if step == "tick" and argument == 4:
            await check()
    await check()
    for tool in "ab":
        work.end(tool)
    await check()
    for tool, task in callers:
        if task.cancelled():
            assert task in given_up
        elif not isinstance(task.exception(), Fault):
            assert 1 <= task.result().body["result"] <= work.made[tool]


async def test_a_failure_is_everybodys_who_waits_and_nobodys_who_comes_later():
    work = Work()
    first, second = work.caller("a"), work.caller("a")
    await settle()
    work.end("a", ToolRejected("no"))
    for task in (first, second):
        with pytest.raises(ToolRejected, match="no"):
            await task
    third = work.caller("a")
    await settle()
    work.end("a")
    assert (await third).body == {"result": 2}


def test_who_joins_waits_no_longer_than_its_own_time():
    async def both() -> tuple[bool, float]:
        loop = asyncio.get_running_loop()
        cache, call = Cache(loop.time), ToolCall(tool="a", payload={})

        async def ask() -> ToolResult:
            await asyncio.sleep(10)
            return ToolResult(body={})

        async def answer(seconds: float) -> ToolResult:
            deadline = Deadline.after(seconds, "timeout", loop.time)
            return await cache.answer(call, ROUTE, deadline, ask)

        first = asyncio.ensure_future(answer(60.0))
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await answer(4.0)
        left_at = loop.time()
        return (await first).cached, left_at

    assert run_virtual(both()) == ((False, 4.0), 10.0)


def test_memory_keeps_results_for_their_time_and_within_their_bytes(monkeypatch):
    monkeypatch.setattr(cache_module, "CACHE_BYTES", 5000)
    now = [0.0]
    cache = Cache(lambda: now[0])
    asked: list[str] = []

    def is_cached(tool: str, size: int = 800) -> bool:
        async def ask() -> ToolResult:
            asked.append(tool)
            return ToolResult(body={"result": "x" * size})

        call, deadline = ToolCall(tool=tool, payload={}), Deadline.after(60.0, "timeout")
        return asyncio.run(cache.answer(call, ROUTE, deadline, ask)).cached

    assert [is_cached(tool) for tool in "abac"] == [False, False, True, False]
    assert [is_cached(tool) for tool in "acb"] == [True, True, False]  # b was used longest ago
    assert [is_cached("large", size=9000) for _ in range(2)] == [False, False]
    assert is_cached("b")
    now[0] = CACHE_S
    assert not is_cached("b")


def test_half_a_character_in_a_call_has_a_key_as_any_other():
    half, other = (ToolCall(tool="calculate", payload={"x": x}) for x in ("\ud83d", "\udc00"))
    assert content_key(half) != content_key(other)
