"""The trainers by their names in `trainer.v1.trainer_mode`.

verl adapter: `TRAINER_REGISTRY` (trainer/ppo/v1/trainer_base.py at 0.9.1). verl calls what it finds
there with the config. A config with the `mixed:` tree gets the trainers of `verl-mixed train`; one
with `data.mixture`, a recipe of verl's, gets verl's trainer with exact updates.
"""

from importlib import import_module
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict


def mixed_sync(config: DictConfig) -> Any:
    """Synchronous training."""
    return _trainer(config, "sync", "MixedSyncTrainer")


def mixed_colocate_async(config: DictConfig) -> Any:
    """Asynchronous training; rollout and training share their devices."""
    return _trainer(config, "colocate_async", "MixedColocateAsyncTrainer")


def mixed_separate_async(config: DictConfig) -> Any:
    """Asynchronous training; rollout has devices of its own."""
    return _trainer(config, "separate_async", "MixedSeparateAsyncTrainer")


def _trainer(config: DictConfig, mode: str, ours: str) -> Any:
    if config.get("mixed") is not None:
        return getattr(import_module("agent_loop.training.trainer"), ours)(config)
    return _exact(config, mode)


def _exact(config: DictConfig, mode: str) -> Any:
    """verl's trainer with exact updates."""
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.utils.import_utils import load_module

    if path := OmegaConf.select(config, "data.custom_cls.path"):
        load_module(path)  # first: it finds `samplers` also behind a user's module of that name
    from samplers.exact_updates import ExactUpdates
    from samplers.faults import RecipeError
    from samplers.recipe_rules import config_problems

    plain: Any = OmegaConf.to_container(config, resolve=True)
    if problems := config_problems(plain, shares=False):
        raise RecipeError(problems)
    with open_dict(config):
        # verl compares with its own names in several places (trainer_base.py:153, 731, 902).
        config.trainer.v1.trainer_mode = mode
    verls = get_trainer_cls(mode)
    plan = property(lambda self: self.train_dataset.plan)
    return type(f"Exact{verls.__name__}", (ExactUpdates, verls), {"plan": plan})(config)
