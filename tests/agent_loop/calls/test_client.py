"""The tool client against a real server that misbehaves."""

import asyncio
import json
import pickle
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from agent_loop.calls.client import ToolClient, shared_client
from agent_loop.calls.servers import Server
from agent_loop.deadline import Deadline
from agent_loop.watchdog import Activity, Watchdog, waits_for
from config.schema import MixedConfig, SourceConfig, ToolConfig
from rate_limit.file_limiter import FileRateLimiter, LimiterTimeout
from rate_limit.slots import FileSlots
from tests.fakes.tool_server import running
from tests.fakes.virtual_loop import run_virtual
from tests.rate_limit.slots_seen import in_use, waiting_in
from tool_server.wire.protocol import (
    Fault,
    ToolCall,
    ToolRejected,
    ToolResult,
    ToolTimeout,
    ToolUnavailable,
)
from tool_server.wire.responses import RETRY_AFTER_CAP_S

CALL = ToolCall(tool="calculate", payload={"expression": "1+1"})
GOOD = {"result": "2"}
NOBODY = "http://127.0.0.1:9"


class RecordingLimiter:
    def __init__(self) -> None:
        self.acquired = 0
        self.pauses: list[float] = []
        self.sources: list[str] = []
        self.timeouts: list[float | None] = []

    async def acquire_async(
        self, n: int = 1, timeout_s: float | None = None, source: str = ""
    ) -> float:
        self.acquired += n
        self.timeouts.append(timeout_s)
        self.sources.append(source)
        return 0.0

    async def penalise_async(self, retry_after_s: float = 0.0) -> None:
        self.pauses.append(retry_after_s)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class SlowServer:
    """Slots that let the clock go on by `request_s` while a request is under way."""

    def __init__(self, clock: Clock, request_s: float) -> None:
        self._clock, self.request_s = clock, request_s
        self.timeouts: list[float | None] = []

    @asynccontextmanager
    async def hold_async(self, timeout_s: float | None = None) -> AsyncIterator[None]:
        self.timeouts.append(timeout_s)
        asyncio.get_running_loop().call_soon(self._pass_time)
        yield

    def _pass_time(self) -> None:
        self._clock.now += self.request_s


def client(url: str | list[str], **settings) -> ToolClient:
    clock = settings.pop("clock", Clock())
    return ToolClient(
        url,
        limiter=settings.pop("limiter", None),
        sleep=clock.sleep,
        clock=clock,
        rng=random.Random(0),
        **settings,
    )


async def test_a_call_brings_the_answer_and_passes_the_limiter_once():
    limiter = RecordingLimiter()
    async with running([GOOD]) as server, client(server.url, limiter=limiter) as tools:
        result = await tools.call(CALL)
    assert result.body == GOOD
    assert (result.attempts, result.cached, limiter.acquired) == (1, False, 1)
    assert server.seen == [("/calculate", CALL.payload)]


@pytest.mark.parametrize("fault", [503, 500, 429, "drop", [1, 2]], ids=str)
async def test_a_passing_fault_is_tried_again_through_the_limiter(fault):
    limiter, clock = RecordingLimiter(), Clock()
    async with (
        running([fault, fault, GOOD]) as server,
        client(server.url, limiter=limiter, clock=clock) as tools,
    ):
        result = await tools.call(CALL)
    assert result.body == GOOD
    assert (result.attempts, limiter.acquired) == (3, 3)
    assert 0 < sum(clock.slept) <= 0.75
    assert result.server_wait_s == pytest.approx(0.0 if fault in (500, [1, 2]) else clock.now)


@pytest.mark.parametrize(
    ("fault", "pauses"),
    [(429, [0.0]), (503, [0.0]), (500, []), ((500, {"Retry-After": "7"}), [7.0]), ("drop", [])],
    ids=str,
)
async def test_the_limiter_hears_of_overloads_and_of_pauses(fault, pauses):
    limiter = RecordingLimiter()
    async with running([fault, GOOD]) as server, client(server.url, limiter=limiter) as tools:
        await tools.call(CALL)
    assert limiter.pauses == pauses


