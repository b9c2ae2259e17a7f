"""Makes a `Rollout` from each output of an agent loop that is not a `TurnAgentLoop`.

verl's `tool_agent` and `single_turn_agent`, and loops of users, return verl's `AgentLoopOutput`, or
a list of them, one for each row of a session. The tokens with mask 1 are compared with those of the
engine, and no answer of the engine may be in two rows. The answer is read from the model's
own text. A reward that the loop computed is kept as its verdict. What else verl's batch takes
(images, routes of experts, `extra_fields`, counts) is passed on unchanged. No verl.
"""

import pickle
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from agent_loop.deadline import Deadline
from agent_loop.loop_settings import LoopSettings
from agent_loop.records.trajectory_record import StopReason, Turn
from agent_loop.training.verl_adapters.engine_client import EngineTurn, routes_of
from agent_loop.turns.codec import HFCodec
from agent_loop.turns.tags import ActionKind, Tags, held_answer
from agent_loop.turns.trajectory import Trajectory
from agent_loop.turns.turn_loop import Rollout
from agent_loop.watchdog import current_activity

PASSED = (
    "multi_modal_data",
    "mm_processor_kwargs",
    "mm_processor_output",
    "routed_experts",
    "num_turns",
    "metrics",
    "extra_fields",
)
"""Fields of verl's `AgentLoopOutput` that are passed on unchanged."""

READ = ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "reward_score")
"""Its other fields. They are read; the log-probs are those of the engine."""

_RESERVED = frozenset({"mixed", "reward_baseline"})
"""Keys of `extra_fields` that only this project sets."""


def rollouts_of(
    outputs: Sequence[Any],
    turns: Sequence[EngineTurn],
    codec: HFCodec,
    settings: LoopSettings,
    source: str,
) -> list[Rollout]:
    """The rollouts of a finished loop, one for each of verl's `AgentLoopOutput`s, of which the last
    one answers.

    Raises:
        ValueError: there is no output; or the tokens with mask 1 are not those of the engine,
            because the loop tokenised the text again, dropped tokens, or has the same answer of the
            engine in two rows; or an output has something that cannot be passed on.
    """
    if not outputs:
        raise ValueError(f"the loop of source={source} returned no output")
    answers = _Answers(turns, is_single=len(outputs) == 1)
    return [_rollout_of(output, answers, codec, settings, source) for output in outputs]


class _Answers:
    """The engine's answers of a session, each of which is taken once.

    The rows of a session may have been sampled side by side, so that the answers of one row do not
    follow each other. Of several rows, an answer belongs to the row whose tokens so far its request
    had. In a single row the answers come in their order.
    """

    def __init__(self, turns: Sequence[EngineTurn], *, is_single: bool) -> None:
        self._left = [(n, turn) for n, turn in enumerate(turns, 1) if turn.output.token_ids]
        self._is_single = is_single

    def take(self, before: list[int], sampled: list[int]) -> tuple[int, EngineTurn] | None:
        """The next answer of a row, with the number of its request; None if there is none.

        Args:
            before: prompt and response before the answer.
            sampled: tokens with mask 1 from there on.
        """
        fitting: list[tuple[int, int]] = []  # tokens, place
        for place, (_, turn) in enumerate(self._left[:1] if self._is_single else self._left):
            kept = list(turn.output.token_ids)[: len(sampled)]
            if kept == sampled[: len(kept)] and (
                self._is_single or list(turn.prompt_ids) == before
            ):
                fitting.append((len(kept), -place))
        return self._left.pop(-max(fitting)[1]) if fitting else None


