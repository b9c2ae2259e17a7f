"""The processes of one session's program: started, waited for and ended without blocking the loop.

The first process of a pid namespace dies with the program, with bwrap and with the worker, and the
kernel then kills all others in the namespace. Its own end comes after theirs. So when it has ended,
nothing is left, and this end is what `ended` waits for. `isolation` makes the namespaces.
"""

import asyncio
import os
import select
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

from agent_loop.calls.child_process import uninterrupted
from agent_loop.gateway.isolation import INSIDE, Start
from config.compat import timeout
from tool_server.isolation import guard
from tool_server.isolation.errors import SandboxUnavailable
from tool_server.isolation.host import interpreter
from tool_server.isolation.proc import (
    descendants,
    file_bytes,
    memory_bytes,
    resident_bytes,
)

STDOUT_BYTES, STDERR_BYTES = 1 << 16, 4096
"""Bytes that are kept of what a program prints: the last ones."""

TERM_S = 1.0
"""Time that a program has after SIGTERM."""

KILL_S = 5.0
"""Longest wait for the kernel to end processes after SIGKILL; it takes milliseconds."""

MEMORY_EVERY_S = 1.0
"""Time between two looks at the memory of a program."""

_READ_BYTES = 1 << 16
_PIPE_READS = 16  # a pipe holds at most 1 MiB


class Running:
    """One session's processes. `open_fds` closes what they hold of this process.

    Args:
        command: absolute path of the program, and its arguments.
        env: all its environment variables.

    Raises:
        OSError: no process or descriptor is left.
    """

    def __init__(
        self, start: Start, command: Sequence[str], env: Mapping[str, str], open_fds: ExitStack
    ) -> None:
        self._start, self._open_fds = start, open_fds
        self._init = self._group = -1
        """pidfd of the first process of the pid namespace; process group of the command."""

        self._control, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        open_fds.callback(self._control.close)
        with ExitStack() as of_child:
            of_child.enter_context(child)
            self.stdout = _Tail(STDOUT_BYTES, open_fds, of_child)
            self.stderr = _Tail(STDERR_BYTES, open_fds, of_child)
            # The thread that calls this must live as long as the session, because the kernel sends
            # the signal at the parent's death when the thread ends. Without `preexec_fn` Python
            # uses vfork, which does not copy the page tables of a large worker.
            self._process = subprocess.Popen(
                [
                    *(start.prefix or guard.line(child.fileno())),
                    *(interpreter(), "-I", "-S", INSIDE, str(child.fileno())),
                    *(start.kind, start.folder, start.cwd, *start.settings, "--", *command),
                ],
                stdin=start.stdin,
                stdout=self.stdout.write_end,
                stderr=self.stderr.write_end,
                env=env,
                cwd="/",
                pass_fds=(child.fileno(), *start.fds),
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._pidfd = self._held(os.pidfd_open(self.pid))

    async def begin(self) -> list[int]:
        """Read its output, and wait until the command can begin.

        Returns:
            a descriptor of its folder; in a sandbox also of /dev/shm and of its listening socket.

        Raises:
            SandboxUnavailable: it is not isolated, so it does not begin.
        """
        for output in (self.stdout, self.stderr):
            output.read_when_ready()
        await _until_readable(self._control.fileno())
        if fds := self._begun():
            return fds
        with suppress(TimeoutError):
            async with timeout(KILL_S):
                await _until_readable(self._pidfd)
        raise SandboxUnavailable(f"no program begins in {self._start.kind}: {self._last_words()}")

    def trial(self, wait_s: float) -> str:
        """Begin and end in this thread; returns why the command failed, empty if it did not."""
        self._control.settimeout(wait_s)
        if self._begun():
            self.allow()
        try:
            return "" if self._process.wait(wait_s) == 0 else self._last_words()
        except subprocess.TimeoutExpired:
            return f"no end within {wait_s} s: {self._last_words()}"

    def _begun(self) -> list[int]:
        """The descriptors that it sends when it is ready; none if it failed."""
        try:
            data, fds, _, _ = socket.recv_fds(self._control, 16, 3)
        except OSError:
            return []
        family = list(descendants(self.pid))
        for fd in fds:
            self._held(fd)
        self._find_init(family)
        if data and family:
            with suppress(ProcessLookupError):
                self._group = os.getpgid(family[-1])
        return fds

    def _last_words(self) -> str:
        lines = self.stderr.text().split("\n")
        return next((line for line in reversed(lines) if line.strip()), "it left no message")

    def allow(self) -> None:
        """Let the command begin."""
        with suppress(BrokenPipeError):  # it was killed; its exit code says so
            self._control.send(b"1")

    async def ended(self) -> None:
        """Wait until the command has ended, and everything that it started."""
        await _until_readable(self._pidfd)
        if self._init >= 0:
            await _until_readable(self._init)

    async def stop(self) -> None:
        """End everything. A cancellation ends the time after SIGTERM, and is raised at the end."""
        try:
            if self._group > 0 and not _is_readable(self._pidfd):
                # The first process of the namespace, or the guard, is in this group, but does not
                # heed it.
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._group, signal.SIGTERM)
                with suppress(TimeoutError):
                    async with timeout(TERM_S):
                        await self.ended()
        finally:
            self.kill()
            await uninterrupted(self._gone())

    async def keep_below(self, memory_mb: int, folders: Sequence[int]) -> None:
        """Kill everything if the processes and the files of these tmpfs take more memory."""
        exceeds = False
        while not exceeds:
            await asyncio.sleep(MEMORY_EVERY_S)
            exceeds = await asyncio.to_thread(_exceeds, self.pid, memory_mb << 20, folders)
        self.stderr.note(
            f"killed: its processes and files had more than memory_mb={memory_mb} together"
        )
        self.kill()

    def kill(self) -> None:
        """End everything that runs, also if it has not begun yet."""
        self._control.close()  # a guard kills what it guards, then ends
        if not self._start.prefix or self._process.returncode is not None:
            return
        if self._init < 0:
            self._find_init([*descendants(self.pid)])
        with suppress(ProcessLookupError):
            if self._init >= 0:
                signal.pidfd_send_signal(self._init, signal.SIGKILL)
            else:
                os.killpg(self.pid, signal.SIGKILL)

    def _find_init(self, family: Sequence[int]) -> None:
        if self._start.prefix and family:
            with suppress(ProcessLookupError):
                self._init = self._held(os.pidfd_open(family[0]))

    async def _gone(self) -> None:
        try:
            async with timeout(KILL_S):
                await self.ended()
        except TimeoutError as error:
            raise RuntimeError(
                f"processes of pid={self.pid} do not end within {KILL_S} s of SIGKILL: the kernel "
                "holds them; look for what they wait for in /proc/PID/stack"
            ) from error
        finally:
            for output in (self.stdout, self.stderr):
                output.finish()
            self._process.poll()  # its end was seen, so this collects it

    def exit_code(self) -> int:
        """Of the command; negative if a signal ended it. bwrap and `inside` write 128 + signal, as
        shells do, so a command that exits with such a code seems to be killed."""
        code = self._process.returncode
        assert code is not None, "it was waited for"
        return 128 - code if 128 < code <= 128 + signal.NSIG else code

    def _held(self, fd: int) -> int:
        self._open_fds.callback(os.close, fd)
        return fd


