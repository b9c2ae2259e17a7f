"""Makes a `Rollout` from the output of an agent loop that is not a `TurnAgentLoop`.

verl's `tool_agent` and `single_turn_agent`, and loops of users, return only ids, mask and
log-probs. The tokens with mask 1 are compared with those of the engine. The answer is read from the
model's own text. No verl.
"""

import sys
import time
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from agent_loop.turns.engine_client import EngineTurn
from agent_loop.turns.loop_settings import LoopSettings
from agent_loop.turns.observation_style import HFCodec
from agent_loop.turns.tags import ActionKind, Tags
from agent_loop.turns.trajectory import StopReason, Trajectory
from agent_loop.turns.turn_loop import Budget, Rollout, Turn
from agent_loop.watchdog import current_activity
from samplers.rows.sources.math import boxed_answer


def rollout_of(
    output: Any, turns: Sequence[EngineTurn], codec: HFCodec, settings: LoopSettings, source: str
) -> Rollout:
    """The rollout of a finished loop, from verl's `AgentLoopOutput` and the engine's turns.

    Raises:
        ValueError: the tokens with mask 1 are not those of the engine: the loop tokenised the text
            again, or dropped tokens.
    """
    mask, ids = output.response_mask, output.response_ids
    trajectory = Trajectory(output.prompt_ids)
    returned = [turn.output for turn in turns if turn.output.token_ids]
    words: list[str] = []
    at = 0
    for bit, run in groupby(mask):
        length = len(list(run))
        own, at = slice(at, at + length), at + length
        if not bit:
            trajectory.add_tool_tokens(ids[own], codec.decode(ids[own]))
            continue
        # Turns without tool tokens between them are one run of mask 1.
        left = list(ids[own])
        while left:
            turn = returned.pop(0) if returned else None
            kept = list(turn.token_ids)[: len(left)] if turn else []
            if turn is None or kept != left[: len(kept)]:
                raise ValueError(
                    f"the tokens with mask 1 of a loop of source={source} are not the engine's, "
                    f"from token {at - len(left)} of {len(ids)} on: a loop must not tokenise the "
                    "model's words again; return what generate() returned"
                )
            trajectory.add_model_tokens(list(turn.token_ids), turn.log_probs or [])
            words.append(codec.decode(kept))
            trajectory.cut_turn(len(kept), words[-1])
            left = left[len(kept) :]
    answer = _answer(words, codec, settings)
    is_full = len(ids) >= settings.budget_of(source).response_length
    reason = StopReason.RESPONSE_BUDGET if is_full else StopReason.ANSWERED
    if answer is None and not is_full:
        reason = StopReason.NO_ACTION
    return _finished(trajectory, codec, reason, answer, turns)


def late_rollout(turns: Sequence[EngineTurn], codec: HFCodec, budget: Budget) -> Rollout:
    """The lost rollout of a loop that was ended by its deadline, from its requests to the engine.

    The prompt of each request has all earlier tokens, those of the environment included.
    """
    trajectory = Trajectory(turns[0].prompt_ids if turns else sorted(codec.end_ids)[:1])
    for turn in turns:
        before, asked = trajectory.ids, list(turn.prompt_ids)
        if asked[: len(before)] != before:
            break  # the loop began another conversation
        if added := asked[len(before) :]:
            trajectory.add_tool_tokens(added, codec.decode(added))
        token_ids = list(turn.output.token_ids)
        trajectory.add_model_tokens(token_ids, turn.output.log_probs or [])
        trajectory.cut_turn(len(token_ids), codec.decode(token_ids))
    rollout = _finished(trajectory, codec, StopReason.DEADLINE, None, turns)
    with current_activity(time.monotonic) as activity:
        rollout.lose_to_deadline(budget.timeout_name, budget.timeout_s, activity)
    trajectory.without_gradient()
    return rollout


def _finished(
    trajectory: Trajectory,
    codec: HFCodec,
    stop_reason: StopReason,
    answer: str | None,
    answers: Sequence[EngineTurn],
) -> Rollout:
    trajectory.finish(min(codec.end_ids, default=0))
    lengths = [s.length for s in trajectory.segments if s.author == "model"]
    versions = [each.weight_versions for each in answers if each.output.token_ids]
    turns = [
        Turn(tokens=length, min_global_steps=oldest, max_global_steps=newest)
        for length, (oldest, newest) in zip(lengths, versions, strict=False)
    ]
    return Rollout(trajectory=trajectory, stop_reason=stop_reason, answer=answer, turns=turns)


def _answer(words: Sequence[str], codec: HFCodec, settings: LoopSettings) -> str | None:
    r"""The text between the answer tags; else in the last `\boxed{}`; else the last turn."""
    if not words:
        return None
    # A closing tag without an opening one is a malformed action. The answer may come after many.
    tags = Tags.from_config(settings.tools, [ActionKind.ANSWER], max_actions=sys.maxsize)
    actions = tags.actions("".join(words))
    if actions and actions[-1].kind == ActionKind.ANSWER:
        return actions[-1].content
    if (boxed := boxed_answer("".join(words))) is not None:
        return boxed
    last = words[-1]
    for token_id in codec.end_ids:
        last = last.removesuffix(codec.decode([token_id]))
    return last.strip() or None
