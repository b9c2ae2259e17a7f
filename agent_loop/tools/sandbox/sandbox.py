"""Runs programs in zygotes' children: feeds them, caps their output, sees them dead.

Decides what a result is called; how a zygote is isolated is the backends' business.
"""

import asyncio
import base64
import itertools
import json
import os
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from agent_loop.tools.sandbox.collector import Collector, pipe_to
from agent_loop.tools.sandbox.host import COMMON_MODULES, memory_file
from agent_loop.tools.sandbox.languages import FOLDER, LANGUAGES, Language
from agent_loop.tools.sandbox.program import (
    CellResult,
    Limits,
    NotSupported,
    Program,
    RunResult,
    RunStatus,
    SandboxUnavailable,
)
from agent_loop.tools.sandbox.watch import Watch
from agent_loop.tools.sandbox.zygote import Launch, Zygote

TIME_LIMIT = "the time limit"
SESSION_S = 3600.0
"""Longest life of a session."""

MOST_NAME, MOST_DEEP = 255, 12
"""Bytes of a file's name; folders above each other."""

MOST_REPLY_BYTES = 1 << 17

INTERRUPT_S = 1.0
"""How long a cell may take to end after it was interrupted."""

GRACE_S = 5.0
"""A run that the zygote itself has not ended so long after its time is ended with the zygote."""

_PYTHON = Language(source="main.py", run=())


