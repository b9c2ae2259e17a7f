"""The tool server: model-written code, passage search and arithmetic over HTTP.

Speaks the protocols that users already run: SandboxFusion's and Search-R1's. A wrong request is 400
with one message; a tool without its means (no corpus, no isolation) is 503, never a made-up answer;
a tool with more work than it can line up is 429 with `Retry-After`.
"""

from agent_loop.tools.server.app import app_runner, create_app, serve
from agent_loop.tools.server.settings import ServerSettings

__all__ = ["ServerSettings", "app_runner", "create_app", "serve"]
