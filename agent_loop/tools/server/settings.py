"""How the tool server runs."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from agent_loop.tools.sandbox import SandboxKind


class ServerSettings(BaseModel):
    """Address, tools and limits of one tool server."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = Field(default=8100, ge=0, le=65535)
    """0 takes a free port."""

    corpus_path: Path | None = None
    """Passages for /retrieve, JSON lines of `{"id", "contents"}`; None: /retrieve is 503."""

    sandbox: SandboxKind = "auto"
    """auto: the strongest that works here."""

    sandbox_workers: int = Field(default=2, ge=1)
    """Programs run at once; further ones wait."""

    queue_length: int = Field(default=20_000, ge=0)
    """Requests of one tool that may wait; who comes then gets 429 with `Retry-After`."""

    limiter_path: Path | None = None
    """State file of the rate limiter of those who call; its numbers join /metrics."""
