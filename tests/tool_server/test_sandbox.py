"""The sandbox, for real: what a program may do, what comes of it, and what is left of it."""

import asyncio
import ctypes
import os
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from config.compat import timeout
from tests.tool_server.hostile.judge import IDLE_PROCESSES, holds
from tool_server.isolation.host import import_names, package_paths
from tool_server.isolation.seccomp import build_filter
from tool_server.sandbox import (
    Interpreter,
    Limits,
    NotSupported,
    PackageUnusable,
    Program,
    RunStatus,
    Sandbox,
    SandboxKind,
    SandboxUnavailable,
    choose_sandbox,
)
from tool_server.sandbox import sandbox as sandbox_module
from tool_server.sandbox.bubblewrap import BubblewrapSandbox
from tool_server.sandbox.inside.parts import read_parts, write_parts
from tool_server.sandbox.landlock import LandlockSandbox
from tool_server.sandbox.languages import LANGUAGES, Language
from tool_server.sandbox.probe import prove
from tool_server.sandbox.zygote import Launch

pytestmark = pytest.mark.sandbox

SLEEPER = "import time\nprint('begun', flush=True)\ntime.sleep(60)"


def chosen_or_skip(kind: SandboxKind, packages: tuple[str, ...] = ()) -> Sandbox:
    """A backend that this machine lacks is skipped; one that leaks is not."""
    try:
        return choose_sandbox(kind, packages=packages)
    except SandboxUnavailable as error:
        if "got out" in str(error):
            raise
        pytest.skip(f"not on this machine: {error}")


