"""Processes that may be killed: no call is lost with an idle one, and none is executed twice."""

import asyncio
import os
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from pebble.pool.process import TaskManager

from agent_loop import processes
from agent_loop.processes import CallTimedOut, KillablePool, ProcessDied, call_in_file
from tool_server.wire.protocol import ToolRejected


def note(file: str, word: str) -> int:
    """In a process: write that it was called."""
    with Path(file).open("a") as log:
        log.write(f"{word}\n")
    return os.getpid()


def note_and_end(file: str) -> None:
    note(file, "begun")
    os._exit(7)


class Torn(Exception):
    """An error that cannot be made from its `args`, as those of many HTTP clients."""

    def __init__(self, code: int, *, body: str) -> None:
        super().__init__(f"{code} {body}")


def torn(how: str) -> None:
    raise {
        "args": Torn(500, body="no"),
        "cancelled": asyncio.CancelledError("of the function"),
        "interrupt": KeyboardInterrupt(),
        "stop": StopIteration(),
        "timeout": TimeoutError("of the function"),
    }[how]


def unknown() -> Any:
    """A value of a class that no module has."""
    return type("Local", (), {})()


def _children() -> dict[int, psutil.Process]:
    alive = [c for c in psutil.Process().children() if c.status() != psutil.STATUS_ZOMBIE]
    return {child.pid: child for child in alive if "spawn_main" in " ".join(child.cmdline())}


@pytest.fixture
def children() -> Callable[[], list[psutil.Process]]:
    """The processes of pools of this test. Earlier tests have left those of scorers."""
    before = _children().keys()
    return lambda: [child for pid, child in _children().items() if pid not in before]


async def test_calls_that_had_not_begun_when_idle_processes_were_killed_are_made_once(
    children, tmp_path, monkeypatch
):
    monkeypatch.setattr(processes, "LOOK_S", 0.1)
    log = tmp_path / "log"
    pool, count = KillablePool(2), 200
    await pool.run(note, str(log), "first")
    killed = children()
    for child in killed:
        child.kill()
    words = [str(number) for number in range(count)]
    pids = await asyncio.gather(*(pool.run(note, str(log), word) for word in words))
    await pool.close()
    assert len(killed) == 2 and not {child.pid for child in killed} & {*pids}
    assert sorted(log.read_text().split()) == sorted(["first", *words])


@pytest.mark.parametrize("pebble_knows", [True, False])
async def test_a_call_that_has_begun_is_not_made_again(
    children, pebble_knows, tmp_path, monkeypatch
):
    """pebble does not know that it has begun if the process dies before pebble reads so; then it
    gives up all processes."""
    if not pebble_knows:
        monkeypatch.setattr(TaskManager, "task_start", lambda *_: None)
    log, pool = tmp_path / "log", KillablePool(1)
    with pytest.raises(ProcessDied) as died:
        await pool.run(note_and_end, str(log))
    assert died.value.exitcode == (7 if pebble_knows else None)
    assert await pool.run(os.getpid) in {child.pid for child in children()}
    await pool.close()
    assert log.read_text() == "begun\n"


def fails() -> None:
    raise ImportError("no such library")


async def test_that_no_process_starts_is_said(children, monkeypatch):
    pool = KillablePool(1, fails)
    with pytest.raises(ProcessDied, match="ended twice before it began"):
        await pool.run(os.getpid)
    assert not children()

    def denied(_: object) -> None:
        raise BlockingIOError("no process is left")

    monkeypatch.setattr(processes._Process, "_Popen", staticmethod(denied))
    with pytest.raises(ProcessDied, match="no process is left"):
        await pool.run(os.getpid)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("args", "Torn: 500 no"),
        ("cancelled", "CancelledError: of the function"),
        ("interrupt", "KeyboardInterrupt"),
        ("stop", "StopIteration"),
    ],
)
async def test_whatever_a_function_raises_is_an_error_of_its_call_alone(children, how, words):
    pool = KillablePool(1)
    process = await pool.run(os.getpid)
    with pytest.raises(RuntimeError, match=words):
        await pool.run(torn, how)
    with pytest.raises(pickle.PicklingError):
        await pool.run(unknown)
    assert await pool.run(os.getpid) == process
    await pool.close()
    assert not children()


async def test_a_timeout_of_the_function_is_not_the_limit_of_its_call():
    pool = KillablePool(1)
    with pytest.raises(TimeoutError, match="of the function"):
        await pool.run(torn, "timeout", timeout_s=60.0)
    with pytest.raises(CallTimedOut):
        await pool.run(time.sleep, 60, timeout_s=0.1)
    await pool.close()


async def test_a_mistake_of_the_model_is_told_whatever_class_of_the_file_says_so(tmp_path):
    file = tmp_path / "orders.py"
    file.write_text(
        "from tool_server.wire.protocol import ToolRejected\n"
        "class NoOrder(ToolRejected):\n"
        "    def __init__(self, order, shop):\n"
        "        super().__init__(f'no {order} in {shop}')\n"
        "def find(order): raise NoOrder(order, 'A')\n"
    )
    pool = KillablePool(1)
    with pytest.raises(ToolRejected, match=r"^no 7 in A$"):
        await pool.run(call_in_file, str(file), "find", {"order": 7})
    await pool.close()


async def test_the_event_loop_goes_on_while_processes_start_and_end(monkeypatch):
    goes_on = threading.Event()

    class Slow:
        """Starts and ends when the event loop has done something else."""

        def __init__(self, *_: object) -> None: ...

        @property
        def active(self) -> bool:
            return goes_on.wait(60)

        def schedule(self, *_: object, **__: object) -> None:
            raise RuntimeError("Unexpected error within the Pool")

        def stop(self) -> None:
            goes_on.clear()

        def join(self) -> None:
            assert goes_on.wait(60)

    async def goes() -> None:
        while True:
            goes_on.set()
            await asyncio.sleep(0)

    monkeypatch.setattr(processes, "ProcessPool", Slow)
    going = asyncio.ensure_future(goes())
    with pytest.raises(ProcessDied):
        await KillablePool(1).run(os.getpid)
    going.cancel()


async def test_a_call_that_a_breaking_pool_forgets_is_made_in_the_next_one(children, monkeypatch):
    monkeypatch.setattr(processes, "LOOK_S", 0.0)
    pool = KillablePool(1)
    forgets: Any = SimpleNamespace(active=False, stop=lambda: None, join=lambda: None)
    forgets.schedule = lambda *_, **__: processes.Future()
    pool._started = (forgets, [0] * processes.BOARD)
    assert await pool.run(os.getpid) in {child.pid for child in children()}
    await pool.close()