def _rollout_of(
    output: Any, answers: _Answers, codec: HFCodec, settings: LoopSettings, source: str
) -> Rollout:
    mask, ids = output.response_mask, output.response_ids
    trajectory = Trajectory(output.prompt_ids)
    taken: list[tuple[int, EngineTurn]] = []
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
            if (found := answers.take(trajectory.ids, left)) is None:
                raise ValueError(
                    f"the tokens with mask 1 of a loop of source={source} are not the engine's, "
                    f"from token {at - len(left)} of {len(ids)} on: a loop must not tokenise the "
                    "model's words again, nor return them twice; return what generate() returned"
                )
            taken.append(found)
            turn = found[1].output
            kept = list(turn.token_ids)[: len(left)]
            trajectory.add_model_tokens(list(turn.token_ids), turn.log_probs or [])
            words.append(codec.decode(kept))
            trajectory.cut_turn(len(kept), words[-1])
            left = left[len(kept) :]
    answer, is_message = _answer(words, codec, settings)
    ends = trajectory.segments[-1].author == "model" and ids[-1] in codec.end_ids
    is_full = len(ids) >= settings.budget_of(source).response_length and not ends
    reason = StopReason.RESPONSE_BUDGET if is_full else StopReason.ANSWERED
    if answer is None and not is_full:
        reason = StopReason.NO_ACTION
    rollout = _finished(trajectory, codec, reason, answer, taken)
    rollout.answer_is_message = is_message
    used = [turn for _, turn in taken]
    rollout.passed, rollout.verdict = _passed(output, used, source), _verdict(output)
    return rollout


def pass_on(rollout: Rollout, output: Any) -> None:
    """Set what a loop passed on in `output`, verl's output of its judged trajectory.

    `extra_fields` are those of the loop and ours; where both have a key, ours stays. In
    `reward_extra_info` the same holds for each part; of the loop's parts, numbers and texts are
    passed on, which verl's validation can read.
    """
    for name, value in rollout.passed.items():
        if name != "extra_fields":
            setattr(output, name, value)
    theirs, ours = rollout.passed.get("extra_fields", {}), output.extra_fields
    info = {k: v for k, v in _info(theirs).items() if isinstance(v, str | int | float)}
    parts = {**info, **ours["reward_extra_info"]}
    output.extra_fields = {**theirs, **ours, "reward_extra_info": parts}


def _passed(output: Any, turns: Sequence[EngineTurn], source: str) -> dict[str, Any]:
    """Field -> value, of the fields in `PASSED` that the loop set."""
    is_set: set[str] = set(getattr(output, "model_fields_set", ()))
    if unknown := sorted(is_set.difference(PASSED, READ)):
        raise ValueError(
            f"the output of a loop of source={source} has {', '.join(unknown)}: verl's batch takes "
            "no such field; put it into extra_fields"
        )
    passed: dict[str, Any] = {name: getattr(output, name) for name in PASSED if name in is_set}
    # A default that was changed in place is not in `model_fields_set`.
    extra = passed["extra_fields"] = dict(getattr(output, "extra_fields", {}))
    if taken := sorted(_RESERVED & extra.keys()):
        raise ValueError(
            f"extra_fields of a loop of source={source} has {', '.join(taken)}: the trainer has "
            "values of its own there; choose another name"
        )
    for name, value in extra.items():
        try:
            pickle.dumps(value)
        except Exception as error:  # whatever the value's own class raises
            raise ValueError(
                f"extra_fields.{name} of a loop of source={source} cannot be sent to the trainer "
                f"({type(error).__name__}: {error}); keep it in the loop"
            ) from error
    given = {name: value for name, value in passed.items() if value is not None}
    return given if given.get("multi_modal_data") else given | _media(turns)


def _media(turns: Sequence[EngineTurn]) -> dict[str, Any]:
    """The images, videos and audio of the last request, which had those of all earlier ones."""
    last = turns[-1].media if turns else {}
    names = {kind: f"{kind}_data" for kind in ("image", "video", "audio")}
    data = {f"{kind}s": last[name] for kind, name in names.items() if len(last.get(name, ()))}
    rest = {name: last[name] for name in PASSED if name in last}
    return {"multi_modal_data": data, **rest} if data else {}


