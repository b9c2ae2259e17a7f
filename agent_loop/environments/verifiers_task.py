"""Tasks of a taskset of verifiers (Brown 2025), as `use: verifiers`.

    environment:
      use: verifiers
      python: /opt/verifiers/bin/python     # with verifiers and aiohttp; its pins differ from ours
      options: {taskset: textarena, config: {game: Hangman-v0}}

A row's `extras.seed` is the number of the task in its taskset. verifiers drives the agent itself:
its environment asks a model over an OpenAI-compatible endpoint. Here that endpoint is
`agent_loop.environments.policy_endpoint`: the environment's first request is what `reset` returns,
and each later one answers a step. The reward is verifiers' own, and comes with the last step.

Source: verifiers 0.4.0, v1/env.py (`run_slot`, `serving`) and v1/trace.py (`reward`).
"""

# The package verifiers is in an interpreter of its own.
# pyright: reportMissingImports=false

import asyncio
import os
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

from agent_loop.environments.policy_endpoint import PolicyEndpoint

KEY_VARIABLE = "MIXED_POLICY_API_KEY"
"""Environment variable of the session's process with the key of its endpoint."""

DEFAULT_HARNESS = "bash"


def _check_package() -> None:
    """Refuse an interpreter without the package.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import verifiers.v1.env  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"use: verifiers needs verifiers 0.4 ({error}); make an environment of its own for it, "
            "as `python3.11 -m venv /opt/verifiers && /opt/verifiers/bin/pip install "
            "verifiers==0.4.0 aiohttp`, and set `python` of the environment"
        ) from error


class VerifiersTask:
    """A task.

    Args:
        taskset: id of an installed taskset, as `textarena`.
        config: its settings.
        env: settings of its environment, as `{player: {max_turns: 8}}`.
    """

    def __init__(
        self,
        taskset: str,
        config: Mapping[str, Any] | None = None,
        env: Mapping[str, Any] | None = None,
    ) -> None:
        _check_package()
        refuse(taskset, config or {})
        self._taskset = taskset
        self._config = env_config(taskset, config or {}, env or {})
        self._endpoint = PolicyEndpoint()
        self._episode: asyncio.Task[Any] | None = None
        self.tools: list[dict[str, Any]] = []

    async def reset(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        """Begin the episode of the task whose number is the row's seed."""
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.configs.client import EvalClientConfig
        from verifiers.v1.utils.loaders import load_environment

        environment = load_environment(self._config)
        task = task_of(environment.taskset, self._taskset, int(row["extras"].get("seed", 0)))
        await self._endpoint.start()
        os.environ[KEY_VARIABLE] = self._endpoint.key
        client = EvalClientConfig(base_url=self._endpoint.url, api_key_var=KEY_VARIABLE)
        context = ModelContext(model="policy", client=client)
        self._episode = asyncio.ensure_future(_play(environment, task, context))
        asked = await self._endpoint.asked(self._episode)
        if asked is None:
            _verdict(await self._episode)  # says why, if it failed
            raise RuntimeError(f"taskset={self._taskset}: the episode ended before its first turn")
        self.tools = self._endpoint.tools
        return asked

    async def step(self, action: Any) -> dict[str, Any]:
        """Answer the environment's request, and wait for the next one or for the end."""
        assert self._episode is not None, "step before reset"
        self._endpoint.reply(action)
        asked = await self._endpoint.asked(self._episode)
        if asked is not None:
            said = "\n".join(each["content"] for each in asked)
            return {"observation": said, "reward": 0.0, "done": False}
        reward, info = _verdict(await self._episode)
        return {"observation": "", "reward": reward, "done": True, "info": info}

    async def close(self) -> None:
        """End the episode, with the programs that it started."""
        if self._episode is not None:
            self._episode.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self._episode
        await self._endpoint.close()


async def _play(environment: Any, task: Any, context: Any) -> Any:
    async with environment.serving():
        [slot] = environment.slots(task)
        return await environment.run_slot(slot, context)


