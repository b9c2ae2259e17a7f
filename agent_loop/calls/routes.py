"""A route of tool calls: which program answers them, and the limits that they have of their own.

`ToolClient` sends every call on a route. Its default route goes to the tool servers over HTTP. The
other tools of a run (Python functions, MCP servers, verl's tools, a judge) have routes of their
own, so that their calls pass the same limiter, slots, deadline, retries and cache.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from agent_loop.calls.servers import Server, Servers
from tool_server.wire.protocol import ToolCall, ToolResult

if TYPE_CHECKING:
    from rate_limit.slots import FileSlots


class Limiter(Protocol):
    """The methods of a rate limiter that a client calls."""

    async def acquire_async(
        self, n: int = 1, timeout_s: float | None = None, source: str = ""
    ) -> float: ...

    async def penalise_async(self, retry_after_s: float = 0.0) -> None: ...


Post = Callable[[ToolCall, Server], Awaitable[ToolResult]]
"""One attempt of a call. It raises `ToolRejected` for a mistake of the model, and `ToolUnavailable`
for a fault, which says whether another attempt may succeed. It is cancelled at the deadline of the
call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How calls of a tool are answered."""

    servers: Servers
    post: Post
    timeout_s: float
    """Seconds for one call, with its waits, attempts and pauses."""

    max_retries: int
    """Attempts after the first one, where the tool answers that it failed (`Again.COUNTED`)."""

    limiter: Limiter | None = None
    """A rate limit of the tool's own; calls pass the run's limit too."""

    slots: "FileSlots | None" = None
    """Most calls of the tool at once; calls need a slot of the run too."""

    caches: bool | None = None
    """Whether equal calls may share a result. None: searches, calculations and deterministic
    programs may."""

    key: str = ""
    """Tells the route's calls apart from equal calls of another route, in the cache. It changes
    when the answers may change. Empty: the tool servers answer, and say their fingerprint."""

    advice: str = "is the server up, and the rate limit high enough?"
    """What to look at if no answer comes in time."""

    @property
    def is_http(self) -> bool:
        """Whether the tool servers answer; their overload slows down all callers."""
        return not self.key

    @property
    def names(self) -> str:
        return ", ".join(server.name for server in self.servers.all)

    def origin_of(self, tool: str) -> str | None:
        """`ToolResult.origin` of the last answer, for the cache; None if there was none."""
        return self.servers.origins.get(tool) if self.is_http else ""

    def limited(self, **changes: Any) -> "Route":
        """The route with other limits; a value of None keeps this route's."""
        given = {name: value for name, value in changes.items() if value is not None}
        return replace(self, **given)


def local_route(
    name: str,
    post: Post,
    *,
    key: str,
    timeout_s: float,
    clock: Callable[[], float],
    max_retries: int = 0,
    caches: bool = False,
    advice: str = "",
) -> Route:
    """The route of a tool that is not behind the tool servers.

    Args:
        name: of the tool's server in messages.
        key: see `Route.key`.
    """
    return Route(
        servers=Servers([name], timeout_s, clock),
        post=post,
        timeout_s=timeout_s,
        max_retries=max_retries,
        caches=caches,
        key=key,
        advice=advice or "raise its timeout, or look into the log of the tool",
    )
