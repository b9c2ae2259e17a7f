"""An MCP server over stdio: its process, and the lines of JSON that go to it and come from it.

The SDK's own transport keeps a line without end in memory, and prints the server's stderr on the
screen. Here a line has a bound: a longer one is skipped, and the call that it answers gets an
error. Of stderr the last lines are kept, for messages. A server that floods its stdout for ever is
ended.

The process has a guard (`isolation.guard`), which kills all that the server has started when the
server has ended, when it is stopped, and when the worker dies in any way.
"""

import asyncio
import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from agent_loop.calls.child_process import find_program, uninterrupted
from agent_loop.toolbox.mcp_client.messages import (
    MAX_MESSAGE_BYTES,
    id_of_large,
    reply_to,
    too_large,
)
from agent_loop.toolbox.mcp_client.streams import Answers, Requests
from tool_server.isolation.guard import guarded
from tool_server.wire.responses import dumps, may_have_surrogates, rewritten_without_surrogates

MAX_SKIPPED_BYTES = 256 << 20
"""A line that is still longer has no end: the server is ended."""

MAX_UNREAD_BYTES = 16 << 20
"""Bytes that a server has not read from its stdin. A server with more does not read: it is
ended."""

STDERR_BYTES = 4096
"""Bytes of stderr that are kept."""

SHOWN_STDERR = 600
"""Characters of stderr in a message."""

EXIT_S, TERM_S, KILL_S = 2.0, 1.0, 5.0
"""Longest waits for the end of the process: after its stdin was closed, after SIGTERM, and after
its guard was told to kill everything."""

LAST_WORDS_S = 0.5
"""Longest wait for the exit code of a process that closed its stdout."""

_POLL_S = 0.01
_END_BYTES = 256


class ProcessFault(Exception):
    """The process cannot be started."""


