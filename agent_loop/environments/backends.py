"""Who answers the calls of an environment: an instance in this process, one in a process of its
own, or a server over HTTP that the user started.

Limits, deadlines and the meaning of answers are in `agent_loop.environments.provider`.
"""

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import aiohttp

from agent_loop.calls.child_process import inherited_environment
from agent_loop.environments.episode import InvalidAction
from agent_loop.environments.instances import class_of, made
from agent_loop.environments.processes import (
    MAX_ANSWER_BYTES,
    SessionProcess,
    SessionProcesses,
    StartFailed,
)
from agent_loop.environments.session_process import MAX_SHOWN
from agent_loop.toolbox.functions import run_in_loop
from config.environment import RUN_MARK
from config.environments import EnvironmentEntry
from config.tool_entries import without_secrets
from tool_server.wire.http import Peer, post, unreadable
from tool_server.wire.protocol import Again, Fault, ToolRejected, ToolUnavailable
from tool_server.wire.responses import dumps


class Backend:
    """Answers the calls of the sessions of one environment.

    The answers are not checked yet. Faults are raised as in `agent_loop.calls.routes.Post`.
    """

    async def ready(self) -> None:
        """Start what answers, if it does not run."""

    async def reset(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a session: what the other methods take, as `session`, `messages` and `tools`."""
        raise NotImplementedError

    async def step(self, session: Any, action: Any) -> Any:
        raise NotImplementedError

    async def end(self, session: Any) -> None:
        """End a session, also one that has failed."""
        raise NotImplementedError

    async def close(self) -> None:
        """End what `ready` started."""


class LoopBackend(Backend):
    """Instances in this process."""

    def __init__(self, entry: EnvironmentEntry) -> None:
        self._name, self._options = entry.name, entry.options
        self._kind = class_of(entry.class_name or "")

    async def reset(self, row: Mapping[str, Any]) -> dict[str, Any]:
        try:
            instance = made(self._kind, self._options)
        except (ValueError, Fault):
            raise
        except (Exception, SystemExit) as error:
            raise self._fault("its class", error) from error
        try:
            messages = await self._called(instance.reset, row=row)
        except BaseException:
            await self.end(instance)
            raise
        tools = getattr(instance, "tools", None)
        return {"session": instance, "messages": messages, "tools": tools}

    async def step(self, session: Any, action: Any) -> Any:
        return await self._called(session.step, action=action)

    async def end(self, session: Any) -> None:
        if (close := getattr(session, "close", None)) is not None:
            await self._called(close)

    async def _called(self, method: Any, **arguments: Any) -> Any:
        try:
            return await run_in_loop(method, self._name, arguments)
        except InvalidAction as error:
            raise ToolRejected(str(error), tool=self._name) from error
        except Fault:
            raise
        except (Exception, SystemExit) as error:
            raise self._fault(method.__name__, error) from error

    def _fault(self, what: str, error: BaseException) -> ToolUnavailable:
        return ToolUnavailable(
            f"environment={self._name}: {what} raised {type(error).__name__}: {error}",
            tool=self._name,
        )


class HttpBackend(Backend):
    """A server with the protocol of `agent_loop.environments.serve`.

    Args:
        session: HTTP session to the server.
    """

    def __init__(
        self, entry: EnvironmentEntry, session: aiohttp.ClientSession, token: str = ""
    ) -> None:
        self._options, self._http, self._url = entry.options, session, entry.use.rstrip("/")
        remedy = f"is it a server of environments, and {entry.token or '`token`'} its token?"
        self._peer = Peer(
            name=f"environment={entry.name} at {without_secrets(self._url)}",
            tool=entry.name,
            address_key="environment",
            remedy=remedy,
            refused=remedy,
            secret=token,
            mistakes=frozenset({422}),
            shows=MAX_SHOWN,
        )

    async def reset(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return await self._asked("reset", {"row": row, "options": self._options})

    async def step(self, session: Any, action: Any) -> Any:
        return await self._asked("step", {"session": session, "action": action})

    async def end(self, session: Any) -> None:
        await self._asked("close", {"session": session})

    async def _asked(self, path: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        url, data = f"{self._url}/{path}", dumps(payload)
        raw, _ = await post(self._http, url, data, self._peer, limit=MAX_ANSWER_BYTES)
        try:
            body = json.loads(raw)
            if not isinstance(body, dict):
                raise ValueError("its answer is no JSON object")
        except (ValueError, RecursionError) as error:
            raise unreadable(error, self._peer) from error
        return body


class ProcessBackend(Backend):
    """Instances in processes of their own.

    Raises:
        ValueError: an environment variable that the entry names is not set.
    """

    def __init__(self, entry: EnvironmentEntry) -> None:
        if missing := [name for name in entry.env if name not in os.environ]:
            raise ValueError(f"env={missing}: not set in the environment of the worker; set them")
        self._name, self._options = entry.name, entry.options
        own = {n: os.environ[n] for n in (RUN_MARK, *entry.env) if n in os.environ}
        self._processes = SessionProcesses(
            entry.class_name or "", entry.python or sys.executable, inherited_environment() | own
        )

    async def ready(self) -> None:
        try:
            await self._processes.ready()
        except StartFailed as error:
            words = f"environment={self._name} {error}"
            raise ToolUnavailable(words, tool=self._name) from error

    async def reset(self, row: Mapping[str, Any]) -> dict[str, Any]:
        await self.ready()
        try:
            session = await self._processes.open()
            asked = {"op": "reset", "row": row, "options": self._options}
            try:
                start = self._answer(await session.ask(asked))
            except BaseException:
                session.end()
                raise
        except ConnectionError as error:  # nothing of the episode is left: it may begin again
            fault = self._fault(str(error))
            fault.again, fault.executed = Again.UNTIL_DEADLINE, False
            raise fault from error
        return {**start, "session": session}

    async def step(self, session: SessionProcess, action: Any) -> Any:
        try:
            return self._answer(await session.ask({"op": "step", "action": action}))
        except ConnectionError as error:
            raise self._fault(f"{error}, and this episode with it") from error

    async def end(self, session: SessionProcess) -> None:
        await session.close()

    async def close(self) -> None:
        await self._processes.close()

    def _answer(self, said: Mapping[str, Any]) -> dict[str, Any]:
        if "invalid" in said:
            raise ToolRejected(said["invalid"][:MAX_SHOWN], tool=self._name)
        if "error" in said:
            raise self._fault(said["error"][:MAX_SHOWN])
        return said["answer"]

    def _fault(self, words: str) -> ToolUnavailable:
        return ToolUnavailable(f"environment={self._name}: {words}", tool=self._name)
