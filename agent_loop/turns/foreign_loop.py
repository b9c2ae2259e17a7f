"""The output of an agent loop that is not ours, as a rollout like any other.

verl's `tool_agent` and `single_turn_agent`, and whatever a user brings, return ids, mask and
log-probs and no more. What they sampled is held against what the engine returned; the answer is
read from the model's own words. No verl.
"""

import sys
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from agent_loop.turns.engine_client import EngineTurn
from agent_loop.turns.loop_settings import LoopSettings
from agent_loop.turns.observation_style import HFCodec
from agent_loop.turns.tags import ActionKind, Tags
from agent_loop.turns.trajectory import StopReason, Trajectory
from agent_loop.turns.turn_loop import Rollout, Turn
from samplers.rows.sources.math import boxed_answer


def rollout_of(
    output: Any, turns: Sequence[EngineTurn], codec: HFCodec, settings: LoopSettings, source: str
) -> Rollout:
    """A rollout with the tokens of a finished loop.

    Args:
        output: verl's `AgentLoopOutput`.
        turns: the engine's answers, in order; log-probs are taken from them.
        codec: the tokenizer.
        settings: for tags and lengths.
        source: whose row it was.

    Raises:
        ValueError: mask 1 is not on the engine's tokens: the loop re-tokenised or dropped some.
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
        # Turns with nothing between them are one run of mask 1.
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
    trajectory.finish(min(codec.end_ids, default=0))
    answer = _answer(words, codec, settings)
    is_full = len(ids) >= settings.budget_of(source).response_length
    reason = StopReason.RESPONSE_BUDGET if is_full else StopReason.ANSWERED
    return Rollout(
        trajectory=trajectory,
        stop_reason=reason if answer is not None else StopReason.NO_ACTION,
        answer=answer,
        turns=[Turn(tokens=s.length) for s in trajectory.segments if s.author == "model"],
    )


def partial_rollout(turns: Sequence[EngineTurn], codec: HFCodec) -> Rollout:
    """What a loop had at its deadline, read from what it asked the engine.

    The prompt of each request holds all that came before, the environment's tokens too.
    """
    trajectory = Trajectory(turns[0].prompt_ids if turns else sorted(codec.end_ids)[:1])
    for turn in turns:
        before, asked = trajectory.ids, list(turn.prompt_ids)
        if asked[: len(before)] != before:
            break  # it began another conversation: what follows does not continue this one
        if added := asked[len(before) :]:
            trajectory.add_tool_tokens(added, codec.decode(added))
        token_ids = list(turn.output.token_ids)
        trajectory.add_model_tokens(token_ids, turn.output.log_probs or [])
        trajectory.cut_turn(len(token_ids), codec.decode(token_ids))
    trajectory.finish(min(codec.end_ids, default=0))
    return Rollout(
        trajectory=trajectory,
        stop_reason=StopReason.DEADLINE,
        answer=None,
        turns=[Turn(tokens=s.length) for s in trajectory.segments if s.author == "model"],
    )


def _answer(words: Sequence[str], codec: HFCodec, settings: LoopSettings) -> str | None:
    r"""Between the answer tags, else in the last `\boxed{}`, else all of the last turn."""
    if not words:
        return None
    # A stray closing tag is not the answer: as many attempts as the words hold.
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