async def test_who_waits_leaves_a_request_its_time():
    limiter, clock = RecordingLimiter(), Clock()
    slots = SlowServer(clock, request_s=2.0)
    async with (
        running([GOOD]) as server,
        client(
            server.url,
            limiter=limiter,
            slots=slots.hold_async,
            clock=clock,
            timeout_s=40.0,
            caches=False,
        ) as tools,
    ):
        await tools.call(CALL)
        await tools.for_source("nq").call(CALL)
        slots.request_s = 1000.0
        await tools.call(CALL)
        await tools.call(CALL)
    # not known yet, twice the mean, the same, and never more than a quarter
    assert limiter.timeouts == slots.timeouts == [30.0, 36.0, 36.0, 30.0]


async def test_retry_after_is_obeyed_and_told_to_everybody():
    limiter, clock = RecordingLimiter(), Clock()
    async with (
        running([(429, {"Retry-After": "7"}), GOOD]) as server,
        client(server.url, limiter=limiter, clock=clock) as tools,
    ):
        await tools.call(CALL)
    assert limiter.pauses == [7.0]
    assert clock.slept == [7.0]


@pytest.mark.parametrize(
    ("header", "pauses"),
    [("1e12", [RETRY_AFTER_CAP_S]), ("inf", [RETRY_AFTER_CAP_S]), ("nan", [0.0]), ("-3", [0.0])],
)
async def test_a_mad_retry_after_stops_nobody_for_ever(header, pauses):
    limiter = RecordingLimiter()
    async with (
        running([(429, {"Retry-After": header}), GOOD]) as server,
        client(server.url, limiter=limiter, timeout_s=2 * RETRY_AFTER_CAP_S) as tools,
    ):
        await tools.call(CALL)
    assert limiter.pauses == pauses


async def test_a_pause_beyond_the_deadline_is_not_waited_for():
    limiter, clock = RecordingLimiter(), Clock()
    async with (
        running([(503, {"Retry-After": "40"})]) as server,
        client(server.url, limiter=limiter, clock=clock, timeout_s=30.0) as tools,
    ):
        with pytest.raises(ToolUnavailable, match="1 attempts"):
            await tools.call(CALL)
    assert (clock.slept, limiter.pauses) == ([], [40.0])


async def test_a_sandbox_that_failed_under_http_200_is_a_fault_and_not_a_verdict():
    call = ToolCall(tool="run_code", payload={"code": "1"})
    failed = {"status": "SandboxError", "message": "no memory", "run_result": None}
    async with running([failed]) as server, client(server.url, max_retries=1) as tools:
        with pytest.raises(ToolUnavailable, match="SandboxError: no memory"):
            await tools.call(call)
    assert len(server.seen) == 2


async def test_a_run_that_timed_out_is_run_again_and_one_that_ended_is_not():
    call = ToolCall(tool="run_code", payload={"code": "1"})
    late = {"status": "Failed", "run_result": {"status": "TimeLimitExceeded"}}
    done = {"status": "Success", "run_result": {"status": "Finished", "stdout": ""}}
    async with running([late, done]) as server, client(server.url) as tools:
        bodies = [(await tools.call(call)).body for _ in range(3)]
    assert bodies == [late, done, done]
    assert len(server.seen) == 2


@pytest.mark.parametrize("error", [LimiterTimeout("the wait is 99 s"), TimeoutError()], ids=repr)
async def test_no_place_in_the_limiter_says_so_and_asks_no_server(error):
    class Full(RecordingLimiter):
        async def acquire_async(
            self, n: int = 1, timeout_s: float | None = None, source: str = ""
        ) -> float:
            raise error

    async with running([GOOD]) as server, client(server.url, limiter=Full()) as tools:
        with pytest.raises(ToolUnavailable, match=r"no place .*(99 s|still waited)"):
            await tools.call(CALL)
    assert server.seen == []