def _verdict(episode: Any) -> tuple[float, dict[str, float]]:
    """The reward, and its parts and metrics.

    Raises:
        RuntimeError: the episode failed, or a time limit of verifiers cut it. verifiers scores what
            was cut, but how long an answer takes says nothing about its quality.
    """
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        said = "; ".join(f"{error.type}: {error.message}" for error in errors) or "it says no more"
        raise RuntimeError(f"the episode failed: {said[:1500]}")
    if cut := [each.stop_condition for each in episode.traces if each.is_timeout]:
        raise RuntimeError(
            f"a time limit of verifiers cut the episode ({', '.join(map(str, cut))}): its reward "
            "would depend on the load; raise the limit that the taskset gives its tasks "
            "(TaskData.timeout), and limit the time by `timeout` of the environment"
        )
    [trace] = episode.traces
    parts = {name: each.value for name, each in trace.rewards.items() if each is not None}
    return trace.reward, {**trace.metrics, **parts}


def refuse(taskset: str, config: Mapping[str, Any]) -> None:
    """Refuse tasksets of verifiers that need what is not here.

    Raises:
        ValueError: the taskset needs containers, or a server that was not named.
    """
    why = ""
    if taskset == "harbor":
        why = "its tasks run in containers of Docker, or of a service with an account"
    elif taskset == "nemo_gym" and not (config.get("task") or {}).get("resources_url"):
        why = "it downloads NeMo Gym to start a server; set config.task.resources_url to a server"
    elif taskset == "openenv" and not config.get("base_url"):
        why = (
            "it downloads its environment to start a server; set config.base_url to a server, or "
            "take `use: openenv`"
        )
    if why:
        raise ValueError(f"taskset={taskset!r}: {why}")


def env_config(taskset: str, config: Mapping[str, Any], env: Mapping[str, Any]) -> Any:
    """The settings of an environment whose one agent is the policy, in this process.

    Raises:
        ValueError: there is no such taskset, its settings are wrong, it has several agents without
            a model, it needs containers, or it has time limits of its own.
    """
    from verifiers.v1.configs.agent import AgentConfig, agent_config_fields
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type

    from agent_loop.environments.verifiers_harness import register

    limited = {"env.timeout": env, **{f"env.{name}.timeout": role for name, role in env.items()}}
    if timed := [name for name, settings in limited.items() if _is_timed(settings)]:
        raise ValueError(
            f"taskset={taskset!r}: {timed[0]} cuts episodes that wait for the engine; leave it "
            "out, and set `timeout` of the environment"
        )
    try:
        kind = env_config_type(taskset, env.get("id") or "")
        keeps_harness = default_harness_id(taskset) != DEFAULT_HARNESS
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f"taskset={taskset!r}: {error}") from error
    given: dict[str, Any] = {**env, "taskset": {**config, "id": taskset}}
    for name, field in kind.model_fields.items():
        default = field.default
        if not isinstance(default, AgentConfig):
            continue
        role = given[name] = dict(given.get(name) or {})
        if "runtime" not in default.model_fields_set:
            role.setdefault("runtime", {"type": "subprocess"})
        if default.harness is None and not keeps_harness:
            role.setdefault("harness", {"id": register()})
    made = kind.model_validate(given)
    roles = agent_config_fields(made)
    if elsewhere := {n: r.runtime.type for n, r in roles.items() if r.runtime.type != "subprocess"}:
        raise ValueError(
            f"taskset={taskset!r}: runtime={elsewhere} needs containers or an account; set "
            "env.<role>.runtime.type to subprocess, or take another taskset"
        )
    if len(players := [name for name, role in roles.items() if role.client is None]) != 1:
        raise ValueError(
            f"taskset={taskset!r}: the policy plays one role, and these have no model of their "
            f"own: {', '.join(players) or 'none'}; set env.<role>.client and env.<role>.model of "
            "the others"
        )
    return made


def _is_timed(settings: Any) -> bool:
    """Whether settings have a time limit."""
    limits = settings.get("timeout") if isinstance(settings, Mapping) else None
    return isinstance(limits, Mapping) and any(limit is not None for limit in limits.values())


def task_of(tasks: Any, taskset: str, number: int) -> Any:
    """The task with this number.

    Raises:
        ValueError: there is none.
    """
    if number < 0 or (task := next(islice(iter(tasks), number, None), None)) is None:
        raise ValueError(
            f"seed={number}: taskset={taskset!r} has no task with this number; correct the rows' "
            "extras.seed"
        )
    return task
