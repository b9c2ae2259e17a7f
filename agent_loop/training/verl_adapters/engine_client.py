"""verl's client of the rollout servers, as agent loops use it: with records, seeds and cancelling.

verl adapter: `LLMServerClient` (workers/rollout/llm_server.py at 0.9.1). Four things are added.
The engine's answers are recorded for the trajectory. Each request may have its own seed, so that
its tokens do not depend on other requests. A request is cancelled with its trajectory. Requests
never take all slots of a server, because `resume_generation` needs one.
"""

import asyncio
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray

from agent_loop.watchdog import waits_for
from tool_server.wire.protocol import ToolUnavailable


@dataclass(frozen=True, slots=True)
class EngineTurn:
    """One request and its answer."""

    prompt_ids: Sequence[int]  # (P,) all earlier tokens
    output: Any
    """verl's `TokenOutput`."""

    media: Mapping[str, Any] = field(default_factory=dict)
    """Images, videos, audio and settings of the processor, by verl's names; empty for text."""

    @property
    def weight_versions(self) -> tuple[int, int]:
        """Oldest and newest version of the weights that sampled its tokens."""
        return weight_versions(self.output)


MEDIA = ("image_data", "video_data", "audio_data", "mm_processor_kwargs", "mm_processor_output")
"""What verl's `generate` takes besides text."""


def weight_versions(output: Any) -> tuple[int, int]:
    """The versions of an answer, from verl's `TokenOutput.extra_fields`.

    In the asynchronous modes verl's client may continue an answer with newer weights. Then
    `global_steps` is the version of the last part only (`FullyAsyncLLMServerClient`,
    llm_server.py:343).
    """
    fields = output.extra_fields
    last = fields.get("global_steps") or 0
    oldest, newest = fields.get("min_global_steps"), fields.get("max_global_steps")
    return (last if oldest is None else oldest), (last if newest is None else newest)


turns_of_trajectory: ContextVar[list[EngineTurn] | None] = ContextVar("engine_turns", default=None)
"""The requests of the current trajectory so far; None: they are not recorded."""


def request_of(output: Any) -> int | None:
    """Number, from 1, of the request of the current trajectory that had this answer."""
    turns = turns_of_trajectory.get() or []
    places = range(len(turns), 0, -1)
    return next((place for place in places if turns[place - 1].output is output), None)


faults_of_trajectory: ContextVar[list[ToolUnavailable] | None] = ContextVar("faults", default=None)
"""Requests of the current trajectory that failed. A loop may catch the error and go on."""

seeds_of_trajectory: ContextVar[Iterator[int] | None] = ContextVar("engine_seeds", default=None)
"""Seeds for the requests of the current trajectory; None: the engine chooses."""