async def test_time_outs_after_a_failed_attempt_are_of_the_wait_again():
    class FullLater(RecordingLimiter):
        async def acquire_async(
            self, n: int = 1, timeout_s: float | None = None, source: str = ""
        ) -> float:
            if self.acquired:
                raise TimeoutError
            return await super().acquire_async(n, timeout_s, source)

    async with running([500]) as server, client(server.url, limiter=FullLater()) as tools:
        with pytest.raises(ToolUnavailable, match="no place"):
            await tools.call(CALL)


async def test_a_sources_client_is_the_same_but_tells_the_limiter_whose_calls_they_are():
    limiter = RecordingLimiter()
    async with running([GOOD]) as server, client(server.url, limiter=limiter) as tools:
        await tools.for_source("nq").call(CALL)
        await tools.for_source("math").call(ToolCall(tool="calculate", payload={}))
        assert limiter.sources == ["nq", "math"]
        assert len(server.seen) == 2


async def test_a_sources_client_is_open_while_the_common_one_is():
    async with running([GOOD]) as server:
        tools = client(server.url, caches=False)
        of_nq = tools.for_source("nq")
        async with tools:
            assert (await of_nq.call(CALL)).body == GOOD
        with pytest.raises(RuntimeError, match="outside `async with"):
            await of_nq.call(CALL)


def mixed_in(folder: Path) -> MixedConfig:
    sources = {"taco": SourceConfig(ratio=1)}
    return MixedConfig(sources=sources, experiment="here", run_dir=str(folder))


async def test_the_real_limiter_and_slots_let_a_call_pass(tmp_path):
    async with running([GOOD]) as server:
        config = ToolConfig(server_url=server.url, max_retries=0)
        tools = await shared_client(config, mixed_in(tmp_path))
        assert (await tools.call(CALL)).body == GOOD
        assert await shared_client(config, mixed_in(tmp_path)) is tools
        await tools.__aexit__(None, None, None)
    assert (tmp_path / "rate_limit.state").exists()


def test_each_event_loop_has_a_client_of_its_own(tmp_path):
    config = ToolConfig(server_url="http://127.0.0.1:9")

    async def client_here() -> ToolClient:
        tools = await shared_client(config, mixed_in(tmp_path))
        await tools.__aexit__(None, None, None)
        return tools

    first, second = asyncio.run(client_here()), asyncio.run(client_here())
    assert first is not second


async def test_a_fault_that_stays_is_unavailable_and_says_where_and_how_often():
    async with running([500]) as server, client(server.url, max_retries=2) as tools:
        with pytest.raises(ToolUnavailable, match=r"calculate.*3 attempts.*HTTP 500"):
            await tools.call(CALL)
    assert len(server.seen) == 3


async def test_a_call_that_the_server_refuses_is_not_tried_again():
    async with running([400]) as server, client(server.url) as tools:
        with pytest.raises(ToolRejected, match="HTTP 400"):
            await tools.call(CALL)
    assert len(server.seen) == 1


async def test_a_server_that_never_answers_costs_the_deadline_and_no_more():
    async with running(["hang"]) as server, client(server.url, timeout_s=0.05) as tools:
        with pytest.raises(ToolUnavailable, match=r"timeout=0\.05"):
            await tools.call(CALL)


NOT_NOW = [503, 429, 502, "drop", (503, {"X-Executed": "no"})]


@pytest.mark.parametrize("fault", NOT_NOW, ids=str)
async def test_a_server_that_does_not_answer_is_asked_until_the_deadline_and_then_named_once(fault):
    clock = Clock()
    async with running([fault]) as server, client(server.url, clock=clock, max_retries=0) as tools:
        with pytest.raises(ToolTimeout, match=f"no answer from {server.url} .*, last: ") as raised:
            await tools.call(CALL)
    assert len(server.seen) > 5
    assert clock.now == pytest.approx(30.0)
    assert raised.value.server_wait_s == pytest.approx(30.0)


