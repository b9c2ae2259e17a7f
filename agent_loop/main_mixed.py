"""The training process: verl's own entry with a config that is composed already.

verl adapter: `trainer/main_ppo.py` at 0.9.1. It runs what `main_ppo.main` runs, but takes the
resolved config of the run's folder, and refuses to start when our plugin did not load, which verl
would hide.
"""

import sys

from omegaconf import DictConfig, OmegaConf


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

    if "agent_loop.plugin" not in sys.modules:
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
    run_ppo(config, task_runner_class=TaskRunnerV1)


if __name__ == "__main__":
    main(sys.argv[1])
