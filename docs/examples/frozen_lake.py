# gymnasium is the environment's own package.
# pyright: reportMissingImports=false
"""A gymnasium environment as the environment of a source: FrozenLake, as a picture of letters.

environment: {use: docs/examples/frozen_lake.py:FrozenLake, options: {slippery: false}}
"""

import re
from collections.abc import Mapping
from typing import Any

import gymnasium

from agent_loop.environments.episode import InvalidAction

MOVES = ("left", "down", "right", "up")
RULES = "Cross the lake from S to G and do not fall into a hole (H). Write one of: {}.\n\n{}"
COLOURS = re.compile(r"\x1b\[\d+m")


class FrozenLake:
    """A lake of `size` x `size` fields; the row's `extras.seed` says which."""

    def __init__(self, size: int = 4, slippery: bool = True) -> None:
        self._size, self._slippery = size, slippery

    def reset(self, row: Mapping[str, Any]) -> str:
        from gymnasium.envs.toy_text.frozen_lake import generate_random_map

        seed = int(row["extras"].get("seed", 0))
        lake = generate_random_map(size=self._size, seed=seed)
        self._env = gymnasium.make(
            "FrozenLake-v1", desc=lake, is_slippery=self._slippery, render_mode="ansi"
        )
        self._env.reset(seed=seed)
        return RULES.format(", ".join(MOVES), self._picture())

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        said = [word for word in re.findall(r"[a-z]+", action.lower()) if word in MOVES]
        if len(said) != 1:
            raise InvalidAction(f"write exactly one of: {', '.join(MOVES)}")
        _, reward, terminated, truncated, info = self._env.step(MOVES.index(said[0]))
        return self._picture(), float(reward), terminated, truncated, info

    def close(self) -> None:
        self._env.close()

    def _picture(self) -> str:
        """The lake, with brackets around the field where the player stands."""
        picture = str(self._env.render())
        return COLOURS.sub("", re.sub(r"\x1b\[\d+m(\w)\x1b\[0m", r"[\1]", picture)).strip("\n")
