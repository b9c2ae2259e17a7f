"""Settings of a gateway agent: an agent program that was not written for this project.

    agent_loops:
      gateway: {command: "python agent.py"}         # a program, in the sandbox
      gateway: {function: agents/solve.py:solve}    # or an async function in the worker

They stand beside `_target_` in an entry of agent loops. Pure.
"""

import os
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from config.section import Section

GATEWAY_LOOP = "agent_loop.gateway_agent_loop.GatewayAgentLoop"
"""`_target_` of gateway agents."""

MAX_REQUESTS = 256
"""Of a session, unless its agent says otherwise."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class GatewayOptions(Section):
    """What runs for each session, and what it may do."""

    command: str | None = None
    """A program with its arguments. It gets `OPENAI_BASE_URL`, `OPENAI_API_KEY`,
    `ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY`, `MIXED_MCP_URL` and `MIXED_REWARD_URL`, and the row
    as JSON on stdin and in the file `MIXED_ROW_FILE`. Its answer is the last line that it
    prints."""

    function: str | None = None
    """`path/to/file.py:name`, an async function that is called with an
    `agent_loop.gateway.server.Address` and the row. It returns the answer as a text, the reward as
    a number, or None. It runs in the event loop of the worker: put what blocks into a thread."""

    where: Literal["sandbox", "host"] = "sandbox"
    """Of a command. sandbox: it reads the system, its folder and `readable`, writes a small
    folder of its own, and its network is one port, the gateway's. host: as it is."""

    cwd: str | None = None
    """Folder of a command; None: an empty one of the session. Then words of the command that name
    files may be relative to the folder in which the run was started, which the sandbox shows for
    such a word."""

    env: list[Name] = []
    """Names of further environment variables of the worker that a command gets."""

    readable: list[str] = []
    """Further folders that a command in the sandbox may read."""

    hidden: list[str] = []
    """Files and folders that a command in the sandbox never sees, also below a folder that it may
    read. A start adds the data, the runs and the secrets that it knows of."""

    memory_mb: int = Field(default=2048, ge=16)
    """MiB of private memory of each process of a command in the sandbox."""

    processes: int = Field(default=128, ge=1)
    """Processes and threads of a command in the sandbox."""

    answer_file: str | None = None
    """A file that a command writes its answer to, in its session's folder (`MIXED_SESSION_DIR`);
    None: the last line of its stdout is the answer."""

    max_requests: int = Field(default=MAX_REQUESTS, ge=1)
    """Requests of one session that the model may answer, of all its conversations together. Each
    conversation has `max_turns` of the source."""

    let_agent_set: list[Literal["temperature"]] = []
    """Sampling parameters that a request may change. The others are the source's, because
    log-probs must be those of what was sampled."""

    structured: Literal["prompt", "guided"] = "prompt"
    """How a reply gets the JSON schema that a request demands. prompt: the policy is told. guided:
    vLLM's guided decoding forces it too, in requests without tools; only in `verl-mixed evaluate`,
    because trained tokens must be sampled from the policy's own distribution."""

    @model_validator(mode="after")
    def _one_agent(self) -> Self:
        if (self.command is None) == (self.function is None):
            raise ValueError("name one of command and function: what runs for each session")
        if self.function is not None and ":" not in self.function:
            raise ValueError(f"function={self.function!r}: write it as path/to/file.py:name")
        of_both = {"function", "max_requests", "let_agent_set", "structured"}
        fields = type(self).model_fields.items()
        changed = {name for name, field in fields if getattr(self, name) != field.default}
        given = sorted(changed - of_both)
        if self.function is not None and given:
            raise ValueError(f"{', '.join(given)}: only a command has it; leave it out")
        return self


def with_absolute_paths(entry: Mapping[str, Any], hidden: Iterable[str] = ()) -> dict[str, Any]:
    """The settings of a gateway agent that have paths, with absolute ones, because workers run in
    another folder. What is `hidden` from a command is added to its own."""
    made: dict[str, Any] = {}
    function, command = entry.get("function"), entry.get("command")
    if isinstance(function, str) and ":" in function:
        path, _, name = function.rpartition(":")
        made["function"] = f"{Path(path).expanduser().absolute()}:{name}"
    readable = _absolute(entry.get("readable"))
    if isinstance(command, str):
        if entry.get("cwd"):
            made["cwd"] = _absolute([entry["cwd"]])[0]
        else:
            made["command"], folders = _from_start_folder(command)
            readable += [folder for folder in folders if folder not in readable]
        made["hidden"] = list(dict.fromkeys([*_absolute(entry.get("hidden")), *hidden]))
    if readable:
        made["readable"] = readable
    return made


def _absolute(paths: Any) -> list[str]:
    given = paths if isinstance(paths, list | tuple) else []
    return [str(Path(str(path)).expanduser().absolute()) for path in given]


def _from_start_folder(command: str) -> tuple[str, list[str]]:
    """A command in which words that name files are absolute, and the folders to show for them.

    The start folder is shown whole if a file below it is named, because a script reads what is
    beside it: modules, prompts, `node_modules`.
    """
    try:
        words = shlex.split(command)
    except ValueError:  # `AgentProgram` says so
        return command, []
    folders = list[str]()
    for number, word in enumerate(words):
        option, is_option, name = word.partition("=") if word.startswith("-") else ("", "", word)
        is_named = os.path.exists(name) if "/" in name else number > 0 and os.path.isfile(name)
        if not is_named:
            continue
        path = os.path.abspath(name)
        words[number] = f"{option}{is_option}{path}"
        if Path(path).is_relative_to(os.getcwd()):
            folders.append(os.getcwd())
        elif not os.path.isabs(name):
            folders.append(os.path.dirname(path))
    return shlex.join(words), list(dict.fromkeys(folders))