@pytest.mark.parametrize("fault", NOT_NOW, ids=str)
async def test_what_may_have_been_executed_is_sent_once_if_it_may_not_run_twice(fault):
    once = replace(CALL, idempotent=False)
    async with running([fault, GOOD]) as server, client(server.url, max_retries=9) as tools:
        if isinstance(fault, tuple):
            assert (await tools.call(once)).attempts == 1  # the refused one was not executed
            return
        with pytest.raises(ToolUnavailable, match="may have been executed"):
            await tools.call(once)
    assert len(server.seen) == 1


async def test_callers_of_a_server_that_is_away_wait_for_it_together_and_it_costs_no_attempt():
    clock, limiter = Clock(), RecordingLimiter()
    calls = [ToolCall(tool="calculate", payload={"expression": str(n)}) for n in range(50)]
    async with client(NOBODY, clock=clock, limiter=limiter, timeout_s=30.0) as tools:
        errors = await asyncio.gather(*map(tools.call, calls), return_exceptions=True)
    assert {type(error) for error in errors} == {ToolTimeout}
    assert all("0 attempts" in str(e) and "ClientConnectorError" in str(e) for e in errors)
    assert limiter.acquired < 2 * len(calls)  # one of them tries, after each pause


async def test_a_call_has_no_more_time_than_is_left_of_its_trajectory():
    clock = Clock()
    async with client(NOBODY, clock=clock) as tools:
        trajectory = Deadline.after(5.0, "trajectory_s", clock)
        clock.now += 3.0
        mine = tools.for_source("nq", trajectory)
        with pytest.raises(ToolTimeout, match=r"the rest of mixed\.deadlines\.trajectory_s=2 s"):
            await mine.call(CALL)
    assert clock.now == pytest.approx(5.0)


async def test_a_token_that_was_renewed_is_read_again(monkeypatch):
    monkeypatch.setenv("TOOL_SERVER_TOKEN", "old")

    def renew(_: Any) -> int:
        monkeypatch.setenv("TOOL_SERVER_TOKEN", "new")
        return 401

    async with running([renew, GOOD, 401]) as server, client(server.url, caches=False) as tools:
        assert (await tools.call(replace(CALL, idempotent=False))).body == GOOD
        with pytest.raises(ToolUnavailable, match="TOOL_SERVER_TOKEN"):
            await tools.call(CALL)
    assert [each["Authorization"] for each in server.headers] == [
        "Bearer old",
        "Bearer new",
        "Bearer new",
    ]


async def test_equal_calls_at_once_are_one_request_and_later_ones_none():
    limiter = RecordingLimiter()
    async with running([GOOD]) as server, client(server.url, limiter=limiter) as tools:
        results = await asyncio.gather(*(tools.call(CALL) for _ in range(8)))
        later = await tools.call(CALL)
    assert len(server.seen) == limiter.acquired == 1
    assert sum(result.cached for result in results) == 7
    assert later.cached and later.body == GOOD


async def test_a_failure_is_never_cached():
    async with running([400, GOOD]) as server, client(server.url) as tools:
        with pytest.raises(ToolRejected):
            await tools.call(CALL)
        assert (await tools.call(CALL)).body == GOOD


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - files and processes set no event
        await asyncio.sleep(0)


def requests_under_way(tools: ToolClient) -> int:
    """Requests of the cache that are under way."""
    assert tools._cache is not None
    return len(tools._cache._under_way)


async def cancelled(*calls: "asyncio.Task[ToolResult]") -> None:
    """Cancel calls and see them leave."""
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    assert all(call.cancelled() for call in calls)


async def test_a_cancelled_call_hangs_up_and_leaves_its_slot_to_another(tmp_path):
    slots = FileSlots(tmp_path / "slots", 1)
    async with (
        running(["hang", GOOD]) as server,
        client(server.url, slots=slots.hold_async) as tools,
    ):
        call = asyncio.create_task(tools.call(CALL))
        await server.hangs.wait()
        assert in_use(slots) == 1
        await cancelled(call)
        assert in_use(slots) == 0
        await server.hung_up.wait()
        again = await tools.call(CALL)
    assert (again.body, again.cached) == (GOOD, False)


