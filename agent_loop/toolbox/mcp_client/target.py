"""What an entry names as its MCP server: a command with its environment, or a URL with a token."""

import hashlib
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from agent_loop.calls.own_limits import own_name
from config.tool_entries import ToolEntry, is_url, without_secrets

SHOWN_COMMAND = 100
"""Characters of a command in a message."""

SECRET_LENGTH = 8
"""Values of `env` that are as long may be secrets; messages do not show them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTarget:
    """An MCP server that can be started or reached."""

    name: str
    """In messages; without what may be secret in a URL."""

    limits_name: str
    """Of the entry's limits, under which a server that does not start is counted."""

    command: tuple[str, ...] = ()
    """Of a server over stdio."""

    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that a server over stdio gets beside PATH, HOME, USER and the like."""

    cwd: str | None = None
    """Folder of a server over stdio."""

    url: str = ""
    """Of a server over HTTP."""

    token: str = field(default="", repr=False)
    token_variable: str = ""

    @property
    def digest(self) -> str:
        """Changes with everything that the answers may depend on here."""
        parts = self.command, self.cwd, self.url, self.token, sorted(self.env.items())
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    def hidden(self, text: str) -> str:
        """What the server says, without its token and variables, which it may repeat."""
        secrets = [value for value in self.env.values() if len(value) >= SECRET_LENGTH]
        for secret in sorted(filter(None, [self.token, *secrets]), key=len, reverse=True):
            text = text.replace(secret, "***")
        return text


def target_of(entry: ToolEntry, environ: Mapping[str, str] = os.environ) -> ServerTarget:
    """The server of an entry with `mcp`.

    Raises:
        ValueError: a variable that `env` or `token` names is missing, or the command cannot be
            split into words.
    """
    text = entry.mcp or ""
    named = [*entry.env, *([entry.token] if entry.token else [])]
    if missing := [name for name in named if not environ.get(name)]:
        field_name = "token" if entry.token else "env"
        raise ValueError(
            f"mcp={without_secrets(text)!r}: the environment has no {', '.join(missing)}, which "
            f"`{field_name}` names; export it before the run starts"
        )
    is_http = is_url(text)
    try:
        command = () if is_http else tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"mcp={text!r} is no command: {error}; correct its quotes") from error
    if not is_http and not command:
        raise ValueError("mcp='' is no command: write a program and its arguments, or a URL")
    shown = without_secrets(text) if is_http else f"`{text[:SHOWN_COMMAND]}`"
    return ServerTarget(
        name=f"mcp server {shown}",
        limits_name=own_name(entry.target),
        command=command,
        env={name: environ[name] for name in entry.env},
        cwd=entry.cwd,
        url=text if is_http else "",
        token=environ[entry.token] if entry.token else "",
        token_variable=entry.token or "",
    )
