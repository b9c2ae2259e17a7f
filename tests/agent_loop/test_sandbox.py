"""The sandbox, for real: what a program may do, what it may not, and what is left of it."""

import asyncio
import os
import shutil
import struct

import psutil
import pytest

from agent_loop.compat import timeout
from agent_loop.tools.sandbox import (
    Limits,
    RunStatus,
    Sandbox,
    SandboxKind,
    SandboxUnavailable,
    choose_sandbox,
)
from agent_loop.tools.sandbox.bubblewrap import BubblewrapSandbox
from agent_loop.tools.sandbox.landlock import LandlockSandbox
from agent_loop.tools.sandbox.probe import prove
from agent_loop.tools.sandbox.seccomp import UnsupportedArchitecture, build_filter

pytestmark = pytest.mark.sandbox


def chosen_or_skip(kind: SandboxKind) -> Sandbox:
    """A backend that this machine lacks is skipped; one that leaks is not."""
    try:
        return choose_sandbox(kind)
    except SandboxUnavailable as error:
        if "got out" in str(error):
            raise
        pytest.skip(f"not on this machine: {error}")


@pytest.fixture(scope="module", params=["bubblewrap", "landlock"])
def sandbox(request) -> Sandbox:
    return chosen_or_skip(request.param)


@pytest.fixture
def bubblewrap() -> BubblewrapSandbox:
    sandbox = chosen_or_skip("bubblewrap")
    assert isinstance(sandbox, BubblewrapSandbox)
    return sandbox


async def test_a_program_reads_its_input_and_its_output_comes_back(sandbox):
    result = await sandbox.run_python("print(input()[::-1], end='é')", "abc\n")
    assert (result.status, result.return_code) == (RunStatus.FINISHED, 0)
    assert (result.stdout, result.stderr) == ("cbaé", "")


@pytest.mark.parametrize(
    ("code", "return_code", "said"),
    [
        ("1/0", 1, "ZeroDivisionError: division by zero"),
        ("(", 1, "SyntaxError"),
        ("raise SystemExit(3)", 3, ""),
        ("import ctypes; ctypes.string_at(0)", 139, ""),
    ],
)
async def test_a_program_that_fails_is_an_error_with_its_own_words(
    sandbox, code, return_code, said
):
    result = await sandbox.run_python(code)
    assert (result.status, result.return_code) == (RunStatus.ERROR, return_code)
    assert said in result.stderr


@pytest.mark.parametrize(
    ("code", "limits"),
    [
        ("import time; time.sleep(60)", Limits(wall_s=0.3)),
        ("while True: pass", Limits(wall_s=30, cpu_s=1)),
        ("import signal; signal.signal(15, signal.SIG_IGN)\nwhile True: pass", Limits(wall_s=0.3)),
    ],
)
async def test_time_that_runs_out_is_the_time_limit(sandbox, code, limits):
    assert (await sandbox.run_python(code, limits=limits)).status == RunStatus.TIME_LIMIT


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_output_is_cut_at_its_limit_and_ends_the_program(sandbox, stream):
    code = f"import sys\nwhile True: sys.{stream}.write('x' * 4096)"
    result = await sandbox.run_python(code, limits=Limits(output_bytes=10_000))
    assert (result.status, result.killed) == (RunStatus.ERROR, True)
    assert getattr(result, stream).startswith("x" * 10_000)
    assert not getattr(result, stream).startswith("x" * 10_001)
    assert getattr(result, f"{stream}_truncated")
    assert "output limit of 10000 bytes" in result.stderr


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("bytearray(1 << 30)", "MemoryError"),
        ("open('f', 'w').write('x' * (20 << 20))", "Error"),
        ("import os; os.fork()", "PermissionError"),
        ("import subprocess; subprocess.run(['true'])", "PermissionError"),
        ("import socket; socket.socket()", "PermissionError"),
        ("import os; os.kill(os.getpid(), 9)", "PermissionError"),
        ("import os; os.chmod('main.py', 0o777)", "PermissionError"),
        ("open('/etc/passwd')", "Error"),
        ("open('/usr/lib/x', 'w')", "Error"),
        ("import os; os.listdir('/home')", "Error"),
        ("open('/proc/self/status')", "Error"),
    ],
)
async def test_what_a_program_may_not_do_fails_inside_it(sandbox, code, error):
    result = await sandbox.run_python(code)
    assert result.status == RunStatus.ERROR
    assert error in result.stderr.splitlines()[-1]


