"""The program that forks the sessions of a class: the event loop never waits for the kernel."""

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest

from agent_loop.environments import processes
from agent_loop.environments.processes import SessionProcesses, StartFailed
from tests.agent_loop.environments.conftest import WORLDS


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
        calls.add(processes, "guarded")
        calls.add(processes, "_wait")
        going = asyncio.ensure_future(calls.let_go_on())
        yield calls
        going.cancel()


def sessions_of(name: str) -> SessionProcesses:
    return SessionProcesses(f"{WORLDS}:{name}", sys.executable, os.environ)


def program_of(own: SessionProcesses) -> psutil.Process:
    assert own._program is not None
    (program,) = psutil.Process(own._program.pid).children()  # of the guard
    return program


async def test_the_loop_goes_on_while_a_program_starts_and_after_its_kill(slow: SlowCalls):
    own = sessions_of("Guess")
    await own.open()
    program = program_of(own)
    program.kill()
    await own.close()
    assert slow.names == ["guarded", "_wait"] and not program.is_running()


async def test_the_loop_goes_on_while_the_last_words_of_a_program_are_read(slow: SlowCalls):
    slow.add(processes, "_last_words")
    with pytest.raises(StartFailed, match="the class has no step"):
        await sessions_of("NoStep").ready()
    assert slow.names == ["guarded", "_last_words", "_wait"]


@pytest.mark.parametrize("passes", [1, 4])
async def test_a_program_is_killed_if_its_close_is_cancelled(passes: int, slow: SlowCalls):
    own = sessions_of("Guess")
    await own.ready()
    program = program_of(own)
    program.suspend()  # it does not end by itself
    closing = asyncio.ensure_future(own.close())
    for _ in range(4):
        for _ in range(passes):
            await asyncio.sleep(0)
        closing.cancel()
    await asyncio.wait([closing])
    assert closing.cancelled() and not program.is_running()


async def test_a_program_whose_start_is_cancelled_is_ended(slow: SlowCalls):
    before = psutil.Process().children()
    own = sessions_of("Guess")
    starting = asyncio.ensure_future(own.ready())
    while not slow.names:  # noqa: ASYNC110 (a thread, which tells nobody)
        await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait([starting])
    assert starting.cancelled() and own._program is None
    assert [child for child in psutil.Process().children() if child not in before] == []


async def test_a_session_outlives_neither_its_socket_nor_the_program():
    own = sessions_of("Parent")
    sessions = [await own.open() for _ in range(3)]
    children = list[psutil.Process]()
    for session in sessions:
        said = await session.ask({"op": "reset", "row": {}, "options": {}})
        children.append(psutil.Process(int(said["answer"]["messages"][0]["content"])))
    sessions[0].end()
    await gone(children[0])
    assert "answer" in await sessions[1].ask({"op": "step", "action": "x"}), "the others live on"
    program_of(own).kill()
    for child in children:
        await gone(child)
    for session in sessions[1:]:
        with pytest.raises(ConnectionError):
            await session.ask({"op": "step", "action": "x"})
    assert "answer" in await (await own.open()).ask({"op": "reset", "row": {}, "options": {}})
    await own.close()


async def gone(process: psutil.Process) -> None:
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
