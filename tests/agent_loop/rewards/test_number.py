"""One rule says which values are a reward, wherever the value comes from."""

import asyncio
import sys
from fractions import Fraction
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from agent_loop.environments.episode import InvalidAnswer, step_of
from agent_loop.environments.textarena_game import TextArenaGame
from agent_loop.gateway.wire import WireError
from agent_loop.rewards.attempt import Attempt
from agent_loop.rewards.custom import CustomReward, LoopReward
from agent_loop.rewards.number import MAX_REWARD, reward_number
from agent_loop.rewards.reasoning_gym import ReasoningReward
from agent_loop.rewards.scoring import Scorer
from config.schema import FormatTermConfig, LengthTermConfig
from tests.agent_loop.gateway.test_session import session_of


class Odd:
    """What a user's object may do when it is asked."""

    def item(self, place: int) -> float:
        return 1.0

    def __repr__(self) -> str:
        raise RuntimeError("no words")


REWARDS: list[tuple[Any, float]] = [
    *[(True, 1.0), (False, 0.0), (-2, -2.0), (0.25, 0.25), (Fraction(1, 4), 0.25)],
    *[(MAX_REWARD, 1e9), (-MAX_REWARD, -1e9)],
    *[(np.float32(0.25), 0.25), (np.int64(3), 3.0), (np.bool_(True), 1.0), (np.array(0.25), 0.25)],
    *[(torch.tensor(0.25), 0.25), (torch.tensor(True), 1.0)],
    *[(torch.tensor(0.25, dtype=torch.bfloat16, requires_grad=True), 0.25)],
    *[(np.array([0.25]), 0.25), (torch.tensor([[0.25]]), 0.25)],
]
NONE: list[Any] = [
    *[None, "0.5", "", b"1", [0.5], (0.5,), {"reward": 0.5}, 1j, object(), Odd()],
    *[float("nan"), float("inf"), -float("inf"), np.float32("nan"), torch.tensor(float("inf"))],
    *[MAX_REWARD * 1.001, -1e30, 1e39, 10**400, 10**5000, np.float64(1e30), torch.tensor(1e30)],
    *[np.array([0.5, 0.5]), np.array([]), np.str_("1"), torch.tensor([0.5, 0.5]), torch.tensor(1j)],
]
ATTEMPT = Attempt(answer="x", ground_truth={"task": "sums", "entry": {}})


def from_a_step(value: Any) -> float:
    return step_of(("seen", value, False)).reward


def from_gymnasiums_five(value: Any) -> float:
    return step_of(("seen", value, False, True, {})).reward


def from_a_dict(value: Any) -> float:
    return step_of({"observation": "seen", "reward": value}).reward


def from_a_game(value: Any) -> float:
    class Played:
        def step(self, action: str) -> tuple[bool, dict[str, Any]]:
            return True, {}

        def get_observation(self) -> tuple[int, list[Any]]:
            return 0, []

        def close(self) -> tuple[dict[int, Any], dict[int, Any]]:
            return {0: value}, {}

    game = TextArenaGame.__new__(TextArenaGame)
    game._env = Played()
    return step_of(game.step("move")).reward


def from_a_function(value: Any) -> float:
    reward = CustomReward(name="own.py:score", function=lambda **_: {"score": value, "part": 1})
    return asyncio.run(reward.judge(ATTEMPT, None))["score"]  # type: ignore[arg-type]


def from_a_loop(value: Any) -> float:
    reward = LoopReward(verdict={"score": value})
    return asyncio.run(reward.judge(ATTEMPT, None))["score"]  # type: ignore[arg-type]


def from_an_agent(value: Any) -> float | None:
    session = session_of("hermes", [])
    session.set_verdict({"reward": value})
    return session.reward


WAYS = {
    from_a_step: InvalidAnswer,
    from_gymnasiums_five: InvalidAnswer,
    from_a_dict: InvalidAnswer,
    from_a_game: InvalidAnswer,
    from_a_function: ValueError,
    from_a_loop: ValueError,
    from_an_agent: WireError,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_takes_the_same_rewards(way: Any) -> None:
    for value, number in REWARDS:
        assert (way(value), reward_number(value)) == (number, number)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_refuses_the_same_values_and_says_the_rule(way: Any) -> None:
    for value in NONE:
        with pytest.raises(WAYS[way], match=r"want .*a finite number from -1e9 to 1e9"):
            way(value)


async def test_a_part_may_be_a_number_that_is_no_reward() -> None:
    returned = {"score": 1, "time": 1.7e9, "none": float("inf")}
    reward = CustomReward(name="own.py:score", function=lambda **_: returned)
    parts = await reward.judge(ATTEMPT, None)  # type: ignore[arg-type]
    assert parts == {"score": 1.0, "acc": 1.0, "format": 1.0, "time": 1.7e9}


def test_a_step_without_a_reward_adds_nothing() -> None:
    assert step_of({"observation": "seen"}).reward == 0.0


@pytest.mark.parametrize("found", [1e30, float("nan")])
async def test_a_scorers_number_that_is_no_reward_is_its_error(
    found: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(*_: Any) -> float:
        return found

    monkeypatch.setattr(Scorer, "run", run)
    parts = await ReasoningReward(name="reasoning_gym").judge(ATTEMPT, None)  # type: ignore[arg-type]
    assert (parts["score"], parts["scorer_error"]) == (0.0, 1.0)


@pytest.mark.parametrize("term", [FormatTermConfig, LengthTermConfig])
@pytest.mark.parametrize("weight", [1e30, float("inf"), float("nan"), -1e30])
def test_a_weight_cannot_make_a_reward_that_single_precision_does_not_hold(
    term: Any, weight: float
) -> None:
    with pytest.raises(ValidationError, match=r"weight\n"):
        term(weight=weight)
    assert torch.tensor(2 * MAX_REWARD + 1e9).isfinite()


def test_the_rule_needs_neither_numpy_nor_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("fresh")
    source = sys.modules["agent_loop.rewards.number"].__file__
    assert source is not None
    for name in ("numpy", "torch"):
        monkeypatch.setitem(sys.modules, name, None)
    with open(source, encoding="utf-8") as text:
        exec(compile(text.read(), source, "exec"), vars(module))
    assert vars(module)["reward_number"](True) == 1.0
