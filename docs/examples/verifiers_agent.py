"""A task of verifiers as an agent program of the gateway; for the interpreter of verifiers 0.4.0.

    verifiers_agent.py TASKSET [SETTINGS OF THE TASKSET] [SETTINGS OF ITS ENVIRONMENT]

Settings are JSON. The row's `extras.seed` is the number of the task in its taskset. verifiers
drives its agent itself, and asks the session's address for each message. Its reward
(`trace.reward`) is posted as the session's, so the source has `reward: loop`. An episode that
failed, or that a time limit of verifiers cut, ends with an error, because its reward would say
nothing about the policy.
"""

import asyncio
import json
import os
import sys
import urllib.request
from itertools import islice
from typing import Any

from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.runtimes.subprocess import SubprocessRuntime
from verifiers.v1.utils.loaders import default_harness_id, env_config_type, load_environment


async def here(self: Any, script: str, env: Any = None, *, activate: bool = True) -> list[str]:
    """The command of a harness's program. Its packages are in this interpreter too, so uv, which
    would download them, is not asked."""
    await self.write("program.py", script.encode())
    return [sys.executable, "program.py"]


SubprocessRuntime.prepare_uv_script = here


def environment_of(taskset: str, config: dict[str, Any], env: dict[str, Any]) -> Any:
    """An environment whose agents run as processes of this machine. `null` is a chat with the
    task's tools; verifiers' default, `bash`, adds a shell."""
    kind = env_config_type(taskset, env.get("id", ""))
    harness = default_harness_id(taskset)
    plain = {
        "runtime": {"type": "subprocess"},
        "harness": {"id": "null" if harness == "bash" else harness},
    }
    roles = {
        name: {**plain, **env.get(name, {})}
        for name, field in kind.model_fields.items()
        if isinstance(field.default, AgentConfig)
    }
    given = {**env, **roles, "taskset": {**config, "id": taskset}}
    return load_environment(kind.model_validate(given))


async def play(environment: Any, number: int) -> float:
    """The reward of the episode of the task with this number."""
    task = next(islice(environment.taskset, number, None))
    client = EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with environment.serving():
        [slot] = environment.slots(task)
        episode = await environment.run_slot(slot, ModelContext(model="policy", client=client))
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok or any(trace.is_timeout for trace in episode.traces):
        sys.exit(f"the episode failed or was cut by a time limit: {errors}")
    [trace] = episode.traces
    return trace.reward


def main(taskset: str, config: str = "{}", env: str = "{}") -> None:
    row = json.load(sys.stdin)
    environment = environment_of(taskset, json.loads(config), json.loads(env))
    reward = asyncio.run(play(environment, int(row["extras"].get("seed", 0))))
    post = urllib.request.Request(
        os.environ["MIXED_REWARD_URL"],
        json.dumps({"reward": reward}).encode(),
        {"Content-Type": "application/json"},
    )
    urllib.request.urlopen(post).close()


if __name__ == "__main__":
    main(*sys.argv[1:])
