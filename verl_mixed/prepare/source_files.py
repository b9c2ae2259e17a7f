"""The files that sources name as theirs: raw ones become rows, and all join those of the run."""

import hashlib
import os
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from config.schema import ConfigError, SourceConfig
from samplers.rows.sources import kind_of
from verl_mixed.prepare.rows import prepare_files
from verl_mixed.run.compose import unset_keys
from verl_mixed.run.sections import sound_sources

PREPARED = Path("data") / "prepared"
"""Where rows of raw files are kept, a file each."""

_SPLITS = {"files": ("train", "data.train_files"), "val_files": ("validation", "data.val_files")}
"""Key of a source -> what its rows are for, and the key that they join."""


def sources_with_files(config: DictConfig) -> set[str]:
    """The sources that bring training rows of their own."""
    return {name for name, source in _sources(config).items() if source.files}


def add_files_of_sources(config: DictConfig) -> None:
    """Let `data.train_files` and `data.val_files` hold the files that sources name as theirs.

    Files that are not parquet are prepared first, if that was not done before, and their place
    taken by what came of it.

    Raises:
        ConfigError: files that cannot be prepared, a line each.
    """
    problems: list[str] = []
    for key, (split, common_key) in _SPLITS.items():
        named: list[str] = []
        for name, source in _sources(config).items():
            if key == "files" and not source.takes_part:
                continue  # nothing is drawn from them
            own: list[str] = []
            for number, file in enumerate(getattr(source, key)):
                try:
                    own.append(str(_rows_of(Path(file), name, source, split)))
                except (ValueError, OSError) as error:
                    place = f"mixed.sources.{name}.{key}[{number}]"
                    problems += [f"{place}: {line}" for line in str(error).splitlines()]
            if own:
                config.mixed.sources[name][key] = own
            named += own
        if named:
            common = (
                [] if common_key in unset_keys(config) else OmegaConf.select(config, common_key)
            )
            common = [common] if isinstance(common, str) else list(common)
            there = set(map(os.path.abspath, common))
            added = [file for file in dict.fromkeys(named) if os.path.abspath(file) not in there]
            OmegaConf.update(config, common_key, [*common, *added])
    if problems:
        raise ConfigError(problems)


def _rows_of(file: Path, name: str, source: SourceConfig, split: str) -> Path:
    """The parquet file of a source's file: itself, or what is prepared of it."""
    if source.kind is None:
        return file
    where = hashlib.sha1(str(file.absolute()).encode()).hexdigest()[:8]
    output = PREPARED / name / f"{file.name.split('.')[0]}.{where}.{split}.parquet"
    prepare_files(
        kind_of(source.kind),
        [file],
        output,
        console=Console(stderr=True, highlight=False),
        again=False,
        split=split,
        options=source.kind_options,
        source=name,
        agent=source.agent,
    )
    return output


def _sources(config: DictConfig) -> dict[str, SourceConfig]:
    """Those whose settings are sound; the others are named by the check before the run."""
    given = OmegaConf.to_container(config.mixed.sources, resolve=True)
    return sound_sources({"mixed": {"sources": given}})
