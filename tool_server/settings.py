"""Settings of the tool server: address, tools and limits.

`verl-mixed serve-tools` makes its options, defaults and help texts from these fields.
"""

import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from tool_server.sandbox import SandboxKind


class ServerSettings(BaseModel):
    """Address, tools and limits of one tool server."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    host: str = "127.0.0.1"
    """address to listen on"""

    port: int = Field(default=8100, ge=0, le=65535)
    """port to listen on; 0 takes a free port"""

    corpus_path: Path | None = None
    """passages for /retrieve: an index folder of `verl-mixed prepare corpus`, or a file of JSON
    lines {"id", "contents"}, which is indexed at the start unless `<file>.index` holds its index"""

    search_upstream: str | None = None
    """URL of a search engine that answers /retrieve: a Search-R1 server, or
    https://google.serper.dev/search with its key in SERPER_API_KEY; without this and a corpus, a
    server with that key asks Serper, and without the key /retrieve answers 503"""

    sandbox: SandboxKind = "auto"
    """isolation of programs; auto takes the stronger one that works here"""

    sandbox_workers: int = Field(default=2, ge=1)
    """programs and algebra expressions that run at once; further ones wait"""

    sandbox_packages: tuple[str, ...] = ()
    """installed packages that programs may import, for example numpy sympy; they are loaded before
    programs start"""

    max_sessions: int = Field(default=64, ge=0)
    """persistent interpreters that are kept; a new one ends the one unused for the longest time, or
    is refused with 429 if all were used in the last 5 minutes"""

    token: SecretStr | None = None
    """token that callers must send as `Authorization: Bearer`; without one, all are served"""

    limiter_path: Path | None = None
    """state file of the callers' rate limiter, whose numbers are added to /metrics"""

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


class OwnServerSettings(ServerSettings):
    """`mixed.tool_server`: a tool server that a run starts for itself."""

    restarts: int = Field(default=3, ge=0)
    """how often a start of the run may start a tool server again, at the same address, after the
    server has ended; after that the run ends"""

    per_node: bool = False
    """whether a run that joins a Ray cluster starts a tool server on each node, not only on the
    head; calls go to the least loaded one, and the rate limit holds for all of them together"""
