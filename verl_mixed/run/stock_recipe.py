"""A recipe of verl's with `+data.mixture`, as `check` and `plan` look at it. Imports no verl.

The config is composed as `python3 -m verl.trainer.main_ppo` composes it, with verl's own files.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from config.lookup import at, files_at
from config.schema import ConfigError
from samplers.module_file import module_of
from samplers.recipe_rules import (
    BASE,
    asks,
    config_problems,
    row_problems,
    shares_of,
    update_note,
)
from samplers.source_sizes import source_sizes
from verl_mixed.run.compose import refused, resolve, verl_folder
from verl_mixed.run.settings import override_key

NOT_OURS = (
    "data.mixture, MixedDataset and ExactMixture are for a recipe of verl's, which `python3 -m "
    "verl.trainer.main_ppo` starts; in a run of `verl-mixed train` shares are "
    "mixed.sources.<name>.ratio"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StockRecipe:
    """What is known of a recipe before it starts."""

    config: dict[str, Any]
    """Resolved."""

    problems: list[str]
    warnings: list[str]
    sizes: dict[str, int] | None
    """Source -> rows in the training files; None if they cannot be counted here."""

    unknown: str | None
    """Why the rows cannot be counted; None if they are."""

    @property
    def mixture(self) -> dict[str, Any]:
        return at(self.config, "data.mixture")

    @property
    def shares(self) -> dict[str, float] | None:
        """Source -> share; None if it depends on unknown rows."""
        if self.sizes is None and None in self.mixture.values():
            return None
        shares = shares_of(self.mixture, self.sizes or {})
        return {name: float(share) for name, share in shares.items()}

    @property
    def steps_per_epoch(self) -> int | None:
        """As verl counts them; None if the rows are unknown."""
        if self.sizes is None:
            return None
        return sum(self.sizes.values()) // at(self.config, "data.train_batch_size")

    def notes(self) -> list[str]:
        """What an epoch is, and why its rows may be fewer."""
        notes: list[str] = []
        if self.sizes is not None:
            notes.append(
                "an epoch is as many prompts as data.train_files has rows, whatever the shares: "
                f"{sum(self.sizes.values())} rows, {self.steps_per_epoch} steps of "
                f"{at(self.config, 'data.train_batch_size')} prompts"
            )
        filters: list[str] = []
        if (most := at(self.config, "data.train_max_samples") or 0) > 0:
            filters.append(f"data.train_max_samples={most}")
        if at(self.config, "data.filter_overlong_prompts"):
            filters.append("data.filter_overlong_prompts=true")
        if filters:
            notes.append(
                f"{' and '.join(filters)}: verl may leave out some of these rows; the counts are "
                "checked again when it starts"
            )
        return notes


def is_stock(overrides: Sequence[str]) -> bool:
    """Whether overrides ask for the mixture in a recipe of verl's."""
    pairs = (override.partition("=") for override in overrides if "=" in override)
    given = {override_key(start): value.strip("'\"") for start, _, value in pairs}
    data, sampler = (
        {name: given.get(f"{key}.{name}") for name in ("path", "name")}
        for key in ("data.custom_cls", "trainer.v1.sampler.custom_sampler")
    )
    mixture = {"mixture": {}} if any(key.startswith("data.mixture") for key in given) else {}
    return asks(
        {
            "data": {"custom_cls": data, **mixture},
            "trainer": {"v1": {"sampler": {"custom_sampler": sampler}}},
        }
    )


def stock_recipe(arguments: argparse.Namespace) -> StockRecipe | None:
    """The recipe that the arguments of `check` or `plan` describe; None: a run of ours.

    Raises:
        ConfigError: they describe both, or Hydra refuses them.
    """
    folder, name = arguments.config_path, arguments.config_name
    if not (folder or name or is_stock(arguments.overrides)):
        return None
    of_ours = [key for key in map(override_key, arguments.overrides) if _is_ours(key)]
    if of_ours or arguments.config or arguments.config_dir:
        given = of_ours or ["--config" if arguments.config else "--config-dir"]
        raise ConfigError([f"{given[0]} is of a run of `verl-mixed train`: {NOT_OURS}"])
    config = _composed(arguments.overrides, folder or "config", name or "ppo_trainer")
    problems = config_problems(config)
    sizes, unknown, of_rows = _rows(config)
    problems += of_rows
    note = None if problems else update_note(config)
    return StockRecipe(
        config=config,
        problems=problems,
        warnings=[note] if note else [],
        sizes=sizes,
        unknown=unknown,
    )


def _is_ours(key: str) -> bool:
    return key in ("profile", "mixture") or key.startswith("mixed.")


def _composed(overrides: Sequence[str], folder: str, name: str) -> dict[str, Any]:
    # as Hydra does, a relative --config-path begins at the folder of main_ppo.py
    place = os.path.normpath(verl_folder() / "trainer" / folder)
    try:
        with initialize_config_dir(place, version_base=None):
            config: DictConfig = compose(name, overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise refused(error) from error
    return resolve(config, complete=False)


def _rows(config: Mapping[str, Any]) -> tuple[dict[str, int] | None, str | None, list[str]]:
    """(source -> rows, why they are unknown, problems)"""
    files = list(map(os.path.expanduser, files_at(config, "data.train_files")))
    if at(config, BASE) is not None:
        file = str(at(config, f"{BASE}.path")).removeprefix("file://")
        if not file.startswith("pkg://") and not os.path.exists(file):
            return None, f"{BASE}.path={file}, which is not on this machine, reads them", []
        reads = f"the class of {BASE} reads the training files"
        try:
            if file.startswith("pkg://"):
                module = import_module(file.removeprefix("pkg://").replace("/", "."))
            else:
                module = module_of(Path(file), "base")
            getattr(module, str(at(config, f"{BASE}.name")))
        except (Exception, SystemExit) as error:  # a user's module may raise anything
            if isinstance(error.__cause__ or error, ModuleNotFoundError):
                return None, f"{reads}, and was not imported here ({error})", []
            words = f"{BASE}={at(config, BASE)}: cannot load it ({type(error).__name__}: {error})"
            return None, None, [f"{words}; correct it"]
        return None, reads, []
    if absent := [file for file in files if not os.path.exists(file)]:
        return None, f"data.train_files has {absent[0]}, which is not on this machine", []
    try:
        sizes = source_sizes(files)
    except ValueError as error:
        return None, None, [str(error)]
    mixture, batch_size = at(config, "data.mixture"), at(config, "data.train_batch_size")
    return sizes, None, row_problems(mixture, sizes, batch_size)
