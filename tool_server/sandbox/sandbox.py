"""Runs programs in children of zygotes: sends input, limits output, waits until all is dead.

It also turns reports of zygotes into results. The backends decide how a zygote is isolated.
"""

import asyncio
import io
import itertools
import json
import math
import os
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.requirements import Requirement

from tool_server.isolation.errors import SandboxUnavailable
from tool_server.isolation.host import import_names, memory_file
from tool_server.isolation.proc import remove
from tool_server.sandbox.collector import Collector, pipe_to
from tool_server.sandbox.inside.parts import read_parts, write_parts
from tool_server.sandbox.languages import FOLDER, LANGUAGES, Language
from tool_server.sandbox.program import (
    Limits,
    NotSupported,
    Program,
    RunResult,
    RunStatus,
)
from tool_server.sandbox.usage_monitor import THREADS, TICK_S, UsageMonitor
from tool_server.sandbox.zygote import Launch, Zygote

TIME_LIMIT = "the time limit"
COMMON_MODULES = (
    "base64", "bisect", "collections", "copy", "csv", "datetime", "decimal", "fractions",
    "functools", "hashlib", "heapq", "io", "itertools", "json", "math", "operator", "queue",
    "random", "re", "statistics", "string", "struct", "textwrap", "time", "typing",
)  # fmt: skip
"""Modules that programs import often; the zygote loads them before programs start."""

WALL_FACTOR = 4
"""Real time of a program, in time limits. Only an overloaded machine reaches it."""

INTERPRETER_S = 3600.0
"""Longest life of an interpreter."""

MAX_NAME_BYTES, MAX_DEPTH = 255, 12
"""Bytes of a file name; parts of a path."""

MAX_REPLY_BYTES = 1 << 17

LOOK_S = 0.2
"""Time between two looks at a program that has reached its time limit in real time."""

INTERRUPT_S = 1.0
"""How long a cell may take to end after it was interrupted, in seconds."""

MAX_LOOKS = 256
"""Threads for what a program can make slow: looks at it, and removing its files."""

NO_THREAD = ("can't start new thread", "Resource temporarily unavailable")

GRACE_S = 5.0
"""If a run is still alive this long after it was ended, its zygote is killed with it."""

_PYTHON = Language(source="main.py", run=())


