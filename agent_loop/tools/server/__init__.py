"""The tool server: runs model-written code, searches passages and calculates, over HTTP.

It speaks the protocols of SandboxFusion and Search-R1. A wrong request is answered with 400 and one
message. A tool that cannot work (no corpus, no isolation) answers 503. A tool whose queue is full
answers 429 with `Retry-After`.
"""

from typing import TYPE_CHECKING, Any

from agent_loop.tools.server.settings import ServerSettings

if TYPE_CHECKING:
    from agent_loop.tools.server.app import app_runner, create_app, serve

__all__ = ["ServerSettings", "app_runner", "create_app", "serve"]


def __getattr__(name: str) -> Any:
    """Import the application on first use, so that its settings and their help load quickly."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from agent_loop.tools.server import app

    return getattr(app, name)