class _Tail:
    """A pipe of which the last bytes are kept."""

    def __init__(self, size: int, open_fds: ExitStack, of_child: ExitStack) -> None:
        self._size, self._kept, self._note = size, bytearray(), ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fd, self.write_end = os.pipe2(os.O_CLOEXEC)
        open_fds.callback(os.close, self._fd)
        of_child.callback(os.close, self.write_end)
        os.set_blocking(self._fd, False)

    def read_when_ready(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._read)

    def _read(self) -> bool:
        """Whether more may come."""
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return False
        self._kept += data
        del self._kept[: -self._size]
        if not data:
            self._stop_reading()
        return bool(data)

    def _stop_reading(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
            self._loop = None

    def finish(self) -> None:
        """Read what the pipe still holds. The processes that wrote have ended."""
        for _ in range(_PIPE_READS):
            if not self._read():
                break
        self._stop_reading()

    def note(self, text: str) -> None:
        """Add a line of our own to the end."""
        self._note = f"\n{text}"

    def text(self) -> str:
        self.finish()
        return self._kept.decode(errors="replace") + self._note


def _exceeds(pid: int, limit: int, folders: Sequence[int]) -> bool:
    """Whether the descendants of a process have more bytes of memory together."""
    # What processes share counts several times here, so this is a cheap upper bound.
    files = sum(map(file_bytes, folders))
    if files + sum(map(resident_bytes, descendants(pid))) <= limit:
        return False
    try:
        return files + memory_bytes(pid, without=folders) > limit
    except PermissionError:  # a process does not let us look
        return True


async def _until_readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(fd, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(fd)


def _is_readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
