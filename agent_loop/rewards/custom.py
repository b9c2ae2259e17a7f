"""A user's own reward: a function from a file (`reward: path/to/file.py:function`), or the score
that an agent loop computed.

docs/mixture.md says what a function gets and returns, and when a loop's score is the reward. A
function that is not async runs in a thread, which cannot be ended at the deadline of rewards. A
function with a parameter `tools` gets the tool client of its source, and must be async, because
calls of tools are awaited.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from agent_loop.daemon_threads import DaemonThreads
from agent_loop.rewards.attempt import Attempt, Reward
from agent_loop.rewards.number import WANTED, finite_number, reward_number, shown
from samplers.module_file import named_in
from tool_server.wire.protocol import Fault, ToolBackend

_GIVEN = ("data_source", "solution_str", "ground_truth", "extra_info")

_TOOLS = "tools"
"""The parameter that gets the tool client, unless `reward_options` has a value of this name."""


def split_path(name: str) -> tuple[str, str] | None:
    """(path, function) of a reward that is named by a file; None for any other name."""
    path, colon, function = name.rpartition(":")
    return (path, function) if colon and path.endswith(".py") else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomReward:
    name: str
    function: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    takes_tools: bool = False

    async def judge(self, attempt: Attempt, tools: ToolBackend) -> dict[str, float]:
        ground_truth = attempt.ground_truth
        if isinstance(ground_truth, dict) and "answer" in ground_truth:
            only = ground_truth["answer"]  # verl's functions expect the one answer as a text
            if ground_truth in ({"answer": only}, {"answer": only, "target": [only]}):
                ground_truth = only
        given = {
            "data_source": attempt.source,
            "solution_str": attempt.text,
            "ground_truth": ground_truth,
            "extra_info": {**attempt.extra_info, "answer": attempt.answer},
            **({_TOOLS: tools} if self.takes_tools else {}),
            **self.options,
        }
        if inspect.iscoroutinefunction(self.function):
            value = self._called(given)
        else:
            value = await _THREADS.run(partial(self._called, given))
        if inspect.isawaitable(value):
            try:
                value = await value
            except (Exception, SystemExit) as error:
                raise self._failed(error) from error
        return _parts(self.name, value, attempt)

    def _called(self, given: Mapping[str, Any]) -> Any:
        try:
            return self.function(**given)
        except (Exception, SystemExit) as error:
            # In the thread, because `StopIteration` (of `next`, say) never leaves a future.
            raise self._failed(error) from error

    def _failed(self, error: BaseException) -> Exception:
        if isinstance(error, Fault):
            return error
        return RuntimeError(f"reward {self.name} raised {type(error).__name__}: {error}")

    def truth_problem(self, ground_truth: Any) -> str | None:
        return None  # only the function can tell


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopReward:
    """The reward that an agent loop of another project computed itself: its `reward_score`, and the
    numbers of its `reward_extra_info` as parts."""

    name: str = "loop"
    verdict: Mapping[str, Any] | None = None
    """None: the loop set no `reward_score`."""

    named: Reward | None = None
    """The reward that the source names. It is the score then, and the loop's parts are recorded as
    `loop_<part>`."""

    async def judge(self, attempt: Attempt, tools: ToolBackend) -> dict[str, float]:
        if self.verdict is None:
            raise ValueError(
                f"the agent loop of source={attempt.source} set no reward_score, and the source "
                "has reward=loop; set it in the loop, or name another reward"
            )
        theirs = _parts(self.name, self.verdict, attempt)
        if self.named is None:
            return theirs
        beside = {f"loop_{part}": number for part, number in theirs.items()}
        return {**beside, **await self.named.judge(attempt, tools)}

    def truth_problem(self, ground_truth: Any) -> str | None:
        return None  # only the loop can tell


_THREADS = DaemonThreads("reward", 32)


def custom_reward(name: str, options: Mapping[str, Any]) -> CustomReward:
    """Load `path/to/file.py:function`.

    Raises:
        ValueError: there is no such file or function, the file cannot be loaded, the function does
            not take verl's arguments and the options, or it takes `tools` and is not async.
    """
    function, failed = named_in(name, "reward"), f"cannot load reward={name}"
    word = name.rpartition(":")[2]
    signature = inspect.signature(function)
    takes_tools = _TOOLS in signature.parameters and _TOOLS not in options
    if takes_tools and not is_async(function):
        raise ValueError(
            f"{failed}: it has a parameter {_TOOLS!r}, the tool client, whose calls are awaited, "
            f"and is not async; write `async def {word}`, or rename the parameter"
        )
    given = [*_GIVEN, *([_TOOLS] if takes_tools else []), *options]
    try:
        signature.bind(**dict.fromkeys(given))
    except TypeError as error:
        raise ValueError(
            f"{failed}: {error}; it is called with {', '.join(given)} by name, where those after "
            f"extra_info are {_TOOLS}, if it has this parameter, and reward_options"
        ) from error
    return CustomReward(
        name=name, function=function, options=dict(options), takes_tools=takes_tools
    )


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call gives an awaitable: an async function, also below decorators, or an object
    whose `__call__` is one."""
    inner = inspect.unwrap(function)
    call = inspect.getattr_static(type(inner), "__call__", None)
    return any(map(inspect.iscoroutinefunction, (inner, call)))


def _parts(name: str, value: Any, attempt: Attempt) -> dict[str, float]:
    returned = value if isinstance(value, Mapping) else {"score": value}
    numbers = {str(part): finite_number(given) for part, given in returned.items()}
    score = reward_number(numbers.get("score"))
    if score is None:
        raise ValueError(
            f"reward {name} returned {shown(value)}: want {WANTED}, or a dict with one as `score`"
        )
    return {
        "acc": float(score >= 1),
        "format": float(attempt.answer is not None),
        **{part: number for part, number in numbers.items() if number is not None},
    }
