"""Adds the files of sources to the files of the run; raw files, and rows that a kind makes, are
prepared first."""

import hashlib
import json
import os
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict
from rich.console import Console

from config.schema import ConfigError, SourceConfig
from samplers.rows.made_records import installed_version
from samplers.rows.sources import kind_of, makes_records
from verl_mixed.prepare.rows import prepare_files
from verl_mixed.run.compose import unset_keys
from verl_mixed.run.sections import sound_sources

PREPARED = Path("data") / "prepared"
"""Folder of the rows that are prepared from raw files, or made."""

_SPLITS = {"files": ("train", "data.train_files"), "val_files": ("validation", "data.val_files")}
"""Key of a source -> split of its rows, and the key of the run's files that they are added to."""


def sources_with_rows(config: DictConfig) -> set[str]:
    """The sources that name training files of their own, or whose kind makes their rows."""
    return {
        name
        for name, source in _sources(config).items()
        if source.files or makes_records(source.kind)
    }


def add_files_of_sources(config: DictConfig, prepared: Path = PREPARED) -> None:
    """Add the files that sources name to `data.train_files` and `data.val_files`.

    Raw files are prepared first, in the folder `prepared`, unless this was done before, and are
    replaced by their rows. A source whose kind makes its rows gets a file of them for each key.

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
            place = f"mixed.sources.{name}"
            files = [(f"{place}.{key}[{i}]", Path(f)) for i, f in enumerate(getattr(source, key))]
            if makes_records(source.kind):
                files = [(f"{place}.kind", None), *files]
            for where, file in files:
                if str(file) in own:  # the made rows, in the config of a run that has them
                    continue
                try:
                    own.append(str(_rows_of(file, name, source, split, prepared)))
                except (ValueError, OSError) as error:
                    problems += [f"{where}: {line}" for line in str(error).splitlines()]
            if own:
                with open_dict(config.mixed.sources[name]) as settings:
                    settings[key] = own
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
        raise ConfigError(list(dict.fromkeys(problems)))  # made rows fail for both keys alike


def _rows_of(
    file: Path | None, name: str, source: SourceConfig, split: str, prepared: Path
) -> Path:
    """The parquet file with the rows of a source's file; a raw file is prepared.

    Args:
        file: None for the rows that the source's kind makes.
    """
    if source.kind is None:
        assert file is not None
        return file
    kind = kind_of(source.kind)
    if file is None:
        # other options have another file, because a run may still read this one
        made = json.dumps([source.kind_options, source.agent, installed_version(kind)])
        begin = kind.name
    else:
        made, begin = str(file.absolute()), file.name.split(".")[0]
    where = hashlib.sha1(made.encode()).hexdigest()[:8]
    output = prepared.absolute() / name / f"{begin}.{where}.{split}.parquet"
    prepare_files(
        kind,
        [] if file is None else [file],
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
