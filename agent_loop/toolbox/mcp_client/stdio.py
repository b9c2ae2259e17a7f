"""An MCP server over stdio: its process, and the lines of JSON that go to it and come from it.

The SDK's own transport keeps a line of any length, copies it with every chunk, and starts no guard;
a call through it takes twice the CPU. Here a line has a bound: a longer one is skipped, and the
call that it answers gets an error. Of stderr the last bytes are kept, for messages.

The process has a guard, which kills all that the server has started when the server has ended, when
it is stopped, and when the worker dies in any way.
"""

import asyncio
import re
import subprocess
from asyncio.streams import FlowControlMixin
from contextlib import ExitStack
from functools import partial

from anyio import BrokenResourceError, EndOfStream
from anyio.abc import ObjectStream
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCNotification, jsonrpc_message_adapter

from agent_loop.calls.child_process import find_program, inherited_environment, uninterrupted
from agent_loop.calls.guarded_process import GuardedProcess
from agent_loop.toolbox.mcp_client.results import (
    BAD_ANSWER,
    MAX_MESSAGE_BYTES,
    TOO_LARGE,
    TOO_LARGE_TEXT,
    error_answer,
)
from agent_loop.toolbox.mcp_client.target import ServerTarget
from tool_server.wire.responses import read_json

SHOWN_STDERR = 600
"""Characters of stderr in a message."""

EXIT_S = 2.0
"""Longest wait for the end of the process after its stdin was closed."""

LAST_WORDS_S = 0.5
"""Longest wait for the exit code of a process that closed its stdout."""

_message = partial(jsonrpc_message_adapter.validate_json, by_name=False)
_END_BYTES = 256
_VERSION = rb'"jsonrpc"\s*:\s*"2\.0"'
_ID = re.compile(
    rb'\A\s*\{\s*(?:%b\s*,\s*)?"id"\s*:\s*(\d{1,15})' % _VERSION  # before the result, or after it
    + rb'|"id"\s*:\s*(\d{1,15})\s*(?:,\s*%b\s*)?\}\s*\Z' % _VERSION
)


