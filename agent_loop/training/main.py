"""The training process: `python -m agent_loop.training.main CONFIG`.

verl adapter: `trainer/main_ppo.py` at 0.9.1. This does what `main_ppo.main` does, with seven
differences:

- It reads the resolved config in the run's folder.
- It does not start if verl did not load this project's plugin, because verl would not report that.
- It builds all of verl's config classes first, also those that verl builds in Ray's workers.
- On a cluster it connects to Ray itself, because verl would print the variables of the workers,
  secrets included.
- Without a cluster it asks for a Ray of its own by name. `ray.init` without an address would join
  the Ray that an earlier `ray start` on this machine recorded, or fail if that Ray is gone.
- The trainer stays on this node, because this node has the run's folder.
- Ray chooses the port of its dashboard if it is the default one.
"""

import json
import os
import re
import sys
import uuid
from fnmatch import fnmatchcase
from typing import Any

from omegaconf import DictConfig, OmegaConf

from agent_loop.ray_path import keep_folder_off_workers
from agent_loop.training.queue_namespace import VARIABLE
from agent_loop.training.verl_config import refusals
from config import child
from config.environment import DASHBOARD_PORT, ENV_FORWARD, why_taken
from config.environments import EnvironmentEntry, as_environment
from config.schema import ConfigError
from config.tool_entries import ToolEntry, as_entry

OWN = re.compile(
    r"TENSORBOARD_DIR|HYDRA_FULL_ERROR|PYTHONUNBUFFERED|VERL_(?!MIXED_)\w+|TOOL_SERVER_TOKEN"
    r"|SERPER_API_KEY|WANDB_API_KEY|HF_TOKEN|JUDGE_API_KEY|JUDGE_BASE_URL"
)
"""Variables that this project sets or reads, beside those of `ENV_FORWARD`."""


def is_forwarded(name: str) -> bool:
    """Whether a variable of this process is sent to workers on a cluster.

    Workers inherit the variables of their node's Ray, which was started before the run: Ray's own,
    and the devices, are only those. The mark of the run is not sent: a launcher ends all processes
    with the mark, but Ray ends these workers with their job.
    """
    if name.startswith("RAY_") or name == "CUDA_VISIBLE_DEVICES":
        return False
    patterns = os.environ.get("ENV_FORWARD") or ENV_FORWARD
    return OWN.fullmatch(name) is not None or any(
        fnmatchcase(name, pattern) for pattern in patterns.split()
    )


def given_to_the_job() -> set[str]:
    """The variables in the runtime environment of a `ray job submit`; empty without one.

    Ray sends them to the workers itself, and `ray.init` refuses a variable that comes twice.
    """
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}")
    return set((job.get("runtime_env") or {}).get("env_vars") or {})


_ADDRESS = "ray_kwargs.ray_init.address"


def main(config_path: str) -> None:
    """Train to the end.

    Raises:
        ConfigError: verl refuses the config.
        RuntimeError: verl did not load the `verl.plugins` entry point.
    """
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    from verl.utils.device import auto_set_device

    # The plugin is not imported here: an import would hide that verl did not load it.
    plugin = sys.modules.get("agent_loop.plugin")
    if plugin is None or not plugin.is_loaded():
        raise RuntimeError(
            "verl did not load the entry point verl.plugins -> agent_loop.plugin: install the "
            "project (pip install --no-deps -e .) and unset VERL_USE_EXTERNAL_PLUGINS"
        )
    config = OmegaConf.load(config_path)
    assert isinstance(config, DictConfig), "the launcher writes a mapping"
    auto_set_device(config)
    if problems := refusals(config):
        raise ConfigError(problems)
    keep_folder_off_workers()
    if OmegaConf.select(config, _ADDRESS):
        join(config)
    else:
        OmegaConf.update(config, _ADDRESS, "local", force_add=True)
        let_ray_choose_a_port(config.ray_kwargs.ray_init)
    run_ppo(config, task_runner_class=_PinnedToThisNode(TaskRunnerV1))


def let_ray_choose_a_port(ray_init: DictConfig) -> None:
    """Leave the dashboard's port to Ray where it is the default one, or was taken since the check.

    Ray then binds the first free port from 8265 on. A port that is named it only binds or fails, so
    of two runs that start on one machine the second would end.
    """
    port = ray_init.get("dashboard_port")
    host = ray_init.get("dashboard_host") or "127.0.0.1"
    if not port or (port != DASHBOARD_PORT and why_taken(host, port) is None):
        return
    if port != DASHBOARD_PORT:
        print(f"dashboard_port={port} was taken since the start; Ray takes another")
    del ray_init["dashboard_port"]


def join(config: DictConfig) -> None:
    """Connect to a running Ray cluster as `run_ppo` would, and send variables of this process."""
    import ray
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    if config.actor_rollout_ref.rollout.full_determinism:
        os.environ["VERL_FULL_DETERMINISM"] = os.environ["VLLM_BATCH_INVARIANT"] = "1"
        os.environ["PYTHONHASHSEED"] = str(config.actor_rollout_ref.rollout.seed)
    os.environ[VARIABLE] = f"transfer_queue_{uuid.uuid4().hex}"
    settings: Any = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
    of_user: dict[str, Any] = settings.pop("runtime_env", None) or {}
    of_verl = get_ppo_ray_runtime_env(config)
    runtime_env = {**of_verl, **of_user}
    runtime_env["env_vars"] = {
        **of_verl["env_vars"],
        **{name: value for name, value in os.environ.items() if is_forwarded(name)},
        **{name: os.environ[name] for name in named_by_tools(config) if name in os.environ},
        "TRANSFER_QUEUE_ENABLE": "1",
        VARIABLE: os.environ[VARIABLE],
        child.VARIABLE: os.environ.get(child.VARIABLE, os.getcwd()),
        **of_user.get("env_vars", {}),
    }
    for name in given_to_the_job() & runtime_env["env_vars"].keys():
        del runtime_env["env_vars"][name]
    ray.init(**settings, runtime_env=runtime_env)


def named_by_tools(config: DictConfig) -> set[str]:
    """Variables that MCP servers and environments of sources get (`env`, `token`)."""
    sources: Any = OmegaConf.to_container(config.mixed.sources, resolve=True)
    entries = [tool for source in sources.values() for tool in source.get("tools") or ()]
    tools = [ToolEntry.model_validate(as_entry(entry)) for entry in entries]
    given = [source["environment"] for source in sources.values() if source.get("environment")]
    environments = [EnvironmentEntry.model_validate(as_environment(each)) for each in given]
    owners = [*tools, *environments]
    return {name for own in owners for name in (*own.env, *([own.token] if own.token else ()))}


class _PinnedToThisNode:
    """A remote class of Ray whose actors are started on the node of this process."""

    def __init__(self, remote_class: Any) -> None:
        self._class = remote_class

    def options(self, **options: Any) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node = ray.get_runtime_context().get_node_id()
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        return self._class.options(scheduling_strategy=strategy, **options)

    def remote(self) -> Any:
        return self.options().remote()


if __name__ == "__main__":
    main(sys.argv[1])