class RecordingClient:
    """verl's server client; see the module. Its method that finds a server is replaced.

    Args:
        client: verl's.
        route_shape: layers and experts of a token; None: the engine returns no routes.
        most_open: requests that this client may have open at one server (`most_open_requests`).
            Further ones wait. A cancelled one does not count, although the server may not have
            ended it yet.
    """

    def __init__(
        self,
        client: Any,
        route_shape: tuple[int, int] | None = None,
        most_open: int = sys.maxsize,
    ) -> None:
        self._client = client
        self._route_shape = route_shape
        self.newest_version = 0
        """The newest version of the weights in an answer so far."""

        self._slots: defaultdict[Any, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(most_open)
        )
        """Id of a server -> this client's share of its slots."""

        self._acquire = client._acquire_server
        client._acquire_server = self._acquire_server

    async def generate(self, request_id: str, *, prompt_ids: list[int], **kwargs: Any) -> Any:
        """As verl's. A server that fails, aborts the request, returns no token, or does not return
        the routes of a model with experts where they are replayed, raises `ToolUnavailable`."""
        turns = turns_of_trajectory.get()
        waits_for("engine", turn=len(turns or []) + 1)
        if (seeds := seeds_of_trajectory.get()) is not None:
            own = {"seed": next(seeds), **kwargs.get("sampling_params", {})}
            kwargs["sampling_params"] = own
        try:
            output = await self._answer(request_id, prompt_ids, kwargs)
        except ToolUnavailable as error:
            if (faults := faults_of_trajectory.get()) is not None:
                faults.append(error)
            raise
        self.newest_version = max(self.newest_version, weight_versions(output)[1])
        if turns is not None:
            media = {name: kwargs[name] for name in MEDIA if kwargs.get(name) is not None}
            turns.append(EngineTurn(prompt_ids, output, media))
        waits_for("tool")
        return output

    async def _answer(self, request_id: str, prompt_ids: list[int], kwargs: dict[str, Any]) -> Any:
        try:
            output = await self._client.generate(request_id, prompt_ids=prompt_ids, **kwargs)
        except Exception as error:
            raise ToolUnavailable(
                f"no tokens from the rollout server: {type(error).__name__}: {error}", tool="engine"
            ) from error
        # verl's asynchronous client continues an aborted request. Its other client returns the part
        # that was generated, which must not count as the model's whole turn.
        if getattr(output, "stop_reason", None) in ("abort", "aborted"):
            raise ToolUnavailable("the rollout server aborted the request", tool="engine")
        if not output.token_ids:  # as SGLang's server after a fault; a model's turn has its end
            raise ToolUnavailable("the rollout server returned no token", tool="engine")
        if self._route_shape is not None and output.token_ids:
            least = len(prompt_ids) + len(output.token_ids) - 1  # the last token was not computed
            shape = getattr(output.routed_experts, "shape", (0,))
            if shape[0] < least or tuple(shape[1:]) != self._route_shape:
                raise ToolUnavailable(
                    f"the rollout server returned routes of shape {tuple(shape)}: router replay "
                    f"needs {least} or more tokens x {self._route_shape} (layers, experts of a "
                    "token); set rollout.enable_rollout_routing_replay=false and router_replay."
                    "mode=disabled if this engine cannot return them",
                    tool="engine",
                )
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[Any, "_Server"]:
        """A server. It is given back if the caller is cancelled, because verl counts its users."""
        asked = asyncio.ensure_future(self._acquire(request_id, **extra))
        try:
            server_id, handle = await asyncio.shield(asked)
        except asyncio.CancelledError:
            asked.add_done_callback(lambda done: self._give_back(done, request_id))
            raise
        return server_id, _Server(handle, self._slots[server_id])

    def _give_back(self, done: "asyncio.Future[tuple[Any, Any]]", request_id: str) -> None:
        if not done.cancelled() and done.exception() is None:
            self._client._release_server(done.result()[0], request_id=request_id)


def current_version(client: Any, step: int | None) -> int:
    """Version of the weights that a request of this row would get now, as far as is known here.

    It is the version when the row's step began, or a newer one that an answer had. It is the
    version of a trajectory that is lost before its first answer, which is not off-policy.
    """
    return max((step or 0) - 1, getattr(client, "newest_version", 0), 0)


def routes_of(
    turns: Sequence[EngineTurn], ids: Sequence[int], shape: tuple[int, int]
) -> np.ndarray:  # (t, layers, experts of a token), t <= T
    """The experts that the engine chose for the first tokens of a trajectory.

    A request computes all earlier tokens too, so the last one that the trajectory continues has
    all routes (as in verl's `tool_agent`). The rows stop where its turn was cut. verl fills the
    missing rows with zeros, as for a trajectory without a request.

    Args:
        turns: the requests, each with routes (P + t, layers, experts of a token).
        ids: (T,) prompt and response of the trajectory.
        shape: layers and experts of a token.
    """
    routes = np.zeros((0, *shape), dtype=np.int16)
    for turn in reversed(turns):
        asked = [*turn.prompt_ids, *turn.output.token_ids]
        if turn.output.token_ids and len(asked) > len(routes):
            pairs = enumerate(zip(asked, ids, strict=False))
            same = next((at for at, (a, b) in pairs if a != b), min(len(asked), len(ids)))
            if same > len(routes):
                routes = np.asarray(turn.output.routed_experts)[:same]
    return routes


class _Server:
    """A rollout server whose request waits for a slot, and is cancelled when its caller is.

    Ray does not send the cancellation of an `await` to the actor. Without this class a request past
    its deadline would be decoded to its end.
    """

    def __init__(self, handle: Any, slots: asyncio.Semaphore) -> None:
        self._handle, self._slots = handle, slots
        self.generate = self

    async def remote(self, *args: Any, **kwargs: Any) -> Any:
        async with self._slots:
            reference = self._handle.generate.remote(*args, **kwargs)
            try:
                return await reference
            except asyncio.CancelledError:
                ray.cancel(reference)
                raise
