"""The turn loop: generate, find actions, run them, append results, until an answer or a limit.

This module decides when a trajectory ends, and how many tokens a result may take. It uses no verl
and no torch. The engine is a `Generate` function, the tools are an `Environment`, a `Language`
finds the actions, and a `GlueOf` says what is put around their results. A fault of the
infrastructure (`ToolUnavailable`) or a deadline ends the trajectory, which is then not trained. A
mistake of the model becomes a text that the model reads.
"""

import asyncio
import math
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from agent_loop.deadline import Deadline
from agent_loop.records.trajectory_record import Call, StopReason, TrajectoryRecord, Turn
from agent_loop.turns.codec import TokenCodec
from agent_loop.turns.observation_style import GlueOf, fit_between
from agent_loop.turns.tags import Action, ActionKind, Language, cut_at_end, stop_token_ids
from agent_loop.turns.trajectory import Trajectory
from agent_loop.watchdog import Activity, current_activity, part_of_activity, waits_for
from config.compat import gather_all, timeout
from tool_server.wire.protocol import Fault, ToolRejected, ToolResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    token_ids: list[int]  # (t,)
    log_probs: list[float]  # (t,)
    min_global_steps: int = 0
    max_global_steps: int = 0
    request: int | None = None
    """The three as in `Turn`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Where the engine may stop, besides at the end of the message.

    If an engine cannot stop there, the turn is cut afterwards; the trajectory is the same.
    """

    texts: tuple[str, ...]
    """Stop after the token that completes one of these."""

    token_ids: tuple[int, ...]
    """Token ids of the `texts` that are one token each."""


class Generate(Protocol):
    """The engine: token ids in, token ids out."""

    async def __call__(
        self, prompt_ids: list[int], *, max_tokens: int, stop: Stop
    ) -> Generated: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The result of an action: the text that the model reads, and the tool's answer."""

    text: str
    result: ToolResult | None = None
    """None if no tool was called."""

    rejected: bool = False
    """Whether the tool did not run because of a mistake of the model. The text has the reason."""

    reward: float | None = None
    ends: bool = False
    """Both as in `Call`."""


