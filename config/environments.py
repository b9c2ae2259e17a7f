"""`mixed.sources.<name>.environment`: the environment in which the model of a source acts.

    environment: envs/maze.py:Maze                # a Python class
    environment: http://10.0.0.7:9000             # an environment server
    environment: {use: textarena, options: {game: Mastermind-v0}}
    environment: {use: envs/maze.py:Maze, options: {size: 5}, reward: last, timeout: 10}

Pure; the environments themselves are in `agent_loop.environments`.
"""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from config.removed import VERIFIERS
from config.section import Section
from config.tool_entries import RateText, is_url, without_secrets

ENVIRONMENT_LOOP = "agent_loop.environment_agent_loop.EnvironmentAgentLoop"
"""`_target_` of the agent that acts in environments."""

ENVIRONMENT_AGENT = "environment"
"""Its name in config/agent_loops.yaml, and the agent of a source with an `environment`."""

ADAPTERS = {
    "openenv": "agent_loop.environments.openenv_client:OpenEnv",
    "textarena": "agent_loop.environments.textarena_game:TextArenaGame",
}
"""Environments of other projects: name in `use` -> module and class."""

_LIVE_IN_LOOP = frozenset({"openenv"})
"""Adapters that are clients of a server: they have no state that a process would protect."""


class EnvironmentEntry(Section):
    """An environment, and the limits of its calls."""

    use: str
    """`path/to/file.py:Class`; or an http(s) URL of a server of environments (docs/environments.md
    has its protocol); or `textarena` or `openenv`."""

    options: dict[str, Any] = {}
    """Arguments of the class. A server gets them with each reset."""

    reward: Literal["sum", "last"] = "sum"
    """The reward of a trajectory: the sum of its steps' rewards, or that of its last step."""

    where: Literal["process", "loop"] | None = None
    """Of a class. process: each trajectory has a process of its own, which is ended if it hangs.
    loop: in the agent loop's process; methods that are not async run in threads, which cannot be
    ended. None: process; loop for `openenv`, which is a client of a server."""

    python: str | None = None
    """Of a class in a process: another Python interpreter, as `/opt/games/bin/python`, whose
    packages may differ from those of the run. It needs none of ours. None: the run's."""

    env: list[str] = []
    """Of a class in a process: names of environment variables that it gets, beside PATH, HOME, USER
    and the like."""

    token: str | None = None
    """Of a URL: name of the environment variable with its bearer token."""

    rate: RateText | None = None
    """Most calls (resets and steps), as `2/s`, `30/min` or `100/h`, over all processes of the run;
    calls pass the run's own limit too. None: no limit of its own."""

    slots: int | None = Field(default=None, ge=1)
    """Most calls at once, over all processes of a node. None: no limit of its own."""

    timeout: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Seconds for one reset or step; None takes `tool_config.timeout`."""

    @model_validator(mode="after")
    def _belongs_together(self) -> Self:
        if self.use == "verifiers":
            raise ValueError(f"use='verifiers': {VERIFIERS}")
        if not self.is_url and self.class_name is None:
            raise ValueError(
                f"use={self.use!r} is no path/to/file.py:Class, no http(s) URL and none of "
                f"{', '.join(ADAPTERS)}"
            )
        in_process = not self.is_url and self.lives_in == "process"
        wrong = {
            "where": self.is_url,
            "python": not in_process,
            "env": not in_process,
            "token": not self.is_url,
        }
        if unread := [n for n, is_wrong in wrong.items() if is_wrong and getattr(self, n)]:
            raise ValueError(
                f"{', '.join(unread)}: not read for use={without_secrets(self.use)!r} "
                f"{'' if self.is_url else f'with where={self.lives_in} '}; leave it out"
            )
        return self

    @property
    def is_url(self) -> bool:
        """Whether a server that the user started answers."""
        return is_url(self.use)

    @property
    def class_name(self) -> str | None:
        """`path/to/file.py:Class` or `module:Class`; None for a URL."""
        if self.use in ADAPTERS:
            return ADAPTERS[self.use]
        path, colon, name = self.use.rpartition(":")
        return self.use if colon and path.endswith(".py") and name.isidentifier() else None

    @property
    def lives_in(self) -> Literal["process", "loop"]:
        """Where a class runs."""
        return self.where or ("loop" if self.use in _LIVE_IN_LOOP else "process")

    @property
    def name(self) -> str:
        """The environment in metrics and faults: an adapter's name, or the name of the class."""
        if self.is_url:
            return "environment"
        return self.use if self.use in ADAPTERS else self.use.rpartition(":")[2]

    @property
    def target(self) -> str:
        """What the entry names; entries with one target share its rate and slots."""
        return f"{self.use} {json.dumps(self.options, sort_keys=True, default=str)}"

    # `agent_loop.calls.own_limits.OwnLimits`: a step is never repeated and never shared.
    @property
    def retry(self) -> int | None:
        return None

    @property
    def cache(self) -> bool | None:
        return None


def as_environment(value: Any) -> Any:
    """A text is short for `{use: text}`."""
    return {"use": value} if isinstance(value, str) else value


def with_absolute_paths(value: Any) -> Any:
    """An entry whose files have absolute paths, because workers run in another folder. What is no
    entry is left as it is."""
    if not isinstance(given := as_environment(value), dict):
        return value
    made: dict[str, Any] = {}
    path, colon, name = str(given.get("use", "")).rpartition(":")
    if colon and path.endswith(".py"):
        made["use"] = f"{Path(path).expanduser().absolute()}:{name}"
    if isinstance(python := given.get("python"), str) and "/" in python:
        made["python"] = str(Path(python).expanduser().absolute())
    return {**given, **made}
