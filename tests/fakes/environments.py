"""Environments as a user writes them, some of which fail in a way that `mode` names."""

import asyncio
import os
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from agent_loop.environments.episode import InvalidAction, Step

FAULTS: dict[str, str] = {
    "raises": "step raised KeyError",
    "exits": "step raised SystemExit",
    "nan": "reward=nan: want a finite number",
    "text reward": "reward='much': want a finite number",
    "lies": "done='yes': want true or false",
    "numbers": "want (observation, reward, done) with a text as observation",
    "floods": "the most is 1 MiB",
    "is huge": "reward=1e+39: want a finite number",
    "no reward": "reward=None: want a finite number",
}
"""Mode of `Guess` -> what its fault says."""

HARD_FAULTS = {"crashes": "its process ended with exit code 7", "hangs": "within timeout="}
"""Modes that only a process of its own survives."""


class Guess:
    """Guess a number; reward 1 for it, and 0.25 for each guess that comes nearer."""

    def __init__(self, high: int = 9, mode: str = "") -> None:
        self.high, self.mode, self.best, self.secret = high, mode, high, 0

    def reset(self, row: Mapping[str, Any]) -> Any:
        if self.mode == "no start":
            return []
        if self.mode == "fails at once":
            raise OSError("no board")
        if self.mode == "refuses":
            raise InvalidAction("no such board")
        self.secret = row["extras"].get("seed", 3) % self.high + 1
        system = {"role": "system", "content": "You play."}
        return [system, {"role": "user", "content": f"a number from 1 to {self.high}"}]

    def step(self, action: str) -> Any:
        if self.mode in _ACTS:
            return _ACTS[self.mode]()
        if not action.strip().isdigit():
            raise InvalidAction("write a number")
        guess = int(action)
        if guess == self.secret:
            return {"observation": "right", "reward": 1.0, "done": True, "info": {"acc": 1, "x": 2}}
        reward = 0.25 * (abs(guess - self.secret) < self.best)
        self.best = min(self.best, abs(guess - self.secret))
        return ("higher" if guess < self.secret else "lower"), reward, False


def _raises() -> Any:
    raise KeyError("x")


def _prints() -> Any:
    for _ in range(64):
        print("x" * (1 << 20), flush=True)
    return "more", 0.0, False


_ACTS = {
    "raises": _raises,
    "exits": lambda: exit(3),
    "nan": lambda: ("x", float("nan"), False),
    "text reward": lambda: ("x", "much", False),
    "lies": lambda: ("x", 0.0, "yes"),
    "numbers": lambda: (1, 0.0, False),
    "floods": lambda: ("x" * (2 << 20), 0.0, False),
    "is huge": lambda: ("x", 1e39, False),
    "no reward": lambda: ("x", None, False),
    "sums up": lambda: ("x", 6e8, False),
    "half a character": lambda: ("caf\ud83d", 1.0, True),
    "names the score": lambda: {
        "observation": "x",
        "reward": 0.5,
        "done": True,
        "info": {"score": 250.0, "format": 7.0, "steps": 9.0, "huge": 1e39},
    },
    "crashes": lambda: os._exit(7),
    "hangs": lambda: time.sleep(600),
    "prints": _prints,
    "never ends": lambda: ("more", 0.0, False),
}


class Orders:
    """An async environment with a tool and a state: look up an order, then say how many."""

    tools: ClassVar[list[Any]] = [
        {
            "name": "look_up",
            "description": "The pieces of an order.",
            "parameters": {
                "type": "object",
                "properties": {"order": {"type": "string"}},
                "required": ["order"],
            },
        }
    ]

    async def reset(self, row: Mapping[str, Any]) -> str:
        self.calls = 0
        return "How many pieces has order b?"

    async def step(self, action: Any) -> Step:
        await asyncio.sleep(0)
        if isinstance(action, str):
            return Step(observation="thanks", reward=float(action == "7"), done=True)
        self.calls += 1
        return Step(observation=f"7 pieces, call {self.calls}", reward=0.5)


class Parent:
    """Starts a program that does not end."""

    def reset(self, row: Mapping[str, Any]) -> str:
        import subprocess

        return str(subprocess.Popen(["sleep", "600"]).pid)

    def step(self, action: str) -> Any:
        return "x", 0.0, False


class NoStep:
    def reset(self, row: Mapping[str, Any]) -> str:
        return "?"


class Risky(Guess):
    """Some seeds hang, crash, flood or lie; the others end with the first message."""

    MODES: ClassVar[list[str]] = ["hangs", "crashes", "floods", "lies", "", "", "", ""]

    def reset(self, row: Mapping[str, Any]) -> Any:
        self.mode = self.MODES[row["extras"]["seed"] % 8]
        return "say anything"

    def step(self, action: str) -> Any:
        return _ACTS[self.mode]() if self.mode else ("thanks", 0.5, True)
