"""Starts a process for each session of a class, and asks it. Standard library only, because an
interpreter of another environment may serve the class over HTTP.

A program (`session_process.main`) imports the class in its own interpreter and forks. Each session
has a socket of its own, so nothing lies between this process and the session's.
"""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from agent_loop.calls.child_process import uninterrupted
from agent_loop.environments.episode import MAX_OBSERVATION_BYTES
from agent_loop.environments.session_process import HEAD, MAX_SHOWN, framed
from tool_server.isolation.guard import guarded

START_S = 60.0
"""Longest start of the program: it imports the class and its packages."""

END_S = 10.0
"""Longest wait for its end, after it was killed."""

CLOSE_S = 5.0
"""Longest wait for `close` of an instance; then its process is killed."""

MAX_ANSWER_BYTES = 8 * MAX_OBSERVATION_BYTES
"""Bytes of an answer; JSON writes a character in six bytes at most."""

_ROOT = Path(__file__).resolve().parents[2]

# The project's folder is last on the path: the interpreter's own packages hide ours of one name.
_PROGRAM = (
    "import os, sys; sys.path[:1] = [] if sys.path[0] == '' else sys.path[:1]; "
    f"sys.path += [{str(_ROOT)!r}, os.getcwd()]; "
    "from agent_loop.environments.session_process import main; main()"
)


class StartFailed(Exception):
    """The program does not start, or cannot load the class."""


@dataclass(slots=True, eq=False)
class SessionProcess:
    """The process of one session."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    among: set["SessionProcess"]
    """Sessions that have not ended."""

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """`answer`, `invalid` (the model's mistake) or `error`, after which the process is ended,
        as it is if this is cancelled.

        Raises:
            ConnectionError: the process was killed, with the program or by `end`.
        """
        said: dict[str, Any] = {"error": ""}
        try:
            self.writer.write(framed(dict(request)))
            (size,) = HEAD.unpack(await self.reader.readexactly(HEAD.size))
            if size > MAX_ANSWER_BYTES:
                said = {"error": f"it answered with {size} bytes"}
            else:
                said = json.loads(await self.reader.readexactly(size))
        except (OSError, asyncio.IncompleteReadError) as error:
            raise ConnectionError("its process was killed") from error
        except ValueError:  # the words of its guard follow the first half of an answer
            said = {"error": "its process ended during an answer"}
        finally:
            if "error" in said:
                self.end()
        return said

    async def close(self) -> None:
        """Let the instance close, and end the process."""
        try:
            await asyncio.wait_for(self.ask({"op": "close"}), CLOSE_S)
        except (ConnectionError, asyncio.TimeoutError):
            pass
        finally:
            self.end()

    def end(self) -> None:
        """Kill the process and all that it has started, soon."""
        self.among.discard(self)
        with contextlib.suppress(OSError):  # it is closed
            # else a fork of this process, which holds the socket too, would keep the session
            self.writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        self.writer.transport.abort()


class SessionProcesses:
    """The sessions of one class, in processes of one program. It starts at first use, and again if
    it died: its sessions died with it. It ends with this process.

    Args:
        name: `path/to/file.py:Class` or `module:Class`.
        python: its interpreter.
        env: the environment of its processes.
    """

    def __init__(self, name: str, python: str, env: Mapping[str, str]) -> None:
        self._name, self._python, self._env = name, python, env
        self._program: subprocess.Popen[bytes] | None = None
        self._end_all: Callable[[], object] = bool
        self._control: socket.socket | None = None
        self._sessions = set[SessionProcess]()
        self._starting = asyncio.Lock()

    async def ready(self) -> None:
        """Start the program if it does not run.

        Raises:
            StartFailed: it does not start.
        """
        async with self._starting:
            if self._program is None or self._program.poll() is not None:
                await self.close()
                try:
                    await self._start()
                except BaseException:
                    await self.close()
                    raise

    async def open(self) -> SessionProcess:
        """Begin a session.

        Raises:
            ConnectionError: the program has ended, or cannot be asked now.
            StartFailed: it does not start.
        """
        await self.ready()
        ours, theirs = socket.socketpair()
        with theirs:
            streams = await asyncio.open_connection(sock=ours)
            process = SessionProcess(*streams, self._sessions)
            self._sessions.add(process)
            try:
                assert self._control is not None
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
            except OSError as error:
                process.end()
                raise ConnectionError(f"no session can begin now: {error}") from error
        return process

    async def close(self) -> None:
        """End all sessions."""
        program, self._program = self._program, None
        self._end_all()
        for session in list(self._sessions):
            session.end()
        if self._control is not None:
            self._control.close()
        if program is not None:  # a thread, because the kernel may hold it for seconds
            await uninterrupted(asyncio.to_thread(_wait, program))

    async def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        with tempfile.TemporaryFile() as log:
            with theirs:  # the program's alone, so that the socket ends with it
                # in a thread, because it returns only when the kernel has loaded the interpreter
                await uninterrupted(asyncio.to_thread(self._spawn, theirs, log))
            said, within = b"", ""
            try:
                hearing = asyncio.get_running_loop().sock_recv(self._control, 1)
                said = await asyncio.wait_for(hearing, START_S)
            except asyncio.TimeoutError:
                within = f" within {START_S:g} s"
            except OSError:
                pass
            if not said:
                self._end_all()
                words = await asyncio.to_thread(_last_words, log)
                raise StartFailed(f"did not start{within}: {words}")

    def _spawn(self, control: socket.socket, log: IO[bytes]) -> None:
        try:
            if (program := shutil.which(self._python)) is None:
                raise FileNotFoundError("there is no such program")
            command = [program, "-c", _PROGRAM, self._name]
            self._program, self._end_all = guarded(
                command, stdin=control, stdout=log, stderr=log, env=dict(self._env)
            )
        except OSError as error:
            raise StartFailed(
                f"did not start: {self._python} cannot be started ({error}); correct `python` of "
                "the environment"
            ) from error


def _wait(program: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel holds it
        program.wait(END_S)


def _last_words(log: IO[bytes]) -> str:
    log.seek(max(0, os.fstat(log.fileno()).st_size - 4 * MAX_SHOWN))
    return log.read().decode(errors="replace").strip()[-MAX_SHOWN:]
