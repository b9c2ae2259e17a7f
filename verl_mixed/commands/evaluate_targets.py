"""What `verl-mixed evaluate` was asked to evaluate: weights, configs and rows. Starts nothing.

Everything that cannot work is refused here, before tool server and Ray start.
"""

import argparse
import json
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from agent_loop.evaluation.main import Job
from agent_loop.evaluation.selection import Selection
from config.lookup import at, files_at, flatten
from config.schema import ConfigError
from verl_mixed.checks.config.gateway import guided_problems
from verl_mixed.checks.config.prompts import media_problems
from verl_mixed.checks.preflight import mixture_problems
from verl_mixed.commands.evaluate_weights import (
    Identity,
    exported,
    identity_of_checkpoint,
    identity_of_model,
    identity_of_server,
)
from verl_mixed.commands.export import LATEST, chosen_step
from verl_mixed.launch.evaluation import Target, evaluation_config
from verl_mixed.launch.generated import forms_of, make_generated_data
from verl_mixed.launch.plan import Plan, corpus_beside, make_plan
from verl_mixed.run.checkpoints import lora_facts
from verl_mixed.run.compose import SHIPPED_EPOCHS, load_config, nearest_key
from verl_mixed.run.evaluations import PROFILE, evaluations_of
from verl_mixed.run.name import name_problems
from verl_mixed.run.opener import opener
from verl_mixed.run.override import quoted, readable
from verl_mixed.run.settings import ADDRESS_KEY, SERVER_URL_KEY, absolute_if_local
from verl_mixed.run.state import RunFolder

MODEL_KEY = "actor_rollout_ref.model.path"
KEY_VARIABLE = "OPENAI_API_KEY"
PROBE_S = 30.0

Say = Callable[[str], None]


def targets_of(
    arguments: argparse.Namespace,
    names: Sequence[str],
    overrides: Sequence[str],
    environ: Mapping[str, str],
    say: Say,
) -> list[Target]:
    """One target for each step, or the one of MODEL or --base-url.

    A checkpoint is exported if it is not yet, and a demo that is missing is made.

    Args:
        names: the words of the command line that are neither overrides nor files.
        overrides: of the config.

    Raises:
        ConfigError, ValueError: it cannot be evaluated.
        OSError: a checkpoint cannot be read or exported.
    """
    _refuse_contradictions(arguments, names)
    given = names[0] if names else ""
    run = Path(given) if given and (Path(given) / "config.yaml").is_file() else None
    if run is None and arguments.step:
        raise ValueError(
            f"--step {arguments.step[0]}: only a run has steps, and {given or '--base-url'} is "
            "none; give runs/<experiment>"
        )
    if arguments.base_url:
        targets = [_of_server(arguments, overrides, environ, say)]
    elif run is not None:
        targets = _of_run(arguments, RunFolder(run), overrides, say)
    else:
        targets = [_of_model(arguments, given, overrides, environ, say)]
    config = targets[0].plan.config
    _refuse_missing_rows(targets[0], "training" if arguments.of_training else "validation")
    # a run has checked its rows, and an evaluation does not need those of its training
    needs_check = run is None and arguments.config_of is None
    problems = [*mixture_problems(config, data=needs_check), *media_problems(config)]
    if problems := [*problems, *guided_problems(config)]:
        raise ConfigError(problems)
    return targets


def _refuse_contradictions(arguments: argparse.Namespace, names: Sequence[str]) -> None:
    if len(names) > 1:
        raise ValueError(f"{names[1]!r}: one RUN or MODEL at a time; several steps are --step N N")
    if bool(names) == bool(arguments.base_url):
        raise ValueError("name what to evaluate: RUN or MODEL, or --base-url URL, and not both")
    for option in ("model", "tokenizer"):
        if getattr(arguments, option) and not arguments.base_url:
            raise ValueError(f"--{option} is of --base-url; name MODEL alone, or give --base-url")
    if arguments.limit and arguments.sample:
        raise ValueError("--limit and --sample choose the rows in two ways: give one of them")
    if arguments.label and len(arguments.step) > 1:
        raise ValueError("--label names one evaluation: give one --step, or leave it out")
    if arguments.label and (problems := name_problems(arguments.label)):
        raise ValueError(f"--label {arguments.label!r}: {problems[0].partition(': ')[2]}")


# --- configs --------------------------------------------------------------------------------------


