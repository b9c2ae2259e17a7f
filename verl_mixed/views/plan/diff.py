"""The plan of another config or mixture, and where two plans differ."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from config.lookup import at, files_at
from config.removed import without_removed
from config.schema import ConfigError
from verl_mixed.run.audit import rows_of
from verl_mixed.run.sections import named_sources
from verl_mixed.views.plan.report import PlanReport, make_report


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDiff:
    """Two plans and their difference."""

    name: str
    """File of the other plan, as the output calls it."""

    this: PlanReport
    other: PlanReport
    fields: tuple[str, ...]
    """Fields of the fingerprint that differ."""

    resumable: bool | None
    """Whether a run of one plan can resume with the other with `mixed.on_change=refuse`; None if
    this depends on unknown rows only."""


def other_report(
    path: Path, config: Mapping[str, Any], *, batches: int, rows_unknown: str | None = None
) -> PlanReport:
    """The plan of another file.

    Args:
        path: a resolved config, such as `runs/<experiment>/config.yaml`; or a mixture with
            `sources:`, which replaces that of `config`.
        config: the resolved config whose mixture is replaced.
        batches: how many batches to list.
        rows_unknown: why the rows of `config` are unknown; None if they are known.

    Raises:
        ConfigError: all problems of the file, a line each with the file's name.
    """
    try:
        other = _read(path)
        if "sources" in other:
            other = _with_mixture(config, other)
        elif not isinstance(at(other, "mixed.sources"), Mapping):
            raise ConfigError(
                ["it has neither `sources:` nor `mixed.sources`; name a mixture or a run's config"]
            )
        else:
            rows_unknown = None
        rows = None
        if rows_unknown is None:
            try:
                rows = rows_of(files_at(other, "data.train_files"))
            except ValueError as error:  # without data the ratios can still be compared
                rows_unknown = str(error).splitlines()[0]
        return make_report(other, rows, batches=batches, rows_unknown=rows_unknown)
    except ValueError as error:
        raise ConfigError([f"{path}: {line}" for line in str(error).splitlines()]) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (
        OSError,
        UnicodeError,
        RecursionError,
        yaml.YAMLError,
        OmegaConfBaseException,
    ) as error:
        raise ConfigError([f"cannot be read: {' '.join(str(error).split())}"]) from error
    named = {str(key): value for key, value in values.items()} if isinstance(values, dict) else {}
    return without_removed(named)  # it may be the config of an earlier release


def _with_mixture(config: Mapping[str, Any], mixture: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with another mixture and with the training files that its sources name."""
    mixed = {**at(config, "mixed", {}), **mixture}
    ours = _files_of(config)
    common = [file for file in files_at(config, "data.train_files") if file not in ours]
    files = list(dict.fromkeys([*common, *_files_of({"mixed": mixed})]))
    return {**config, "mixed": mixed, "data": {**at(config, "data", {}), "train_files": files}}


def _files_of(config: Mapping[str, Any]) -> list[str]:
    """The files that the sources of a config name themselves."""
    return [
        file
        for source in named_sources(config).values()
        if isinstance(source, Mapping)
        for file in files_at(source, "files")
    ]


def compare(name: str, this: PlanReport, other: PlanReport) -> PlanDiff:
    """Compare two plans. A value that one of them does not know counts as equal.

    Only a plan whose shares are rounded has `parts`; its ratios differ from those of other plans.
    A plan that decides nothing has no `policy`, and one that draws all rows no `choices`.
    """
    absent: dict[str, Any] = {"policy": {}, "choices": {}}
    of_this, of_other = absent | this.fingerprint, absent | other.fingerprint
    pairs = {field: (of_this.get(field), of_other.get(field)) for field in of_this | of_other}
    fields = tuple(field for field, (a, b) in pairs.items() if None not in (a, b) and a != b)
    is_known = all(None not in pair for pair in pairs.values())
    resumable = False if fields else is_known or None
    return PlanDiff(name=name, this=this, other=other, fields=fields, resumable=resumable)
