"""The process of one session: an environment's instance that answers over a socket.

Standard library only, because it also runs in the interpreters of other environments. The process
is forked from a server that has imported the class. A message is 4 bytes of length, big-endian, and
JSON. When its socket ends, as it does when the server dies, a guard kills all that it has started.
"""

import asyncio
import inspect
import json
import os
import random
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from agent_loop.environments.episode import InvalidAction, InvalidAnswer, start_of, step_of
from agent_loop.environments.instances import made
from tool_server.isolation.guard import guard

HEAD = struct.Struct(">I")

MAX_TRACE = 1500
"""Characters of a traceback in a message, its end."""


def serve_forked(own: socket.socket, kind: Any) -> NoReturn:
    """Answer requests on a socket until it ends; called in the forked process, never returns."""
    code = 1
    try:
        _leave_the_server(own)
        guard(own.fileno())
        _ForkedInstance(own, kind).run()
        code = 0
    except (EOFError, OSError):  # the server closed the socket, or died
        code = 0
    finally:
        os._exit(code)


def _leave_the_server(own: socket.socket) -> None:
    """Give up what the fork inherited: signals, descriptors, the random state."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    kept = own.fileno()
    os.closerange(3, kept)
    os.closerange(kept + 1, 65536)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):  # what an environment prints would fill a log
        os.dup2(null, number)
    own.setblocking(True)
    asyncio.set_event_loop(None)


class _ForkedInstance:
    """The instance in the forked process, and its answers."""

    def __init__(self, own: socket.socket, kind: Any) -> None:
        self._socket, self._kind = own, kind
        self._loop = asyncio.new_event_loop()
        self._instance: Any = None

    def run(self) -> None:
        while True:
            request = json.loads(self._read(HEAD.unpack(self._read(HEAD.size))[0]))
            answer = json.dumps(self._answer(request)).encode()
            self._socket.sendall(HEAD.pack(len(answer)) + answer)

    def _read(self, size: int) -> bytes:
        chunks: list[bytes] = []
        while size:
            chunk = self._socket.recv(min(size, 1 << 20))
            if not chunk:
                raise EOFError
            chunks.append(chunk)
            size -= len(chunk)
        return b"".join(chunks)

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """`answer`, `invalid` (the model's mistake) or `error` (the environment's)."""
        try:
            return {"answer": getattr(self, f"_{request['op']}")(request)}
        except InvalidAction as error:
            return {"invalid": str(error)}
        except InvalidAnswer as error:
            return {"error": str(error)}
        except (Exception, SystemExit) as error:
            trace = traceback.format_exc()[-MAX_TRACE:]
            return {"error": f"{request['op']} raised {type(error).__name__}: {error}\n{trace}"}

    def _reset(self, request: dict[str, Any]) -> dict[str, Any]:
        _seed(str(request["row"].get("row_id")))
        self._instance = made(self._kind, request["options"])
        value = self._called(self._instance.reset, request["row"])
        start = start_of(value, getattr(self._instance, "tools", None))
        return {"messages": start.messages, "tools": start.tools}

    def _step(self, request: dict[str, Any]) -> dict[str, Any]:
        step = step_of(self._called(self._instance.step, request["action"]))
        return {name: getattr(step, name) for name in ("observation", "reward", "done", "info")}

    def _close(self, request: dict[str, Any]) -> dict[str, Any]:
        if (close := getattr(self._instance, "close", None)) is not None:
            self._called(close)
        return {}

    def _called(self, method: Callable[..., Any], *arguments: Any) -> Any:
        value = method(*arguments)
        return self._loop.run_until_complete(value) if inspect.isawaitable(value) else value


def _seed(row_id: str) -> None:
    """Set the random state by the row: all trajectories of a prompt meet the same environment, and
    a run can be repeated."""
    random.seed(row_id)
    if (numpy := sys.modules.get("numpy")) is not None:
        with suppress(Exception):  # a broken numpy is the environment's matter
            numpy.random.seed(random.Random(row_id).getrandbits(32))
