"""Turns: generate, find the action, run it, append the result, until an answer or a limit.

Decides when a trajectory ends and what room a result may take. Knows no verl and no torch: the
engine is a `generate` function, the tools are an `Environment`. Infrastructure faults
(`ToolUnavailable`) end the trajectory and are told apart from the model's own mistakes, which come
back as text.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agent_loop.compat import timeout
from agent_loop.tags import (
    Action,
    ActionKind,
    Tags,
    cut_at_end_tag,
    parse_action,
    stop_token_ids,
)
from agent_loop.tools.protocol import ToolError, ToolRejected, ToolResult
from agent_loop.trajectory import StopReason, Trajectory

CUT_MARK = "..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What the engine returned for one turn."""

    token_ids: list[int]  # (t,)
    log_probs: list[float]  # (t,)


class Generate(Protocol):
    """The engine: token ids in, token ids out."""

    async def __call__(
        self, prompt_ids: list[int], *, max_tokens: int, stop_token_ids: list[int]
    ) -> Generated: ...


class TokenCodec(Protocol):
    """The two directions of a tokenizer that a loop needs."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class HFCodec:
    """A Hugging Face tokenizer as `TokenCodec`: no special tokens added or dropped."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What an action brought: the text the model reads, and what the call cost."""

    text: str
    result: ToolResult | None = None
    rejected: bool = False
    """True when the server refused the call: counted, and the model reads why."""