class Sandbox(ABC):
    """One way to isolate programs. No state passes from one run to another.

    `workers` is the number of zygotes; the caller limits how many programs run at once. `packages`
    are distributions that programs may import; zygotes load them before programs start.
    """

    name: str
    has_processes: bool
    """Whether a program may start processes; languages besides Python need this."""

    def __init__(self, workers: int = 1, packages: Sequence[str] = ()) -> None:
        self.why = "not proven"
        self.packages = tuple(packages)
        self._zygotes: list[Zygote | None] = [None] * workers
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(MAX_LOOKS, thread_name_prefix="sandbox")
        self._threads_ran_out_at = -math.inf
        self._numbers = itertools.count()

    @abstractmethod
    def launch(self, open_fds: ExitStack) -> Launch:
        """How a zygote is started; descriptors that it needs are closed with `open_fds`.

        Raises:
            SandboxUnavailable: this machine does not support the backend.
        """

    def home_of_run(self) -> str:
        """New folder of a run on the host; empty if the backend needs none."""
        return ""

    def start(self) -> None:
        """Start the zygotes that are dead or missing; otherwise the first runs start them.

        A server starts them before it listens, so that no zygote inherits a connection.

        Raises:
            SandboxUnavailable: one does not start.
        """
        with self._lock:
            missing = [
                index
                for index, zygote in enumerate(self._zygotes)
                if zygote is None or not zygote.is_alive
            ]
            for index, zygote in zip(
                missing, self._threads.map(self._started, missing), strict=True
            ):
                self._zygotes[index] = zygote

    def _started(self, index: int) -> Zygote:
        """A new zygote for this place."""
        if (dead := self._zygotes[index]) is not None:
            dead.close()
        with ExitStack() as open_fds:
            return Zygote(self.launch(open_fds), self.name)

    @property
    def languages(self) -> list[str]:
        """Languages that run on this machine."""
        others = LANGUAGES.items() if self.has_processes else ()
        return ["python", *(name for name, language in others if language.is_here)]

    def close(self) -> None:
        """Kill the zygotes and all their runs; the next run starts new zygotes."""
        with self._lock:
            for index, zygote in enumerate(self._zygotes):
                if zygote is not None:
                    zygote.close()
                    self._zygotes[index] = None

    def run_blocking(self, program: Program, limits: Limits | None = None) -> RunResult:
        """As `run`, in an event loop of its own: this thread may already run one."""
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(asyncio.run, self.run(program, limits)).result()

    async def run_python(
        self, code: str, stdin: str = "", limits: Limits | None = None
    ) -> RunResult:
        """Run a Python program; see `run`."""
        return await self.run(Program(code=code, stdin=stdin), limits)

    async def run(self, program: Program, limits: Limits | None = None) -> RunResult:
        """Run one program and wait until all of its processes are dead.

        Raises:
            NotSupported: the language does not run here, or a path leads out of the folder.
            SandboxUnavailable: the isolation could not be set up, so nothing ran.
        """
        limits = limits or Limits()
        language = self._language_of(program.language)
        check_files(program, limits, language.source)
        # The run's own clock ends the program only if this server hangs.
        longest = replace(
            limits,
            wall_s=WALL_FACTOR * limits.wall_s + GRACE_S,
            compile_s=WALL_FACTOR * limits.compile_s + GRACE_S,
        )
        started = time.monotonic()
        async with self._prepared(language, limits, longest) as (run, open_fds):
            patience_s = 0.0
            stdout = Collector(limits.output_bytes, run.end)
            stderr = Collector(limits.output_bytes, run.end)
            try:
                with ExitStack() as child_fds:
                    fds = {
                        "payload": memory_file(child_fds, _payload(program)),
                        "stdin": memory_file(child_fds, program.stdin.encode(errors="replace")),
                        "stdout": pipe_to(stdout, open_fds, child_fds),
                        "stderr": pipe_to(stderr, open_fds, child_fds),
                    }
                    run.start(fds, open_fds)
                try:
                    is_compiled = not language.compile or await run.finishes(
                        limits.compile_s, run.compiled, run.ended
                    )
                    if not is_compiled or not await run.finishes(limits.wall_s, run.ended):
                        run.end(TIME_LIMIT)
                    patience_s = GRACE_S
                finally:
                    await run.wait_dead(patience_s, stdout.ended, stderr.ended)
            finally:
                stdout.close()
                stderr.close()
            report = await run.report()
            run.check_starved(report)
            result = _result_of(report, stdout, stderr, run.ended_why)
        if result.status is RunStatus.ERROR and started < self._threads_ran_out_at:
            self._check_threads(result)
        return result

    def _note_end(self, why: str) -> None:
        if why.endswith(THREADS):
            self._threads_ran_out_at = time.monotonic()

    def _check_threads(self, result: RunResult) -> None:
        """Refuse a verdict on a program that may have failed for another program's threads.

        Only Landlock needs this: it has no namespace in which the kernel would count the threads
        of one run.

        Raises:
            SandboxUnavailable: the program could not start a thread, and another program was ended
                for its threads while it ran.
        """
        if not result.killed and any(word in result.stderr for word in NO_THREAD):
            raise SandboxUnavailable(
                "a program got no thread while another program had too many: call again"
            )

    @asynccontextmanager
    async def _prepared(
        self, language: Language, limits: Limits, order_limits: Limits
    ) -> AsyncIterator[tuple["_Run", ExitStack]]:
        """A run that is not started, and what closes its descriptors. The run's folder on the host,
        if it needs one, is removed at the end."""
        home = self.home_of_run()
        try:
            with ExitStack() as open_fds:
                zygote = await self._ready_zygote()
                order = self._order(home, language, order_limits)
                yield _Run(zygote, order, limits, self._threads, self._note_end), open_fds
        finally:
            if home:  # a thread, because a program can fill it with many files
                loop = asyncio.get_running_loop()
                await asyncio.shield(loop.run_in_executor(self._threads, remove, home))

    @asynccontextmanager
    async def interpreter(
        self, limits: Limits | None = None, files: Mapping[str, bytes] | None = None
    ) -> AsyncIterator["Interpreter"]:
        """A Python interpreter that keeps its state from cell to cell, isolated like a run.

        Args:
            limits: limits of its whole life; time and output limits hold for each cell.
            files: relative path -> content, written before the first cell.

        Raises:
            NotSupported: a path leads out of its folder.
            SandboxUnavailable: the isolation could not be set up.
        """
        limits = limits or Limits()
        whole = replace(limits, wall_s=INTERPRETER_S, cpu_s=int(INTERPRETER_S))
        program = Program(code="", files=files or {})
        check_files(program, whole, "")
        async with self._prepared(_PYTHON, whole, whole) as (run, open_fds):
            channel, child_channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            open_fds.callback(channel.close)
            channel.setblocking(False)
            with ExitStack() as child_fds, child_channel:
                devnull = os.open(os.devnull, os.O_RDWR)
                child_fds.callback(os.close, devnull)
                fds = {"payload": memory_file(child_fds, _payload(program))}
                fds |= dict.fromkeys(("stdin", "stdout", "stderr"), devnull)
                fds["channel"] = child_channel.fileno()
                run.start(fds, open_fds)
            try:
                yield Interpreter(run, channel, limits, has_processes=self.has_processes)
            finally:
                await run.wait_dead(0.0)

    def _order(self, home: str, language: Language, limits: Limits) -> dict[str, Any]:
        return {
            "id": next(self._numbers),
            "limits": asdict(limits),
            "source": language.source,
            "compile": language.compile,
            "argv": language.run,
            "reserves_memory": language.reserves_memory,
            "processes": self.processes(limits),
            "home": home,
        }

    def processes(self, limits: Limits) -> int:
        """The kernel's limit on processes of the run's user; 0 sets no limit."""
        return 0

    def _language_of(self, name: str) -> Language:
        if name == "python":
            return _PYTHON
        if name not in LANGUAGES:
            raise NotSupported(
                f"language={name!r} is not known: this server runs {', '.join(self.languages)}"
            )
        language = LANGUAGES[name]
        if not self.has_processes:
            raise NotSupported(
                f"language={name!r} needs processes, which sandbox={self.name} refuses: this "
                "server runs python; use bubblewrap for other languages"
            )
        if not language.is_here:
            tool = (language.compile or language.run)[0]
            raise NotSupported(
                f"language={name!r} needs {FOLDER}/{tool}, which is not installed: this server "
                f"runs {', '.join(self.languages)}"
            )
        return language

    async def _ready_zygote(self) -> Zygote:
        """The zygote with the fewest runs; dead or missing ones are started first."""
        if not all(zygote is not None and zygote.is_alive for zygote in self._zygotes):
            await asyncio.to_thread(self.start)
        return min(filter(None, self._zygotes), key=lambda zygote: zygote.active)

    @property
    def versions(self) -> dict[str, str]:
        """Distributions that programs may import, with their versions."""
        names = sorted(Requirement(package).name for package in self.packages)
        return {name: metadata.version(name) for name in names}

    def plan(self, package_paths: Sequence[Path], **backend: Any) -> dict[str, Any]:
        """Settings of a zygote (`Launch.plan`); `backend` replaces those of no isolation."""
        modules = [name for package in self.packages for name in import_names(package)]
        plan = {
            "namespaces": False,
            "landlock": False,
            "filter": "",
            "uid": None,
            "uids": [],
            "own_user_namespace": False,
            "read_only": [],
            "packages": list(dict.fromkeys(str(path.parent) for path in package_paths)),
            "preload": [*COMMON_MODULES, *modules],
        }
        return plan | backend


