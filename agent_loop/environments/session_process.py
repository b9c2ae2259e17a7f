"""The process of one session: an environment's instance that answers over a socket.

Standard library only, because it also runs in the interpreters of other environments. `main` is a
program that has imported the class and forks a process for each session. A message is 4 bytes of
length, big-endian, and JSON. When its socket ends, as it does when the worker ends the session or
dies, a guard kills the process and all that it has started.
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
from agent_loop.environments.instances import class_of, made
from tool_server.isolation.guard import guard

HEAD = struct.Struct(">I")

MAX_SHOWN = 1500
"""Characters of an environment's error in a message; of a traceback, the last ones."""


def main() -> None:
    """Import a class, write a byte to the socket on stdin, and begin a session on each socket that
    comes there, until it ends."""
    control = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
    try:
        kind = class_of(sys.argv[1])
    except ValueError as error:
        sys.exit(str(error))
    control.send(b"+")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel clears up after sessions
    while (given := socket.recv_fds(control, 1, 1))[0]:
        with socket.socket(fileno=given[1][0]) as own, suppress(OSError):  # of fork: no process
            if not os.fork():
                _serve(own, kind)


def framed(message: dict[str, Any]) -> bytes:
    data = json.dumps(message).encode()
    return HEAD.pack(len(data)) + data


def _serve(own: socket.socket, kind: Any) -> NoReturn:
    """Answer requests on a socket until it ends."""

    def say_end(code: int) -> None:
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        with suppress(OSError):
            own.sendall(framed({"error": f"its process ended {how}"}))

    code = 1
    try:
        _leave_the_parent(own)
        guard(own.fileno(), say_end)
        _Instance(own, kind).run()
    except (EOFError, OSError):  # the session was ended
        code = 0
    finally:
        os._exit(code)


def _leave_the_parent(own: socket.socket) -> None:
    """Give up what the fork inherited: its session, signals, descriptors."""
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
    asyncio.set_event_loop(None)


class _Instance:
    """The instance, and its answers."""

    def __init__(self, own: socket.socket, kind: Any) -> None:
        self._stream, self._socket, self._kind = own.makefile("rb"), own, kind
        self._loop = asyncio.new_event_loop()
        self._instance: Any = None

    def run(self) -> None:
        while len(head := self._stream.read(HEAD.size)) == HEAD.size:
            (size,) = HEAD.unpack(head)
            request = json.loads(self._stream.read(size))
            self._socket.sendall(framed(self._answer(request)))
        raise EOFError

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """`answer`, `invalid` (the model's mistake) or `error` (the environment's)."""
        try:
            return {"answer": getattr(self, f"_{request['op']}")(request)}
        except InvalidAction as error:
            return {"invalid": str(error)}
        except InvalidAnswer as error:
            return {"error": str(error)}
        except (Exception, SystemExit) as error:
            trace = traceback.format_exc()[-MAX_SHOWN:]
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
