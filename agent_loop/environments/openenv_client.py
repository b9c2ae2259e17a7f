"""Environments of an OpenEnv server, as `use: openenv`, over its WebSocket.

    environment: {use: openenv, options: {url: http://127.0.0.1:8000, action: {message: "{text}"}}}

Each trajectory has a connection of its own, which is its session on the server; OpenEnv's HTTP
calls keep no state. The server must be running: images and Spaces, which OpenEnv's client can
start too, are not started here, because they need Docker or the network.

Source: openenv 0.10.0 and openenv-core 0.3.0, core/env_client.py and core/env_server/types.py.
"""

# The package openenv is installed by hand.
# pyright: reportMissingImports=false

import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Awaitable, Mapping
from functools import cache
from typing import Any, TypeVar

from agent_loop.environments.episode import MAX_OBSERVATION_BYTES, InvalidAction, Step
from config.tool_entries import is_url
from tool_server.wire.protocol import Again, ToolUnavailable

TEXT = "{text}"
"""In a template of an action: what the model wrote."""

MAX_MESSAGE_MIB = 8.0 * MAX_OBSERVATION_BYTES / (1 << 20)
"""Size of a message of the server; JSON writes a character in six bytes at most."""

FOREVER_S = 365 * 24 * 3600.0
"""Time limit of the client, which cannot be left out; the caller of a step has one of its own."""

_CODE = re.compile(r"\(code: (?:WSErrorCode\.)?(\w+)\)$")

T = TypeVar("T")

_accepted: set[tuple[str, str]] = set()
"""Addresses and templates of which the server took an action in this process."""


@cache
def client_class() -> Any:
    """OpenEnv's `GenericEnvClient`, without the packages of its server. It never connects again by
    itself: that would be another session, and its steps those of an environment that was never
    reset.

    `openenv/core/__init__.py` imports the server, with fastmcp and gradio; fastmcp needs another
    version of the package mcp than this project. So the modules of the client are imported beside
    an `openenv.core` that has not run.

    Raises:
        ImportError: OpenEnv's client is not installed.
    """
    name = "openenv.core"
    is_new = name not in sys.modules
    try:
        if is_new and (spec := importlib.util.find_spec(name)):
            sys.modules[name] = importlib.util.module_from_spec(spec)
        generic = importlib.import_module(f"{name}.generic_client")
    except ImportError as error:
        raise ImportError(
            f"use: openenv needs OpenEnv's client ({error}); install it with `pip install "
            "'websockets>=15.0.1' && pip install --no-deps openenv==0.10.0`"
        ) from error
    finally:
        if is_new:
            sys.modules.pop(name, None)

    class OneConnection(generic.GenericEnvClient):
        async def _ensure_connected(self) -> None:
            if self._ws is None:
                raise ConnectionError("the connection to the server is closed")

    return OneConnection


_check_package = client_class