Environment = Callable[[Action], Awaitable[Observation]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of one trajectory."""

    max_turns: int
    """Generations."""

    response_length: int
    """Tokens of the whole response, tool results included."""

    max_turn_length: int | None = None
    """Tokens of one generation; None: no limit of its own."""

    take_turn: Callable[[], bool] = field(default=lambda: True, repr=False)
    """Takes one of the turns that several conversations share; False if none is left."""

    max_result_length: int | None = None
    """Tokens of one result without what is around it; None: as many as fit."""

    answer_reserve: int = 16
    """Tokens that a result may not use, so that the model can still answer; at most a quarter of
    the response."""


@dataclass(slots=True, kw_only=True)
class Rollout:
    """A conversation while it runs: one sequence of a session. `record` is what is kept of it."""

    trajectory: Trajectory
    stop_reason: StopReason
    answer: str | None
    """The answer, from the model's own text; None without one."""

    answer_is_message: bool = False
    """As `Action.is_message`."""

    turns: list[Turn] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    fault: str | None = None
    fault_tool: str = ""
    loop_error: str | None = None
    """The three as in `TrajectoryRecord`, and so are `cause` and `temperature`."""

    verdict: dict[str, Any] | None = None
    """`score` and other parts of a reward that another project's loop computed itself."""

    knows_calls: bool = True
    """Whether `calls` has every call, as it has not in a loop of another project."""

    passed: dict[str, Any] = field(default_factory=dict)
    """Fields of verl's output that another project's loop set and that reach the batch."""

    cause: str = ""
    temperature: float | None = None

    parent: "Rollout | None" = None
    """The sequence out of which this one began."""

    def lose(self, tool: str, fault: str, stop_reason: StopReason = StopReason.INFRA_ERROR) -> None:
        """End the trajectory by a fault: no gradient, not in the baseline of its group."""
        self.stop_reason, self.answer = stop_reason, None
        self.fault_tool, self.fault = tool, fault

    def lose_to_deadline(self, deadline: Deadline, activity: Activity) -> None:
        """End the trajectory because it waited too long. Load must not become a learning signal, so
        a deadline is a fault of whatever the trajectory waited for longest."""
        activity.note("end")
        waited = sorted(activity.waited_s.items(), key=lambda item: -item[1])
        where = f"in turn {activity.turn}" if activity.turn else "before the first turn"
        parts = ", ".join(f"{seconds:.1f} s for {what}" for what, seconds in waited)
        self.lose(
            waited[0][0],
            f"mixed.deadlines.{deadline.name} passed {where}, after {deadline.limit_s:g} s; "
            f"waited {parts}",
            StopReason.DEADLINE,
        )

    @property
    def is_lost(self) -> bool:
        return self.fault is not None

    @property
    def weight_versions(self) -> tuple[int, int] | None:
        """Oldest and newest version of the weights that sampled its turns; None without a turn."""
        oldest = [t.min_global_steps for t in self.turns if t.min_global_steps is not None]
        newest = [t.max_global_steps for t in self.turns if t.max_global_steps is not None]
        return (min(oldest), max(newest)) if oldest and newest else None

    def record(self) -> TrajectoryRecord:
        """What is kept of it, once it has ended."""
        return TrajectoryRecord(
            stop_reason=str(self.stop_reason),
            turns=[*self.turns],
            # copies: a call may go on after its trajectory has ended
            calls=[msgspec.structs.replace(call) for call in self.calls],
            fault=self.fault,
            fault_tool=self.fault_tool,
            loop_error=self.loop_error,
            weight_versions=self.weight_versions,
            cause=self.cause,
            temperature=self.temperature,
            answer=self.answer,
            engine_turns=self.trajectory.engine_turns,
            segments=self.trajectory.segments,
        )


async def run_turns(
    *,
    prompt_ids: list[int],
    generate: Generate,
    environment: Environment,
    language: Language,
    glue: GlueOf,
    codec: TokenCodec,
    budget: Budget,
    filler_id: int,
    deadline: Deadline | None = None,
    acts_at_end: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Rollout:
    """Run one trajectory to its end.

    Args:
        prompt_ids: (P,) rendered prompt.
        environment: runs one action that is not the answer.
        deadline: of the trajectory; None: no deadline.
        filler_id: the only token of an empty response.
        acts_at_end: whether the actions of the last turn are run too, although the model does not
            read their results: a step of an environment may have a reward.
        clock: seconds, for the time of each phase.

    Returns:
        The trajectory with its stop reason. Only cancellation is raised. A trajectory that a fault
        or a deadline ended has an all-zero mask. An exception in the code of the loop ends it as
        `infra_error`, and is in `loop_error`.
    """
    rollout = Rollout(
        trajectory=Trajectory(prompt_ids), stop_reason=StopReason.MAX_TURNS, answer=None
    )
    ends = deadline or Deadline.after(math.inf, "trajectory_s")
    with current_activity(clock) as activity:
        try:
            if not ends.left_s():
                raise TimeoutError  # the engine is not called
            async with timeout(None if deadline is None else ends.left_s()):
                rollout.stop_reason = await _run(
                    rollout,
                    generate,
                    environment,
                    language,
                    glue,
                    codec,
                    budget,
                    acts_at_end,
                    clock,
                )
        except TimeoutError:
            rollout.lose_to_deadline(ends, activity)
        except Fault as error:
            if ends.left_s():
                rollout.lose(error.tool or "tool", f"{type(error).__name__}: {error}")
            else:  # a call noticed the deadline first
                rollout.lose_to_deadline(ends, activity)
        except Exception as error:
            # Only here exceptions in the code of a loop are caught: they cost one trajectory.
            rollout.lose("loop", f"{type(error).__name__}: {error}")
            rollout.loop_error = traceback.format_exc()
    rollout.trajectory.finish(filler_id)
    if rollout.is_lost:
        rollout.trajectory.without_gradient()
    return rollout


async def _run(
    rollout: Rollout,
    generate: Generate,
    environment: Environment,
    language: Language,
    glue: GlueOf,
    codec: TokenCodec,
    budget: Budget,
    acts_at_end: bool,
    clock: Callable[[], float],
) -> StopReason:
    trajectory = rollout.trajectory
    texts = language.stop_texts
    stop = Stop(texts=tuple(texts), token_ids=tuple(stop_token_ids(texts, codec.encode)))
    # A reserve of a whole short response would leave no result any room.
    reserve = min(budget.answer_reserve, budget.response_length // 4)
    for number in range(1, budget.max_turns + 1):
        if not budget.take_turn():
            return StopReason.MAX_TURNS
        room = budget.response_length - len(trajectory)
        if room <= 0:
            return StopReason.RESPONSE_BUDGET
        turn = Turn()
        rollout.turns.append(turn)
        limit = min(room, budget.max_turn_length or room)
        started = clock()
        waits_for("engine", turn=number)
        try:
            generated = await generate(trajectory.ids, max_tokens=limit, stop=stop)
        finally:
            turn.generate_s = clock() - started
        turn.min_global_steps = generated.min_global_steps
        turn.max_global_steps = generated.max_global_steps
        turn.request = generated.request
        text, is_whole = append_turn(trajectory, generated, language, codec)
        turn.tokens = trajectory.segments[-1].length

        actions = language.actions(text, is_whole=is_whole)
        if not actions:
            is_full = turn.tokens >= room
            return StopReason.RESPONSE_BUDGET if is_full else StopReason.NO_ACTION
        # An environment judges a message that the limit of one turn cuts.
        longest = room if acts_at_end else limit
        if actions[-1].is_open and not is_whole and turn.tokens >= longest:
            return StopReason.RESPONSE_BUDGET
        if actions[-1].kind == ActionKind.ANSWER:
            rollout.answer = actions[-1].content
            rollout.answer_is_message = actions[-1].is_message
            return StopReason.ANSWERED
        is_last = number == budget.max_turns
        if is_last and not acts_at_end:
            break  # the model would not read the results

        started = clock()
        calls = [Call(turn=number, action=a.kind, arguments=a.content) for a in actions]
        rollout.calls += calls
        try:
            results = await gather_all(
                [run_call(call, a, environment) for call, a in zip(calls, actions, strict=True)]
            )
        finally:
            turn.tools_s = clock() - started
        if is_last or any(call.ends for call in calls):
            for call, result in zip(calls, results, strict=True):
                call.unread = result
            if not any(call.ends for call in calls):
                break
            rollout.answer = actions[-1].content
            return StopReason.ANSWERED
        room = budget.response_length - len(trajectory) - reserve
        shown = await fit_between(
            glue(len(results)),
            results,
            codec,
            last_id=trajectory.last_id,
            room=room,
            max_length=budget.max_result_length,
        )
        if shown is None:
            return StopReason.RESPONSE_BUDGET
        trajectory.add_tool_tokens(shown, codec.decode(shown))
    return StopReason.MAX_TURNS


def append_turn(
    trajectory: Trajectory, generated: Generated, language: Language, codec: TokenCodec
) -> tuple[str, bool]:
    """Append a turn to the trajectory, and cut it at its end. Returns its text without the end of
    the message, and whether the turn has an end (else a limit of tokens cut it)."""
    ids = generated.token_ids
    trajectory.add_model_tokens(ids, generated.log_probs)
    length = len(ids)  # without tokens that end the message
    while length and ids[length - 1] in codec.end_ids:
        length -= 1
    text = codec.decode(ids[:length])
    keep = cut_at_end(ids[:length], text, language, codec.decode)
    if keep is None:
        trajectory.cut_turn(len(ids), text if length == len(ids) else codec.decode(ids))
        return text, length < len(ids)
    text = text if keep == length else codec.decode(ids[:keep])
    trajectory.cut_turn(keep, text)
    return text, True


async def run_call(call: Call, action: Action, environment: Environment) -> str:
    """Run one action, record status and cost in `call`, and return the text for the model.

    Raises:
        Fault: the infrastructure failed.
        RuntimeError: the code of the action was cancelled from within, or timed out.
    """
    if action.kind == ActionKind.MALFORMED:
        call.status = "rejected"
        return f"error: {action.content}"
    try:
        with part_of_activity() as own:
            waits_for("tool")
            try:
                observation = await environment(action)
            except asyncio.CancelledError:
                call.server_wait_s = own.waited_for_s("server")
                raise
    except ToolRejected as error:
        call.status, call.error, call.tool = "rejected", str(error), error.tool
        call.server_wait_s = error.server_wait_s
        return f"error: {error}"
    except Fault as error:
        call.status, call.error, call.tool = "unavailable", str(error), error.tool
        call.server_wait_s = error.server_wait_s
        raise
    except asyncio.CancelledError as error:
        if is_being_cancelled():
            raise
        call.status, call.error = "failed", "CancelledError"
        raise RuntimeError(f"action={call.action} was cancelled from within") from error
    except Exception as error:
        call.status, call.error = "failed", f"{type(error).__name__}: {error}"
        # A deadline comes as a cancellation: this `TimeoutError` (two classes in Python 3.10) is
        # not one, and must not be taken for one.
        if isinstance(error, TimeoutError | asyncio.TimeoutError):
            raise RuntimeError(f"action={action.kind} raised {call.error}") from error
        raise
    call.status = "rejected" if observation.rejected else "ok"
    call.reward = None if observation.reward is None else float(observation.reward)
    call.ends = bool(observation.ends)
    if (result := observation.result) is not None:
        call.latency_s, call.limiter_wait_s = result.latency_s, result.limiter_wait_s
        call.server_wait_s = result.server_wait_s
        call.attempts, call.tool = result.attempts, result.tool
    return observation.text


def is_being_cancelled() -> bool:
    """Whether the current task was cancelled, and not only something that it awaits.

    Python 3.10 cannot tell; there the result is True.
    """
    cancelling = getattr(asyncio.current_task(), "cancelling", None)
    return cancelling is None or cancelling() > 0
