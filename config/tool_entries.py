"""`mixed.sources.<name>.tools`: the tools that the model of a source may call.

    tools:
      - run_code                                  # of the tool server: run_code, search, calculate
      - tools/orders.py:look_up                   # a Python function, or a class with state
      - {mcp: "python -m mcp_server_time"}        # all tools of an MCP server
      - {verl: "config/tools.yaml"}               # verl's BaseTool and function tools
      - {tool: search, rate: 2/s, slots: 4}       # each form may have limits of its own

Pure; the tools themselves are in `agent_loop.toolbox`.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator
from typing_extensions import Self

from config.section import Section

OWN_TOOLS = ("run_code", "search", "calculate")
"""Tools of the tool server, by the names that a model calls."""

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*/\s*(s|min|h)")
_SLOWEST, _FASTEST = 1 / (366 * 24 * 60), 6e10
"""Calls a minute that a limiter can keep to."""

_PER_MINUTE = {"s": 60.0, "min": 1.0, "h": 1 / 60}

FORMS = ("tool", "mcp", "verl")


def _checked_rate(rate: str) -> str:
    if per_minute(rate) is None:
        raise ValueError(
            "write a number above 0 and a unit, as 2/s, 30/min or 100/h, of more than one call a "
            "year and below 1e9/s"
        )
    return rate


RateText = Annotated[str, AfterValidator(_checked_rate)]
"""A rate as `2/s`."""


class ToolEntry(Section):
    """One entry of `tools`: a tool, or all tools of an MCP server or of a file of verl's."""

    tool: str | None = None
    """`run_code`, `search` or `calculate`; or `path/to/file.py:name`, a function, or a class with
    `start(row)`, `call(...)` and `close()`, of which each trajectory has an instance."""

    mcp: str | None = None
    """An MCP server: a command, which is started and spoken to over stdio, or an http(s) URL."""

    verl: str | None = None
    """A file of verl's tools: `.yaml` as for `multi_turn.tool_config_path`, `.py` as for
    `function_tool_path`."""

    only: list[str] | None = None
    """Names of the tools that are offered, of those that an MCP server or a file has; None: all."""

    rate: RateText | None = None
    """Most calls, as `2/s`, `30/min` or `100/h`, over all processes of the run and all tools of
    this entry; calls pass the run's own limit too. None: no limit of its own."""

    slots: int | None = Field(default=None, ge=1)
    """Most calls at once, over all processes of a node; with `per: trajectory` also the most
    servers, so the most trajectories. None: no limit of its own; `where: process` then has 2
    processes for each worker."""

    timeout: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Seconds for one call, with waits and attempts; None takes `tool_config.timeout`. With
    `where: sandbox` also the longest run of the program; None: 5 s, the server's default."""

    retry: int | None = Field(default=None, ge=0)
    """Attempts after the first one, also where an attempt may have been executed. None:
    `tool_config.max_retries` for tools of the tool server and for MCP tools whose annotations say
    that they only read or may be repeated; else 0."""

    cache: bool | None = None
    """Whether equal calls may share a result. None: as `tool_config.cache` for tools of the tool
    server, else False."""

    where: Literal["loop", "process", "sandbox"] | None = None
    """Of a Python function. loop (None): in the agent loop's process, a function that is not async
    in a thread. process: in a pool of processes, which are ended at the deadline. sandbox: in the
    tool server's sandbox."""

    per: Literal["worker", "trajectory"] | None = None
    """Of an MCP server over stdio. worker (None): one server for each agent loop worker, which is
    started again if it dies. trajectory: one for each trajectory, for a server with state."""

    env: list[str] = []
    """Of an MCP server over stdio: names of environment variables that it gets, beside PATH, HOME,
    USER and the like."""

    cwd: str | None = None
    """Of an MCP server over stdio: the folder in which it runs. None takes the folder in which the
    run is started."""

    token: str | None = None
    """Of an MCP server over HTTP: name of the environment variable with its bearer token."""

    @model_validator(mode="after")
    def _belongs_together(self) -> Self:
        given = [form for form in FORMS if getattr(self, form) is not None]
        if len(given) != 1:
            raise ValueError(
                f"an entry has one of {', '.join(FORMS)}, not {' and '.join(given) or 'none'}"
            )
        form, target = given[0], getattr(self, given[0])
        is_http, shown = is_url(target), without_secrets(target)
        if form == "tool" and target not in OWN_TOOLS and self.python_name is None:
            raise ValueError(
                f"tool={shown!r} is none of {', '.join(OWN_TOOLS)} and no path/to/file.py:name"
            )
        wrong = {
            "only": form == "tool",
            "where": self.python_name is None,
            "per": form != "mcp" or is_http,
            "env": form != "mcp" or is_http,
            "cwd": form != "mcp" or is_http,
            "token": form != "mcp" or not is_http,
            "cache": self.per == "trajectory" and bool(self.cache),
        }
        if self.only is not None and len(set(self.only)) < len(self.only):
            raise ValueError(f"only={self.only} names a tool twice")
        fields = type(self).model_fields
        set_ones = [name for name in wrong if getattr(self, name) != fields[name].default]
        if unread := [name for name in set_ones if wrong[name]]:
            raise ValueError(f"{', '.join(unread)}: not read for {form}={shown!r}; leave it out")
        return self

    @property
    def python_name(self) -> tuple[str, str] | None:
        """(file, name) of a Python function or class; None for other entries."""
        path, colon, name = (self.tool or "").rpartition(":")
        return (path, name) if colon and path.endswith(".py") else None

    @property
    def target(self) -> str:
        """What the entry names; entries with one target share its rate and slots."""
        return next(value for form in FORMS if (value := getattr(self, form)) is not None)


