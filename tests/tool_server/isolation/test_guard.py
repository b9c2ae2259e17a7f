"""Nothing that was started outlives a command with a guard, whoever starts it."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator

import anyio
import pytest

from agent_loop.environments.processes import SessionProcesses
from agent_loop.processes import CallTimedOut, KillablePool
from agent_loop.toolbox.mcp_client.stdio import ServerProcess
from agent_loop.toolbox.mcp_client.target import ServerTarget
from tests.agent_loop.toolbox.mcp_rig import until
from tests.fakes import daemons
from tests.fakes.daemons import DAEMONS, processes_with
from tool_server.isolation.guard import guarded

ENDS = {
    "exit": ("sys.exit(3)", 3),
    "signal": ("os.kill(os.getpid(), signal.SIGTERM if MARK == 0 else signal.SIGKILL)", -9),
    "crash": ("os.abort()", -6),
}


@pytest.fixture
def mark() -> Iterator[str]:
    """An argument by which the processes of a test are found."""
    text = uuid.uuid4().hex
    yield text
    for pid in processes_with(text):
        os.kill(pid, signal.SIGKILL)


def leaving(mark: str, then: str) -> list[str]:
    """A command that starts processes, says so, and goes on."""
    code = textwrap.dedent(DAEMONS.replace("MARK", repr(mark)))
    return [sys.executable, "-c", f"{code}print(7, flush=True)\n{then}"]


@pytest.mark.parametrize("how", ENDS)
def test_a_command_ends_as_it_did_and_leaves_nothing(how: str, mark: str):
    then, code = ENDS[how]
    command = leaving(mark, then.replace("MARK", "1"))
    guard, end = guarded(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    out, _ = guard.communicate()
    assert (out, guard.returncode, processes_with(mark)) == (b"7\n", code, [])
    end()


def test_nothing_is_left_when_it_is_told_to_end_also_if_a_fork_holds_the_line(mark: str):
    guard, end = guarded(leaving(mark, "time.sleep(1000)"), stdout=subprocess.PIPE)
    assert guard.stdout is not None and guard.stdout.readline() == b"7\n"
    if (fork := os.fork()) == 0:
        signal.pause()
    end()
    end()  # again is no mistake
    assert guard.wait(60) == -9 and processes_with(mark) == []
    os.kill(fork, signal.SIGKILL)
    os.waitpid(fork, 0)
    guard.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGQUIT, signal.SIGTERM])
def test_what_a_command_sends_to_its_group_does_not_reach_its_guard(number: int, mark: str):
    then = f"signal.signal({number:d}, lambda *_: None)\nos.killpg(0, {number:d})\nsys.exit(3)"
    guard, end = guarded(leaving(mark, then), stdout=subprocess.DEVNULL)
    assert (guard.wait(60), processes_with(mark)) == (3, [])
    end()


def test_a_command_that_stops_its_group_can_be_ended(mark: str):
    guard, end = guarded(leaving(mark, "os.killpg(0, signal.SIGSTOP)"), stdout=subprocess.PIPE)
    assert guard.stdout is not None and guard.stdout.readline() == b"7\n"
    end()
    assert (guard.wait(60), processes_with(mark)) == (-9, [])
    guard.stdout.close()


def test_a_guard_passes_sigterm_on(mark: str):
    then = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))\nprint(8, flush=True)\n"
    guard, end = guarded(leaving(mark, f"{then}signal.pause()"), stdout=subprocess.PIPE)
    assert guard.stdout is not None and guard.stdout.readline() == b"7\n"
    assert guard.stdout.readline() == b"8\n"
    guard.terminate()
    assert (guard.wait(60), processes_with(mark)) == (4, [])
    guard.stdout.close()
    end()


async def test_nothing_is_left_of_a_killed_process_also_if_a_fork_of_it_lives(mark: str):
    started = (
        "import os, sys, time\nfrom tool_server.isolation.guard import guarded\n"
        f"held = guarded(['/bin/sh', '-c', 'sleep 1000; : {mark}'])\n"
        "fork = os.fork()\nif fork: print(fork, flush=True)\ntime.sleep(1000)"
    )
    command = [sys.executable, "-c", started]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    fork = int(await process.stdout.readline())
    ours = {process.pid, fork}  # their code has the mark too
    await until(lambda: len({*processes_with(mark)} - ours) > 1)
    process.kill()
    await until(lambda: not {*processes_with(mark)} - ours)
    os.kill(fork, signal.SIGKILL)
    await process.communicate()


def test_a_guard_keeps_no_zombies_and_no_pipes_of_its_command():
    """A daemon that ends is collected, and the end of the command's stdout is seen."""
    code = "import os, time\n" + "os.fork() or os.fork() or os._exit(0)\n" * 3
    code += "os.close(1)\ntime.sleep(1000)"
    guard, end = guarded([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert guard.stdout is not None and guard.stdout.read() == b""
    end()
    guard.wait(60)
    guard.stdout.close()


def test_a_command_that_cannot_be_executed_is_named():
    guard, end = guarded(["/etc/passwd"], stderr=subprocess.PIPE)
    _, error = guard.communicate()
    assert guard.returncode == 127 and b"cannot start /etc/passwd: Permission denied" in error
    end()


@pytest.mark.parametrize("then", ["sys.stdin.read()", "time.sleep(1000)", "os._exit(1)"])
async def test_a_server_of_mcp_leaves_nothing(
    then: str, mark: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agent_loop.toolbox.mcp_client.stdio.EXIT_S", 0.1)
    monkeypatch.setattr("agent_loop.calls.guarded_process.TERM_S", 0.1)
    target = ServerTarget(name="x", limits_name="x", command=tuple(leaving(mark, then)))
    server = ServerProcess(target, asyncio.Event())
    await server.start()
    if "exit" in then:
        with pytest.raises(anyio.EndOfStream):
            await server.receive()
    else:
        await until(lambda: len(processes_with(mark)) > 4)
    await server.stop()
    assert processes_with(mark) == []


@pytest.mark.parametrize("how", ["close", "crash"])
async def test_an_episode_leaves_nothing(how: str, mark: str):
    processes = SessionProcesses(f"{daemons.__file__}:Leaves", sys.executable, os.environ)
    process = await processes.open()
    assert "answer" in await process.ask({"op": "reset", "row": {"mark": mark}, "options": {}})
    await until(lambda: len(processes_with(mark)) > 2)
    if how == "crash":
        said = await process.ask({"op": "step", "action": "crash"})
        assert said == {"error": "its process ended with exit code 3"}
        assert processes_with(mark) == []
    else:
        await process.close()
        await until(lambda: not processes_with(mark))
    await processes.close()


def leave_and(mark: str, then: str) -> int:
    exec(textwrap.dedent(DAEMONS.replace("MARK", repr(mark))))
    if then == "hang":
        signal.pause()
    return os.getpid()


async def test_a_function_in_a_process_leaves_nothing_when_its_process_ends(mark: str):
    pool = KillablePool(1)
    with pytest.raises(CallTimedOut):
        await pool.run(leave_and, mark, "hang", timeout_s=1)
    await until(lambda: not processes_with(mark))
    await pool.run(leave_and, mark, "return")
    await pool.close()
    assert processes_with(mark) == []
