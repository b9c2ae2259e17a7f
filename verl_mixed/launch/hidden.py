"""What no agent in a sandbox sees of a run: its data with the answers, its records, its secrets."""

import os
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from config.lookup import files_at
from config.schema import TOOL_CONFIG
from verl_mixed.run.versions import REPOSITORY

_KEYS = (
    "mixed.run_dir",
    "trainer.default_local_dir",
    f"{TOOL_CONFIG}.rate_limit_file",
    "ray_kwargs.ray_init._temp_dir",
)

_OF_START = ("data", "runs", "logs", ".env")
"""Of the folder in which a run is started."""

_OF_HOME = (
    *(".ssh", ".netrc", ".config", ".aws", ".git-credentials"),
    *(".cache/huggingface/token", ".cache/huggingface/datasets"),
)

_OF_REPOSITORY = (".env", ".cluster", "config/cluster")

_VARIABLES = ("NETRC", "HF_TOKEN_PATH", "HF_DATASETS_CACHE")


def hidden_paths(config: DictConfig) -> list[str]:
    """Absolute paths. The files of sources are those that the user named, raw or prepared; what is
    prepared or made of them is in the start folder."""
    keys = ["data.train_files", "data.val_files"]
    for name in config.mixed.sources:
        keys += [f"mixed.sources.{name}.files", f"mixed.sources.{name}.val_files"]
    named = [file for key in keys for file in files_at(config, key)]
    named += [OmegaConf.select(config, key) for key in _KEYS]
    named += [os.environ.get(name) for name in _VARIABLES]
    named += [Path(os.environ.get("WANDB_DIR") or ".") / "wandb"]
    named += [*_OF_START, *(Path.home() / name for name in _OF_HOME)]
    named += [REPOSITORY / name for name in _OF_REPOSITORY]
    paths = [os.path.abspath(os.path.expanduser(str(path))) for path in named if path]
    return sorted(set(paths))