class _Run:
    """One run, as the server sees it."""

    def __init__(
        self,
        zygote: Zygote,
        order: dict[str, Any],
        limits: Limits,
        threads: Executor,
        on_end: Callable[[str], None],
    ) -> None:
        self._zygote, self._order, self._on_end = zygote, order, on_end
        self._status = Collector(4096, until=b"done\n")
        self._monitor = UsageMonitor(zygote.process.pid, order["home"], limits, self.end, threads)
        self._status.on_data = self._read_status
        self._is_starved = False
        self.ended = self._status.ended
        self.compiled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended_why = ""
        """Why the server killed the program; empty if it did not."""

    def _read_status(self, data: bytes) -> None:
        self._monitor.begin(data)
        if b"\ncompiled\n" in data and not self.compiled.done():
            self.compiled.set_result(None)

    @property
    def is_over(self) -> bool:
        return self.ended.done()

    async def finishes(self, limit_s: float, *ends: "asyncio.Future[Any]") -> bool:
        """Wait for one of `ends`; False if the run used up its time limit before.

        The time in which the run waits for a processor does not count. Example: beside two busy
        programs on one processor, an endless loop with a limit of 5 s is late after 15 s, and a
        program that sleeps after 5 s.
        """
        before, started = (await self._monitor.measure()).own_s, time.monotonic()
        wait_s = limit_s
        while True:
            await asyncio.wait(ends, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if any(end.done() for end in ends):
                return True
            left_s = limit_s - ((await self._monitor.measure()).own_s - before)
            if left_s < TICK_S:
                return False
            if time.monotonic() - started >= WALL_FACTOR * limit_s:
                self._is_starved = True
                return False
            wait_s = min(LOOK_S, left_s)

    def check_starved(self, report: Mapping[str, Any]) -> None:
        """Refuse a verdict on a program that other load kept from its time.

        Raises:
            SandboxUnavailable: its real time ended before its own time.
        """
        steps = (report.get("compile", {}), report.get("run", {}))
        if self._is_starved or any(step.get("starved") for step in steps):
            raise SandboxUnavailable(
                f"a program waited for a processor for most of {WALL_FACTOR} times its time limit: "
                "the machine is overloaded, so its end says nothing; give the server fewer "
                "sandbox_workers, or more cores"
            )

    def end(self, why: str) -> None:
        """Kill the program for this reason; its output and files are still collected."""
        self.ended_why = self.ended_why or why
        self._on_end(why)
        self._signal("stop")

    def work(self) -> None:
        """A cell begins."""
        self._monitor.cpu_limit_s = math.inf

    async def rest(self, cpu_s: float, *, has_processes: bool) -> None:
        """A cell has ended: kill the processes that it left, and limit the time of its threads.

        Args:
            cpu_s: processor time until the next cell; a run that uses more is ended.
        """
        if has_processes and not await self._monitor.end_others():
            self.end("the processes that a cell left")
        self._monitor.cpu_limit_s = self._monitor.activity.cpu_s + cpu_s

    def interrupt(self) -> None:
        self._signal("interrupt")

    def _signal(self, action: str) -> None:
        with suppress(SandboxUnavailable):  # the zygote is dead, and so is the run
            self._zygote.order({action: self._order["id"]})

    def start(self, fds: Mapping[str, int], open_fds: ExitStack) -> None:
        """Send the order to the zygote, with `fds` (listed in `inside/__main__.py`).

        `open_fds` closes the descriptors that are needed until the run is dead.

        Raises:
            SandboxUnavailable: the zygote is dead.
        """
        self._started = time.monotonic()
        self._result = memory_file(open_fds)
        with ExitStack() as child_fds:
            status = pipe_to(self._status, open_fds, child_fds)
            try:
                order = self._order | {"descriptors": list(fds)}
                self._zygote.order(order, [*fds.values(), self._result, status])
            except SandboxUnavailable:
                self.close()
                raise
        self._zygote.active += 1

    async def wait_dead(self, timeout_s: float, *further: "asyncio.Future[None]") -> None:
        """Wait until the run is dead and `further` are done; after `timeout_s` kill the run."""
        ended = asyncio.ensure_future(asyncio.gather(self._status.ended, *further))
        try:
            await asyncio.wait([ended], timeout=timeout_s)
        finally:
            if not ended.done():
                self.ended_why = self.ended_why or TIME_LIMIT
                self._signal("kill")
                await asyncio.shield(self._wait_killed(ended))
            self._zygote.active -= 1
            self.close()

    def close(self) -> None:
        self._monitor.end()
        self._status.close()

    async def wait_over(self) -> None:
        """Wait until the run is dead; kill it if that takes long."""
        await asyncio.wait([self._status.ended], timeout=INTERRUPT_S)
        if not self.is_over:
            self.end("an answer out of turn")
            await asyncio.wait([self._status.ended], timeout=GRACE_S)

    async def _wait_killed(self, ended: "asyncio.Future[Any]") -> None:
        await asyncio.wait([ended], timeout=GRACE_S)
        if not ended.done():
            self._zygote.close()
            await asyncio.wait([ended])

    async def report(self) -> dict[str, Any]:
        """The report of a dead run: `compile`, `run`, `files`. Others have a turn after each file,
        because 16 MB take some milliseconds to read.

        Raises:
            SandboxUnavailable: nothing ran, or the zygote died.
        """
        if not self._status.data.endswith((b"done\n", b"ended\n")):
            self._zygote.close()
            raise SandboxUnavailable(
                "the sandbox died with the program: the next call starts a new one; call again"
            )
        is_empty = os.fstat(self._result).st_size == 0
        if is_empty and self.ended_why:  # killed before it could report
            wall_s = time.monotonic() - self._started
            return {"run": {"code": -signal.SIGKILL, "late": False, "wall_s": wall_s, "cpu_s": 0.0}}
        report: dict[str, Any] = {"fault": "the run died before its program started"}
        if not is_empty:
            with os.fdopen(self._result, "rb", closefd=False) as file:
                file.seek(0)
                report, files = read_parts(file)
                report["files"] = {}
                for name, content in files:
                    report["files"][name] = content
                    await asyncio.sleep(0)
        if "fault" in report:
            last = report["fault"].strip().splitlines()[-1]
            raise SandboxUnavailable(
                f"cannot isolate a program ({last}): it worked at start-up; check the host's "
                "limits on namespaces and memory"
            )
        return report


class Interpreter:
    """A Python interpreter in a sandbox that runs one cell after the other."""

    def __init__(
        self, run: _Run, channel: socket.socket, limits: Limits, *, has_processes: bool
    ) -> None:
        self._run, self._channel, self._limits = run, channel, limits
        self._has_processes = has_processes
        self._cells = 0

    @property
    def is_alive(self) -> bool:
        return not self._run.is_over

    async def run_cell(self, code: str, stdin: str = "", wall_s: float | None = None) -> RunResult:
        """Run a cell of Python. `stdout` ends with `repr` of the last expression's value.

        A cell that exceeds its time is interrupted, and the interpreter keeps its state. If the
        cell does not end after the interrupt, the interpreter is killed.

        Raises:
            SandboxUnavailable: it is over, because a cell ended it or its sandbox died; or
                the cell was late because the machine is overloaded.
        """
        if self._run.is_over:
            raise SandboxUnavailable("the session is over: start another one")
        wall_s = wall_s or self._limits.wall_s
        self._cells += 1
        self._run.work()
        stdout, stderr = (Collector(self._limits.output_bytes, self._run.end) for _ in range(2))
        started = time.monotonic()
        is_late = False
        reply = b""
        with ExitStack() as open_fds:
            try:
                with ExitStack() as child_fds:
                    fds = [
                        memory_file(child_fds, code.encode(errors="replace")),
                        memory_file(child_fds, stdin.encode(errors="replace")),
                        pipe_to(stdout, open_fds, child_fds),
                        pipe_to(stderr, open_fds, child_fds),
                    ]
                    with suppress(OSError):  # it died, so no reply will come
                        socket.send_fds(self._channel, [str(self._cells).encode()], fds)
                loop = asyncio.get_running_loop()
                answer = asyncio.ensure_future(loop.sock_recv(self._channel, MAX_REPLY_BYTES))
                try:
                    for limit_s, give_up in (
                        (wall_s, self._run.interrupt),
                        (INTERRUPT_S, partial(self._run.end, TIME_LIMIT)),
                    ):
                        if await self._run.finishes(limit_s, answer):
                            break
                        is_late = True
                        give_up()
                    else:
                        await asyncio.wait([answer], timeout=GRACE_S)
                    reply = answer.result() if answer.done() else b""
                except OSError:
                    reply = b""
                finally:
                    answer.cancel()
                parsed = _parse_reply(reply, self._cells)
                if parsed:
                    await self._run.rest(self._limits.cpu_s, has_processes=self._has_processes)
                if not parsed or self._run.ended_why:
                    parsed = {}
                    await self._run.wait_over()
                stdout.read_rest()
                stderr.read_rest()
            finally:
                stdout.close()
                stderr.close()
        wall_s = time.monotonic() - started
        step = {"late": is_late, "wall_s": wall_s, "cpu_s": 0.0}
        report = {} if parsed else await self._run.report()
        self._run.check_starved(report)
        step["code"] = parsed["code"] if parsed else report["run"]["code"]
        result = _result_of({"run": step}, stdout, stderr, self._run.ended_why)
        shown = parsed.get("shown")
        return result if shown is None else replace(result, stdout=f"{result.stdout}{shown}\n")


def _parse_reply(reply: bytes, cell: int) -> dict[str, Any]:
    """An interpreter's reply to this cell; empty if it is malformed, as the program can forge
    it."""
    try:
        parsed = json.loads(reply)
        if parsed["cell"] != cell:
            return {}
        return {
            "code": int(parsed["code"]) & 0xFF,
            "shown": None if parsed["shown"] is None else str(parsed["shown"]),
        }
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return {}


def _payload(program: Program) -> bytes:
    file = io.BytesIO()
    code = program.code.encode(errors="replace")
    write_parts(file, {"fetch": program.fetch}, [("", code), *program.files.items()])
    return file.getvalue()


def _result_of(report: dict[str, Any], out: Collector, err: Collector, ended_why: str) -> RunResult:
    compiled = None
    if "compile" in report:
        step = report["compile"]
        is_last = "run" not in report
        compiled = _step_result(step, step["stdout"], step["stderr"], ended_why if is_last else "")
        if is_last:
            return RunResult(
                status=compiled.status,
                return_code=compiled.return_code,
                stdout="",
                stderr="",
                execution_time_s=0.0,
                killed=compiled.killed,
                compiled=compiled,
            )
    return _step_result(
        report["run"],
        out.text("stdout"),
        err.text("stderr"),
        ended_why,
        files=report.get("files", {}),
        compiled=compiled,
    )


def _step_result(
    step: dict[str, Any], stdout: str, stderr: str, ended_why: str, **further: Any
) -> RunResult:
    code = step["code"]
    return_code = 128 - code if code < 0 else code
    is_late = step["late"] or ended_why == TIME_LIMIT
    if ended_why and not is_late:
        stderr = f"{stderr}\nended for {ended_why}".lstrip("\n")
    if is_late:
        status = RunStatus.TIME_LIMIT
    else:
        status = RunStatus.FINISHED if code == 0 and not ended_why else RunStatus.ERROR
    return RunResult(
        status=status,
        return_code=return_code,
        stdout=stdout,
        stderr=stderr,
        execution_time_s=step["wall_s"],
        cpu_time_s=step["cpu_s"],
        killed=bool(ended_why) or is_late,
        **further,
    )


def check_files(program: Program, limits: Limits, source: str) -> None:
    """Check the files of a program and the files to fetch, before anything is started.

    Raises:
        NotSupported: a path is wrong or leads out of the folder, or the files are too many or
            large.
    """
    size = sum(map(len, program.files.values())) + len(program.code.encode(errors="replace"))
    if size > (limits.file_mb << 20) * 9 // 10 or len(program.files) > limits.files // 2:
        raise NotSupported(
            f"{len(program.files)} files of {size} bytes with the code: a program's folder has "
            f"{limits.file_mb} MB for {limits.files} files, with those that it writes; send less"
        )
    if len(program.fetch) > limits.files:
        raise NotSupported(f"fetch_files={len(program.fetch)}: at most {limits.files}")
    for path in program.fetch:
        check_path(path)
    files = {PurePosixPath(source).parts, *map(check_path, program.files)}
    for parts in files:
        if any(parts[:depth] in files for depth in range(1, len(parts))):
            raise NotSupported(f"file path={'/'.join(parts)}: a file cannot be a folder as well")


def check_path(path: str) -> tuple[str, ...]:
    """Check a path of a program; returns its parts.

    Raises:
        NotSupported: the path leads out of the folder, or cannot be the name of a file.
    """
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts:
        raise NotSupported(
            f"file path={path!r} leads out of the program's folder: use a relative one without '..'"
        )
    try:
        longest = max(len(part.encode()) for part in parts)
    except UnicodeEncodeError:
        longest = MAX_NAME_BYTES + 1
    if "\0" in path or longest > MAX_NAME_BYTES or len(parts) > MAX_DEPTH:
        raise NotSupported(
            f"file path={path[:80]!r} is not a file name: use at most {MAX_NAME_BYTES} bytes of "
            f"UTF-8 in each of at most {MAX_DEPTH} parts"
        )
    return parts
