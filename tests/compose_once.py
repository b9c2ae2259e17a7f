"""Hydra composes each choice of files once in a process, and tests lay their values over a copy."""

import pickle
from typing import Any

from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import DefaultsList, Overrides, create_defaults_list
from omegaconf import DictConfig

from config.lookup import CONFIG_DIR
from verl_mixed.run.compose import verl_folder


def compose_once() -> None:
    """Replace hydra's two slow steps, which depend on the chosen files only, by ones that remember.

    Values of the command line are laid over a copy, as before. Files of a test's own are read each
    time: they may change.
    """
    shipped = (str(CONFIG_DIR), str(verl_folder()))
    lists = dict[tuple[object, ...], DefaultsList]()
    configs = dict[int, bytes]()
    compose: Any = ConfigLoaderImpl._compose_config_from_defaults_list

    def defaults_of(repo: Any, config_name: Any, overrides_list: Any, **how: Any) -> DefaultsList:
        paths = [source.path for source in repo.get_sources() if source.scheme() == "file"]
        if not all(path.startswith(shipped) for path in paths):
            return create_defaults_list(repo, config_name, overrides_list, **how)
        groups = [one for one in overrides_list if repo.group_exists(one.key_or_group)]
        key = (config_name, *how.values(), *paths, *(one.input_line for one in groups))
        if key not in lists:
            lists[key] = create_defaults_list(repo, config_name, overrides_list, **how)
        known = lists[key]
        return DefaultsList(
            defaults=known.defaults,
            defaults_tree=known.defaults_tree,
            overrides=known.overrides,
            config_overrides=Overrides(repo, overrides_list).config_overrides,
        )

    def composed(self: ConfigLoaderImpl, defaults: Any, repo: Any) -> DictConfig:
        if not any(known.defaults is defaults for known in lists.values()):
            return compose(self, defaults, repo)
        if id(defaults) not in configs:
            configs[id(defaults)] = pickle.dumps(compose(self, defaults, repo))
        return pickle.loads(configs[id(defaults)])

    setattr(config_loader_impl, "create_defaults_list", defaults_of)  # noqa: B010
    setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", composed)  # noqa: B010
