"""The program that forks the sessions of a class: the event loop never waits for the kernel."""

import asyncio
import errno
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest

from agent_loop.environments import processes
from agent_loop.environments.processes import SessionProcess, SessionProcesses, StartFailed
from agent_loop.environments.session_process import HEAD, framed
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


async def test_a_session_ends_also_if_a_fork_of_the_worker_holds_its_socket():
    own = sessions_of("Parent")
    session = await own.open()
    said = await session.ask({"op": "reset", "row": {}, "options": {}})
    child = psutil.Process(int(said["answer"]["messages"][0]["content"]))
    held = os.dup(session.writer.get_extra_info("socket").fileno())
    session.end()
    session.end()
    await gone(child)
    os.close(held)
    await own.close()


async def test_a_session_that_cannot_begin_ends_no_other(monkeypatch):
    own = sessions_of("Guess")
    session = await own.open()

    def refused(*arguments: Any) -> int:
        raise OSError(errno.ETOOMANYREFS, "too many references")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "send_fds", refused)
        with pytest.raises(ConnectionError, match="no session can begin now"):
            await own.open()
    reset = {"op": "reset", "row": {"extras": {}}, "options": {}}
    assert "answer" in await session.ask(reset) and "answer" in await (await own.open()).ask(reset)
    await own.close()


async def test_an_answer_that_ends_in_the_words_of_the_guard_is_a_fault():
    ours, theirs = socket.socketpair()
    session = SessionProcess(*await asyncio.open_connection(sock=ours), set())
    with theirs:
        theirs.sendall(HEAD.pack(30) + b'{"answer": {"obser')
        theirs.sendall(framed({"error": "its process ended by signal 9"}))
        said = await session.ask({"op": "step", "action": "x"})
    assert said == {"error": "its process ended during an answer"}


async def gone(process: psutil.Process) -> None:
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
