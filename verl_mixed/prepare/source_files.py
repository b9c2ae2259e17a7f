"""Adds the files that sources name to the files of the run; raw files are prepared first."""

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
"""Folder of the rows that are prepared from raw files."""

_SPLITS = {"files": ("train", "data.train_files"), "val_files": ("validation", "data.val_files")}
"""Key of a source -> split of its rows, and the key of the run's files that they are added to."""


def sources_with_files(config: DictConfig) -> set[str]:
    """The sources that name training files of their own."""
    return {name for name, source in _sources(config).items() if source.files}


def add_files_of_sources(config: DictConfig, prepared: Path = PREPARED) -> None:
    """Add the files that sources name to `data.train_files` and `data.val_files`.

    Raw files are prepared first, in the folder `prepared`, unless this was done before, and are
    replaced by their rows.

    Raises:
        ConfigError: files that cannot be prepared, a line each.
    """
    problems: list[str] = []
    for key, (split, common_key) in _SPLITS.items():
        named: list[str] = []
        for name, source in _sources(config).items():
            if key == "files" and not source.takes_part:
                continue  # the run does not train this source
            own: list[str] = []
            for number, file in enumerate(getattr(source, key)):
                try:
                    own.append(str(_rows_of(Path(file), name, source, split, prepared)))
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
            known = set(map(os.path.abspath, common))
            added = [file for file in dict.fromkeys(named) if os.path.abspath(file) not in known]
            OmegaConf.update(config, common_key, [*common, *added])
    if problems:
        raise ConfigError(problems)


def _rows_of(file: Path, name: str, source: SourceConfig, split: str, prepared: Path) -> Path:
    """The parquet file with the rows of a source's file; a raw file is prepared."""
    if source.kind is None:
        return file
    where = hashlib.sha1(str(file.absolute()).encode()).hexdigest()[:8]
    output = prepared / name / f"{file.name.split('.')[0]}.{where}.{split}.parquet"
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
    """The sources with valid settings; the check before the run names the others."""
    given = OmegaConf.to_container(config.mixed.sources, resolve=True)
    return sound_sources({"mixed": {"sources": given}})
