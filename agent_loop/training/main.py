"""The training process: verl's own entry with a config that is composed already.

verl adapter: `trainer/main_ppo.py` at 0.9.1. It runs what `main_ppo.main` runs, but takes the
resolved config of the run's folder, and refuses to start when our plugin did not load, which verl
would hide. On a cluster it joins Ray itself, because verl would print what workers are handed, and
keeps the trainer on this node, whose folder holds the run.
"""

import os
import re
import sys
from typing import Any

from omegaconf import DictConfig, OmegaConf

HANDED_ON = re.compile(
    r"WANDB_\w+|TENSORBOARD_DIR|HF_\w+|NCCL_\w+|GLOO_\w+|VLLM_\w+|TORCH\w*|HYDRA_FULL_ERROR"
    r"|OMP_NUM_THREADS|TOKENIZERS_PARALLELISM|PYTHONUNBUFFERED|VERL_(?!MIXED_)\w+|TOOL_SERVER_TOKEN"
    r"|SERPER_API_KEY"
)
"""Variables of this process that workers on a cluster get: they inherit those of their node's Ray,
which was started before the run. Not the run's mark, by which a launcher finds what it has to end:
these end with their job."""


def main(config_path: str) -> None:
    """Train to the end.

    Args:
        config_path: `config.yaml` of a run's folder.

    Raises:
        RuntimeError: the `verl.plugins` entry point did not load.
    """
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    # Not imported here: an import would register what verl itself did not load.
    plugin = sys.modules.get("agent_loop.plugin")
    if plugin is None or not plugin.is_loaded():
        raise RuntimeError(
            "verl did not load the entry point verl.plugins -> agent_loop.plugin: install the "
            "project (pip install --no-deps -e .) and unset VERL_USE_EXTERNAL_PLUGINS"
        )
    config = OmegaConf.load(config_path)
    assert isinstance(config, DictConfig), "the launcher writes a mapping"
    auto_set_device(config)
    validate_config(
        config=config,
        use_reference_policy=need_reference_policy(config),
        use_critic=need_critic(config),
    )
    if OmegaConf.select(config, "ray_kwargs.ray_init.address"):
        join(config)
    run_ppo(config, task_runner_class=_OnThisNode(TaskRunnerV1))


def join(config: DictConfig) -> None:
    """Connect to a Ray cluster that runs, as `run_ppo` would, with the variables of `HANDED_ON`."""
    import ray
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    if config.actor_rollout_ref.rollout.full_determinism:
        os.environ["VERL_FULL_DETERMINISM"] = os.environ["VLLM_BATCH_INVARIANT"] = "1"
        os.environ["PYTHONHASHSEED"] = str(config.actor_rollout_ref.rollout.seed)
    settings: Any = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
    given: dict[str, Any] = settings.pop("runtime_env", None) or {}
    stock = get_ppo_ray_runtime_env(config)
    runtime_env = {**stock, **given}
    runtime_env["env_vars"] = {
        **stock["env_vars"],
        **{name: value for name, value in os.environ.items() if HANDED_ON.fullmatch(name)},
        "TRANSFER_QUEUE_ENABLE": "1",
        **given.get("env_vars", {}),
    }
    ray.init(**settings, runtime_env=runtime_env)


class _OnThisNode:
    """A remote class whose actors stay on the node of the process that makes them.

    Args:
        remote_class: decorated with `ray.remote`.
    """

    def __init__(self, remote_class: Any) -> None:
        self._class = remote_class

    def options(self, **options: Any) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node = ray.get_runtime_context().get_node_id()
        here = NodeAffinitySchedulingStrategy(node, soft=False)
        return self._class.options(scheduling_strategy=here, **options)

    def remote(self) -> Any:
        return self.options().remote()


if __name__ == "__main__":
    main(sys.argv[1])
