"""The protocol of stateful environments, and what their answers must be. Standard library only.

An environment is a class; each trajectory has an instance:

    class Maze:
        def __init__(self, size: int = 5): ...     # the `options` of the entry
        def reset(self, row) -> str | list[message]: ...
        def step(self, action) -> (observation, reward, done): ...
        def close(self): ...                       # may be left out

Each method may be async. `row` has `data_source`, `row_id`, `prompt` (messages), `extras` and
`ground_truth`. `step` gets the text of the model's message; if the environment has
`tools` (JSON schemas, set in `reset` or in the class), a tool call comes as
`{"name": ..., "arguments": {...}}`. It may also return a dict with `observation`, `reward`, `done`
and `info`, whose numbers become parts of the reward. `InvalidAction` is the model's mistake: the
model reads its text, and the episode goes on.

This module also runs in the interpreters of other environments, so it
imports nothing but `rewards.number`, which needs no more than it does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_loop.rewards.number import WANTED, reward_number, shown

MAX_OBSERVATION_BYTES = 1 << 20
"""Bytes of one observation, and of the messages of a reset; an environment that says more is at
fault, because it would fill the memory of the worker."""


class InvalidAction(ValueError):
    """The model's action is not one that the environment takes. Raised by `step`."""


class InvalidAnswer(ValueError):
    """What an environment returned is not what the protocol says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """An episode that has begun."""

    messages: list[dict[str, str]]
    """What the model reads first."""

    tools: list[dict[str, Any]] = field(default_factory=list)
    """JSON schemas of the tools that the model may call; none: the model writes text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The answer to one action."""

    observation: str
    reward: float = 0.0
    done: bool = False
    info: dict[str, float] = field(default_factory=dict)
    """Numbers that become parts of the reward; `acc` says whether the prompt is solved."""


def start_of(value: Any, tools: Any = None) -> Start:
    """What `reset` returned.

    Raises:
        InvalidAnswer: it is neither a text nor a list of messages with at least one, or too large.
    """
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if (
        not isinstance(messages, Sequence)
        or not messages
        or not all(
            isinstance(each, Mapping)
            and isinstance(each.get("role"), str)
            and isinstance(each.get("content"), str)
            for each in messages
        )
    ):
        raise InvalidAnswer(
            f"reset returned {shown(value)}: want a text, or a list of {{role, content}} with texts"
        )
    _bounded("reset", *(each["content"] for each in messages))
    if tools is not None and not (
        isinstance(tools, Sequence) and all(isinstance(tool, Mapping) for tool in tools)
    ):
        raise InvalidAnswer(f"tools={shown(tools)}: want a list of JSON schemas of functions")
    return Start(
        messages=[
            {"role": each["role"], "content": whole_text(each["content"])} for each in messages
        ],
        tools=[dict(tool) for tool in tools or ()],
    )


def step_of(value: Any) -> Step:
    """What `step` returned, as a tuple of 3 (or of gymnasium's 5) or as a mapping.

    Raises:
        InvalidAnswer: no observation, a reward that is none (`reward_number`), a `done` that is
            neither true nor false, or too large.
    """
    if isinstance(value, Step):
        value = {name: getattr(value, name) for name in ("observation", "reward", "done", "info")}
    elif isinstance(value, tuple | list) and len(value) == 3:
        value = dict(zip(("observation", "reward", "done"), value, strict=True))
    elif isinstance(value, tuple | list) and len(value) == 5:
        observation, reward, terminated, truncated, info = value
        if not _is_truth(terminated) or not _is_truth(truncated):
            raise InvalidAnswer("step returned terminated or truncated that is no true or false")
        value = {"observation": observation, "reward": reward, "info": info}
        value["done"] = bool(terminated) or bool(truncated)
    if not isinstance(value, Mapping) or not isinstance(value.get("observation"), str):
        raise InvalidAnswer(
            f"step returned {shown(value)}: want (observation, reward, done) with a text as "
            "observation, or a dict with these keys"
        )
    reward, done = value.get("reward", 0.0), value.get("done", False)
    if (number := reward_number(reward)) is None:
        raise InvalidAnswer(f"step returned reward={shown(reward)}: want {WANTED}")
    if not _is_truth(done):
        raise InvalidAnswer(f"step returned done={shown(done)}: want true or false")
    info = value.get("info")
    named = info if isinstance(info, Mapping) else {}
    numbers = {whole_text(str(name))[:64]: reward_number(own) for name, own in named.items()}
    _bounded("step", value["observation"])
    return Step(
        observation=whole_text(value["observation"]),
        reward=number,
        done=bool(done),
        info={n: own for n, own in numbers.items() if own is not None},
    )


def whole_text(text: str) -> str:
    """The text with `?` for each half of a character, which no file and no tokenizer takes."""
    return text.encode(errors="replace").decode()


def _is_truth(value: Any) -> bool:
    """Whether a value is a truth value; numpy's have another type."""
    return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")


def _bounded(method: str, *texts: str) -> None:
    size = sum(len(text.encode(errors="replace")) for text in texts)
    if size > MAX_OBSERVATION_BYTES:
        raise InvalidAnswer(
            f"{method} returned a text of {size} bytes: the most is {MAX_OBSERVATION_BYTES >> 20} "
            "MiB"
        )
