"""Deadlines, cancellation and faults of a trajectory, on a clock that jumps."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from agent_loop import loop_settings, turn_agent_loop
from agent_loop.deadline import Deadline
from agent_loop.loop_settings import LoopSettings
from agent_loop.records.mask_audit import mask_problems
from agent_loop.turn_agent_loop import TurnAgentLoop
from agent_loop.turns.observation_style import inline_glue
from agent_loop.turns.tags import Action, ActionKind, Tags
from agent_loop.turns.trajectory import StopReason
from agent_loop.turns.turn_loop import Budget, Generated, Observation, Rollout, Stop, run_turns
from agent_loop.watchdog import Watchdog, waits_for
from config.schema import MixedConfig, ToolConfig
from tests.fakes.engine import CharTokenizer, ScriptedGenerate, whole_of
from tests.fakes.virtual_loop import run_virtual
from tool_server.wire.protocol import ToolTimeout, ToolUnavailable

CODEC = CharTokenizer()
CONFIG = ToolConfig(server_url="http://127.0.0.1:1")
TAGS = Tags.from_config(CONFIG, (ActionKind.CODE, ActionKind.ANSWER), max_actions=4)
TURNS = ["<code>a</code><code>b</code><code>c</code>", "<answer>d</answer>"]
Act = Callable[[Action], Awaitable[Observation]]


async def trajectory_of(act: Act, turns: list[str] = TURNS, **changed: Any) -> Rollout:
    limits = {"max_turns": 3, "response_length": 400, **changed.pop("limits", {})}
    clock = asyncio.get_running_loop().time
    limit_s, name = limits.pop("timeout_s", 100.0), limits.pop("timeout_name", "trajectory_s")
    given = {
        "generate": ScriptedGenerate(CODEC, turns),
        "language": TAGS,
        "glue": inline_glue(CODEC, "[", "]"),
        "budget": Budget(**limits),
        "deadline": Deadline.after(limit_s, name, clock),
        **changed,
    }
    return await run_turns(
        prompt_ids=[1],
        environment=act,
        codec=CODEC,
        filler_id=0,
        clock=clock,
        **given,
    )


def after(**seconds: float) -> Act:
    """A tool that answers an action with its own content, after a time; others never."""

    async def act(action: Action) -> Observation:
        await asyncio.sleep(seconds.get(action.content, 1e9))
        return Observation(text=action.content)

    return act


def raising(error: BaseException) -> Act:
    async def act(action: Action) -> Observation:
        raise error

    return act


def test_results_come_in_the_order_of_the_actions_and_calls_run_side_by_side():
    rollout, took_s = run_virtual(trajectory_of(after(a=30, b=20, c=10)))
    assert rollout.stop_reason is StopReason.ANSWERED
    assert "[a][b][c]" in CODEC.decode(rollout.trajectory.response_ids)
    assert (took_s, rollout.turns[0].tools_s) == (30, 30)


@pytest.mark.parametrize("at_s", [50, 0])
def test_a_deadline_ends_the_trajectory_on_time_and_nothing_of_it_is_trained(at_s):
    rollout, took_s = run_virtual(trajectory_of(after(a=1, b=2), limits={"timeout_s": at_s}))
    assert (rollout.stop_reason, took_s) == (StopReason.DEADLINE, at_s)
    assert mask_problems(whole_of(rollout)) == []
    assert rollout.is_lost and not any(rollout.trajectory.response_mask)
    where = "in turn 1" if at_s else "before the first turn"
    said = f"mixed.deadlines.trajectory_s passed {where}, after {at_s} s; waited {at_s}.0 s for"
    assert rollout.fault is not None and said in rollout.fault
    assert rollout.fault_tool == ("tool" if at_s else "start")
    if at_s:
        assert CODEC.decode(rollout.trajectory.response_ids) == TURNS[0]
        assert [call.status for call in rollout.calls] == ["ok", "ok", "cancelled"]


def test_an_engine_that_never_answers_ends_with_one_filler_token():
    async def silent(prompt_ids: list[int], *, max_tokens: int, stop: Stop) -> Generated:
        return await asyncio.Event().wait()  # pyright: ignore

    rollout, took_s = run_virtual(trajectory_of(after(), generate=silent))
    assert (rollout.stop_reason, took_s) == (StopReason.DEADLINE, 100)
    assert (rollout.trajectory.response_ids, rollout.trajectory.response_mask) == ([0], [0])
    assert (rollout.fault_tool, rollout.turns[0].generate_s) == ("engine", 100)


def test_a_deadline_names_who_was_waited_for_longest_and_not_who_was_last():
    async def slow(prompt_ids: list[int], *, max_tokens: int, stop: Stop) -> Generated:
        await asyncio.sleep(80)
        return await ScriptedGenerate(CODEC, TURNS)(prompt_ids, max_tokens=max_tokens, stop=stop)

    rollout, _ = run_virtual(trajectory_of(after(), generate=slow))
    assert rollout.fault_tool == "engine"
    assert "waited 80.0 s for engine, 20.0 s for tool" in (rollout.fault or "")


def test_a_call_that_a_deadline_ends_has_the_seconds_that_it_waited_for_a_server_and_no_other_has():
    async def act(action: Action) -> Observation:
        if action.content == "a":
            await asyncio.sleep(10)
            waits_for("server")
            await asyncio.sleep(20)
            waits_for("tool")
            await asyncio.sleep(5)
            waits_for("server")
        return await after(b=1)(action)

    rollout, _ = run_virtual(trajectory_of(act, limits={"timeout_s": 50}))
    assert [call.status for call in rollout.calls] == ["cancelled", "ok", "cancelled"]
    assert [call.server_wait_s for call in rollout.calls] == [35, 0, 0]
    assert "waited 35.0 s for server, 15.0 s for tool" in (rollout.fault or "")


@pytest.mark.parametrize("content", ["a", "b", "c"])
def test_a_tool_that_never_answers_costs_its_own_time_limit_and_no_more(content):
    async def act(action: Action) -> Observation:
        if action.content == content:
            await asyncio.sleep(30)
            raise ToolUnavailable("no answer within timeout_s=30", tool="run_code")
        return await after(a=1, b=1, c=1)(action)

    rollout, took_s = run_virtual(trajectory_of(act))
    assert 30 <= took_s <= 31
    assert (rollout.stop_reason, rollout.fault_tool) == (StopReason.INFRA_ERROR, "run_code")
    assert not any(rollout.trajectory.response_mask + rollout.trajectory.log_probs)


def test_the_first_fault_cancels_the_other_calls_and_waits_until_they_are_done():
    done = []

    async def act(action: Action) -> Observation:
        if action.content == "b":
            await asyncio.sleep(5)
            raise ToolUnavailable("b is dead", tool="b")
        try:
            return await after()(action)
        finally:
            await asyncio.sleep(2)  # closes its connection
            done.append(action.content)

    rollout, took_s = run_virtual(trajectory_of(act))
    assert (sorted(done), took_s) == (["a", "c"], 7)
    assert [call.status for call in rollout.calls] == ["cancelled", "unavailable", "cancelled"]
    assert rollout.fault_tool == "b"


def test_a_cancelled_trajectory_leaves_nothing_running():
    async def cancelled() -> None:
        task = asyncio.ensure_future(trajectory_of(after()))
        await asyncio.sleep(3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert run_virtual(cancelled()) == (None, 3)


@pytest.mark.parametrize("turn", ["<code>a</code>", TURNS[0]])
@pytest.mark.parametrize("error", [TimeoutError("t"), asyncio.TimeoutError("t"), KeyError("k")])
def test_what_an_action_raises_is_the_loop_s_error_and_no_deadline(turn, error):
    rollout, _ = run_virtual(trajectory_of(raising(error), [turn]))
    assert_lost_to_the_loop(rollout, type(error).__name__)
    assert "failed" in [call.status for call in rollout.calls]


def broken_glue(count: int) -> Any:
    raise ValueError("broken")


class BrokenTags(Tags):
    def actions(self, text: str, *, is_whole: bool = True) -> list[Action]:
        raise ValueError("broken")


@pytest.mark.parametrize(
    "changed", [{"glue": broken_glue}, {"language": BrokenTags(pairs=TAGS.pairs)}]
)
def test_what_glue_or_language_raise_is_the_loop_s_error(changed):
    rollout, _ = run_virtual(trajectory_of(after(a=0, b=0, c=0), **changed))
    assert_lost_to_the_loop(rollout, "ValueError")


def assert_lost_to_the_loop(rollout: Rollout, error: str) -> None:
    assert (rollout.stop_reason, rollout.fault_tool) == (StopReason.INFRA_ERROR, "loop")
    assert error in (rollout.loop_error or "")
    assert set(rollout.trajectory.response_mask) == {0}
    assert mask_problems(whole_of(rollout)) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("turn", ["<code>a</code>", TURNS[0]])
def test_an_interrupt_passes_through(error, turn):
    with pytest.raises(error):
        run_virtual(trajectory_of(raising(error()), [turn]))


@pytest.mark.parametrize(
    ("deadline", "left_s", "name"),
    [
        (None, 300, "trajectory_s"),
        (1060, 60, "step_s"),
        (1900, 300, "trajectory_s"),
        (1000, 0, "step_s"),
        (990, 0, "step_s"),
    ],
)
def test_a_trajectory_ends_when_its_step_does(monkeypatch, deadline, left_s, name):
    clock = SimpleNamespace(monotonic=lambda: 1000.0)
    monkeypatch.setattr(loop_settings, "time", clock)
    mixed = {"experiment": "x", "run_dir": "/x", "sources": {"nq": {"ratio": 1, "max_turns": 7}}}
    settings = LoopSettings(
        mixed=MixedConfig.model_validate(mixed),
        tools=CONFIG,
        budget=Budget(max_turns=3, response_length=160),
        trajectory_s=300.0,
        max_actions=1,
        backend="cpu",
        sampling={},
        watchdog=Watchdog(60.0),
    )
    given = settings.deadline_of(deadline)
    assert (given.limit_s, given.name) == (left_s, name)


class Stuck(TurnAgentLoop):
    """A loop whose tools never start."""

    is_ended = False

    def __init__(self) -> None:
        self.settings: Any = SimpleNamespace(
            tools=None,
            mixed=None,
            deadline_of=lambda step_deadline: Deadline.after(30.0, "trajectory_s"),
        )

    def language(self) -> Any: ...

    async def act(self, action: Action, extras: dict[str, Any]) -> Any: ...

    async def begin(self, row: Any) -> None:
        await asyncio.Event().wait()

    async def end(self) -> None:
        self.is_ended = True


class Slow(Stuck):
    """A loop whose tools take 20 s to start."""

    tokenizer = SimpleNamespace(eos_token_id=0)

    async def begin(self, row: Any) -> None:
        await asyncio.sleep(20)

    def _begin_session(self, sampling_params: dict[str, Any], row: Any) -> None:
        self._source, self._extras, self._engine = "nq", {}, SimpleNamespace(generate=print)
        self._budget = Budget(max_turns=1, response_length=9)

    def _messages(self, rows_own: Any) -> list[dict[str, Any]]:
        return []

    def _prompt_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        return [1]

    def dialogue(self, codec: Any, source: str, prompt_ids: Any) -> Any:
        return None, None


def test_the_start_of_the_tools_the_turns_and_the_calls_have_one_deadline(
    monkeypatch: pytest.MonkeyPatch,
):
    given: list[Deadline] = []

    async def shared(tools: Any, mixed: Any) -> Any:
        return SimpleNamespace(for_source=lambda source, deadline: given.append(deadline))

    async def turns(*, deadline: Deadline, **_: Any) -> Rollout:
        given.append(deadline)
        raise RuntimeError(f"{deadline.left_s():g} s are left")

    async def run() -> None:
        loop, clock = Slow(), asyncio.get_running_loop().time
        loop.settings.deadline_of = lambda _: Deadline.after(30.0, "trajectory_s", clock)
        with pytest.raises(RuntimeError, match=r"^10 s are left"):
            await loop.run({}, data_source="nq")
        assert len(given) == 2 and all(each is loop._deadline for each in given)

    monkeypatch.setattr(turn_agent_loop, "shared_client", shared)
    monkeypatch.setattr(turn_agent_loop, "run_turns", turns)
    monkeypatch.setattr(turn_agent_loop, "codec_of", lambda tokenizer: None)
    run_virtual(run())


def test_tools_that_do_not_start_end_the_trajectory_at_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
):
    async def shared(tools: Any, mixed: Any) -> Any:
        return SimpleNamespace(for_source=lambda *_: None)

    monkeypatch.setattr(turn_agent_loop, "shared_client", shared)
    loop = Stuck()
    with pytest.raises(
        ToolTimeout, match=r"did not start within mixed\.deadlines\.trajectory_s, 30"
    ):
        run_virtual(loop.run({}, data_source="nq"))
    assert loop.is_ended
