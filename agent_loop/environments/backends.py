"""Who answers the calls of an environment: an instance in this process, or a server over HTTP.

A server is one that the user started, or one that this process starts for a class and ends with
itself. Limits, deadlines and the meaning of answers are in `agent_loop.environments.provider`.
"""

import asyncio
import contextlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import aiohttp
import msgspec

from agent_loop.calls.child_process import inherited_environment, uninterrupted
from agent_loop.environments.episode import (
    MAX_OBSERVATION_BYTES,
    InvalidAction,
    InvalidAnswer,
    start_of,
)
from agent_loop.environments.instances import class_of, made
from agent_loop.toolbox.functions import run_in_loop
from config.environment import RUN_MARK
from config.environments import ADAPTERS, EnvironmentEntry
from config.tool_entries import without_secrets
from tool_server.isolation.guard import guarded
from tool_server.wire.http import Peer, plain_session, post, unreadable
from tool_server.wire.protocol import Again, Fault, ToolRejected, ToolUnavailable
from tool_server.wire.responses import dumps

START_S = 60.0
"""Longest start of a server: it imports the class and its packages."""

END_S = 10.0
"""Longest wait for the end of a server that was told to end."""

POLL_S = 0.01

MAX_ANSWER_BYTES = 8 * MAX_OBSERVATION_BYTES
MAX_SHOWN = 1500
"""Characters of an environment's error in a message."""

_ROOT = Path(__file__).resolve().parents[2]

# The project's folder is last on the path: the interpreter's own packages hide ours of one name.
_PROGRAM = (
    "import os, sys; sys.path[:1] = [] if sys.path[0] == '' else sys.path[:1]; "
    f"sys.path += [{str(_ROOT)!r}, os.getcwd()]; "
    "from agent_loop.environments.serve import main; main()"
)


