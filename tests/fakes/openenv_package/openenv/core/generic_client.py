"""OpenEnv's client: its constructor, its methods and the texts of its errors, without a socket."""

import asyncio
from dataclasses import dataclass
from typing import Any


@dataclass
class StepResult:
    observation: dict[str, Any]
    reward: float | None = None
    done: bool = False


class Socket:
    """A socket that is closed at once."""

    def __init__(self) -> None:
        self.is_aborted = False
        self.transport = self

    def abort(self) -> None:
        self.is_aborted = True


class GenericEnvClient:
    script: list[Any] = []  # noqa: RUF012 (each test sets it)
    """Of each request the answer: a result, an exception, or None for no answer."""

    made: list["GenericEnvClient"] = []  # noqa: RUF012

    def __init__(self, base_url: str, **settings: Any) -> None:
        self.base_url, self.settings = base_url, settings
        self.asked: list[Any] = []
        self.socket: Socket | None = None
        self._ws: Socket | None = None
        self.made.append(self)

    async def connect(self) -> None:
        self._ws = self.socket = Socket()

    async def reset(self, **arguments: Any) -> Any:
        return await self._answer(arguments)

    async def step(self, action: dict[str, Any]) -> Any:
        return await self._answer(action)

    async def close(self) -> None:
        self._ws = None

    async def _ensure_connected(self) -> None:
        await self.connect()

    async def _answer(self, asked: Any) -> Any:
        await self._ensure_connected()
        self.asked.append(asked)
        answer = self.script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            await asyncio.Event().wait()
        return answer