class Sandbox(ABC):
    """One way of isolating programs. No state passes from one run to another.

    Args:
        workers: zygotes; runs at once are the caller's business.
        packages: distributions that programs may import, loaded before they start.
    """

    name: str
    isolates: bool = True
    """Whether a program is kept from what its user may do."""

    has_processes: bool
    """Whether a program may start others, and so whether languages besides Python run."""

    def __init__(self, workers: int = 1, packages: Sequence[str] = ()) -> None:
        self.why = "not proven"
        self.packages = tuple(packages)
        self._zygotes: list[Zygote | None] = [None] * workers
        self._lock = threading.Lock()
        self._numbers = itertools.count()

    @abstractmethod
    def launch(self, open_fds: ExitStack) -> Launch:
        """How a zygote is started; what is opened for that closes with `open_fds`.

        Raises:
            SandboxUnavailable: this machine cannot.
        """

    def home_of_run(self, open_fds: ExitStack, limits: Limits) -> str:
        """The folder of a run on the host, where it needs one; removed with `open_fds`."""
        return ""

    @property
    def languages(self) -> list[str]:
        """Those that run here."""
        others = LANGUAGES.items() if self.has_processes else ()
        return ["python", *(name for name, language in others if language.is_here)]

    def close(self) -> None:
        """End the zygotes, and every run with them; the next run starts them anew."""
        with self._lock:
            for at, zygote in enumerate(self._zygotes):
                if zygote is not None:
                    zygote.close()
                    self._zygotes[at] = None

    async def run_python(
        self, code: str, stdin: str = "", limits: Limits | None = None
    ) -> RunResult:
        """As `run`."""
        return await self.run(Program(code=code, stdin=stdin), limits)

    async def run(self, program: Program, limits: Limits | None = None) -> RunResult:
        """Run one program to its end and leave nothing of it behind.

        Raises:
            NotSupported: its language does not run here, or a path leads out of its folder.
            SandboxUnavailable: the isolation could not be set up, so nothing ran.
        """
        limits = limits or Limits()
        language = self._language_of(program.language)
        check_files(program, limits, language.source)
        with ExitStack() as open_fds:
            zygote = await self._ready_zygote()
            run = _Run(zygote, self._order(zygote, language, limits, open_fds), limits)
            stdout = Collector(limits.output_bytes, run.end)
            stderr = Collector(limits.output_bytes, run.end)
            try:
                with ExitStack() as theirs:
                    fds = [
                        memory_file(theirs, _payload(program)),
                        memory_file(theirs, program.stdin.encode(errors="replace")),
                        pipe_to(stdout, open_fds, theirs),
                        pipe_to(stderr, open_fds, theirs),
                    ]
                    run.start(fds, open_fds)
                longest_s = limits.wall_s + limits.compile_s + GRACE_S
                await run.see_dead(longest_s, stdout.ended, stderr.ended)
            finally:
                stdout.close()
                stderr.close()
            return _result_of(run.report(), stdout, stderr, run.ended_why)

    @asynccontextmanager
    async def session(
        self, limits: Limits | None = None, files: Mapping[str, bytes] | None = None
    ) -> AsyncIterator["Session"]:
        """A Python interpreter that keeps its state from cell to cell, as isolated as a run.

        Args:
            limits: of the whole session; time and output are each cell's.
            files: relative path -> content; there from the beginning.

        Raises:
            NotSupported: a path leads out of the session's folder.
            SandboxUnavailable: the isolation could not be set up.
        """
        limits = limits or Limits()
        whole = replace(limits, wall_s=SESSION_S, cpu_s=int(SESSION_S))
        program = Program(code="", files=files or {})
        check_files(program, whole, "")
        with ExitStack() as open_fds:
            zygote = await self._ready_zygote()
            run = _Run(zygote, self._order(zygote, _PYTHON, whole, open_fds), whole)
            channel, theirs_of_channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            open_fds.callback(channel.close)
            channel.setblocking(False)
            with ExitStack() as theirs, theirs_of_channel:
                payload = memory_file(theirs, _payload(program))
                nothing = os.open(os.devnull, os.O_RDWR)
                theirs.callback(os.close, nothing)
                fds = [payload, nothing, nothing, nothing]
                run.start(fds, open_fds, [theirs_of_channel.fileno()])
            try:
                yield Session(run, channel, limits)
            finally:
                await run.see_dead(0.0)

    def _order(
        self,
        zygote: Zygote,
        language: Language,
        limits: Limits,
        open_fds: ExitStack,
    ) -> dict[str, Any]:
        return {
            "id": next(self._numbers),
            "limits": asdict(limits),
            "source": language.source,
            "compile": language.compile,
            "argv": language.run,
            "reserves_memory": language.reserves_memory,
            "processes": self.processes(zygote, limits),
            "home": self.home_of_run(open_fds, limits),
        }

    def processes(self, zygote: Zygote, limits: Limits) -> int:
        """The kernel's limit on processes of the run's user; 0 where it is of no use."""
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
                "server runs python; use bubblewrap for others"
            )
        if not language.is_here:
            tool = (language.compile or language.run)[0]
            raise NotSupported(
                f"language={name!r} needs {FOLDER}/{tool}, which is not installed: this server "
                f"runs {', '.join(self.languages)}"
            )
        return language

    async def _ready_zygote(self) -> Zygote:
        """As `_zygote`; who has to start one does not stop the others."""
        zygotes = [zygote for zygote in self._zygotes if zygote is not None and zygote.is_alive]
        if len(zygotes) == len(self._zygotes):
            return min(zygotes, key=lambda zygote: zygote.active)
        return await asyncio.to_thread(self._zygote)

    def _zygote(self) -> Zygote:
        """The one with least to do; one that died is replaced."""
        with self._lock:
            for at, zygote in enumerate(self._zygotes):
                if zygote is None or not zygote.is_alive:
                    if zygote is not None:
                        zygote.close()
                    with ExitStack() as open_fds:
                        self._zygotes[at] = Zygote(self.launch(open_fds), self.name)
                    break
            return min(filter(None, self._zygotes), key=lambda zygote: zygote.active)

    def preload(self) -> list[str]:
        """Modules that a zygote imports."""
        return [*COMMON_MODULES, *(name.replace("-", "_") for name in self.packages)]