class Backend(Protocol):
    """Answers the calls of the sessions of one environment.

    The answers are not checked yet. Faults are raised as in `agent_loop.calls.routes.Post`.
    """

    async def ready(self) -> None:
        """Start what answers, if it does not run."""

    async def reset(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a session: its name as `session`, `messages` and `tools`."""
        ...

    async def step(self, session: str, action: Any) -> Any: ...

    async def end(self, session: str) -> None:
        """End a session, also one that has failed."""
        ...

    async def close(self) -> None: ...


class LoopBackend:
    """Instances in this process."""

    def __init__(self, entry: EnvironmentEntry) -> None:
        self._name, self._options = entry.name, entry.options
        self._is_ours = entry.use in ADAPTERS
        self._kind = class_of(entry.class_name or "")
        self._instances: dict[str, Any] = {}

    async def ready(self) -> None:
        pass

    async def reset(self, row: Mapping[str, Any]) -> dict[str, Any]:
        try:
            instance = made(self._kind, self._options)
        except (ValueError, Fault):
            raise
        except (Exception, SystemExit) as error:
            raise ToolUnavailable(
                f"environment={self._name}: its class raised {type(error).__name__}: {error}",
                tool=self._name,
            ) from error
        session = uuid4().hex
        self._instances[session] = instance
        try:
            start = start_of(
                await self._called(instance.reset, row=row), getattr(instance, "tools", None)
            )
        except BaseException:
            await self.end(session)
            raise
        return {"session": session, "messages": start.messages, "tools": start.tools}

    async def step(self, session: str, action: Any) -> Any:
        return await self._called(self._instances[session].step, action=action)

    async def end(self, session: str) -> None:
        instance = self._instances.pop(session, None)
        if (close := getattr(instance, "close", None)) is not None:
            await self._called(close)

    async def close(self) -> None:
        await asyncio.gather(*map(self.end, list(self._instances)), return_exceptions=True)

    async def _called(self, method: Any, **arguments: Any) -> Any:
        try:
            if self._is_ours and inspect.iscoroutinefunction(method):
                return await method(**arguments)  # obeys cancellation, so it needs no task
            return await run_in_loop(method, self._name, arguments)
        except InvalidAction as error:
            raise ToolRejected(str(error), tool=self._name) from error
        except (InvalidAnswer, Fault):
            raise
        except (Exception, SystemExit) as error:
            raise ToolUnavailable(
                f"environment={self._name}: {method.__name__} raised "
                f"{type(error).__name__}: {error}",
                tool=self._name,
            ) from error


class HttpBackend:
    """A server with the protocol of `agent_loop.environments.serve`.

    Args:
        session: HTTP session to the server.
        url: base URL.
    """

    def __init__(
        self, entry: EnvironmentEntry, session: aiohttp.ClientSession, url: str, token: str = ""
    ) -> None:
        self._name, self._options = entry.name, entry.options
        self._http, self._url = session, url.rstrip("/")
        remedy = f"is it a server of environments, and {entry.token or '`token`'} its token?"
        self._peer = Peer(
            name=f"environment={entry.name} at {without_secrets(self._url)}",
            tool=self._name,
            address_key="environment",
            remedy=remedy,
            refused=remedy,
            secret=token,
            mistakes=frozenset({422}),
            shows=MAX_SHOWN,
        )

    async def ready(self) -> None:
        pass

    async def reset(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return await self._asked("reset", {"row": row, "options": self._options})

    async def step(self, session: str, action: Any) -> Any:
        return await self._asked("step", {"session": session, "action": action})

    async def end(self, session: str) -> None:
        await self._asked("close", {"session": session})

    async def close(self) -> None:
        pass

    async def _asked(self, path: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        if self._http.closed:  # its server has just ended
            raise ToolUnavailable("its server ended", again=Again.UNTIL_DEADLINE, executed=False)
        raw, _ = await post(
            self._http,
            f"{self._url}/{path}",
            dumps(payload),
            self._peer,
            limit=MAX_ANSWER_BYTES,
        )
        try:
            return _object(raw)
        except (ValueError, RecursionError) as error:
            raise unreadable(error, self._peer) from error


def _object(raw: bytes) -> dict[str, Any]:
    """Raises `ValueError` or `RecursionError` if this is no JSON object."""
    try:
        body = msgspec.json.decode(raw)
    except ValueError:
        body = json.loads(raw)  # NaN, and half characters in escaped form
    if not isinstance(body, dict):
        raise ValueError("its answer is no JSON object")
    return body


class ProcessBackend:
    """A server of our own for a class, on a Unix socket; it starts at first use.

    It starts again if it died: its sessions are lost then. It ends with this process, because its
    stdin ends.

    Raises:
        ValueError: an environment variable that the entry names is not set.
    """

    def __init__(self, entry: EnvironmentEntry) -> None:
        self._entry, self._own_env = entry, _named(entry.env)
        self._server: subprocess.Popen[bytes] | None = None
        self._end_all: Callable[[], object] = bool
        self._folder: Path | None = None
        self._http: aiohttp.ClientSession | None = None
        self._backend: HttpBackend | None = None
        self._starting = asyncio.Lock()

    async def ready(self) -> None:
        await self._started()

    async def reset(self, row: Mapping[str, Any]) -> dict[str, Any]:
        backend, server = await self._started(), self._server
        try:
            return await backend.reset(row)
        except ToolUnavailable as error:
            # A process that was killed still takes connections until the kernel has closed its
            # files. Its sessions ended with it, so the reset may be tried again at the next server.
            is_broken = error.again is Again.UNTIL_DEADLINE and not error.is_overload
            if server is None or not (is_broken and error.executed):
                raise
            if not await _within(END_S, lambda: server.poll() is not None):
                raise
            raise ToolUnavailable(
                str(error), tool=self._entry.name, again=Again.UNTIL_DEADLINE, executed=False
            ) from error

    async def step(self, session: str, action: Any) -> Any:
        server = self._server
        if self._backend is None or server is None or server.poll() is not None:
            raise ToolUnavailable(
                f"environment={self._entry.name}: its server ended, and this episode with it",
                tool=self._entry.name,
            )
        try:
            return await self._backend.step(session, action)
        except ToolUnavailable as error:
            if server.poll() is not None:
                error.again = Again.NEVER  # the episode ended with its server
            raise

    async def end(self, session: str) -> None:
        if self._backend is not None:
            await self._backend.end(session)

    async def close(self) -> None:
        server, folder, http, end_all = self._server, self._folder, self._http, self._end_all
        self._server = self._backend = self._http = self._folder = None
        try:
            if server is not None and server.stdin is not None:
                with contextlib.suppress(OSError):
                    server.stdin.close()  # the server ends its sessions, and itself
            if http is not None:
                await http.close()
            if server is not None:
                await _within(END_S, lambda: server.poll() is not None)
        finally:  # also if this is cancelled
            end_all()
            if folder is not None:
                await uninterrupted(asyncio.to_thread(_clear_away, server, folder))

    async def _started(self) -> HttpBackend:
        async with self._starting:
            if self._backend is None or self._server is None or self._server.poll() is not None:
                await self.close()
                self._backend = await self._start()
            return self._backend

    async def _start(self) -> HttpBackend:
        entry = self._entry
        folder = self._folder = Path(tempfile.mkdtemp(prefix="mixed-environment-"))
        try:
            # in a thread, because it returns only when the kernel has loaded the interpreter
            await uninterrupted(asyncio.to_thread(self._spawn, folder))
            server, socket = self._server, folder / "socket"
            assert server is not None
            await _within(START_S, lambda: socket.exists() or server.poll() is not None)
            if not socket.exists():
                self._end_all()
                words = await asyncio.to_thread(_last_words, folder / "log")
                raise ToolUnavailable(
                    f"environment={entry.name} did not start within {START_S:g} s: {words}",
                    tool=entry.name,
                )
        except BaseException:
            await self.close()
            raise
        self._http = plain_session(connector=aiohttp.UnixConnector(path=str(socket), limit=0))
        return HttpBackend(entry, self._http, "http://localhost")

    def _spawn(self, folder: Path) -> None:
        entry = self._entry
        python = entry.python or sys.executable
        program = shutil.which(python)
        marks = {name: os.environ[name] for name in (RUN_MARK,) if name in os.environ}
        env = {**inherited_environment(), **marks, **self._own_env}
        socket = str(folder / "socket")
        try:
            if program is None:
                raise FileNotFoundError("there is no such program")
            with (folder / "log").open("wb") as printed:
                self._server, self._end_all = guarded(
                    [program, "-c", _PROGRAM, entry.class_name or "", "--unix", socket],
                    stdin=subprocess.PIPE,
                    stdout=printed,
                    stderr=printed,
                    env=env,
                )
        except OSError as error:
            raise ToolUnavailable(
                f"environment={entry.name}: {python} cannot be started ({error}); correct `python` "
                "of the environment",
                tool=entry.name,
            ) from error


async def _within(limit_s: float, holds: Callable[[], bool]) -> bool:
    """Whether something becomes true in time; looks every few milliseconds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_s
    while not holds():
        if loop.time() >= deadline:
            return False
        await asyncio.sleep(POLL_S)
    return True


def _clear_away(server: "subprocess.Popen[bytes] | None", folder: Path) -> None:
    """Wait for a server that was told to end, and delete its folder. This may take seconds where a
    node has many processes or a slow disk."""
    with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel holds it
        if server is not None:
            server.wait(END_S)
    shutil.rmtree(folder, ignore_errors=True)


def _last_words(log: Path) -> str:
    with log.open("rb") as printed:
        printed.seek(max(0, log.stat().st_size - 4 * MAX_SHOWN))
        return printed.read().decode(errors="replace").strip()[-MAX_SHOWN:]


def _named(names: list[str]) -> dict[str, str]:
    """The values of environment variables.

    Raises:
        ValueError: one is not set.
    """
    if missing := [name for name in names if name not in os.environ]:
        raise ValueError(f"env={missing}: not set in the environment of the worker; set them")
    return {name: os.environ[name] for name in names}
