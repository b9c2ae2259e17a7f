"""`verl-mixed train --dry-run`: lines about what a start would do; nothing is started or written.

Names data and model without reading them; `verl-mixed check` reads them. Both commands connect to
a tool server or Ray cluster that the config names.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig

from config.lookup import at, files_at
from samplers.rows.sources import kind_of
from verl_mixed.launch.plan import Plan, plan_of
from verl_mixed.launch.ray_lines import found_line
from verl_mixed.launch.trainer import TRAINER
from verl_mixed.run.compose import compose_with_choices, unset_keys
from verl_mixed.run.name import RunFacts, facts_of
from verl_mixed.run.settings import VARIABLES, overrides_from

_MODEL = "actor_rollout_ref.model.path"


def dry_run(
    arguments: Sequence[str], environ: Mapping[str, str], config_files: Sequence[Path] = ()
) -> tuple[list[str], list[str]]:
    """Lines about the run of these settings, and what would keep it from starting.

    `arguments` are the Hydra overrides of the command line and of the `config_files`.

    Raises:
        ConfigError: settings, overrides or config files are wrong.
    """
    overrides = overrides_from(environ, arguments)
    config, choices = compose_with_choices(overrides)
    run = facts_of(config)
    raw, problems = _take_raw_files_as_they_are(config)
    plan = plan_of(config, choices, overrides)
    lines = [
        f"command      {shlex.join(['verl-mixed', 'train', *overrides])}",
        f"run          {run.folder} ({_state(run)})",
    ]
    if config_files:
        kept = ", ".join(f"<time>-{path.name}" for path in config_files)
        lines.append(f"config       kept in {run.folder}/config as {kept}")
    lines += [f"data         {line}" for line in _data(plan, raw)]
    has_model = _MODEL not in unset_keys(plan.config)
    model = at(plan.config, _MODEL) if has_model else f"none; set {VARIABLES[_MODEL]}"
    lines.append(f"model        {model}")
    lines += [f"first        {line}" for line in plan.still_to_make()]
    tools = "a tool server of its own, on a free port" if plan.own_tool_server else plan.server_url
    lines.append(f"tools        {tools}")
    ray = found_line(plan.config, environ) or "starts its own"
    lines.append(f"ray          {f'joins {plan.cluster}' if plan.cluster else ray}")
    trainer = shlex.join([*TRAINER, f"{run.folder}/config.yaml"])
    lines.append(f"trainer      {trainer}")
    lines += [f"warning      {warning}" for warning in plan.warnings()]
    lines.append("dry run: nothing was started or written, data and model were not looked at")
    problems += plan.problems(data=False, machine=False)
    # the kinds of raw files were removed above, which is no change of the user's
    return lines, problems if raw else [*problems, *plan.refused_changes()]


def _take_raw_files_as_they_are(config: DictConfig) -> tuple[dict[str, str], list[str]]:
    """Remove the kinds of the sources from the config, so that raw files are not prepared.

    Returns raw file -> the rows that a start would prepare from it; and problems of the kinds.
    """
    raw: dict[str, str] = {}
    problems: list[str] = []
    sources = config.mixed.sources
    for name, source in sources.items() if isinstance(sources, DictConfig) else ():
        kind = source.get("kind") if isinstance(source, DictConfig) else None
        if not isinstance(kind, str):
            continue
        try:
            kind_of(kind)
        except ValueError as error:
            problems += [f"mixed.sources.{name}.kind: {line}" for line in str(error).splitlines()]
        source.kind = None
        for key in ("files", "val_files"):
            for file in files_at(source, key):
                raw[str(Path(file))] = f"rows of kind {kind} would be prepared for source {name}"
    return raw, problems


def _state(run: RunFacts) -> str:
    steps = f"{run.step} of {run.total or '?'} steps"
    if run.holder:
        return f"is being run by {run.holder}, {steps} seen: this would be refused"
    if run.done:
        return f"complete, {steps}: nothing would be trained"
    if run.checkpoint:
        return f"{steps} seen; resumes from checkpoint global_step_{run.checkpoint}"
    return f"new, {run.total or '?'} steps"


def _data(plan: Plan, raw: Mapping[str, str]) -> Iterator[str]:
    """The training and validation files, and which of them would be prepared first."""
    if plan.generated is not None:
        yield f"{plan.generated} (generated)"
    unset = unset_keys(plan.config)
    for key, use in {"data.train_files": "", "data.val_files": "validation"}.items():
        if key in unset:
            yield f"none; set {VARIABLES[key]}"
            continue
        for file in files_at(plan.config, key):
            if plan.generated is None or Path(file).parent != plan.generated:
                notes = "; ".join(filter(None, (use, raw.get(file))))
                yield f"{file} ({notes})" if notes else file
