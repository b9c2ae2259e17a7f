"""A server that a worker starts for an environment: the event loop never waits for the kernel."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from agent_loop.environments import backends
from agent_loop.environments.backends import ProcessBackend
from config.environments import EnvironmentEntry
from tests.agent_loop.environments.conftest import ROW, WORLDS
from tool_server.wire.protocol import ToolUnavailable


class SlowCalls:
    """Functions that return only if the event loop goes on meanwhile, and what was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch, self._goes_on = monkeypatch, threading.Event()
        self.names: list[str] = []

    def add(self, module: Any, name: str) -> None:
        function = getattr(module, name)

        def slow(*arguments: Any, **options: Any) -> Any:
            self.names.append(name)
            self._goes_on.clear()
            assert self._goes_on.wait(30), f"the event loop waits for {name}"
            return function(*arguments, **options)

        self._patch.setattr(module, name, slow)

    async def let_go_on(self) -> None:
        while True:
            self._goes_on.set()
            await asyncio.sleep(0)


@pytest.fixture
async def slow(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SlowCalls]:
    with monkeypatch.context() as patch:
        calls = SlowCalls(patch)
        calls.add(backends, "guarded")
        calls.add(backends.shutil, "rmtree")
        going = asyncio.ensure_future(calls.let_go_on())
        yield calls
        going.cancel()


def backend_of(name: str) -> ProcessBackend:
    return ProcessBackend(EnvironmentEntry(use=f"{WORLDS}:{name}"))


def own(backend: ProcessBackend) -> tuple[psutil.Process, Path]:
    """The server's process, and its folder."""
    assert backend._server is not None and backend._folder is not None
    (process,) = psutil.Process(backend._server.pid).children()  # of the guard
    return process, backend._folder


async def test_the_loop_goes_on_while_a_server_starts_and_after_its_kill(slow: SlowCalls):
    backend = backend_of("Guess")
    await backend.reset(ROW.visible())
    process, folder = own(backend)
    process.kill()
    await backend.close()
    assert slow.names == ["guarded", "rmtree"]
    assert not process.is_running() and not folder.exists()


async def test_the_loop_goes_on_while_the_last_words_of_a_server_are_read(slow: SlowCalls):
    slow.add(backends, "_last_words")
    with pytest.raises(ToolUnavailable, match="the class has no step"):
        await backend_of("NoStep").ready()
    assert slow.names == ["guarded", "_last_words", "rmtree"]


@pytest.mark.parametrize("passes", [1, 4])
async def test_a_server_is_killed_and_cleared_away_if_its_close_is_cancelled(
    passes: int, slow: SlowCalls
):
    backend = backend_of("Guess")
    await backend.ready()
    process, folder = own(backend)
    process.suspend()  # it does not end by itself
    closing = asyncio.ensure_future(backend.close())
    for _ in range(4):
        for _ in range(passes):
            await asyncio.sleep(0)
        closing.cancel()
    await asyncio.wait([closing])
    assert closing.cancelled() and not process.is_running() and not folder.exists()


async def test_a_server_whose_start_is_cancelled_is_ended(slow: SlowCalls):
    backend = backend_of("Guess")
    starting = asyncio.ensure_future(backend.ready())
    while not slow.names:  # noqa: ASYNC110 (a thread, which tells nobody)
        await asyncio.sleep(0)
    folder = backend._folder
    starting.cancel()
    await asyncio.wait([starting])
    assert starting.cancelled() and folder is not None and not folder.exists()
    alive = [c for c in psutil.Process().children() if c.status() != psutil.STATUS_ZOMBIE]
    assert not [child for child in alive if str(folder) in " ".join(child.cmdline())]