@pytest.fixture(scope="module", params=["bubblewrap", "landlock"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    chosen = chosen_or_skip(request.param)
    yield chosen
    chosen.close()


@pytest.fixture(scope="module")
def bubblewrap() -> Iterator[Sandbox]:
    chosen = chosen_or_skip("bubblewrap")
    yield chosen
    chosen.close()


@pytest.fixture(scope="module")
def landlock() -> Iterator[Sandbox]:
    chosen = chosen_or_skip("landlock")
    yield chosen
    chosen.close()


@pytest_asyncio.fixture
async def interpreter(sandbox: Sandbox) -> AsyncIterator[Interpreter]:
    async with sandbox.interpreter(Limits(wall_s=1.0)) as begun:
        yield begun


def children_of(pid: int) -> set[int]:
    return {child.pid for child in psutil.Process(pid).children(recursive=True)}


def processes_of(sandbox: Sandbox) -> set[int]:
    """Its zygotes, and all below them."""
    zygotes = {zygote.process.pid for zygote in filter(None, sandbox._zygotes)}
    return zygotes.union(*map(children_of, zygotes))


async def children_when_idle(sandbox: Sandbox) -> set[int]:
    """Wait until the sandbox has only its own processes; the children of this process."""
    assert await holds(lambda: len(processes_of(sandbox)) == IDLE_PROCESSES[sandbox.name])
    return {child.pid for child in psutil.Process().children()}


ENDED_S = 60.0
"""For processes to end that were killed, or whose server was, on a busy machine."""


def are_gone(pids: set[int]) -> bool:
    def is_gone(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    return all(map(is_gone, pids))


# --- what comes back -----------------------------------------------------------------------------


async def test_a_program_reads_its_input_and_its_output_comes_back(sandbox: Sandbox):
    result = await sandbox.run_python("print(input()[::-1], end='é')", "abc\n")
    assert (result.status, result.return_code) == (RunStatus.FINISHED, 0)
    assert (result.stdout, result.stderr) == ("cbaé", "")
    assert not result.killed
    assert result.execution_time_s > 0
    assert result.compiled is None and result.files == {}


async def test_its_processor_time_is_counted(sandbox: Sandbox):
    code = "import time\nwhile time.process_time() < 0.2: pass"
    assert (await sandbox.run_python(code)).cpu_time_s >= 0.15


@pytest.mark.parametrize(
    ("code", "return_code", "said"),
    [
        ("1/0", 1, "ZeroDivisionError: division by zero"),
        ("(", 1, "SyntaxError"),
        ("raise SystemExit(3)", 3, ""),
        ("import sys; sys.exit('a word')", 1, "a word"),
        ("import ctypes; ctypes.string_at(0)", 139, ""),
        ("import os; os._exit(4)", 4, ""),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    ],
)
async def test_a_program_that_fails_is_an_error_with_its_own_words(
    sandbox: Sandbox, code: str, return_code: int, said: str
):
    result = await sandbox.run_python(code)
    assert (result.status, result.return_code) == (RunStatus.ERROR, return_code)
    assert said in result.stderr
    assert not result.killed


async def test_a_traceback_names_the_program_and_nothing_of_ours(sandbox: Sandbox):
    result = await sandbox.run_python("def f():\n    1/0\nf()")
    assert (
        result.stderr.splitlines()[:3]
        == [
            "Traceback (most recent call last):",
            '  File "/box/main.py", line 3, in <module>',
            "    f()",
        ]
        or 'File "/box/main.py", line 3' in result.stderr
    )
    assert "interpreter.py" not in result.stderr


async def test_a_program_is_the_main_module(sandbox: Sandbox):
    code = "import sys\nprint(__name__, sys.argv, sys.modules['__main__'].__dict__ is globals())"
    assert (await sandbox.run_python(code)).stdout == "__main__ ['main.py'] True\n"


async def test_a_program_may_leave_its_input_unread(sandbox: Sandbox):
    assert (await sandbox.run_python("print(1)", stdin="x" * 1_000_000)).stdout == "1\n"


async def test_threads_and_asyncio_and_pickled_classes_work(sandbox: Sandbox):
    code = """
import asyncio, pickle, threading
class Point: pass
thread = threading.Thread(target=print, args=("thread",))
thread.start()
thread.join()
asyncio.run(asyncio.sleep(0))
print("loop", type(pickle.loads(pickle.dumps(Point()))).__name__)
"""
    assert (await sandbox.run_python(code)).stdout == "thread\nloop Point\n"


async def test_what_atexit_and_other_threads_print_is_there(sandbox: Sandbox):
    code = """
import atexit, threading, time
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
"""
    assert (await sandbox.run_python(code)).stdout == "thread\nat exit\n"


async def test_each_run_has_randomness_of_its_own(sandbox: Sandbox):
    runs = [await sandbox.run_python("import random; print(random.random())") for _ in range(3)]
    assert len({run.stdout for run in runs}) == 3


async def test_a_program_sees_none_of_our_environment(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    sandbox.close()
    result = await sandbox.run_python("import os; print(dict(os.environ))")
    assert "PATH" in result.stdout
    assert "secret" not in result.stdout


# --- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "limits"),
    [
        ("import time; time.sleep(60)", Limits(wall_s=0.3)),
        ("while True: pass", Limits(wall_s=30, cpu_s=1)),
        ("import signal; signal.signal(15, signal.SIG_IGN)\nwhile True: pass", Limits(wall_s=0.3)),
        (
            "import signal; signal.signal(24, signal.SIG_IGN)\nwhile True: pass",
            Limits(wall_s=30, cpu_s=1),
        ),
    ],
    ids=["wall", "cpu", "deaf", "cpu-deaf"],
)
async def test_time_that_runs_out_is_the_time_limit(sandbox: Sandbox, code: str, limits: Limits):
    assert (await sandbox.run_python(code, limits=limits)).status == RunStatus.TIME_LIMIT


@contextmanager
def beside(kind: SandboxKind, others: int, *, real_time: bool = False) -> Iterator[Sandbox]:
    """A sandbox whose only processor has busy processes; one of real-time priority takes all but a
    twentieth of it."""
    all_processors = os.sched_getaffinity(0)
    first = min(all_processors)
    os.sched_setaffinity(0, {first})
    try:
        sandbox = chosen_or_skip(kind)
    finally:
        os.sched_setaffinity(0, all_processors)
    code = f"""
import os
os.sched_setaffinity(0, {{{first}}})
if {real_time}: os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
print(flush=True)
while True: pass"""
    with ExitStack() as stack:
        stack.callback(sandbox.close)
        for _ in range(others):
            # a session of its own, because the kernel may share a processor among sessions
            argv = [sys.executable, "-c", code]
            busy = subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True)
            stack.enter_context(busy)
            stack.callback(busy.kill)
            assert busy.stdout is not None
            busy.stdout.readline()
        yield sandbox


@pytest.fixture(params=["bubblewrap", pytest.param("landlock", marks=pytest.mark.nightly)])
def starved(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    if os.geteuid() != 0:
        pytest.skip("only root can start a process of real-time priority")
    with beside(request.param, 1, real_time=True) as sandbox:
        yield sandbox


@pytest.fixture(params=["bubblewrap", pytest.param("landlock", marks=pytest.mark.nightly)])
def shared(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """A sandbox whose programs get a third of a processor."""
    with beside(request.param, 2) as sandbox:
        yield sandbox


SPINNING = "while True: pass"
WORKING = "import time\nbegan = time.process_time()\nwhile time.process_time() < began + 1: pass"


async def test_a_time_limit_on_an_overloaded_machine_is_no_verdict(starved: Sandbox):
    with pytest.raises(SandboxUnavailable, match="the machine is overloaded"):
        await starved.run(Program(code=SPINNING), Limits(wall_s=1.0))
    async with starved.interpreter() as interpreter:
        assert (await interpreter.run_cell("1")).stdout == "1\n"
        with pytest.raises(SandboxUnavailable, match="the machine is overloaded"):
            await interpreter.run_cell(SPINNING, wall_s=1.0)


async def test_a_program_that_waits_for_a_processor_has_its_whole_time(shared: Sandbox):
    done = await shared.run_python(WORKING, limits=Limits(wall_s=2.0))
    assert (done.status, done.stderr) == (RunStatus.FINISHED, "")
    async with shared.interpreter(Limits(wall_s=2.0)) as interpreter:
        cells = [await interpreter.run_cell(WORKING) for _ in range(2)]
    assert [cell.status for cell in cells] == [RunStatus.FINISHED] * 2


async def test_an_endless_loop_beside_others_is_late_all_the_same(shared: Sandbox):
    assert (
        await shared.run_python(SPINNING, limits=Limits(wall_s=0.6))
    ).status == "TimeLimitExceeded"
    async with shared.interpreter(Limits(wall_s=0.6)) as interpreter:
        assert (await interpreter.run_cell(SPINNING)).status == RunStatus.TIME_LIMIT
        assert (await interpreter.run_cell("1")).stdout == "1\n"


async def test_processes_share_one_time_limit_and_count_once():
    with beside("bubblewrap", 2) as sandbox:
        code = f"import os\nif os.fork(): os.wait()\n{WORKING}"  # one after the other
        done = await sandbox.run_python(code, limits=Limits(wall_s=3.2))
        assert done.status == RunStatus.FINISHED
        code = "import os\nfor _ in range(3): os.fork()\nwhile True: pass"
        late = await sandbox.run_python(code, limits=Limits(wall_s=1.0))
    assert late.status == RunStatus.TIME_LIMIT


async def test_a_compiler_and_its_program_have_a_time_limit_each(monkeypatch: pytest.MonkeyPatch):
    compiler, run = ("python3", "-c", WORKING), ("python3", "main.py")
    language = Language(source="main.py", compile=compiler, run=run)
    monkeypatch.setitem(LANGUAGES, "compiled", language)
    if not language.is_here:
        pytest.skip("python3 is not installed here")
    with beside("bubblewrap", 2) as sandbox:
        limits = Limits(wall_s=2.0, compile_s=2.0)
        done = await sandbox.run(Program(code=WORKING, language="compiled"), limits)
        assert done.compiled is not None
        assert (done.compiled.status, done.status) == (RunStatus.FINISHED, RunStatus.FINISHED)
        late = await sandbox.run(Program(code=SPINNING, language="compiled"), limits)
        assert late.status == RunStatus.TIME_LIMIT


@pytest.mark.parametrize(("stream", "other"), [("stdout", "stderr"), ("stderr", "stdout")])
async def test_output_is_cut_at_its_limit_with_a_mark(sandbox: Sandbox, stream: str, other: str):
    code = f"import sys\nsys.{stream}.write('x' * 50_000)\nsys.{other}.write('whole')"
    result = await sandbox.run_python(code, limits=Limits(output_bytes=10_000))
    assert (result.status, result.killed) == (RunStatus.FINISHED, False)
    mark = f"\n... [cut: {stream} has more than 10000 bytes]\n"
    assert getattr(result, stream) == "x" * 10_000 + mark
    assert getattr(result, other) == "whole"


async def test_output_of_exactly_the_limit_is_whole(sandbox: Sandbox):
    result = await sandbox.run_python("print('x' * 99)", limits=Limits(output_bytes=100))
    assert result.stdout == "x" * 99 + "\n"


async def test_output_without_end_ends_the_program_and_says_so(sandbox: Sandbox):
    code = "import os\nwhile True: os.write(1, b'x' * 65536)"
    result = await sandbox.run_python(code, limits=Limits(output_bytes=10_000))
    assert (result.status, result.killed) == (RunStatus.ERROR, True)
    assert "ended for its output" in result.stderr


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("bytearray(1 << 30)", "MemoryError"),
        ("open('f', 'w').write('x' * (3 << 20))", "Error"),
        ("held = [open('/dev/null') for _ in range(100)]", "OSError"),
    ],
    ids=["memory", "file", "descriptors"],
)
async def test_a_limit_is_an_error_of_the_program(sandbox: Sandbox, code: str, said: str):
    limits = Limits(memory_mb=128, file_mb=2, open_files=32)
    result = await sandbox.run_python(code, limits=limits)
    assert result.status == RunStatus.ERROR
    assert said in result.stderr or result.return_code == 153  # SIGXFSZ


@pytest.mark.parametrize(
    "code",
    [
        "for n in range(40): open(f'f{n}', 'w').write('x' * 500_000)",
        "for n in range(200): open(f'f{n}', 'w')",
    ],
    ids=["size", "count"],
)
async def test_files_together_are_limited(sandbox: Sandbox, code: str):
    code += "\nimport time; time.sleep(1.5); print('REACHED')"
    limits = Limits(file_mb=2, files=60, wall_s=5)
    result = await sandbox.run_python(code, limits=limits)
    assert (result.status, result.stdout) == (RunStatus.ERROR, "")


async def test_processes_that_wake_each_other_hand_no_memory_past_its_limit(bubblewrap: Sandbox):
    code = r"""
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
double now() { timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec * 1e-9; }
int main() {
    const double until = now() + 10;
    const size_t size = 280u << 20;
    for (int i = 0; i < 15; i++)  // make each look slow
        if (fork() == 0) {
            for (int j = 0; j < 2000; j++)
                mmap(0, 4096, j & 1 ? 1 : 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            while (now() < until) usleep(50000);
            _exit(0);
        }
    for (int i = 0; i < 2; i++)
        if (fork() == 0) {
            signal(SIGCONT, [](int) {});
            while (now() < until) { kill(-1, SIGCONT); usleep(150); }
            _exit(0);
        }
    for (int i = 0; i < 2; i++)
        if (fork() == 0) {
            char *held = (char *)mmap(0, size, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            size_t at = 0;
            while (now() < until) {
                long me = getpid(), child = -1;
#ifdef __x86_64__  // clone(CLONE_VM); the parent ends at once, on the same stack
                asm volatile("syscall; test %%rax, %%rax; jle 1f; mov $231, %%eax;"
                             "xor %%edi, %%edi; syscall; 1:"
                             : "=a"(child)
                             : "a"(56L), "D"((long)(CLONE_VM | SIGCHLD)), "S"(0L), "d"(0L)
                             : "rcx", "r11", "memory");
#endif
                if (child < 0) continue;
                while (syscall(SYS_getppid) == me) sched_yield();
                for (int k = 0; k < 16 && at < size; k++, at += 4096) held[at] = 1;
            }
            if (at >= size) printf("REACHED twice 280 MB with a limit of 300\n");
            fflush(stdout);
            _exit(0);
        }
    while (now() < until + 0.2) usleep(10000);
}
"""
    limits = Limits(wall_s=15.0, cpu_s=30, processes=64, memory_mb=300)
    result = await bubblewrap.run(Program(code=code, language="cpp"), limits)
    assert (result.status, result.stdout, result.killed) == (RunStatus.ERROR, "", True)


async def test_short_lived_processes_are_halted_only_for_a_look(bubblewrap: Sandbox):
    code = """
import os, time
held, until, ended = bytearray(b"x") * (100 << 20), time.monotonic() + 1.5, 0
while time.monotonic() < until:
    for number in range(8):
        if os.fork() == 0:
            time.sleep(0.002 * number)
            os._exit(7)
    for _ in range(8):
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
        ended += 1
print(ended > 20)
"""
    result = await bubblewrap.run_python(code, limits=Limits(memory_mb=300))
    assert (result.status, result.stdout, result.stderr) == (RunStatus.FINISHED, "True\n", "")


async def test_a_program_may_use_files_of_sqlite(sandbox: Sandbox):
    code = """
import sqlite3
one, other = sqlite3.connect("a.db"), sqlite3.connect("a.db")
one.execute("create table numbers (x)")
one.execute("insert into numbers values (5)"); one.commit()
print(other.execute("select x from numbers").fetchall())
"""
    result = await sandbox.run_python(code)
    assert (result.stdout, result.stderr) == ("[(5,)]\n", "")


async def test_processes_are_limited(bubblewrap: Sandbox):
    code = """
import os, time
for _ in range(200):
    if os.fork() == 0:
        time.sleep(9)
        os._exit(0)
"""
    result = await bubblewrap.run_python(code, limits=Limits(processes=16))
    assert "BlockingIOError" in result.stderr


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.fork()",
        "import subprocess; subprocess.run(['true'])",
        "import socket; socket.socket()",
        "import os; os.kill(os.getpid(), 9)",
        "import os; os.chmod('main.py', 0o777)",
        "open('/proc/self/status')",
    ],
)
async def test_what_landlock_refuses_is_a_permission_error(landlock: Sandbox, code: str):
    result = await landlock.run_python(code)
    assert (result.status, result.return_code) == (RunStatus.ERROR, 1)
    assert "PermissionError" in result.stderr.splitlines()[-1]