def differing_limits(owners: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """What is wrong with limits of one tool, or one judge, that differ.

    Args:
        owners: pairs of a place in the config and what has a `target`, a `rate` and `slots` there.
    """
    limits: dict[str, tuple[str, Any]] = {}
    for place, owner in owners:
        own = (owner.rate, owner.slots)
        first, theirs = limits.setdefault(owner.target, (place, own))
        if own != theirs:
            yield (
                f"{place}: rate and slots of {without_secrets(owner.target)!r} differ from those "
                f"in {first}; all sources share one rate and one number of slots: set the same"
            )


def is_url(target: str) -> bool:
    """Whether the MCP server of an entry is reached over HTTP; else it is a command."""
    return target.lower().startswith(("http://", "https://"))


def without_secrets(target: str) -> str:
    """A URL without user, password, query and fragment, which may be secret; other texts as they
    are."""
    if not is_url(target):
        return target
    parts = urlsplit(target)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def per_minute(rate: str) -> float | None:
    """Calls a minute of a rate as `2/s`; None if it is none, or a limiter cannot
    keep to it."""
    found = _RATE.fullmatch(rate.strip())
    calls = float(found[1]) * _PER_MINUTE[found[2]] if found else 0.0
    return calls if _SLOWEST < calls < _FASTEST else None


def as_entry(value: Any) -> Any:
    """A text is short for `{tool: text}`."""
    return {"tool": value} if isinstance(value, str) else value


def with_absolute_path(value: Any) -> Any:
    """An entry of `tools` whose files have absolute paths, because workers run in another folder.
    What is no entry is left as it is."""
    if isinstance(value, str):
        path, colon, name = value.rpartition(":")
        if not colon or not path.endswith(".py"):
            return value
        return f"{Path(path).expanduser().absolute()}:{name}"
    if not isinstance(value, dict):
        return value
    made = {key: with_absolute_path(value[key]) for key in ("tool",) if key in value}
    if isinstance(verl := value.get("verl"), str):
        made["verl"] = str(Path(verl).expanduser().absolute())
    if isinstance(mcp := value.get("mcp"), str) and not is_url(mcp):
        made["cwd"] = str(Path(str(value.get("cwd") or ".")).expanduser().absolute())
    return {**value, **made}