class OpenEnv:
    """A session of an environment.

    Args:
        url: the server's address, as `http://127.0.0.1:8000`.
        action: fields of an action; the value `{text}` is what the model wrote. `json`: the model
            writes the action as a JSON object. `mcp`: the environment has tools, and the model
            calls them.
        observation: field of the observation that the model reads; None: all fields, as JSON.
        reset: arguments of the environment's reset. The row's `extras.seed` is another one.
    """

    def __init__(
        self,
        url: str,
        action: Mapping[str, Any] | str,
        observation: str | None = None,
        reset: Mapping[str, Any] | None = None,
    ) -> None:
        if not (is_url(url) or url.startswith(("ws://", "wss://"))):
            raise ValueError(
                f"url={url!r}: want the http(s) address of an OpenEnv server that is running; "
                "images and Spaces are not started here"
            )
        if isinstance(action, str) and action not in ("json", "mcp"):
            raise ValueError(
                f"action={action!r}: want the fields of an action, as {{message: '{TEXT}'}}, or "
                "json, or mcp"
            )
        if isinstance(action, Mapping) and TEXT not in action.values():
            raise ValueError(
                f"action={dict(action)!r}: no field has the value {TEXT!r}, so what the model "
                "writes would be lost; give it to one"
            )
        self._template = (url, json.dumps(action, sort_keys=True))
        self._action, self._observation, self._reset = action, observation, dict(reset or {})
        self._client: Any = client_class()(
            base_url=url,
            connect_timeout_s=FOREVER_S,
            message_timeout_s=FOREVER_S,
            max_message_size_mb=MAX_MESSAGE_MIB,
            mode="simulation",
        )
        self.tools: list[dict[str, Any]] = []
        self._is_rewarded = False

    async def reset(self, row: Mapping[str, Any]) -> str:
        """Connect, and begin the episode of the row's seed."""
        given = dict(self._reset)
        if "seed" in row["extras"]:
            given["seed"] = row["extras"]["seed"]
        try:
            await self._client.connect()
        except ConnectionError as error:
            raise ToolUnavailable(
                str(error), again=Again.UNTIL_DEADLINE, executed=False, is_away=True
            ) from error
        result = await self._answer(self._client.reset(**given), action=None)
        if result.done:
            raise RuntimeError("the episode was over after its reset")
        if self._action == "mcp":
            listed = await self._answer(self._client.step({"type": "list_tools"}), action=None)
            self.tools = [_schema(tool) for tool in listed.observation["tools"]]
        return self._shown(result.observation)

    async def step(self, action: Any) -> Step:
        """Send the text or the tool call of the model as an action."""
        payload = self._payload(action)
        result = await self._answer(self._client.step(payload), action=payload)
        _accepted.add(self._template)
        # OpenEnv's None is a step without a reward. An episode that ends without any is a fault.
        reward: Any = result.reward
        self._is_rewarded |= reward is not None
        if reward is None and (self._is_rewarded or not result.done):
            reward = 0.0
        return Step(
            observation=self._shown(result.observation),
            reward=reward,  # pyright: ignore[reportArgumentType] `step_of` refuses None
            done=bool(result.done),
        )

    async def close(self) -> None:
        """End the session."""
        await self._client.close()

    def _payload(self, action: Any) -> dict[str, Any]:
        if isinstance(action, Mapping):
            named = {"tool_name": action["name"], "arguments": action["arguments"]}
            return {"type": "call_tool", **named}
        if self._action == "mcp":
            raise InvalidAction("this is no tool call; call one of the tools")
        if self._action == "json":
            try:
                given = json.loads(action)
            except (ValueError, RecursionError) as error:
                raise InvalidAction(f"this is no JSON ({error}); write a JSON object") from error
            if not isinstance(given, dict):
                raise InvalidAction("this is no JSON object; write one")
            return given
        assert isinstance(self._action, Mapping)
        return {name: action if value == TEXT else value for name, value in self._action.items()}

    async def _answer(self, work: Awaitable[T], action: dict[str, Any] | None) -> T:
        """The server's answer. Its socket is closed if the caller gives up, because the answer
        could still come and would be taken for that of the next step."""
        socket = self._client._ws
        try:
            return await work
        except RuntimeError as error:  # what the server says
            found = _CODE.search(str(error))
            code = found[1] if found else ""
            if code == "VALIDATION_ERROR" and action is not None:
                if isinstance(self._action, Mapping) and self._template not in _accepted:
                    raise RuntimeError(
                        f"action={json.dumps(self._action):.300}: the server has taken no action "
                        f"of this form yet, and not {json.dumps(action):.300} ({error!s:.500}); "
                        "correct `action` of the environment to the fields of the server's action"
                    ) from error
                raise InvalidAction(
                    f"the environment does not take the action {json.dumps(action):.500}"
                ) from error
            if code == "CAPACITY_REACHED":
                self._abort(socket)
                raise ToolUnavailable(
                    str(error), again=Again.UNTIL_DEADLINE, executed=False, is_overload=True
                ) from error
            raise
        except BaseException:
            self._abort(socket)
            raise

    def _abort(self, socket: Any) -> None:
        self._client._ws = None
        if socket is not None:
            socket.transport.abort()

    def _shown(self, observation: Mapping[str, Any]) -> str:
        if self._observation is None:
            return json.dumps(observation, ensure_ascii=False)
        if self._observation not in observation:
            raise RuntimeError(
                f"observation={self._observation!r}: the environment's observation has "
                f"{', '.join(observation)}; correct `observation` of the environment"
            )
        value = observation[self._observation]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool of an OpenEnv environment as a JSON schema of a function."""
    return {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
    }