# --- files ---------------------------------------------------------------------------------------


async def test_files_are_there_and_come_back(sandbox: Sandbox):
    program = Program(
        code="data = open('in/a.bin', 'rb').read()\nopen('out.bin', 'wb').write(data[::-1])",
        files={"in/a.bin": bytes(range(256))},
        fetch=("out.bin", "in/a.bin", "missing"),
    )
    result = await sandbox.run(program)
    whole = bytes(range(256))
    assert result.files == {"out.bin": whole[::-1], "in/a.bin": whole}


async def test_files_of_a_program_that_fails_come_back_too(sandbox: Sandbox):
    program = Program(code="open('f', 'w').write('x')\n1/0", fetch=("f",))
    assert (await sandbox.run(program)).files == {"f": b"x"}


@pytest.mark.parametrize(
    "make",
    [
        "os.symlink('/etc/passwd', 'f')",
        "os.mkfifo('f')",
        "os.mkdir('f')",
        "os.mkdir('folder'); open('folder/f', 'w').close(); os.symlink('folder', 'linked')",
    ],
    ids=["link", "fifo", "folder", "linked-folder"],
)
async def test_what_is_no_small_file_does_not_come(sandbox: Sandbox, make: str):
    program = Program(code=f"import os\n{make}", fetch=("f", "linked/f"))
    assert (await sandbox.run(program)).files == {}