async def test_a_program_sees_none_of_our_environment(sandbox, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    result = await sandbox.run_python("import os; print(*os.environ)")
    assert set(result.stdout.split()) <= {"PWD", "LC_CTYPE"}


async def test_threads_and_asyncio_work(sandbox):
    code = """
import asyncio, threading
thread = threading.Thread(target=print, args=("thread",))
thread.start()
thread.join()
asyncio.run(asyncio.sleep(0))
print("loop")
"""
    assert (await sandbox.run_python(code)).stdout == "thread\nloop\n"


async def test_a_program_may_leave_its_input_unread(sandbox):
    result = await sandbox.run_python("print(1)", stdin="x" * 1_000_000)
    assert result.stdout == "1\n"


async def test_runs_at_once_do_not_mix(sandbox):
    results = await asyncio.gather(
        *(sandbox.run_python("print(input())", str(number)) for number in range(6))
    )
    assert [result.stdout.strip() for result in results] == [str(number) for number in range(6)]


async def test_nothing_is_left_of_a_run_that_was_killed_or_cancelled(
    sandbox, tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    children = psutil.Process().children(recursive=True)
    descriptors = len(os.listdir("/proc/self/fd"))
    sleeper = "import time; time.sleep(60)"
    await sandbox.run_python(sleeper, limits=Limits(wall_s=0.3))
    with pytest.raises(TimeoutError):
        async with timeout(0.3):
            await sandbox.run_python(sleeper)
    assert psutil.Process().children(recursive=True) == children
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors


async def test_a_file_of_one_run_is_not_there_in_the_next(bubblewrap):
    assert (await bubblewrap.run_python("open('f', 'w')")).status == RunStatus.FINISHED
    assert "FileNotFoundError" in (await bubblewrap.run_python("open('f')")).stderr


@pytest.mark.parametrize(
    ("hole", "reached"),
    [
        (["--ro-bind", "/etc", "/etc"], "read /etc/passwd"),
        (["--setenv", "WANDB_API_KEY", "secret"], "environment"),
    ],
)
def test_the_probe_finds_a_hole(bubblewrap, hole, reached):
    bubblewrap._argv += hole
    with pytest.raises(SandboxUnavailable, match=reached):
        prove(bubblewrap)


@pytest.mark.parametrize("sandbox", ["landlock"], indirect=True)
def test_without_a_filter_the_probe_finds_sockets_and_processes(sandbox, monkeypatch):
    allow_all = struct.pack("=HBBI", 6, 0, 0, 0x7FFF0000)
    monkeypatch.setattr("agent_loop.tools.sandbox.landlock.build_filter", lambda: allow_all)
    with pytest.raises(SandboxUnavailable, match="unix socket, new process"):
        prove(LandlockSandbox())


async def test_isolation_that_fails_later_is_no_verdict_on_the_program(sandbox):
    broken = type(sandbox)()
    if isinstance(broken, BubblewrapSandbox):
        broken._argv.append("--no-such-option")
    elif isinstance(broken, LandlockSandbox):
        broken._filter = "00" * 8
    with pytest.raises(SandboxUnavailable, match="cannot isolate"):
        await broken.run_python("print(1)")


@pytest.mark.parametrize("sandbox", ["landlock"], indirect=True)
def test_without_bubblewrap_auto_takes_landlock_and_says_why(sandbox, monkeypatch, tmp_path):
    prlimit = shutil.which("prlimit")
    assert prlimit is not None
    (tmp_path / "prlimit").symlink_to(prlimit)
    monkeypatch.setenv("PATH", str(tmp_path))
    chosen = choose_sandbox("auto")
    assert chosen.name == "landlock"
    assert chosen.why.startswith("bubblewrap: bwrap is not on PATH; landlock: no host file")


def test_without_any_isolation_there_is_no_sandbox(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match=r"bubblewrap: bwrap .* landlock: prlimit"):
        choose_sandbox("auto")


def test_the_filter_exists_for_both_architectures_and_no_other():
    assert build_filter("x86_64") != build_filter("aarch64")
    with pytest.raises(UnsupportedArchitecture, match="riscv64"):
        build_filter("riscv64")