class _Run:
    """One run, from the server's side.

    Args:
        zygote: where it runs.
        order: what the zygote is told.
        limits: of the run.
    """

    def __init__(self, zygote: Zygote, order: dict[str, Any], limits: Limits) -> None:
        self._zygote, self._order, self._limits = zygote, order, limits
        self._status = Collector(4096, until=b"done\n")
        self._watch = Watch(zygote.process.pid, order["home"], limits, self.end)
        self._status.on_first = self._watch.begin
        self.ended_why = ""
        """Why we ended it early."""

    @property
    def is_over(self) -> bool:
        return self._status.ended.done()

    def end(self, why: str) -> None:
        """Kill the program, for this reason; what it leaves is still looked at."""
        self.ended_why = self.ended_why or why
        self._tell("stop")

    def interrupt(self) -> None:
        """As ^C."""
        self._tell("interrupt")

    def _tell(self, word: str) -> None:
        with suppress(SandboxUnavailable):  # then it is dead
            self._zygote.order({word: self._order["id"]})

    def start(self, fds: Sequence[int], open_fds: ExitStack, channel: Sequence[int] = ()) -> None:
        """Let the zygote begin.

        Args:
            fds: payload, stdin, stdout, stderr.
            open_fds: closes what is needed until the run is dead.
            channel: of a session.

        Raises:
            SandboxUnavailable: the zygote is gone.
        """
        self._started = time.monotonic()
        self._result = memory_file(open_fds)
        with ExitStack() as theirs:
            status = pipe_to(self._status, open_fds, theirs)
            try:
                self._zygote.order(self._order, [*fds, self._result, status, *channel])
            except SandboxUnavailable:
                self.close()
                raise
        self._zygote.active += 1

    async def see_dead(self, timeout_s: float, *further: "asyncio.Future[None]") -> None:
        """Until all of it is dead, and these are done; killed where it takes longer."""
        ended = asyncio.ensure_future(asyncio.gather(self._status.ended, *further))
        try:
            await asyncio.wait([ended], timeout=timeout_s)
        finally:
            if not ended.done():
                self.ended_why = self.ended_why or TIME_LIMIT
                self._tell("kill")
                await asyncio.shield(self._see_killed(ended))
            self._zygote.active -= 1
            self.close()

    def close(self) -> None:
        """Listen no longer."""
        self._watch.end()
        self._status.close()

    async def see_over(self) -> None:
        """Until all of it is dead, of itself or, where that takes long, killed."""
        await asyncio.wait([self._status.ended], timeout=INTERRUPT_S)
        if not self.is_over:
            self.end("an answer out of turn")
            await asyncio.wait([self._status.ended], timeout=GRACE_S)

    async def _see_killed(self, ended: "asyncio.Future[Any]") -> None:
        await asyncio.wait([ended], timeout=GRACE_S)
        if not ended.done():
            self._zygote.close()
            await asyncio.wait([ended])

    def report(self) -> dict[str, Any]:
        """What the zygote says of a run that is dead: `compile`, `run`, `files`.

        Raises:
            SandboxUnavailable: nothing ran, or the zygote died.
        """
        if not self._status.data.endswith((b"done\n", b"ended\n")):
            self._zygote.close()
            raise SandboxUnavailable("the sandbox died with the program: the next call starts anew")
        text = os.pread(self._result, os.fstat(self._result).st_size, 0)
        if not text and self.ended_why:  # killed before it could say anything
            wall_s = time.monotonic() - self._started
            return {"run": {"code": -signal.SIGKILL, "late": False, "wall_s": wall_s, "cpu_s": 0.0}}
        report = json.loads(text) if text else {"fault": "it died before the program"}
        if "fault" in report:
            last = report["fault"].strip().splitlines()[-1]
            raise SandboxUnavailable(
                f"cannot isolate a program ({last}): it worked at start-up; check the host's "
                "limits on namespaces and memory"
            )
        return report


class Session:
    """An interpreter that runs one cell after the other."""

    def __init__(self, run: _Run, channel: socket.socket, limits: Limits) -> None:
        self._run, self._channel, self._limits = run, channel, limits
        self._cells = 0

    @property
    def is_alive(self) -> bool:
        return not self._run.is_over

    async def run_cell(self, code: str, stdin: str = "", wall_s: float | None = None) -> CellResult:
        """Run a cell of Python.

        One that is late is interrupted, and keeps its state; one that goes on nevertheless ends the
        session.

        Raises:
            SandboxUnavailable: the session is over: a cell ended it, or its sandbox died.
        """
        if self._run.is_over:
            raise SandboxUnavailable("the session is over: begin another one")
        wall_s = wall_s or self._limits.wall_s
        self._cells += 1
        stdout, stderr = (Collector(self._limits.output_bytes, self._run.end) for _ in range(2))
        started = time.monotonic()
        is_late = False
        reply = b""
        with ExitStack() as open_fds:
            try:
                with ExitStack() as theirs:
                    fds = [
                        memory_file(theirs, code.encode(errors="replace")),
                        memory_file(theirs, stdin.encode(errors="replace")),
                        pipe_to(stdout, open_fds, theirs),
                        pipe_to(stderr, open_fds, theirs),
                    ]
                    with suppress(OSError):  # it died: no reply will come
                        socket.send_fds(self._channel, [str(self._cells).encode()], fds)
                loop = asyncio.get_running_loop()
                answer = asyncio.ensure_future(loop.sock_recv(self._channel, MOST_REPLY_BYTES))
                try:
                    for patience_s, give_up in (
                        (wall_s, self._run.interrupt),
                        (INTERRUPT_S, partial(self._run.end, TIME_LIMIT)),
                        (GRACE_S, lambda: None),
                    ):
                        await asyncio.wait([answer], timeout=patience_s)
                        if answer.done():
                            break
                        is_late = True
                        give_up()
                    reply = answer.result() if answer.done() else b""
                except OSError:
                    reply = b""
                finally:
                    answer.cancel()
                said = _said(reply, self._cells)
                if not said:
                    await self._run.see_over()
                stdout.read_rest()
                stderr.read_rest()
            finally:
                stdout.close()
                stderr.close()
        wall_s = time.monotonic() - started
        own = {"late": is_late, "wall_s": wall_s, "cpu_s": 0.0}
        own["code"] = said["code"] if said else self._run.report()["run"]["code"]
        result = _result_of({"run": own}, stdout, stderr, self._run.ended_why)
        return CellResult(result=result, shown=said.get("shown"), error=said.get("error"))