async def test_files_come_back_up_to_the_limit_of_all_files(sandbox: Sandbox):
    make = "import os\nopen('0', 'wb').write(bytes(900_000))\n"
    links = "for number in range(1, 9): os.link('0', str(number))"
    fetch = tuple(map(str, range(9)))
    limits = Limits(file_mb=2)
    if not sandbox.has_processes:  # Landlock refuses hard links
        links = "for number in range(1, 9): open(str(number), 'wb').write(bytes(90))"
    result = await sandbox.run(Program(code=make + links, fetch=fetch), limits)
    assert result.status is RunStatus.FINISHED, result.stderr
    assert 900_000 <= sum(map(len, result.files.values())) <= 2 << 20


@pytest.mark.parametrize("name", [".compiler-output", "spoken", "main", "stdout"])
async def test_a_compiled_program_may_have_any_files(bubblewrap: Sandbox, name: str):
    if "c" not in bubblewrap.languages:
        pytest.skip("c is not installed here")
    code = '#include <stdio.h>\nint main() { puts("1"); }'
    result = await bubblewrap.run(Program(code=code, language="c", files={name: b"x"}))
    assert result.stdout == "1\n", result


@pytest.mark.parametrize(
    "path",
    ["../f", "/etc/passwd", "a/../../f", "", "a\0b", "\ud800", "x" * 300, "a/" * 3000 + "f"],
    ids=["up", "absolute", "inner", "empty", "nul", "surrogate", "long", "deep"],
)
@pytest.mark.parametrize("kind", ["files", "fetch"])
async def test_a_path_that_cannot_be_is_not_supported(sandbox: Sandbox, path: str, kind: str):
    program = Program(code="print(1)")
    program = replace(program, **{kind: {path: b""} if kind == "files" else (path,)})
    with pytest.raises(NotSupported):
        await sandbox.run(program)


@pytest.mark.parametrize(
    "files",
    [
        {"a": b"", "a/b": b""},
        {"main.py/x": b""},
        {f"f{number}": b"" for number in range(100)},
        {"big": b"x" * (3 << 20)},
    ],
    ids=["folder-and-file", "source-as-folder", "many", "large"],
)
async def test_files_that_cannot_be_there_are_no_fault_of_the_sandbox(
    sandbox: Sandbox, files: dict[str, bytes]
):
    limits = Limits(file_mb=2, files=60)
    with pytest.raises(NotSupported):
        await sandbox.run(Program(code="print(1)", files=files), limits)
    assert (await sandbox.run_python("print(1)")).stdout == "1\n"


def test_the_check_of_files_takes_as_many_steps_as_there_are_files():
    def steps(count: int) -> int:
        calls = []
        program = Program(code="", files={f"d/e/{number}": b"" for number in range(count)})
        sys.setprofile(lambda frame, event, arg: calls.append(event))
        try:
            sandbox_module.check_files(program, Limits(), "main.py")
        except NotSupported:
            assert count > Limits().files // 2
        finally:
            sys.setprofile(None)
        return len(calls)

    assert steps(2000) < 5 * steps(500)
    assert steps(16_000) < steps(500)  # too many: no path is looked at


async def test_a_long_list_of_wanted_files_costs_nobody_else_his_run(sandbox: Sandbox):
    other = asyncio.ensure_future(sandbox.run_python("import time; time.sleep(0.3); print('fine')"))
    wanted = tuple(f"{'d' * 50}/{number}" for number in range(3000))
    with suppress(NotSupported):
        assert (await sandbox.run(Program(code="1", fetch=wanted))).files == {}
    assert (await other).stdout == "fine\n"