async def test_a_cancelled_call_leaves_its_place_in_the_line_for_a_slot(tmp_path):
    slots = FileSlots(tmp_path / "slots", 1)
    async with (
        running(["hang", GOOD]) as server,
        client(server.url, slots=slots.hold_async, caches=False) as tools,
    ):
        holder, first, second = (asyncio.create_task(tools.call(CALL)) for _ in range(3))
        await server.hangs.wait()
        await until(lambda: waiting_in(slots) == 1)
        await cancelled(first)
        await cancelled(holder)
        assert (await second).body == GOOD
        assert (waiting_in(slots), in_use(slots)) == (0, 0)


async def test_a_cancelled_call_gives_back_its_place_in_the_limiter(tmp_path):
    limiter = FileRateLimiter(tmp_path / "rate_limit.state", per_minute=2, burst=1)
    async with (
        running([GOOD]) as server,
        client(server.url, limiter=limiter, timeout_s=1000.0) as tools,
    ):
        await tools.call(CALL)
        call = asyncio.create_task(tools.call(ToolCall(tool="calculate", payload={})))
        await until(lambda: limiter.snapshot().waiting == 1)
        await cancelled(call)
        assert (limiter.snapshot().waiting, limiter.snapshot().abandoned) == (0, 0)
    assert len(server.seen) == 1


async def test_when_the_caller_that_asks_leaves_one_of_the_others_asks():
    async with running(["hang", GOOD]) as server, client(server.url) as tools:
        first, second, third = (asyncio.create_task(tools.call(CALL)) for _ in range(3))
        await server.hangs.wait()
        await cancelled(first)
        await server.hung_up.wait()
        results = [await second, await third]
        assert requests_under_way(tools) == 0
    assert [(one.body, one.cached) for one in results] == [(GOOD, False), (GOOD, True)]
    assert len(server.seen) == 2


@pytest.mark.parametrize(
    ("tool", "body"),
    [
        ("retrieve", {}),
        ("retrieve", {"result": None}),
        ("retrieve", {"result": []}),
        ("retrieve", {"result": [None]}),
        ("retrieve", {"result": [["a passage"]]}),
        ("retrieve", {"result": [[{"id": "0", "contents": "a document without a score"}]]}),
        ("retrieve", {"result": [[{"document": {"id": "0"}, "score": 1.0}]]}),
        ("run_code", {}),
        ("run_code", {"status": None, "run_result": None}),
        ("run_code", {"status": "Failed", "run_result": "no object"}),
        ("run_code", {"status": "Success", "run_result": None}),
        ("run_code", {"status": "Success", "run_result": {"status": "Finished"}}),
        ("calculate", {}),
        ("calculate", {"value": 2}),
    ],
    ids=str,
)
async def test_an_answer_of_another_kind_is_a_fault_of_the_server(tool, body):
    call = ToolCall(tool=tool, payload={})
    async with running([body]) as server, client(server.url, max_retries=1) as tools:
        with pytest.raises(ToolUnavailable, match=f"2 attempts.*not one of /{tool}"):
            await tools.call(call)
    assert len(server.seen) == 2


@pytest.mark.parametrize(
    ("tool", "body"),
    [
        ("retrieve", {"result": [[]]}),
        ("retrieve", {"result": [[{"document": {"contents": "x"}, "score": 1.0}], []]}),
        ("run_code", {"status": "Success", "run_result": {"stdout": ""}}),
        ("run_code", {"status": "Failed", "run_result": None, "message": "no compiler"}),
        ("run_code", {"status": "Failed"}),
        ("calculate", {"error": "division by zero"}),
        ("a_tool_we_do_not_know", {}),
    ],
    ids=str,
)
async def test_an_answer_that_the_loops_can_read_is_taken(tool, body):
    async with running([body]) as server, client(server.url) as tools:
        assert (await tools.call(ToolCall(tool=tool, payload={}))).body == body