class ServerProcess:
    """A transport of the SDK: an async context manager that gives the streams of messages.

    Args:
        command: the program and its arguments.
        env: all environment variables of the process.
        cwd: its folder; None: that of this process.
        hidden: takes secrets out of a text for messages.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: str | None = None,
        hidden: Callable[[str], str] = str,
    ) -> None:
        self._command, self._env, self._cwd = list(command), dict(env), cwd
        self._hidden = hidden
        self._process: subprocess.Popen[bytes] | None = None
        self._end_all: Callable[[], object] = bool
        self._stdin: asyncio.WriteTransport | None = None
        self._unsent: list[bytes] = []
        self._pipes: list[asyncio.ReadTransport] = []
        self._is_stopped = self._has_ended = False
        """Whether this client has ended the process, and whether it ended by itself."""

        self._stderr, self._printed, self._fault = bytearray(), b"", ""
        self._line = bytearray()
        """A line that has not ended; of a line above the bound only the beginning."""

        self._end, self._skipped = b"", 0
        """End and length of a line above the bound."""

        self._answers: deque[dict[str, Any]] = deque()
        self._reader: asyncio.Future[None] | None = None
        self.closed = asyncio.Event()
        """Set when no answers will come any more."""

    async def __aenter__(self) -> tuple[Answers, Requests]:
        process = self._process = self._started()
        loop = asyncio.get_running_loop()
        try:
            stdin, _ = await loop.connect_write_pipe(lambda: _Stdin(self), process.stdin)
            self._stdin = stdin
            stdout, _ = await loop.connect_read_pipe(lambda: _Stdout(self), process.stdout)
            self._pipes.append(stdout)
            stderr, _ = await loop.connect_read_pipe(lambda: _Stderr(self), process.stderr)
            self._pipes.append(stderr)
        except BaseException:
            await self.stop()
            raise
        return Answers(self), Requests(self)

    def _started(self) -> "subprocess.Popen[bytes]":
        try:
            path = self._env.get("PATH")
            program = find_program(self._command[0], cwd=self._cwd, path=path)
        except FileNotFoundError as error:
            raise ProcessFault(str(error)) from error
        try:
            process, self._end_all = guarded(
                [program, *self._command[1:]],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=self._env,
                cwd=self._cwd,
            )
        except (OSError, ValueError) as error:
            raise ProcessFault(f"it cannot be started ({error})") from error
        return process

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """End the process and its children, within a few seconds; at once if this is cancelled."""
        process = self._process
        if process is None or self._is_stopped:
            return
        self._is_stopped = True
        self.close()
        try:
            if self._stdin is not None and not self._stdin.is_closing():
                self._stdin.abort()
            if self._fault or not await _exits(process, EXIT_S):
                if process.returncode is None:  # else the id may be that of another group
                    os.killpg(process.pid, signal.SIGTERM)  # the guard does not heed it
                await _exits(process, TERM_S)
        finally:
            self._end_all()
            for pipe in self._pipes:
                pipe.close()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
            try:
                await uninterrupted(_exits(process, KILL_S))  # it takes some milliseconds
            finally:
                process.poll()  # collects it

    async def why_closed(self) -> str:
        """What ended the process: exit code and last words."""
        process = self._process
        if process is not None and not self._is_stopped and not self._fault:
            await _exits(process, LAST_WORDS_S)
            await asyncio.sleep(_POLL_S)  # for what it wrote last to stderr
        return self.state()

    def state(self) -> str:
        """What is known of the process: fault or exit code, and the last lines of stderr."""
        parts = [self._fault]
        process = self._process
        if not self._fault and process is not None and self._has_ended:
            code = process.poll()
            parts.append("it closed its stdout" if code is None else f"it exited with code {code}")
        if self._printed:
            parts.append(f"it printed to stdout: {self._printed.decode(errors='replace')!r}")
        if words := self._hidden(self._stderr.decode(errors="replace").strip())[-SHOWN_STDERR:]:
            parts.append(f"its stderr ends with: {words}")
        return self._hidden("; ".join(part for part in parts if part))

    def write(self, message: dict[str, Any]) -> None:
        """Send a message to stdin.

        Raises:
            BrokenPipeError: the process has ended.
        """
        stdin = self._stdin
        if stdin is None or self.closed.is_set() or stdin.is_closing():
            raise BrokenPipeError
        self._unsent.append(dumps(message))
        if len(self._unsent) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Send what was written in this pass of the event loop, with one system call."""
        lines, self._unsent = self._unsent, []
        stdin = self._stdin
        if stdin is None or stdin.is_closing():
            return
        stdin.write(b"\n".join([*lines, b""]))
        if stdin.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.fail(f"it left {MAX_UNREAD_BYTES >> 20} MiB of its stdin unread")

    def read(self, data: bytes) -> None:
        """Take bytes from stdout."""
        start = 0
        while not self.closed.is_set():
            end = data.find(b"\n", start)
            if end < 0:
                self._extend(data[start:])
                return
            if self._line:
                self._extend(data[start:end])
                self._end_line()
            elif end > start:
                self._take(data[start:end])
            start = end + 1

    def _extend(self, piece: bytes) -> None:
        """Add to a line that has not ended. Of a line above the bound the ends are kept."""
        if not self._skipped:
            self._line += piece
            if len(self._line) <= MAX_MESSAGE_BYTES:
                return
            piece = bytes(self._line)
            del self._line[_END_BYTES:]
        self._end = (self._end + piece)[-_END_BYTES:]
        self._skipped += len(piece)
        if self._skipped > MAX_SKIPPED_BYTES:
            self.fail(f"it wrote a line of more than {MAX_SKIPPED_BYTES >> 20} MiB")

    def _end_line(self) -> None:
        line, end, skipped = bytes(self._line), self._end, self._skipped
        self._line, self._end, self._skipped = bytearray(), b"", 0
        if not skipped:
            self._take(line)
        elif (request_id := id_of_large(line, end)) is not None:
            self._put(too_large(request_id))

    def _take(self, line: bytes) -> None:
        """Sort out a message; see `messages`."""
        try:
            message = _decoded(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            self._printed = self._printed or line.strip()[:_END_BYTES]
            return
        method, request_id = message.get("method"), message.get("id")
        if method is None:
            self._put(message)
        elif request_id is not None:
            with suppress(BrokenPipeError):
                self.write(reply_to(request_id, str(method)[:_END_BYTES]))

    def _put(self, message: dict[str, Any]) -> None:
        # The queue needs no bound: the session empties it between two reads of the pipe.
        self._answers.append(message)
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def next_answer(self) -> dict[str, Any] | None:
        """The next response; None after the last one."""
        while not self._answers:
            if self.closed.is_set():
                return None
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._answers.popleft()

    def note_stderr(self, data: bytes) -> None:
        self._stderr += data
        del self._stderr[:-STDERR_BYTES]

    def note_end(self) -> None:
        """A pipe of the process has closed."""
        self._has_ended = self._has_ended or not self._is_stopped
        self.close()

    def fail(self, fault: str) -> None:
        """The server breaks a rule: it is ended."""
        self._fault = self._fault or fault
        self.close()

    def close(self) -> None:
        """Let the session know that no answers will come."""
        self.closed.set()
        self._wake()


def _decoded(line: bytes) -> Any:
    try:
        return msgspec.json.decode(line)
    except ValueError:
        if not may_have_surrogates(line):
            raise
        return msgspec.json.decode(rewritten_without_surrogates(line))


async def _exits(process: "subprocess.Popen[bytes]", timeout_s: float) -> bool:
    """Whether the process exits within this time. It stays a zombie, so its group keeps its id."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not _has_exited(process):
        if loop.time() >= deadline:
            return False
        await asyncio.sleep(_POLL_S)
    return True


def _has_exited(process: "subprocess.Popen[bytes]") -> bool:
    if process.returncode is not None:
        return True
    try:
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, process.pid, flags) is not None
    except ChildProcessError:  # another part of this process has waited for it
        return True


class _Stdin(asyncio.BaseProtocol):
    """Nobody waits for the buffer to be written; its size is bounded instead."""

    def __init__(self, process: ServerProcess) -> None:
        self._process = process

    def connection_lost(self, exc: Exception | None) -> None:
        self._process.note_end()


class _Stdout(asyncio.Protocol):
    def __init__(self, process: ServerProcess) -> None:
        self._process = process

    def data_received(self, data: bytes) -> None:
        self._process.read(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._process.note_end()


class _Stderr(asyncio.Protocol):
    def __init__(self, process: ServerProcess) -> None:
        self._process = process

    def data_received(self, data: bytes) -> None:
        self._process.note_stderr(data)
