"""The environment of one source: its episodes, and the limits, deadlines and faults of its calls.

Each reset and step is a call of the tool client: it passes the run's limiter and slots, those of
the entry, and the deadline of a call. A call that was certainly not executed, because the server is
away or overloaded, is tried again until that deadline; a call that may have been executed never is.

| what happens | outcome |
| --- | --- |
| `InvalidAction` | the model reads the text; the episode goes on |
| the environment raises, dies, or breaks the protocol | fault: the trajectory is not trained |
| no answer in time | fault; the session's process is ended |
"""

import hashlib
import os
from typing import Any

from typing_extensions import Self

from agent_loop.calls.client import ToolClient
from agent_loop.calls.routes import local_route
from agent_loop.calls.servers import Server
from agent_loop.environments.backends import Backend, HttpBackend, LoopBackend, ProcessBackend
from agent_loop.environments.episode import InvalidAnswer, Start, Step, start_of, step_of
from agent_loop.rewards.number import WANTED, reward_number
from agent_loop.row import Row
from agent_loop.toolbox.spec import freed
from config.environments import EnvironmentEntry
from config.tool_entries import without_secrets
from tool_server.wire.protocol import ToolCall, ToolResult, ToolUnavailable

_ADVICE = "look into the environment for the reason; if it is only slow, raise its `timeout`"


class EnvironmentProvider:
    """The environment of an entry, shared by the trajectories of an event loop.

    Args:
        client: tool client of the event loop.

    Raises:
        ValueError: the class cannot be loaded, or an environment variable is missing.
    """

    def __init__(self, entry: EnvironmentEntry, client: ToolClient) -> None:
        self.entry = entry
        self.backend = _backend_of(entry, client)
        route = local_route(
            without_secrets(entry.use),
            self._post,
            key=hashlib.sha256(entry.target.encode()).hexdigest()[:32],
            timeout_s=client.route.timeout_s,
            clock=client.clock,
            max_retries=client.route.max_retries,
            advice=_ADVICE,
        )
        self._route = client.limits(route, entry)

    def begin(self, client: ToolClient, row: Row) -> "Episode":
        """The episode of one trajectory; `async with` begins and ends it.

        Args:
            row: of the dataset.
        """
        return Episode(self, client.on(self._route), row)

    async def close(self) -> None:
        await self.backend.close()

    async def _post(self, call: ToolCall, server: Server) -> ToolResult:
        given = call.payload
        if given["op"] == "reset":
            body = await self.backend.reset(given["row"])
        else:
            body = {"step": await self.backend.step(given["session"], given["action"])}
        return ToolResult(body=body, tool=call.tool, cacheable=False)

    def broken(self, error: InvalidAnswer) -> ToolUnavailable:
        """The fault of an environment that answers what is not in the protocol."""
        return ToolUnavailable(
            f"environment={self.entry.name} breaks its protocol: {error}", tool=self.entry.name
        )


class Episode:
    """One session of an environment; an async context manager, which begins and ends it."""

    start: Start

    def __init__(self, provider: EnvironmentProvider, client: ToolClient, row: Row) -> None:
        self._provider, self._client, self._row = provider, client, row
        self._session: Any = None
        self.rewards: list[float] = []
        """Of each step so far."""

        self.is_over = False
        """Whether the environment has said `done`."""

        self.info: dict[str, float] = {}
        """Of the last step that had one."""

    async def __aenter__(self) -> Self:
        """Begin the episode.

        Raises:
            ToolUnavailable: the environment failed, or gave no valid start in time.
        """
        await self._provider.backend.ready()  # the start of a program is not in a reset's time
        # The ground truth is in it, because the environment judges.
        seen = {**self._row.visible(), "ground_truth": self._row.ground_truth}
        body = (await self._asked({"op": "reset", "row": seen})).body
        self._session = body.get("session")
        try:
            self.start = start_of(body.get("messages"), body.get("tools"))
        except InvalidAnswer as error:
            await self.__aexit__()
            raise self._provider.broken(error) from error
        return self

    async def __aexit__(self, *exception: object) -> None:
        provider = self._provider
        await freed(f"environment={provider.entry.name}", provider.backend.end(self._session))

    async def step(self, action: Any) -> tuple[Step, ToolResult]:
        """Take one action: a text, or a tool call.

        Raises:
            ToolRejected: the action is invalid.
            ToolUnavailable: the environment failed, or gave no valid answer in time.
        """
        result = await self._asked({"op": "step", "session": self._session, "action": action})
        try:
            step = step_of(result.body["step"])
            self.rewards.append(step.reward)
            if reward_number(self.reward) is None:
                raise InvalidAnswer(
                    f"the rewards of its steps sum to {self.reward:g}: want {WANTED}"
                )
        except InvalidAnswer as error:
            raise self._provider.broken(error) from error
        self.is_over, self.info = step.done, step.info or self.info
        return step, result

    async def _asked(self, payload: dict[str, Any]) -> ToolResult:
        name = self._provider.entry.name
        return await self._client.call(ToolCall(tool=name, payload=payload, idempotent=False))

    @property
    def reward(self) -> float:
        """The sum of the steps' rewards, or the last one; 0 without a step."""
        if self._provider.entry.reward == "last":
            return self.rewards[-1] if self.rewards else 0.0
        return sum(self.rewards)


def _backend_of(entry: EnvironmentEntry, client: ToolClient) -> Backend:
    if entry.is_url:
        token = os.environ.get(entry.token, "") if entry.token else ""
        if entry.token and not token:
            raise ValueError(f"token={entry.token}: this environment variable is not set; set it")
        return HttpBackend(entry, client.session, token)
    return LoopBackend(entry) if entry.lives_in == "loop" else ProcessBackend(entry)
