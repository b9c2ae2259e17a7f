"""The record of a trajectory: its facts, which the trainer always reads, and its texts.

The facts are numbers and names. They travel in verl's `extra_fields["mixed"]`. Texts and token ids
travel packed in a column of their own, so that the trainer reads them only for the trajectories
that are written or compared. A line of a trajectory file has both.
"""

import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent_loop.turns.turn_loop import Rollout

_TEXTS_OF_CALL = ("arguments", "error", "unread")


def facts_of(rollout: "Rollout") -> dict[str, Any]:
    """The facts of a rollout, as JSON values. Their size grows with its turns and calls."""
    return {
        "stop_reason": str(rollout.stop_reason),
        # `dataclasses.asdict` takes twenty times as long, because it copies deeply.
        "turns": [vars(turn).copy() for turn in rollout.turns],
        "calls": [
            {
                name: value
                for name, value in vars(call).items()
                if name not in _TEXTS_OF_CALL and value is not None and value is not False
            }
            for call in rollout.calls
        ],
        "fault": rollout.fault,
        "fault_tool": rollout.fault_tool,
        "loop_error": rollout.loop_error,
        "weight_versions": rollout.weight_versions,
        "cause": rollout.cause,
        **({} if rollout.temperature is None else {"temperature": rollout.temperature}),
    }


def texts_of(rollout: "Rollout") -> dict[str, Any]:
    """What the model and the tools wrote, and the engine's tokens before any cut."""
    trajectory = rollout.trajectory
    return {
        "answer": rollout.answer,
        "calls": [{name: getattr(call, name) for name in _TEXTS_OF_CALL} for call in rollout.calls],
        "engine_turns": trajectory.engine_turns,
        "segments": [[s.author, s.start, s.length, s.text] for s in trajectory.segments],
    }


def record_of(rollout: "Rollout") -> dict[str, Any]:
    """Facts and texts of a rollout, as in a trajectory file."""
    return joined(facts_of(rollout), texts_of(rollout))


def joined(facts: Mapping[str, Any], texts: Mapping[str, Any]) -> dict[str, Any]:
    """The whole record of a trajectory, from its facts and its texts.

    The facts that an earlier release left in a checkpoint have the texts already.
    """
    if texts is facts:
        return dict(facts)
    calls = [{**fact, **text} for fact, text in zip(facts["calls"], texts["calls"], strict=True)]
    return {**facts, **texts, "calls": calls}


def pack(texts: Mapping[str, Any]) -> bytes:
    """The texts as bytes, which TransferQueue moves as they are. A token takes 3 to 5 bytes."""
    return pickle.dumps(texts, protocol=pickle.HIGHEST_PROTOCOL)


def unpack(packed: bytes) -> dict[str, Any]:
    return pickle.loads(packed)  # written by an agent loop worker of the same run