async def test_a_file_of_one_run_is_not_there_in_the_next(sandbox: Sandbox):
    assert (await sandbox.run_python("open('f', 'w')")).status == RunStatus.FINISHED
    assert "FileNotFoundError" in (await sandbox.run_python("open('f')")).stderr


# --- languages -----------------------------------------------------------------------------------

HELLO = {
    "bash": 'read -r x; echo "hello $x"',
    "c": '#include <stdio.h>\nint main() { char x[9]; scanf("%8s", x); printf("hello %s\\n", x); }',
    "cpp": "#include <iostream>\nint main() { std::string x; std::cin >> x; "
    'std::cout << "hello " << x << "\\n"; }',
    "nodejs": "console.log('hello ' + require('fs').readFileSync(0, 'utf8').trim())",
    "perl": 'my $x = <STDIN>; print "hello $x"',
}


@pytest.mark.parametrize("language", HELLO)
async def test_other_languages_run_as_far_as_they_are_here(bubblewrap: Sandbox, language: str):
    if language not in bubblewrap.languages:
        pytest.skip(f"{language} is not installed here")
    result = await bubblewrap.run(Program(code=HELLO[language], language=language, stdin="you\n"))
    assert (result.status, result.stdout) == (RunStatus.FINISHED, "hello you\n"), result
    assert (result.compiled is not None) == bool(LANGUAGES[language].compile)


@pytest.mark.parametrize("language", ["c", "cpp"])
async def test_a_compile_error_is_the_result(bubblewrap: Sandbox, language: str):
    if language not in bubblewrap.languages:
        pytest.skip(f"{language} is not installed here")
    result = await bubblewrap.run(Program(code="int main() { return x; }", language=language))
    assert result.status == RunStatus.ERROR
    assert result.compiled is not None
    assert result.compiled.return_code == 1
    assert "error" in result.compiled.stderr


async def test_a_compiler_that_takes_too_long_is_the_time_limit(bubblewrap: Sandbox):
    if "c" not in bubblewrap.languages:
        pytest.skip("c is not installed here")
    code = '#include "/dev/full"\nint main() {}'
    limits = Limits(compile_s=0.3)
    result = await bubblewrap.run(Program(code=code, language="c"), limits)
    assert result.compiled is not None
    assert RunStatus.TIME_LIMIT in (result.compiled.status, result.status) or "memory" in (
        result.compiled.stderr
    )


async def test_a_language_that_is_missing_is_named(
    bubblewrap: Sandbox, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(NotSupported, match=r"'brainfuck' is not known: this server runs python"):
        await bubblewrap.run(Program(code="+", language="brainfuck"))
    here = LANGUAGES["bash"]
    monkeypatch.setitem(LANGUAGES, "bash", replace(here, run=("no-such-shell", "main.sh")))
    with pytest.raises(NotSupported, match="no-such-shell, which is not installed"):
        await bubblewrap.run(Program(code="1", language="bash"))


async def test_landlock_says_why_it_runs_no_other_language(landlock: Sandbox):
    assert landlock.languages == ["python"]
    with pytest.raises(NotSupported, match="'bash' needs processes, which sandbox=landlock"):
        await landlock.run(Program(code="echo 1", language="bash"))


@pytest.mark.parametrize("kind", ["bubblewrap", "landlock"])
async def test_packages_are_there_when_they_were_asked_for(kind: SandboxKind):
    pytest.importorskip("pandas")
    sandbox = chosen_or_skip(kind, ("pandas",))
    try:
        code = (
            "import sys\nassert 'pandas' in sys.modules\nimport pandas, numpy, dateutil\n"
            "print(pandas.Series(range(4)).sum(), numpy.random.random())"
        )
        printed = [(await sandbox.run_python(code)).stdout.split() for _ in range(3)]
        assert {total for total, _ in printed} == {"6"}
        assert len({number for _, number in printed}) == 3
    finally:
        sandbox.close()


def _install(folder: Path, name: str, requires: str = "", code: str = "") -> None:
    """A distribution with one module of its name."""
    (folder / f"{name}.py").write_text(code)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{requires}\n"
    )
    (info / "RECORD").write_text(f"{name}.py,,\n{name}-1.0.dist-info/METADATA,,\n")