def add_routes(
    rollout: Rollout, turns: Sequence[EngineTurn], shape: tuple[int, int], source: str
) -> None:
    """Pass the engine's routes on, if the loop did not; see `routes_of`.

    Raises:
        ValueError: a token with mask 1 has no route.
    """
    if "routed_experts" in rollout.passed:
        return
    trajectory = rollout.trajectory
    routes = rollout.passed["routed_experts"] = routes_of(turns, trajectory.ids, shape)
    trained = [at for at, bit in enumerate(trajectory.response_mask) if bit]
    # The logits of a token come from the token before it.
    if trained and len(routes) < (needed := len(trajectory.prompt_ids) + trained[-1]):
        raise ValueError(
            f"the engine's routes of a loop of source={source} end after {len(routes)} tokens and "
            f"{needed} are needed for router replay: a request must continue all tokens of the "
            "trajectory; merge the routes in the loop as AgentLoopOutput.routed_experts"
        )


def _verdict(output: Any) -> dict[str, Any] | None:
    """The reward that a loop computed, with its parts; None without one."""
    if (score := getattr(output, "reward_score", None)) is None:
        return None
    return {**_info(output.extra_fields), "score": score}


def _info(extra_fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """verl's parts of a reward; empty if there are none."""
    info = extra_fields.get("reward_extra_info")
    return info if isinstance(info, Mapping) else {}


def late_rollout(turns: Sequence[EngineTurn], codec: HFCodec, deadline: Deadline) -> Rollout:
    """The lost rollout of a loop that was ended by its deadline, from its requests to the engine.

    The prompt of each request has all earlier tokens, those of the environment included.
    """
    trajectory = Trajectory(turns[0].prompt_ids if turns else sorted(codec.end_ids)[:1])
    used = 0
    for turn in turns:
        before, asked = trajectory.ids, list(turn.prompt_ids)
        if asked[: len(before)] != before:
            break  # the loop began another conversation
        used += 1
        if added := asked[len(before) :]:
            trajectory.add_tool_tokens(added, codec.decode(added))
        token_ids = list(turn.output.token_ids)
        trajectory.add_model_tokens(token_ids, turn.output.log_probs or [])
        trajectory.cut_turn(len(token_ids), codec.decode(token_ids))
    rollout = _finished(trajectory, codec, StopReason.DEADLINE, None, [*enumerate(turns, 1)])
    with current_activity(time.monotonic) as activity:
        rollout.lose_to_deadline(deadline, activity)
    trajectory.without_gradient()
    rollout.passed = _media(turns[:used])
    return rollout


def _finished(
    trajectory: Trajectory,
    codec: HFCodec,
    stop_reason: StopReason,
    answer: str | None,
    answers: Sequence[tuple[int, EngineTurn]],
) -> Rollout:
    """The rollout of a trajectory, from the numbers and answers of its requests."""
    trajectory.finish(min(codec.end_ids, default=0))
    lengths = [s.length for s in trajectory.segments if s.author == "model"]
    with_tokens = [(number, each) for number, each in answers if each.output.token_ids]
    turns = [
        Turn(
            tokens=length,
            min_global_steps=each.weight_versions[0],
            max_global_steps=each.weight_versions[1],
            request=number,
        )
        for length, (number, each) in zip(lengths, with_tokens, strict=False)
    ]
    return Rollout(
        trajectory=trajectory,
        stop_reason=stop_reason,
        answer=answer,
        turns=turns,
        knows_calls=False,
    )


def _answer(
    words: Sequence[str], codec: HFCodec, settings: LoopSettings
) -> tuple[str | None, bool]:
    r"""The text between the answer tags, else in the last `\boxed{}`, else the last turn; and
    whether it is the last turn."""
    if not words:
        return None, False
    # A closing tag without an opening one is a malformed action. The answer may come after many.
    tags = Tags.from_config(settings.tools, [ActionKind.ANSWER], max_actions=sys.maxsize)
    if (held := held_answer("".join(words), tags)) is not None:
        return held, False
    last = words[-1]
    for token_id in codec.end_ids:
        last = last.removesuffix(codec.decode([token_id]))
    return last.strip() or None, True
