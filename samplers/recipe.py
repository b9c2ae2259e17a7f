"""Exact mixtures in a recipe of verl's, by verl's own hooks.

```
data.custom_cls.path=pkg://verl_mixed.recipe data.custom_cls.name=MixedDataset
'+data.mixture={openai/gsm8k: 0.5, search: 0.3, code: 0.2}'
trainer.v1.sampler.custom_sampler.path=pkg://verl_mixed.recipe
trainer.v1.sampler.custom_sampler.name=ExactMixture
```

verl adapter: `data.custom_cls` (utils/dataset/rl_dataset.py) and
`trainer.v1.sampler.custom_sampler` (trainer/ppo/v1/trainer_base.py) at 0.9.1.
docs/beside_your_recipe.md says what this promises.
"""

# verl has no type annotations.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUntypedBaseClass=false, reportPrivateUsage=false

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.import_utils import load_extern_object

from samplers.door import Door, exact_buffer
from samplers.faults import RecipeError
from samplers.mixture_rows import MixtureRows
from samplers.recipe_accounts import RecipeAccounts
from samplers.recipe_rules import (
    LIMITS,
    config_problems,
    limits_of,
    plan_of,
    row_problems,
    share_problems,
    update_note,
)
from samplers.verl_releases import warm_up_once

_log = logging.getLogger(__name__)


class _RecipeRows(MixtureRows):
    """Checks the recipe when the training files are read, and makes the plan."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        data = _data_config(args, kwargs)
        root: Any = data._get_root()  # the whole config, unless a script has the data's part only
        plain: Any = OmegaConf.to_container(root, resolve=True)
        own: Any = OmegaConf.to_container(data, resolve=True)
        mixture, batch_size = own.get("mixture"), own["train_batch_size"]
        problems = config_problems(plain) if "trainer" in plain else share_problems(mixture)
        given = dict(zip(("data_files", "tokenizer", "config"), args, strict=False)) | kwargs
        is_training = (given["data_files"], given.get("max_samples", -1)) == (
            data.train_files,
            data.get("train_max_samples", -1),
        )
        index = {}
        try:
            if is_training:  # validation may have any sources
                index = self.sources()
        except (KeyError, ValueError) as error:
            problems.append(f"cannot read data_source of data.train_files: {error}")
        sizes = {name: len(rows) for name, rows in index.items()}
        if index:
            problems += row_problems(mixture, sizes, batch_size)
        if problems:
            raise RecipeError(problems)
        if is_training:
            self.follow(plan_of(mixture, sizes, batch_size, own.get("seed")), index)


class MixedDataset(_RecipeRows, RLHFDataset):
    """`data.custom_cls`: verl's rows, drawn by the plan of `data.mixture`.

    A dataset class of the user's own is named `data.mixture_base={path, name}` and takes the place
    of `RLHFDataset`.

    Raises:
        RecipeError: settings or rows are wrong; it lists every problem.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if not (args or kwargs):  # as pickle calls it
            return super().__new__(cls)
        base = _base_of(_data_config(args, kwargs))
        if base is RLHFDataset:
            return super().__new__(cls)
        return type(cls.__name__, (_RecipeRows, base), {})(*args, **kwargs)

    @classmethod
    async def process_multi_modal_info(
        cls, messages: list[dict[str, Any]], image_patch_size: int, config: DictConfig
    ) -> Any:
        """verl asks the class that the config names, so a base of the user's is asked from here."""
        base = _base_of(config)
        if base is RLHFDataset:
            return await super().process_multi_modal_info(
                messages, image_patch_size=image_patch_size, config=config
            )
        options = {"image_patch_size": image_patch_size, "config": config}
        if hasattr(base, "process_multi_modal_info"):
            return await base.process_multi_modal_info(messages, **options)
        return *await base.process_vision_info(messages, **options), None


def ExactMixture(*, refill_fn: Any, **_: Any) -> Any:
    """`trainer.v1.sampler.custom_sampler`: the replay buffer of the trainer's mode.

    Args:
        refill_fn: `_add_prompts_to_generate` of the trainer. verl's other arguments repeat the
            config, which says more.

    Raises:
        RecipeError: settings are wrong; it lists every problem.
    """
    trainer = refill_fn.__self__
    config: DictConfig = trainer.config
    plain: Any = OmegaConf.to_container(config, resolve=True)
    if problems := config_problems(plain, shares=False):
        raise RecipeError(problems)
    if config.data.dataloader_num_workers:
        _log.warning(
            "data.dataloader_num_workers=%s is set to 0: the plan orders the prompts in this "
            "process, and other processes would hold copies of it",
            config.data.dataloader_num_workers,
        )
        with open_dict(config):
            config.data.dataloader_num_workers = 0
    if (note := update_note(plain)) and not getattr(trainer, "has_exact_updates", False):
        _log.warning(note)
    door = Door(trainer)
    warm_up_once(trainer)
    limits = limits_of(plain["trainer"]["v1"]["sampler"]["sampler_kwargs"] or {})
    return exact_buffer(
        door,
        RecipeAccounts(door).sampled,
        max_wait_s=limits.max_wait_s,
        max_replacements=limits.max_replacements,
        limits=LIMITS,
    )


def _data_config(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> DictConfig:
    return kwargs["config"] if "config" in kwargs else args[2]


def _base_of(data: Any) -> Any:
    base = data.get("mixture_base")
    return RLHFDataset if base is None else _loaded(base.path, base.name)


@cache  # verl would run the file again at each call
def _loaded(path: str, name: str) -> Any:
    return load_extern_object(path, name)