def _of_run(
    arguments: argparse.Namespace, run: RunFolder, overrides: Sequence[str], say: Say
) -> list[Target]:
    plan = _plan_of_run(run, overrides)
    steps = list(dict.fromkeys(arguments.step)) or [chosen_step(run, LATEST)]
    steps = [chosen_step(run, str(step)) if step else 0 for step in steps]  # all, before any export
    targets: list[Target] = []
    for step in steps:
        if step:
            model, identity = exported(run, step), identity_of_checkpoint(run, step)
            weights = f"step {step} of {run.path}"
        else:
            model = Path(str(at(plan.config, MODEL_KEY)))
            if at(plan.config, "actor_rollout_ref.model.lora_adapter_path"):
                raise ValueError(
                    "--step 0: the run began with an adapter (model.lora_adapter_path), which is "
                    "not merged; evaluate a later step"
                )
            weights = f"{model}, with which {run.path} began"
            identity = identity_of_model(str(model))
        label = arguments.label or f"step_{step}"
        targets.append(
            _target(arguments, plan, run, label, str(model), weights, identity, step=step)
        )
    return targets


def _plan_of_run(run: RunFolder, overrides: Sequence[str]) -> Plan:
    """The plan of a run's own config, with overrides."""
    config = load_config(run.config)
    _override(config, overrides)
    url = str(at(config, SERVER_URL_KEY))
    try:  # the run has written the address of its own server over port 0
        own_url = json.loads((run.path / "tool_server.json").read_text())["url"]
    except (OSError, ValueError, LookupError):
        own_url = None
    return Plan(
        config=config,
        folder=run,
        own_tool_server=own_url == url or url.endswith(":0"),
        generated=None,
        changed=frozenset(),
        added=frozenset(),
        corpus=corpus_beside(OmegaConf.create(config), None),
        cluster=at(config, ADDRESS_KEY) or None,
    )


def _override(config: dict[str, Any], overrides: Sequence[str]) -> None:
    """Set KEY=VALUE in the config of a run, which has all keys.

    Raises:
        ConfigError: the config has no such key.
    """
    known = flatten(config)
    parser, problems = OverridesParser.create(), list[str]()
    for each in parser.parse_overrides(readable(overrides, lambda: known)):
        key, adds = each.key_or_group, each.is_add() or each.is_force_add()
        *path, last = key.split(".")
        section: Any = at(config, ".".join(path)) if path else config
        if not isinstance(section, dict) or (last not in section and not adds):
            near = nearest_key(key, [*known])
            hint = f"; did you mean {near}?" if near else ""
            problems.append(f"unknown key {key}: the config of the run has no such key{hint}")
        elif each.is_delete():
            section.pop(last, None)
        else:
            value: Any = each.value()
            section[last] = OmegaConf.to_container(OmegaConf.create({"": value}))[""]  # type: ignore[index]
    if problems:
        raise ConfigError(problems)


def _of_model(
    arguments: argparse.Namespace,
    model: str,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    say: Say,
) -> Target:
    if Path(model).is_dir() and not (Path(model) / "config.json").is_file():
        raise ValueError(
            f"{model} is neither a run nor a model: it has no config.yaml and no config.json; name "
            "runs/<experiment> or a Hugging Face folder"
        )
    is_name = model.count("/") == 1 and not Path(model).parent.is_dir()  # else a folder is meant
    if not Path(model).exists() and not is_name:
        raise ValueError(
            f"no {model}: name runs/<experiment>, a Hugging Face folder, or owner/name"
        )
    path = absolute_if_local(model)
    plan = _plan(arguments, overrides, environ, path)
    label = arguments.label or Path(path).name
    identity = identity_of_model(path)
    return _target(arguments, plan, _run_of(arguments, plan), label, path, path, identity)


def _of_server(
    arguments: argparse.Namespace,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    say: Say,
) -> Target:
    url = arguments.base_url.rstrip("/")
    name = _model_of_server(url, arguments.model, environ)
    tokenizer = absolute_if_local(arguments.tokenizer or "")
    plan = _plan(arguments, overrides, environ, tokenizer or None)
    tokenizer = tokenizer or str(at(plan.config, MODEL_KEY))
    label = arguments.label or Path(name).name
    say(f"server       {url} (model {name}, tokenizer {tokenizer})")
    run, weights = _run_of(arguments, plan), f"{name} at {url}"
    identity = identity_of_server(url, name)
    return _target(
        arguments, plan, run, label, tokenizer, weights, identity, base_url=url, name=name
    )


def _plan(
    arguments: argparse.Namespace,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    model: str | None,
) -> Plan:
    """The plan of --run, or the one that `train` would make, with a model where it names none."""
    if arguments.config_of is not None:
        return _plan_of_run(RunFolder(arguments.config_of), overrides)
    if arguments.of_training:  # passes over rows that are still to be chosen cannot be counted
        overrides = [*overrides, f"trainer.total_epochs={SHIPPED_EPOCHS}"]
    plan = make_plan(overrides, environ)
    if plan.generated is not None:
        if not plan.has_rows():
            make_generated_data(
                plan.generated, int(at(plan.config, "mixed.seed", 0)), forms_of(plan.config)
            )
        return plan
    if model is not None:
        plan = make_plan([*overrides, f"{MODEL_KEY}={quoted(model)}"], environ)
    return plan


