"""How the tool server runs."""

import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from agent_loop.tools.sandbox import SandboxKind
from agent_loop.tools.search.upstream import Kind


class ServerSettings(BaseModel):
    """Address, tools and limits of one tool server."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = Field(default=8100, ge=0, le=65535)
    """0 takes a free port."""

    corpus_path: Path | None = None
    """Passages for /retrieve: an index folder of `verl-mixed prepare corpus`, or JSON lines of
    `{"id", "contents"}`, indexed at the start unless `<file>.index` holds them. None: see below."""

    search_upstream: str | None = None
    """URL of the search engine that answers instead: Search-R1's server, or Serper with its key in
    SERPER_API_KEY. With neither, /retrieve is 503."""

    search_upstream_kind: Kind = "auto"
    """auto: a URL that ends in /search is Serper's."""

    search_timeout_s: float = Field(default=30.0, gt=0)
    """For one request to that engine; longer is 504."""

    search_connections: int = Field(default=32, ge=1)
    """Requests passed on to it at once; further ones wait."""

    search_workers: int = Field(default=2, ge=1)
    """Threads that search an own index; further requests wait."""

    sandbox: SandboxKind = "auto"
    """auto: the strongest that works here."""

    sandbox_workers: int = Field(default=2, ge=1)
    """Programs run at once; further ones wait."""

    sandbox_packages: tuple[str, ...] = ()
    """Distributions that programs may import, as numpy and sympy; loaded before programs start."""

    max_sessions: int = Field(default=64, ge=0)
    """Persistent interpreters kept; the one unused for longest makes room for the next."""

    session_idle_s: float = Field(default=900.0, gt=0)
    """A session that is not used for so long is ended."""

    queue_length: int = Field(default=20_000, ge=0)
    """Requests of one tool that may wait; who comes then gets 429 with `Retry-After`."""

    algebra_workers: int = Field(default=2, ge=1)
    """Processes for what /calculate cannot do in its own; about 70 MB each, started when needed."""

    algebra_s: float = Field(default=5.0, gt=0, le=600)
    """Time limit of one such expression, seconds."""

    algebra_memory_mb: int = Field(default=1024, ge=256)
    """Address space of such a process."""

    token: SecretStr | None = None
    """What callers must send as `Authorization: Bearer`; None: everybody may come in."""

    drain_s: float = Field(default=10.0, ge=0)
    """How long requests under way may take to end after SIGTERM; then they are cancelled."""

    max_body_mb: int = Field(default=64, ge=1)
    """A larger request is 413."""

    limiter_path: Path | None = None
    """State file of the rate limiter of those who call; its numbers join /metrics."""

    @model_validator(mode="after")
    def _one_search_engine(self) -> "ServerSettings":
        if self.corpus_path is not None and self.search_upstream is not None:
            raise ValueError("corpus_path and search_upstream are two engines: give one of them")
        return self

    @field_validator("token")
    @classmethod
    def _token_fits_a_header(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None and not re.fullmatch(r"[\x21-\x7e]+", token.get_secret_value()):
            raise ValueError("a token is one or more visible ASCII characters without spaces")
        return token