class ServerProcess(ObjectStream[SessionMessage]):
    """The server of a target, and the stream of messages that the SDK's session reads and writes.

    Args:
        closed: set when no answers will come any more.
    """

    def __init__(self, target: ServerTarget, closed: asyncio.Event) -> None:
        self._target, self._closed = target, closed
        self._process: GuardedProcess | None = None
        self._open_fds = ExitStack()
        self._stdout = asyncio.StreamReader(limit=MAX_MESSAGE_BYTES)
        self._pipes: list[asyncio.BaseTransport] = []
        """Stdin and stdout."""

        self._unsent: list[bytes] = []
        self._printed = b""
        self._has_ended = False
        """Whether it ended by itself."""

    async def start(self) -> None:
        """Start the process.

        Raises:
            OSError, ValueError: it cannot be started.
        """
        target = self._target
        env = inherited_environment() | dict(target.env)
        program = find_program(target.command[0], cwd=target.cwd, path=env.get("PATH"))
        self._process = GuardedProcess(
            [program, *target.command[1:]],
            self._open_fds,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=env,
            cwd=target.cwd,
        )
        # else nobody would close the other pipe
        await uninterrupted(self._connect(self._process.process))

    async def _connect(self, process: "subprocess.Popen[bytes]") -> None:
        loop = asyncio.get_running_loop()
        stdin, protocol = await loop.connect_write_pipe(FlowControlMixin, process.stdin)
        self._pipes.append(stdin)
        self._stdin = asyncio.StreamWriter(stdin, protocol, None, loop)
        lines = asyncio.StreamReaderProtocol(self._stdout)
        self._pipes += (await loop.connect_read_pipe(lambda: lines, process.stdout))[:1]

    async def stop(self) -> None:
        """End the process and its children, within a few seconds; at once if this is cancelled."""
        self._closed.set()
        with self._open_fds:
            for stdin in self._pipes[:1]:
                stdin.close()
            try:
                if self._process is not None:
                    await self._process.stop(EXIT_S)
            finally:
                for pipe in self._pipes:
                    pipe.close()

    async def why_closed(self) -> str:
        """What ended the process: exit code and last words."""
        if self._has_ended and self._process is not None:
            await self._process.ends_within(LAST_WORDS_S)
        return self.state()

    @property
    def cannot_be_executed(self) -> bool:
        """Whether the kernel refuses to execute the program, as its guard says."""
        if (process := self._process) is None or process.process.returncode != 127:
            return False
        return process.printed().startswith("cannot start ")

    def state(self) -> str:
        """What is known of the process: fault or exit code, and the last lines of stderr."""
        parts: list[str] = []
        if self._has_ended and self._process is not None:
            code = self._process.process.returncode
            parts.append("it closed its stdout" if code is None else f"it exited with code {code}")
        if self._printed:
            parts.append(f"it printed to stdout: {self._printed.decode(errors='replace')!r}")
        said = self._process.printed() if self._process is not None else ""
        if words := self._target.hidden(said.strip()):
            parts.append(f"its stderr ends with: {words[-SHOWN_STDERR:]}")
        return self._target.hidden("; ".join(parts))

    # --- the stream -------------------------------------------------------------------------------

    async def send(self, item: SessionMessage) -> None:
        line = item.message.model_dump_json(by_alias=True, exclude_unset=True)
        try:
            if not isinstance(item.message, JSONRPCNotification):  # else a call ends after its time
                await self._stdin.drain()
        except OSError as error:
            self._closed.set()
            raise BrokenResourceError from error
        if self._closed.is_set():
            raise BrokenResourceError
        self._unsent.append(line.encode() + b"\n")
        if len(self._unsent) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Send what was written in this pass of the event loop, because a system call for each
        message takes a third of the CPU time of a call."""
        self._stdin.writelines(self._unsent)
        self._unsent.clear()

    async def receive(self) -> SessionMessage:
        """The next response or request of the server. Its notifications are dropped, because
        nothing here reads them, and what is no message is noted. The call that such a line answers,
        if it can be seen, gets an error."""
        while (line := await self._line()) is not None:
            try:
                message = read_json(_message, line)
            except (ValueError, RecursionError):
                self._printed = self._printed or line.strip()[:_END_BYTES]
                request_id = id_of(line[:_END_BYTES], line[-_END_BYTES:])
                if request_id is None or b'"jsonrpc"' not in line:
                    continue
                words = "the answer is no JSON-RPC response"
                message = _message(error_answer(request_id, BAD_ANSWER, words))
            if not isinstance(message, JSONRPCNotification):
                return SessionMessage(message)
        self._has_ended = not self._closed.is_set()
        self._closed.set()
        raise EndOfStream

    async def _line(self) -> bytes | None:
        """The next line; None at the end. In place of one above the bound comes an error for the
        call that it answers, if its beginning or its end says which."""
        head = tail = b""
        while True:
            try:
                line = await self._stdout.readuntil()
            except asyncio.IncompleteReadError:
                return None
            except asyncio.LimitOverrunError as over:
                piece = await self._stdout.readexactly(over.consumed)
                head, tail = head or piece[:_END_BYTES], (tail + piece)[-_END_BYTES:]
                continue
            if not head:
                return line
            if (request_id := id_of(head, tail + line)) is not None:
                return error_answer(request_id, TOO_LARGE, TOO_LARGE_TEXT)
            head = tail = b""

    async def send_eof(self) -> None:
        """The SDK never calls this."""

    async def aclose(self) -> None:
        self._closed.set()


def id_of(head: bytes, tail: bytes) -> int | None:
    """The id of a response of which only the beginning and the end were kept; servers write it
    before the result or after it. None if it cannot be seen."""
    found = _ID.search(head) or _ID.search(tail)
    return int(found[1] or found[2]) if found else None