def _run_of(arguments: argparse.Namespace, plan: Plan) -> RunFolder:
    return plan.folder if arguments.config_of is None else RunFolder(arguments.config_of)


def _target(
    arguments: argparse.Namespace,
    plan: Plan,
    run: RunFolder,
    label: str,
    model: str,
    weights: str,
    identity: Identity,
    *,
    step: int = 0,
    base_url: str = "",
    name: str = "",
) -> Target:
    label = f"{PROFILE}{label}" if arguments.of_training else label
    folder = RunFolder(evaluations_of(run.path) / label)
    usual = "n" if arguments.of_training else "val_kwargs.n"
    samples = arguments.samples or int(at(plan.config, f"actor_rollout_ref.rollout.{usual}"))
    ks = tuple(sorted({1, *(arguments.pass_at or [samples])}))
    if ks[-1] > samples:
        raise ValueError(
            f"--pass-at {ks[-1]}: pass@k needs k samples of a row, and there are {samples}; give "
            f"--samples {ks[-1]}"
        )
    is_exported = (
        step > 0
        and lora_facts(run.path / "checkpoints" / f"global_step_{step}" / "actor") is not None
    )
    config = evaluation_config(
        plan.config, folder=folder, model=model, is_exported=is_exported, base_url=base_url
    )
    if arguments.of_training:
        config["data"] |= {"val_files": config["data"]["train_files"], "val_max_samples": -1}
        sources: dict[str, Any] = config["mixed"]["sources"]
        config["mixed"] |= {"sources": {name: _of_all_rows(own) for name, own in sources.items()}}
    selection = Selection(
        samples=samples,
        sources=tuple(sorted(arguments.source)),
        limit=arguments.limit,
        sample=arguments.sample,
        seed=int(at(config, "mixed.seed") or 0),
    )
    return Target(
        label=label,
        plan=replace(plan, folder=folder, config=config),
        job=Job(step=step, selection=selection, base_url=base_url, model=name),
        ks=ks,
        weights=weights,
        identity=identity,
    )


def _of_all_rows(source: Any) -> Any:
    """Settings of a source without those that choose rows by the profile that is still to come."""
    chooses = ("difficulty", "curriculum")
    if not isinstance(source, Mapping):
        return source
    return {key: value for key, value in source.items() if key not in chooses}


# --- refusals -------------------------------------------------------------------------------------


def _refuse_missing_rows(target: Target, split: str) -> None:
    """Refuse sources without rows in the files of a split."""
    rows: Counter[str] = Counter()
    for file in files_at(target.plan.config, "data.val_files"):
        if file.endswith(".parquet"):
            rows.update(pq.read_table(file, columns=["data_source"])["data_source"].to_pylist())
    if not rows:
        return  # the driver reads files of another format
    known = ", ".join(f"{name} ({count})" for name, count in sorted(rows.items()))
    if unknown := [name for name in target.job.selection.sources if not rows[name]]:
        raise ValueError(
            f"--source {unknown[0]}: the {split} files have no rows of it; there are {known}"
        )


def _model_of_server(url: str, model: str | None, environ: Mapping[str, str]) -> str:
    """The model's name at a server, which must answer.

    Raises:
        ValueError: the server does not answer, or has no such model.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"--base-url {url}: want http://host:port/v1")
    headers = {"User-Agent": "verl-mixed"}
    if key := environ.get(KEY_VARIABLE):
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(f"{url}/models", headers=headers)
    try:
        with opener(use_proxy=True).open(request, timeout=PROBE_S) as answer:
            names = [str(each["id"]) for each in json.loads(answer.read(1 << 20))["data"]]
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise ValueError(
                f"{url} answers HTTP {error.code}: is {KEY_VARIABLE} the key of this server?"
            ) from error
        if 300 <= error.code < 400:
            raise ValueError(
                f"{url}/models answers HTTP {error.code}, a redirect to "
                f"{error.headers.get('Location')}: it is not followed, because {KEY_VARIABLE} "
                "would be sent there; give the address of the server itself"
            ) from error
        names = []  # a server without a list of its models
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"no answer from {url}/models: {error}; is this the address of an OpenAI-compatible "
            "server, with its version, as http://host:8000/v1?"
        ) from error
    if model is None and len(names) == 1:
        return names[0]
    if model is None:
        raise ValueError(
            f"--base-url {url}: give --model, one of {', '.join(names) or 'its models'}"
        )
    if names and model not in names:
        raise ValueError(f"--model {model}: {url} has {', '.join(names[:20])}")
    return model


__all__ = ["targets_of"]