@pytest.mark.parametrize(
    ("script", "timeout_s", "kind", "said"),
    [
        ([400], 30.0, ToolRejected, "HTTP 400"),
        ([500], 30.0, ToolUnavailable, "attempts"),
        (["hang"], 0.05, ToolUnavailable, "health"),
    ],
    ids=str,
)
async def test_an_error_tells_which_tool_failed(script, timeout_s, kind, said):
    async with running(script) as server, client(server.url, timeout_s=timeout_s) as tools:
        with pytest.raises(kind, match=said) as raised:
            await tools.call(CALL)
    assert raised.value.tool == "calculate"


async def test_a_call_that_was_never_made_tells_its_tool_too():
    class Full(RecordingLimiter):
        async def acquire_async(
            self, n: int = 1, timeout_s: float | None = None, source: str = ""
        ) -> float:
            raise LimiterTimeout("the wait is 99 s")

    async with client(NOBODY, limiter=Full()) as tools:
        with pytest.raises(ToolUnavailable, match="no place") as no_place:
            await tools.call(CALL)
    assert no_place.value.tool == "calculate"


@pytest.mark.parametrize("kind", [Fault, ToolRejected, ToolUnavailable, ToolTimeout])
def test_an_error_keeps_what_it_tells_when_it_is_pickled(kind):
    error = kind("no answer", tool="run_code")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (kind, "no answer")
    assert again.tool == "run_code"
    plain = pickle.loads(pickle.dumps(kind("no answer")))
    assert (str(plain), plain.tool) == ("no answer", "")


def test_an_error_that_ray_carried_tells_the_same():
    error = ToolUnavailable("no answer", tool="run_code")
    carried = RayTaskError("call", "traceback", error).as_instanceof_cause()
    assert isinstance(carried, ToolUnavailable)
    assert carried.tool == "run_code"


class Scripted(ToolClient):
    """One request after the other: seconds it takes, and the answer or fault that it brings."""

    def __init__(self, *script: tuple[float, dict[str, Any] | Exception], **settings: Any) -> None:
        loop = asyncio.get_running_loop()
        super().__init__("http://here", timeout_s=1.0, clock=loop.time, **settings)
        self.script, self.asked_at = list(script), list[float]()

    async def _post_http(self, call: ToolCall, server: Server) -> ToolResult:
        self.asked_at.append(asyncio.get_running_loop().time())
        takes_s, answer = self.script.pop(0)
        await asyncio.sleep(takes_s)
        if isinstance(answer, Exception):
            raise answer
        return ToolResult(body=answer, tool=call.tool)

    async def outcome(self, start_s: float) -> tuple[object, float]:
        """The answer, or the fault's class, of a call that starts then; and when it came."""
        await asyncio.sleep(start_s)
        try:
            outcome: object = (await self.call(CALL)).body
        except Fault as error:
            outcome = type(error)
        return outcome, round(asyncio.get_running_loop().time(), 6)


Play = tuple[list[tuple[object, float]], list[float]]


async def play(
    starts_s: list[float], *script: tuple[float, dict[str, Any] | Exception], **settings: Any
) -> Play:
    tools = Scripted(*script, limiter=None, **settings)
    outcomes = await asyncio.gather(*(tools.outcome(start_s) for start_s in starts_s))
    return outcomes, [round(at, 6) for at in tools.asked_at]


def test_who_joined_late_asks_again_when_the_time_of_the_first_one_is_over():
    hangs = (100.0, GOOD)
    (outcomes, asked_at), _ = run_virtual(play([0.0, 0.5, 0.6], hangs, hangs))
    assert outcomes == [(ToolTimeout, 1.0), (ToolTimeout, 1.5), (ToolTimeout, 1.5)]
    assert asked_at == [0.0, 1.0]  # the last one had too little left when the second one's was over
    (outcomes, asked_at), _ = run_virtual(play([0.0, 0.5, 0.9], hangs, (0.01, GOOD)))
    assert outcomes == [(ToolTimeout, 1.0), (GOOD, 1.01), (GOOD, 1.01)]
    assert asked_at == [0.0, 1.0]


def test_who_came_together_fails_together():
    (outcomes, asked_at), _ = run_virtual(play([0.0] * 8 + [0.1], (100.0, GOOD)))
    assert outcomes == [(ToolTimeout, 1.0)] * 9
    assert asked_at == [0.0]


