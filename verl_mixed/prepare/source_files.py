"""Adds the files of sources to the files of the run; raw files, and rows that a kind makes, are
prepared first.

Rows are never replaced by others, because a run may still read them: the name of their file says
what they were made of, and another content, other options or another kind have another file.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from glob import escape
from pathlib import Path
from shutil import copy
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from rich.console import Console

from config.lookup import files_at
from config.schema import ConfigError, SourceConfig
from samplers.adaptive.profiles import profile_path
from samplers.rows.made_records import installed_version
from samplers.rows.prepare import fingerprint_of
from samplers.rows.row_files import Output, description, has_same_rows
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


def add_files_of_sources(
    config: DictConfig, prepared: Path = PREPARED, before: Mapping[str, Any] | None = None
) -> None:
    """Add the files that sources name to `data.train_files` and `data.val_files`.

    Raw files are prepared first, in the folder `prepared`, unless this was done before, and are
    replaced by their rows. A source whose kind makes its rows gets a file of them for each key.
    `before` is the config that the run was started with: it keeps its files of the same rows.

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
            kept = files_at(before or {}, f"mixed.sources.{name}.{key}")
            place = f"mixed.sources.{name}"
            files = [(f"{place}.{key}[{i}]", Path(f)) for i, f in enumerate(getattr(source, key))]
            if makes_records(source.kind):
                files = [(f"{place}.kind", None), *files]
            for where, file in files:
                if str(file) in own:  # the made rows, in the config of a run that has them
                    continue
                try:
                    own.append(str(_rows_of(file, name, source, split, prepared, kept)))
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
    file: Path | None,
    name: str,
    source: SourceConfig,
    split: str,
    prepared: Path,
    kept: list[str],
) -> Path:
    """The parquet file with the rows of a source's file; a raw file is prepared.

    Args:
        file: None for the rows that the source's kind makes.
        kept: the source's files of rows in the run's own config. Its rows stay the same where a
            release names them, or writes their kind, in another way.
    """
    if source.kind is None:
        assert file is not None
        return file
    kind = kind_of(source.kind)
    inputs = [] if file is None else [file]
    settings: dict[str, Any] = {
        "split": split,
        "options": source.kind_options,
        "source": name,
        "agent": source.agent,
    }
    fingerprint = fingerprint_of(kind, inputs, **settings)
    begin = kind.name if file is None else file.name.split(".")[0]
    folder = PREPARED.absolute() / name
    known = sorted(folder.glob(f"{escape(begin)}.*.{split}.parquet"))
    same = [path for path in known if description([Output(path, split)], fingerprint) is not None]
    if same:
        output = same[0]
    else:
        decides = json.dumps([source.kind_options, source.agent, installed_version(kind)])
        if file is not None or folder / _named(begin, decides, split) in known:
            decides = _decides(fingerprint, inputs)
        output = prepared.absolute() / name / _named(begin, decides, split)
        # a dry run, whose rows are removed again, has written nothing
        console = Console(stderr=True, highlight=False, quiet=prepared != PREPARED)
        prepare_files(kind, inputs, output, console=console, again=False, **settings)
        # a profile is by row ids, and holds for the rows that are still there
        profiles = folder.glob(f"{escape(begin)}.*.{split}.profile.jsonl")
        newest = max(profiles, key=lambda path: path.stat().st_mtime_ns, default=None)
        if newest and not profile_path(output).exists():
            copy(newest, profile_path(output))
    if str(folder / output.name) in kept:
        return output
    return next((Path(own) for own in kept if has_same_rows(Path(own), output)), output)


def _named(begin: str, decides: str, split: str) -> str:
    return f"{begin}.{hashlib.sha1(decides.encode()).hexdigest()[:8]}.{split}.parquet"


def _decides(fingerprint: str, inputs: list[Path]) -> str:
    """What decides the rows; of a file its path and content, but not its time."""
    decides = json.loads(fingerprint)
    for identity, file in zip(decides["inputs"], inputs, strict=False):
        digest = hashlib.sha256()
        with file.open("rb") as content:
            while block := content.read(1 << 20):
                digest.update(block)
        identity[1:] = [digest.hexdigest()]
    return json.dumps(decides, sort_keys=True)


def _sources(config: DictConfig) -> dict[str, SourceConfig]:
    """The sources with valid settings; the check before the run names the others."""
    given = OmegaConf.to_container(config.mixed.sources, resolve=True)
    return sound_sources({"mixed": {"sources": given}})
