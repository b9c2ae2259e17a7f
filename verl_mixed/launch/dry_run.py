"""`verl-mixed train --dry-run`: lines about what a start would do; nothing is started or written.

It finds the same problems as a start. It connects to a tool server or Ray cluster that the config
names.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from omegaconf import DictConfig

from config.lookup import at, files_at
from verl_mixed.launch.plan import Plan, plan_of
from verl_mixed.launch.ray_lines import found_line
from verl_mixed.launch.trainer import TRAINER
from verl_mixed.prepare.source_files import PREPARED
from verl_mixed.run.compose import compose_with_choices, unset_keys
from verl_mixed.run.name import holder_words
from verl_mixed.run.settings import VARIABLES, overrides_from
from verl_mixed.run.state import RUNS

_MODEL = "actor_rollout_ref.model.path"


def dry_run(
    arguments: Sequence[str], environ: Mapping[str, str], config_files: Sequence[Path] = ()
) -> tuple[list[str], list[str], list[str]]:
    """What a start would do: lines about the run, problems, and what is not made yet.

    `arguments` are the Hydra overrides of the command line and of the `config_files`. Raw files are
    converted in a temporary folder.

    Raises:
        ConfigError: settings, overrides or config files are wrong.
    """
    overrides = overrides_from(environ, arguments)
    config, choices = compose_with_choices(overrides)
    raw = _raw_files(config)
    with TemporaryDirectory() as folder:
        prepared = Path(folder)
        plan = plan_of(config, choices, overrides, prepared)
        run = RUNS / plan.folder.path.name
        state = plan.next_start().words(plan.length)
        if holder := holder_words(plan.folder):
            seen = f"{plan.folder.last_step()} of {plan.total_steps} steps seen"
            state = f"is being run by {holder}, {seen}: this would be refused"
        lines = [
            f"command      {shlex.join(['verl-mixed', 'train', *overrides])}",
            f"run          {run} ({state})",
        ]
        if config_files:
            kept = ", ".join(f"<time>-{path.name}" for path in config_files)
            lines.append(f"config       kept in {run}/config as {kept}")
        lines += [f"data         {line}" for line in _data(plan, prepared)]
        for name, key, files in raw:
            source = at(plan.config, f"mixed.sources.{name}")
            lines += [
                f"first        {Path(file)}: its rows of kind {source['kind']} are prepared for "
                f"source {name}"
                for file, rows in zip(files, files_at(source, key)[-len(files) :], strict=False)
                if prepared in Path(rows).parents  # where a start finds none that are prepared
            ]
        has_model = _MODEL not in unset_keys(plan.config)
        model = at(plan.config, _MODEL) if has_model else f"none; set {VARIABLES[_MODEL]}"
        lines.append(f"model        {model}")
        missing = plan.still_to_make()
        lines += [f"first        {line}" for line in missing]
        tools = plan.server_url
        tools = "a tool server of its own, on a free port" if plan.own_tool_server else tools
        lines.append(f"tools        {tools}")
        ray = found_line(plan.config, environ) or "starts its own"
        lines.append(f"ray          {f'joins {plan.cluster}' if plan.cluster else ray}")
        trainer = shlex.join([*TRAINER, f"{run}/config.yaml"])
        lines.append(f"trainer      {trainer}")
        lines += [f"warning      {warning}" for warning in plan.warnings()]
        lines.append("dry run: nothing was started or written")
        problems = plan.every_problem()
    lines, shown = (
        [line.replace(folder, str(PREPARED.absolute())) for line in words]
        for words in (lines, problems)
    )
    return lines, shown, missing


def _raw_files(config: DictConfig) -> list[tuple[str, str, list[str]]]:
    """Source, key and raw files of each source that names some."""
    sources = config.mixed.sources
    return [
        (str(name), key, files)
        for name, source in (sources.items() if isinstance(sources, DictConfig) else ())
        if isinstance(source, DictConfig) and isinstance(source.get("kind"), str)
        for key in ("files", "val_files")
        if (files := files_at(source, key))
    ]


def _data(plan: Plan, prepared: Path) -> Iterator[str]:
    """The training and validation files; rows of raw files are in the folder `prepared`."""
    if plan.generated is not None:
        yield f"{plan.generated} (generated)"
    unset = unset_keys(plan.config)
    for key, use in {"data.train_files": "", "data.val_files": " (validation)"}.items():
        if key in unset:
            yield f"none; set {VARIABLES[key]}"
            continue
        for file in files_at(plan.config, key):
            is_known = plan.generated is not None and Path(file).parent == plan.generated
            if not is_known and prepared not in Path(file).parents:
                yield f"{file}{use}"