@pytest.mark.parametrize("fault", [ToolRejected("no"), ToolUnavailable("broken")], ids=str)
def test_a_fault_that_is_not_of_the_first_ones_deadline_is_everybodys(fault):
    (outcomes, asked_at), _ = run_virtual(play([0.0, 0.5], (0.6, fault)))
    assert outcomes == [(type(fault), 0.6)] * 2
    assert asked_at == [0.0]


def test_who_joined_work_that_does_not_end_leaves_in_its_own_time():
    class Stubborn(Scripted):
        async def _post_http(self, call: ToolCall, server: Server) -> ToolResult:
            try:
                return await super()._post_http(call, server)
            finally:
                await asyncio.sleep(5)

    async def both() -> list[tuple[object, float]]:
        tools = Stubborn((100.0, GOOD), limiter=None)
        return list(await asyncio.gather(tools.outcome(0.0), tools.outcome(0.5)))

    assert run_virtual(both())[0] == [(ToolTimeout, 6.0), (ToolTimeout, 1.5)]


def test_a_shared_request_is_what_those_wait_for_who_are_present():
    class SlowLimiter(RecordingLimiter):
        async def acquire_async(
            self, n: int = 1, timeout_s: float | None = None, source: str = ""
        ) -> float:
            await asyncio.sleep(0.3)
            return 0.0

    dog = Watchdog(60.0)

    async def leaves(tools: Scripted) -> Activity:
        with dog.watch("nq", "nq:1") as activity:
            await asyncio.wait([call := asyncio.ensure_future(tools.call(CALL))], timeout=0.2)
            await cancelled(call)
            waits_for("reward")
            return activity

    async def stays(tools: Scripted) -> Activity:
        with dog.watch("nq", "nq:2") as activity:
            await tools.call(CALL)
            return activity

    async def both() -> list[str]:
        tools = Scripted((0.3, GOOD), limiter=SlowLimiter())
        calls = [asyncio.ensure_future(leaves(tools)), asyncio.ensure_future(stays(tools))]
        await asyncio.sleep(0.1)
        seen = [each.waits_for for each in dog.under_way.values()]
        activities = await asyncio.gather(*calls)
        return seen + [each.waits_for for each in activities]

    assert run_virtual(both())[0] == ["limiter", "limiter", "reward", "tool"]


HALF = "half a character: \ud83d."


async def test_half_a_character_in_an_answer_is_replaced_and_a_whole_one_kept():
    body = {"result": HALF, "\udc00": [{"of two escapes": "\ud83d\ude00"}, "\\ud83d", 1.5, None]}
    async with running([body]) as server, client(server.url) as tools:
        got = (await tools.call(ToolCall(tool="a_tool_we_do_not_know", payload={}))).body
    assert got == {
        "result": "half a character: ?.",
        "?": [{"of two escapes": "\U0001f600"}, "\\ud83d", 1.5, None],
    }


async def test_half_a_character_in_a_sandboxs_error_is_replaced():
    call = ToolCall(tool="run_code", payload={"code": "1"})
    failed = {"status": "SandboxError", "message": HALF, "run_result": None}
    async with running([failed]) as server, client(server.url, max_retries=0) as tools:
        with pytest.raises(ToolUnavailable, match=r"half a character: \?\."):
            await tools.call(call)


@pytest.mark.parametrize(
    ("status", "kind"), [("400 Bad Request", ToolRejected), ("500 Internal", ToolUnavailable)]
)
@pytest.mark.parametrize(
    ("charset", "text"), [("utf-8", b"bad \xff"), ("utf-7", "bad \ud83d".encode("utf-7"))]
)
async def test_an_error_in_strange_bytes_is_the_error_that_it_is(status, kind, charset, text):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset={charset}\r\n"
        writer.write(f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, client(f"http://127.0.0.1:{port}", max_retries=0) as tools:
        with pytest.raises(kind, match=f"HTTP {status[:3]} .*bad") as raised:
            await tools.call(CALL)
    json.dumps(str(raised.value), ensure_ascii=False).encode()