Environment = Callable[[Action], Awaitable[Observation]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of one trajectory."""

    max_turns: int
    """Generations."""

    response_length: int
    """Tokens of the whole response, tool results included."""

    max_turn_length: int | None = None
    """Tokens of one generation; None leaves only the response budget."""

    timeout_s: float = 300.0
    """Seconds for the whole trajectory."""

    answer_reserve: int = 16
    """Tokens that a tool result never takes, so that the model can still answer."""


@dataclass(slots=True, kw_only=True)
class Rollout:
    """A finished trajectory and what happened in it."""

    trajectory: Trajectory
    stop_reason: StopReason
    answer: str | None
    """Content of the answer tags, None without an answer; the model's own words only."""

    turns: int = 0
    tool_calls: int = 0
    tool_rejections: int = 0
    tool_latency_s: list[float] = field(default_factory=list)
    limiter_wait_s: list[float] = field(default_factory=list)
    engine_turns: list[list[int]] = field(default_factory=list)
    """Token ids exactly as the engine returned them, a list per turn, before any cut."""

    fault: str | None = None
    """The infrastructure fault that ended the trajectory."""

    seconds: dict[str, float] = field(default_factory=lambda: {"generate": 0.0, "tools": 0.0})


def fit_result(text: str, tags: Tags, codec: TokenCodec, room: int) -> tuple[list[int], str] | None:
    """Tokens of a tool result between its markers, cut in the middle when it is too long.

    Args:
        text: what the tool said.
        tags: for the markers.
        codec: the tokenizer.
        room: tokens that the result may take, markers included.

    Returns:
        (token ids, their text), or None when not even the markers fit.
    """
    whole = f"{tags.start_state_marker}{text}{tags.end_state_marker}"
    ids = codec.encode(whole)
    if len(ids) <= room:
        return ids, whole
    opening = codec.encode(tags.start_state_marker)
    mark = codec.encode(CUT_MARK)
    closing = codec.encode(tags.end_state_marker)
    left = room - len(opening) - len(mark) - len(closing)
    if left < 0:
        return None
    inner = codec.encode(text)
    head, tail = (left + 1) // 2, left // 2
    ids = opening + inner[:head] + mark + (inner[-tail:] if tail else []) + closing
    return ids, codec.decode(ids)


async def run_turns(
    *,
    prompt_ids: list[int],
    generate: Generate,
    environment: Environment,
    tags: Tags,
    codec: TokenCodec,
    budget: Budget,
    filler_id: int,
    clock: Callable[[], float] = time.monotonic,
) -> Rollout:
    """Run one trajectory to its end.

    Args:
        prompt_ids: (P,) rendered prompt.
        generate: the engine.
        environment: runs one action that is not the answer.
        tags: actions that this loop allows, the answer among them.
        codec: the tokenizer.
        budget: limits.
        filler_id: token that stands for the response of a trajectory that has none.
        clock: seconds, for the time spent per phase.

    Returns:
        The trajectory with its one stop reason. A trajectory that ended as `infra_error` has an
        all-zero mask.
    """
    rollout = Rollout(
        trajectory=Trajectory(prompt_ids), stop_reason=StopReason.MAX_TURNS, answer=None
    )
    try:
        async with timeout(budget.timeout_s):
            await _run(rollout, generate, environment, tags, codec, budget, clock)
    except TimeoutError:
        rollout.stop_reason = StopReason.DEADLINE
    except ToolError as error:
        rollout.stop_reason = StopReason.INFRA_ERROR
        rollout.fault = f"{type(error).__name__}: {error}"
    if not rollout.trajectory.response_ids or rollout.stop_reason is StopReason.INFRA_ERROR:
        rollout.trajectory.without_gradient(filler_id)
    return rollout


async def _run(
    rollout: Rollout,
    generate: Generate,
    environment: Environment,
    tags: Tags,
    codec: TokenCodec,
    budget: Budget,
    clock: Callable[[], float],
) -> None:
    trajectory = rollout.trajectory
    stop_ids = stop_token_ids(tags, codec.encode)
    for turn in range(budget.max_turns):
        room = budget.response_length - len(trajectory)
        if room <= 0:
            rollout.stop_reason = StopReason.RESPONSE_BUDGET
            return
        limit = min(room, budget.max_turn_length or room)
        started = clock()
        generated = await generate(trajectory.ids, max_tokens=limit, stop_token_ids=stop_ids)
        rollout.seconds["generate"] += clock() - started
        rollout.engine_turns.append(list(generated.token_ids))
        rollout.turns += 1

        keep = cut_at_end_tag(generated.token_ids, tags, codec.decode)
        text = codec.decode(generated.token_ids[:keep])
        trajectory.add_model_tokens(generated.token_ids[:keep], generated.log_probs[:keep], text)
        action = parse_action(text, tags)
        if action is None:
            rollout.stop_reason = (
                StopReason.RESPONSE_BUDGET if keep >= room else StopReason.NO_ACTION
            )
            return
        if action.kind is ActionKind.ANSWER:
            rollout.stop_reason, rollout.answer = StopReason.ANSWERED, action.content
            return
        if turn == budget.max_turns - 1:
            return  # nobody would read the result

        started = clock()
        observation = await environment(action)
        rollout.seconds["tools"] += clock() - started
        _count(rollout, observation)
        room = budget.response_length - len(trajectory) - budget.answer_reserve
        fitted = fit_result(observation.text, tags, codec, room)
        if fitted is None:
            rollout.stop_reason = StopReason.RESPONSE_BUDGET
            return
        trajectory.add_tool_tokens(*fitted)


def _count(rollout: Rollout, observation: Observation) -> None:
    rollout.tool_calls += 1
    rollout.tool_rejections += observation.rejected
    if observation.result is not None:
        rollout.tool_latency_s.append(observation.result.latency_s)
        rollout.limiter_wait_s.append(observation.result.limiter_wait_s)


def rejected(error: ToolRejected) -> Observation:
    """The observation for a call that the server refused."""
    return Observation(text=f"error: {error}", rejected=True)


def record_of(rollout: Rollout) -> dict[str, Any]:
    """What the trainer and the trajectory files need to know, as plain JSON values."""
    return {
        "stop_reason": str(rollout.stop_reason),
        "answer": rollout.answer,
        "turns": rollout.turns,
        "tool_calls": rollout.tool_calls,
        "tool_rejections": rollout.tool_rejections,
        "tool_latency_s": rollout.tool_latency_s,
        "limiter_wait_s": rollout.limiter_wait_s,
        "engine_turns": rollout.engine_turns,
        "fault": rollout.fault,
        "segments": [
            [segment.author, segment.start, segment.length, segment.text]
            for segment in rollout.trajectory.segments
        ],
    }