def test_requirements_with_markers_count_where_the_markers_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(str(tmp_path))
    holds, other = 'python_version >= "3"', 'sys_platform == "win32"'
    _install(
        tmp_path, "first", f"Requires-Dist: second[more] ; {holds}\nRequires-Dist: far ; {other}"
    )
    _install(tmp_path, "second", 'Requires-Dist: third ; extra == "more"\nRequires-Dist: missing')
    for name in ("third", "far"):
        _install(tmp_path, name)
    found = {path.name for path in package_paths(["first"]) if path.suffix == ".py"}
    assert found == {"first.py", "second.py", "third.py"}


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import no_such_module", "cannot import unusable: ModuleNotFoundError"),
        ("raise RuntimeError('no')", "cannot import unusable: RuntimeError: no"),
    ],
)
def test_a_package_that_does_not_import_is_named(
    code: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(str(tmp_path))
    _install(tmp_path, "unusable", code=code)
    with pytest.raises(PackageUnusable, match=why):
        choose_sandbox("auto", packages=["unusable"])


@pytest.mark.parametrize(("package", "names"), [("sympy", ["sympy"]), ("PyYAML", ["yaml"])])
def test_a_package_is_imported_by_its_own_names(package: str, names: list[str]):
    pytest.importorskip(names[0])
    assert import_names(package) == names


def test_a_package_that_is_not_installed_is_named():
    with pytest.raises(PackageUnusable, match="package='no-such-package' is not installed"):
        choose_sandbox("auto", packages=["no-such-package"])


# --- runs beside and after one another ------------------------------------------------------------


async def test_runs_at_once_do_not_mix(sandbox: Sandbox):
    results = await asyncio.gather(
        *(sandbox.run_python("print(input())", str(number)) for number in range(12))
    )
    assert [result.stdout.strip() for result in results] == [str(number) for number in range(12)]


async def test_a_short_run_does_not_wait_for_a_long_one(sandbox: Sandbox):
    long = asyncio.ensure_future(sandbox.run_python(SLEEPER, limits=Limits(wall_s=30)))
    assert (await sandbox.run_python("print(1)")).stdout == "1\n"
    assert not long.done()
    long.cancel()
    with pytest.raises(asyncio.CancelledError):
        await long


async def test_nothing_is_left_of_a_run_that_was_killed_or_cancelled(sandbox: Sandbox):
    await sandbox.run_python("1")
    children = await children_when_idle(sandbox)
    descriptors = len(os.listdir("/proc/self/fd"))
    folder = sandbox.folder if isinstance(sandbox, LandlockSandbox) else None
    await sandbox.run_python(SLEEPER, limits=Limits(wall_s=0.2))
    with pytest.raises(TimeoutError):
        async with timeout(0.2):
            await sandbox.run_python(SLEEPER)
    assert await children_when_idle(sandbox) == children
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert folder is None or os.listdir(folder) == []


async def begins(sandbox: Sandbox, count: int = 1) -> None:
    """Until so many runs are under way."""
    assert await holds(lambda: sum(each.active for each in filter(None, sandbox._zygotes)) >= count)


def zygote_of(sandbox: Sandbox) -> int:
    """The interpreter that forks, below bubblewrap where that starts it."""
    (zygote,) = filter(None, sandbox._zygotes)
    process = psutil.Process(zygote.process.pid)
    while process.name() == "bwrap":
        (process,) = process.children()
    return process.pid


async def test_a_zygote_that_is_killed_is_replaced_and_its_run_is_no_verdict(sandbox: Sandbox):
    await sandbox.run_python("1")
    lost = asyncio.ensure_future(sandbox.run_python(SLEEPER, limits=Limits(wall_s=1.0)))
    await begins(sandbox)
    before = processes_of(sandbox)
    os.kill(zygote_of(sandbox), signal.SIGKILL)
    try:  # in a namespace of its own it may see its end nevertheless
        assert (await lost).status == RunStatus.TIME_LIMIT
        with suppress(SandboxUnavailable):  # then it may be the next that meets the dead one
            await sandbox.run_python("1")
    except SandboxUnavailable as error:
        assert "the next call starts" in str(error)
    assert (await sandbox.run_python("print(1)")).stdout == "1\n"
    assert await holds(lambda: are_gone(before))


async def test_a_dead_zygote_keeps_its_number_until_it_is_closed(sandbox: Sandbox):
    """Else another process has it by then, and all of its group is killed."""
    await sandbox.run_python("1")
    (zygote,) = filter(None, sandbox._zygotes)
    pid = zygote.process.pid
    os.kill(pid, signal.SIGKILL)
    assert await holds(lambda: not zygote.is_alive)
    assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    zygote.close()
    assert not psutil.pid_exists(pid)


_SERVER = """
import asyncio, sys
from tool_server.sandbox import Limits, choose_sandbox

async def main():
    sandbox = choose_sandbox(sys.argv[1])
    runs = [sandbox.run_python(CODE, limits=Limits(wall_s=60)) for _ in range(3)]
    async def tell():
        while not sandbox._zygotes[0] or sandbox._zygotes[0].active < 3:
            await asyncio.sleep(0.01)
        print("running", flush=True)
    await asyncio.gather(tell(), *runs)

CODE = "import ctypes, time; ctypes.CDLL(None).prctl(1, 0); time.sleep(60)"
asyncio.run(main())
"""


async def test_a_server_that_is_killed_leaves_no_process(sandbox: Sandbox):
    argv = [sys.executable, "-c", _SERVER, sandbox.name]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:  # noqa: ASYNC220
        try:
            assert server.stdout is not None
            assert await asyncio.to_thread(server.stdout.readline) == "running\n"
            # the server has asked for three runs; that they are forked comes a little later
            assert await holds(lambda: len(children_of(server.pid)) > 3)
            below = children_of(server.pid)
        finally:
            server.kill()
    left = (
        []
        if await holds(lambda: are_gone(below), ENDED_S)
        else [pid for pid in below if psutil.pid_exists(pid)]
    )
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


async def test_a_sandbox_that_is_closed_while_programs_run_leaves_no_process(sandbox: Sandbox):
    code = "import ctypes, time; ctypes.CDLL(None).prctl(1, 0); time.sleep(60)"
    run = asyncio.ensure_future(sandbox.run_python(code, limits=Limits(wall_s=60)))
    await begins(sandbox)
    below = processes_of(sandbox)
    sandbox.close()
    with pytest.raises(SandboxUnavailable):
        await run
    assert await holds(lambda: are_gone(below), ENDED_S)


# --- proof ---------------------------------------------------------------------------------------


def launched_with(
    sandbox: Sandbox, change: Callable[[Launch], Launch], monkeypatch: pytest.MonkeyPatch
) -> Sandbox:
    """A new one of its kind, whose zygotes are started otherwise."""
    other = type(sandbox)()
    launch = other.launch
    monkeypatch.setattr(other, "launch", lambda open_fds: change(launch(open_fds)))
    return other


def with_filter(program: str) -> Callable[[Launch], Launch]:
    return lambda launch: replace(launch, plan={**launch.plan, "filter": program})


ALLOW_ALL = struct.pack("=HBBI", 6, 0, 0, 0x7FFF0000).hex()


async def test_isolation_that_fails_later_is_no_verdict_on_the_program(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
):
    broken = launched_with(sandbox, with_filter("00" * 8), monkeypatch)
    with pytest.raises(SandboxUnavailable):
        await broken.run_python("print(1)")
    broken.close()


async def test_a_zygote_that_does_not_start_says_why(
    bubblewrap: Sandbox, monkeypatch: pytest.MonkeyPatch
):
    def change(launch: Launch) -> Launch:
        return replace(launch, prefix=[launch.prefix[0], "--no-such-option", *launch.prefix[1:]])

    broken = launched_with(bubblewrap, change, monkeypatch)
    with pytest.raises(SandboxUnavailable, match=r"does not start .*no-such-option"):
        await broken.run_python("print(1)")


@pytest.mark.parametrize(
    ("hole", "reached"),
    [
        (["--ro-bind", "/etc", "/etc"], "read /etc/passwd"),
        (["--setenv", "WANDB_API_KEY", "secret"], "environment"),
    ],
)
def test_the_probe_finds_a_hole(
    bubblewrap: Sandbox, hole: list[str], reached: str, monkeypatch: pytest.MonkeyPatch
):
    def change(launch: Launch) -> Launch:
        return replace(launch, prefix=[*launch.prefix[:-1], *hole, launch.prefix[-1]])

    opened = launched_with(bubblewrap, change, monkeypatch)
    try:
        with pytest.raises(SandboxUnavailable, match=f"got out .*{reached}"):
            prove(opened)
    finally:
        opened.close()


def test_without_a_filter_the_probe_finds_sockets(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
):
    opened = launched_with(sandbox, with_filter(ALLOW_ALL), monkeypatch)
    try:
        with pytest.raises(SandboxUnavailable, match="unix socket"):
            prove(opened)
    finally:
        opened.close()


def test_auto_takes_the_strongest_and_says_why(bubblewrap: Sandbox):
    chosen = choose_sandbox("auto")
    chosen.close()
    assert chosen.name == "bubblewrap"
    assert chosen.why.startswith("bubblewrap: no host file")


def test_without_bubblewrap_auto_takes_landlock_and_says_why(
    landlock: Sandbox, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", "/nowhere")
    chosen = choose_sandbox("auto")
    chosen.close()
    assert chosen.name == "landlock"
    assert chosen.why.startswith("bubblewrap: bwrap is not on PATH; landlock: no host file")


def test_without_any_isolation_there_is_no_sandbox(monkeypatch: pytest.MonkeyPatch):
    def refuse(self: object, open_fds: ExitStack) -> Launch:
        raise SandboxUnavailable("refused")

    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(LandlockSandbox, "launch", refuse)
    with pytest.raises(SandboxUnavailable, match=r"bubblewrap: bwrap .* landlock: .*refused"):
        choose_sandbox("auto")


def test_an_unknown_kind_is_named():
    with pytest.raises(ValueError, match="unknown sandbox='jail'"):
        choose_sandbox("jail")  # pyright: ignore[reportArgumentType]


# --- sessions ------------------------------------------------------------------------------------


async def test_a_session_keeps_its_state_and_shows_the_last_value(interpreter: Interpreter):
    first = await interpreter.run_cell("x = 20\ndef f(y): return x + y")
    assert first.stdout == ""
    second = await interpreter.run_cell("print('out')\nf(22)")
    assert second.stdout == "out\n42\n"
    assert second.status == RunStatus.FINISHED
    assert interpreter.is_alive


async def test_a_cell_that_fails_says_what_and_the_session_lives(interpreter: Interpreter):
    cell = await interpreter.run_cell("x = 1\n1/0")
    assert cell.status == RunStatus.ERROR
    assert "<cell 1>" in cell.stderr
    assert (await interpreter.run_cell("x")).stdout == "1\n"


async def test_a_null_byte_is_a_syntax_error_in_every_python(interpreter: Interpreter):
    cell = await interpreter.run_cell("x = '\0'")
    assert "SyntaxError: source code string cannot contain null bytes" in cell.stderr
    assert "Traceback" not in cell.stderr


async def test_a_cell_reads_its_own_input(interpreter: Interpreter):
    assert (await interpreter.run_cell("input()", stdin="first\n")).stdout == "'first'\n"
    assert (await interpreter.run_cell("input()", stdin="second\n")).stdout == "'second'\n"


async def test_a_late_cell_is_interrupted_and_the_state_is_kept(interpreter: Interpreter):
    await interpreter.run_cell("x = 1")
    late = await interpreter.run_cell("x = 2\nimport time\ntime.sleep(60)", wall_s=0.2)
    assert late.status == RunStatus.TIME_LIMIT
    assert interpreter.is_alive
    assert (await interpreter.run_cell("x")).stdout == "2\n"


async def test_a_cell_is_interrupted_though_the_server_ignores_interrupts():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell has it for `server &`
    try:
        sandbox = chosen_or_skip("auto")
        async with sandbox.interpreter() as interpreter:
            await interpreter.run_cell("import time; time.sleep(60)", wall_s=0.2)
            assert interpreter.is_alive
        sandbox.close()
    finally:
        signal.signal(signal.SIGINT, before)


async def test_a_cell_that_will_not_end_ends_the_session(interpreter: Interpreter):
    code = """
import time
while True:
    try:
        time.sleep(60)
    except BaseException:
        pass
"""
    cell = await interpreter.run_cell(code, wall_s=0.2)
    assert cell.status == RunStatus.TIME_LIMIT
    assert not interpreter.is_alive
    with pytest.raises(SandboxUnavailable, match="the session is over"):
        await interpreter.run_cell("1")


@pytest.mark.parametrize(
    ("code", "return_code"),
    [("import os; os._exit(5)", 5), ("import ctypes; ctypes.string_at(0)", 139)],
)
async def test_a_cell_that_ends_its_interpreter_ends_the_session(
    interpreter: Interpreter, code: str, return_code: int
):
    cell = await interpreter.run_cell(code)
    assert cell.return_code == return_code
    assert not interpreter.is_alive


async def test_a_cells_output_is_cut_at_its_limit(sandbox: Sandbox):
    async with sandbox.interpreter(Limits(output_bytes=1000)) as interpreter:
        cell = await interpreter.run_cell("print('x' * 5000)")
        assert cell.stdout.startswith("x" * 1000 + "\n... [cut")
        assert (await interpreter.run_cell("1")).stdout == "1\n"


async def test_two_sessions_are_apart_and_have_their_files(sandbox: Sandbox):
    async with (
        sandbox.interpreter(files={"a": b"1"}) as first,
        sandbox.interpreter(files={"a": b"2"}) as second,
    ):
        await asyncio.gather(first.run_cell("x = 'first'"), second.run_cell("x = 'second'"))
        cells = [await each.run_cell("x, open('a').read()") for each in (first, second)]
    assert [cell.stdout for cell in cells] == ["('first', '1')\n", "('second', '2')\n"]


@pytest.mark.parametrize(
    "forge",
    [
        "os.write(3, b'0' * 60)",
        "os.write(3, b'')",
        "socket.socket(fileno=os.dup(3)).send(b'')",
        "os.close(3)",
        'os.write(3, b\'{"code": 0, "shown": 1}\')',
        "os.write(3, b'\\xff' * 1000)",
        "os.write(3, b'[' * 100_000)",
        "[os.write(3, b'{}') for _ in range(50)]",
    ],
)
async def test_a_forged_reply_neither_hangs_nor_breaks_the_server(sandbox: Sandbox, forge: str):
    async with timeout(10), sandbox.interpreter(Limits(wall_s=0.5)) as interpreter:
        await interpreter.run_cell(f"import os, socket, time\n{forge}\ntime.sleep(60)")
        try:
            await interpreter.run_cell("print('second')")
        except SandboxUnavailable as error:
            assert "session" in str(error)
    assert (await sandbox.run_python("print(1)")).stdout == "1\n"


async def test_a_session_that_is_over_leaves_nothing(sandbox: Sandbox):
    await sandbox.run_python("1")
    children = await children_when_idle(sandbox)
    descriptors = len(os.listdir("/proc/self/fd"))
    async with sandbox.interpreter() as interpreter:
        await interpreter.run_cell("open('f', 'w').write('x')")
    async with sandbox.interpreter() as interpreter:
        await interpreter.run_cell("import os; os._exit(0)")
    await sandbox.run_python("1")
    assert await children_when_idle(sandbox) == children
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    if isinstance(sandbox, LandlockSandbox):
        assert os.listdir(sandbox.folder) == []


async def test_a_session_is_as_isolated_as_a_run(sandbox: Sandbox):
    async with sandbox.interpreter() as interpreter:
        for code in ("open('/etc/passwd')", "import socket; socket.socket()"):
            assert (await interpreter.run_cell(code)).status == RunStatus.ERROR


def is_alive(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


async def test_what_a_cell_leaves_ends_with_it(bubblewrap: Sandbox):
    leave = (
        "import os, time\nfor daemon in (False, True):\n    if os.fork() == 0:\n"
        "        if daemon:\n            os.setsid()\n            if os.fork():\n"
        "                os._exit(0)\n        while True:\n            pass"
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
        for _ in range(1100):  # a server with many connections has large descriptors
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        await _check_what_a_cell_leaves(bubblewrap, leave)


async def _check_what_a_cell_leaves(bubblewrap: Sandbox, leave: str) -> None:
    async with bubblewrap.interpreter(Limits(wall_s=5.0)) as interpreter:
        assert (await interpreter.run_cell("kept = 1\n" + leave)).return_code == 0
        assert not any(is_alive(pid) for pid in interpreter._run._monitor._pids()[2:])
        assert (await interpreter.run_cell("kept")).stdout == "1\n"


async def test_a_thread_that_works_between_cells_ends_the_session(sandbox: Sandbox):
    async with sandbox.interpreter(Limits(wall_s=5.0, cpu_s=1)) as interpreter:
        spin = "import threading\nthreading.Thread(target=exec, args=('while 1: pass',)).start()"
        await interpreter.run_cell(spin)
        async with timeout(60.0):
            await interpreter._run.ended
        assert interpreter._run.ended_why == "the processor time that it used between two cells"


# --- the filter ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [{"processes": False}, {"processes": True}, {"processes": True, "agent": True}]
)
def test_the_filter_exists_for_both_architectures_and_no_other(kind: dict[str, bool]):
    filters = {machine: build_filter(machine, **kind) for machine in ("x86_64", "aarch64")}
    assert filters["x86_64"] != filters["aarch64"]
    for program in filters.values():
        instructions = list(struct.iter_unpack("=HBBI", program))
        for at, (code, if_true, if_false, _) in enumerate(instructions):
            if code & 7 == 5:  # every jump ends within the program
                assert at + 1 + max(if_true, if_false) < len(instructions)
        assert instructions[-1][0] == 6
    with pytest.raises(SandboxUnavailable, match="riscv64"):
        build_filter("riscv64", **kind)


def test_without_namespaces_the_filter_denies_more():
    with_processes, without = (build_filter("x86_64", processes=each) for each in (True, False))
    assert len(with_processes) < len(without)


def test_the_rungs_are_what_their_names_say(bubblewrap: Sandbox, landlock: Sandbox):
    assert isinstance(bubblewrap, BubblewrapSandbox)
    assert bubblewrap.has_processes
    assert not landlock.has_processes
    assert ctypes.sizeof(ctypes.c_void_p) == 8  # what both filters are made for


@given(st.lists(st.tuples(st.text(), st.binary())), st.dictionaries(st.text(), st.integers()))
def test_parts_come_out_as_they_went_in(parts: list[tuple[str, bytes]], header: dict[str, int]):
    file = BytesIO()
    write_parts(file, {"header": header}, parts)
    file.seek(0)
    found, content = read_parts(file)
    assert (found, list(content)) == ({"header": header}, parts)
