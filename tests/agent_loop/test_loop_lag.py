"""How late an event loop runs, as a trajectory sees it, and what a late loop does to trajectories.

The clock jumps: `stand_still` is a callback that takes long.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent_loop.calls.client import ToolClient
from agent_loop.calls.servers import Server
from agent_loop.deadline import Deadline
from agent_loop.loop_lag import LoopLag
from agent_loop.records.mask_audit import mask_problems
from agent_loop.rewards.judging import judge
from agent_loop.row import Row
from agent_loop.turns.observation_style import inline_glue
from agent_loop.turns.tags import Action, ActionKind, Tags
from agent_loop.turns.trajectory import StopReason
from agent_loop.turns.turn_loop import Budget, Generated, Observation, Rollout, Stop, run_turns
from config.schema import MixedConfig, ToolConfig
from tests.agent_loop.training.test_foreign_loop import SETTINGS
from tests.fakes.engine import CharTokenizer, ScriptedGenerate, whole_of
from tests.fakes.virtual_loop import VirtualLoop, run_virtual
from tool_server.wire.protocol import ToolCall, ToolResult, run_code_call

Stalls = Sequence[tuple[float, float]]
"""(seconds from the start, seconds that the loop stands still)"""


def stall(stalls: Stalls) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    for at_s, seconds in stalls:
        loop.call_at(at_s, loop.stand_still, seconds)


async def lags(stalls: Stalls, windows: Sequence[tuple[float, float]]) -> list[float]:
    """The lag of trajectories that run from one time to another."""
    lag = LoopLag(asyncio.get_running_loop().time)
    lag.start()
    lag.start()
    stall(stalls)

    async def trajectory(start_s: float, end_s: float) -> float:
        await asyncio.sleep(start_s)
        before = lag.now()
        await asyncio.sleep(end_s - start_s)
        return lag.since(before)

    seen = await asyncio.gather(*[trajectory(*window) for window in windows])
    lag.stop()
    return seen


def test_a_loop_that_is_never_late_has_no_lag():
    (whole, nothing), _ = run_virtual(lags([], [(0, 10), (5, 5)]))
    assert whole == pytest.approx(0.001)
    assert nothing == 0.0


def test_a_second_in_which_the_loop_stood_still_is_not_one_look_of_many():
    (lag_s,), _ = run_virtual(lags([(3.01, 1.0)], [(0, 10)]))
    assert 0.85 <= lag_s <= 1.2  # 10 s have 200 looks, of which 20 lie in this second


def test_a_trajectory_sees_the_lag_of_its_own_time():
    (during, after), _ = run_virtual(lags([(3.01, 1.0)], [(0, 6), (6, 20)]))
    assert during >= 0.85 and after == pytest.approx(0.001)


def test_a_lag_of_minutes_is_the_largest_that_is_counted():
    (lag_s,), _ = run_virtual(lags([(1.0, 3000.0)], [(0, 3010)]))
    assert 97 < lag_s < 98


# --- load is never a lesson ---------------------------------------------------------------------

CODEC = CharTokenizer()
CONFIG = ToolConfig(server_url="http://127.0.0.1:1")
TAGS = Tags.from_config(CONFIG, (ActionKind.CODE, ActionKind.ANSWER), max_actions=2)
TURNS = ["<code>a</code><code>b</code>", "<code>a</code>", "<answer>p</answer>"]
MIXED = {
    "experiment": "x",
    "run_dir": "/x",
    "deadlines": {"reward_s": 6.0},
    "sources": {"taco": {"ratio": 1}},
}
LIMITS = replace(SETTINGS, mixed=MixedConfig.model_validate(MIXED))
ROW = {
    "data_source": "taco",
    "reward_model": {"ground_truth": json.dumps({"inputs": ["1"], "outputs": ["2"]})},
}


class Client(ToolClient):
    """Its server answers a request after a second."""

    def __init__(self, timeout_s: float) -> None:
        clock = asyncio.get_running_loop().time
        super().__init__("http://x", limiter=None, timeout_s=timeout_s, caches=False, clock=clock)

    async def _post_http(self, call: ToolCall, server: Server) -> ToolResult:
        await asyncio.sleep(1.0)
        ran = {"status": "Finished", "stdout": "2\n", "return_code": 0}
        return ToolResult(body={"status": "Success", "run_result": ran}, tool=call.tool)


async def judged(stalls: Stalls) -> tuple[Rollout, dict[str, float]]:
    """A trajectory of three calls and its reward, which together take 12 s if the loop is free."""
    client, said = Client(4.0), ScriptedGenerate(CODEC, TURNS)

    async def generate(prompt_ids: list[int], *, max_tokens: int, stop: Stop) -> Generated:
        await asyncio.sleep(3.0)
        return await said(prompt_ids, max_tokens=max_tokens, stop=stop)

    async def act(action: Action) -> Observation:
        result = await client.call(run_code_call(action.content, ""))
        return Observation(text=result.body["run_result"]["stdout"], result=result)

    stall(stalls)
    rollout = await run_turns(
        prompt_ids=[1],
        generate=generate,
        environment=act,
        language=TAGS,
        glue=inline_glue(CODEC, "[", "]"),
        codec=CODEC,
        budget=Budget(max_turns=3, response_length=400),
        deadline=Deadline.after(20.0, "trajectory_s", asyncio.get_running_loop().time),
        filler_id=0,
        clock=asyncio.get_running_loop().time,
    )
    return rollout, await judge(rollout, Row.from_columns(ROW), LIMITS, client)


@given(st.lists(st.tuples(st.floats(0, 15), st.floats(0.01, 20)), max_size=6))
@example([(3.5, 10.0)])  # a tool's answer waits while its call's time passes
@example([(11.5, 30.0)])  # the judge's
@example([(1.0, 20.0)])  # the engine's, while the time of the trajectory passes
def test_a_loop_that_stands_still_loses_trajectories_and_teaches_nothing(stalls):
    (rollout, parts), _ = run_virtual(judged(stalls))
    assert mask_problems(whole_of(rollout)) == []
    assert rollout.loop_error is None
    assert not {call.status for call in rollout.calls} & {"rejected", "failed"}
    if rollout.is_lost:
        assert rollout.stop_reason in (StopReason.DEADLINE, StopReason.INFRA_ERROR)
        assert not any(rollout.trajectory.response_mask) and parts["infra_error"] == 1.0
    else:
        said = "<code>a</code><code>b</code>[2][2]<code>a</code>[2]<answer>p</answer>"
        assert CODEC.decode(rollout.trajectory.response_ids).replace("\n", "") == said
        assert (rollout.stop_reason, parts["score"]) == (StopReason.ANSWERED, 1.0)


@pytest.mark.parametrize(
    ("stalled", "reason", "tool"),
    [
        ((3.5, 4.0), "infra_error", "run_code"),
        ((1.0, 20.0), "deadline", "engine"),
        ((11.5, 4.0), "infra_error", "run_code"),
        ((11.5, 6.0), "infra_error", "reward"),
    ],
)
def test_the_time_of_a_call_a_trajectory_or_a_verdict_that_passed_meanwhile_is_a_fault(
    stalled: tuple[float, float], reason: str, tool: str
):
    (rollout, _), _ = run_virtual(judged([stalled]))
    assert (rollout.stop_reason, rollout.fault_tool) == (reason, tool)