def _said(reply: bytes, cell: int) -> dict[str, Any]:
    """A session's answer to this cell. Its program may have forged it: then it is empty."""
    try:
        said = json.loads(reply)
        error = said["error"]
        if said["cell"] != cell:
            return {}
        return {
            "code": int(said["code"]) & 0xFF,
            "shown": None if said["shown"] is None else str(said["shown"]),
            "error": None if error is None else (str(error[0]), str(error[1])),
        }
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return {}


def _payload(program: Program) -> bytes:
    files = {path: base64.b64encode(content).decode() for path, content in program.files.items()}
    return json.dumps({"code": program.code, "files": files, "fetch": program.fetch}).encode()


def _result_of(report: dict[str, Any], out: Collector, err: Collector, ended_why: str) -> RunResult:
    compiled = None
    if "compile" in report:
        own = report["compile"]
        is_last = "run" not in report
        compiled = _one_result(own, own["stdout"], own["stderr"], ended_why if is_last else "")
        if "run" not in report:
            return RunResult(
                status=compiled.status,
                return_code=compiled.return_code,
                stdout="",
                stderr="",
                execution_time_s=0.0,
                killed=compiled.killed,
                compiled=compiled,
            )
    return _one_result(
        report["run"],
        out.text("stdout"),
        err.text("stderr"),
        ended_why,
        stdout_truncated=out.dropped > 0,
        stderr_truncated=err.dropped > 0,
        files={
            path: base64.b64decode(content)
            for path, content in report.get("files", {}).items()
            if content is not None
        },
        compiled=compiled,
    )


def _one_result(
    own: dict[str, Any], stdout: str, stderr: str, ended_why: str, **further: Any
) -> RunResult:
    code = own["code"]
    return_code = 128 - code if code < 0 else code
    is_late = own["late"] or ended_why == TIME_LIMIT
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
        execution_time_s=own["wall_s"],
        cpu_time_s=own["cpu_s"],
        killed=bool(ended_why) or is_late,
        **further,
    )


def check_files(program: Program, limits: Limits, source: str) -> None:
    """What a program brings and wants, before anything is started.

    Raises:
        NotSupported: a path leads out of its folder or is none, or there is too much.
    """
    paths = [PurePosixPath(path) for path in program.files]
    for path in (*program.files, *program.fetch):
        check_path(path)
    for path in paths:
        if set(path.parents) & {*paths, PurePosixPath(source or "/")}:
            raise NotSupported(f"file path={path}: a file cannot be a folder as well")
    size = sum(map(len, program.files.values())) + len(program.code.encode(errors="replace"))
    if size > (limits.file_mb << 20) * 9 // 10 or len(paths) > limits.files // 2:
        raise NotSupported(
            f"{len(paths)} files of {size} bytes with the code: a program's folder has "
            f"{limits.file_mb} MB for {limits.files} files, its own among them"
        )
    if len(program.fetch) > limits.files:
        raise NotSupported(f"fetch_files={len(program.fetch)}: at most {limits.files}")


def check_path(path: str) -> None:
    """A path of a program's own.

    Raises:
        NotSupported: it leads out of its folder, or no file can be called so.
    """
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts:
        raise NotSupported(
            f"file path={path!r} leads out of the program's folder: use a relative one without '..'"
        )
    try:
        longest = max(len(part.encode()) for part in parts)
    except UnicodeEncodeError:
        longest = MOST_NAME + 1
    if "\0" in path or longest > MOST_NAME or len(parts) > MOST_DEEP:
        raise NotSupported(
            f"file path={path[:80]!r} is no file name: at most {MOST_NAME} bytes of UTF-8 in each "
            f"of at most {MOST_DEEP} parts"
        )
