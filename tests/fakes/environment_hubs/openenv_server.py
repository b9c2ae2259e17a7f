"""An OpenEnv server for tests, on OpenEnv's own classes: `openenv_server.py guess|notes PORT MOST`.

`guess`: guess a number from 1 to 50; the guess 0 takes a minute. `notes`: a tool that takes notes.
It ends with its stdin.
"""

import asyncio
import random
import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import (
    Action,
    Environment,
    MCPEnvironment,
    Observation,
    State,
    create_app,
)
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class Guess(Action):
    number: int


class Seen(Observation):
    text: str = ""
    left: int = 0


class GuessGame(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, lives: int = 3, **others: Any) -> Seen:
        self._number, self._left = random.Random(seed).randint(1, 50), lives
        return Seen(text="Guess a number from 1 to 50.", left=lives)

    async def step_async(
        self, action: Guess, timeout_s: float | None = None, **others: Any
    ) -> Seen:
        if action.number == 0:
            await asyncio.sleep(60)
        return self.step(action)

    def step(self, action: Guess, timeout_s: float | None = None, **others: Any) -> Seen:
        if action.number == 13:
            raise RuntimeError("the game is broken")
        self._left -= 1
        if action.number == self._number:
            return Seen(text="right", left=self._left, done=True, reward=1.0)
        word = "higher" if action.number < self._number else "lower"
        return Seen(text=word, left=self._left, done=not self._left, reward=-0.125)

    @property
    def state(self) -> State:
        return State(episode_id="guess", step_count=0)


class Notes(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("notes")
        notes: list[str] = []

        @server.tool
        def write(text: str) -> str:
            """Take a note."""
            notes.append(text)
            return f"{len(notes)} notes"

        super().__init__(server)

    def reset(self, seed: int | None = None, **others: Any) -> Observation:
        return Observation(metadata={"topic": "tea"})

    def _step_impl(self, action: Action, **others: Any) -> Observation:
        raise ValueError("call a tool")

    @property
    def state(self) -> State:
        return State(episode_id="notes", step_count=0)


def main() -> None:
    kind, port, most = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if kind == "guess":
        app = create_app(GuessGame, Guess, Seen, max_concurrent_envs=most)
    else:
        app = create_app(Notes, CallToolAction, CallToolObservation, max_concurrent_envs=most)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main()
