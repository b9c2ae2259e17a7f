"""Compose, resolve, load and save the run config. Imports no verl.

The config consists of the files in `config/`, verl's own defaults and overrides. Keys without a
value are reported here; values are checked by `config.schema` and `verl_mixed.checks.preflight`.
"""

import importlib.util
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import AliasEvent, YAMLError

from config.disk import BrokenFile, plain_text
from config.lookup import CONFIG_DIR, at, flatten
from config.removed import why_removed, without_removed
from config.schema import TOOL_CONFIG, ConfigError, SourceConfig
from verl_mixed.run.override import readable
from verl_mixed.run.sections import NAMED_TOOLS_LOOPS, entry_of
from verl_mixed.run.settings import VARIABLES, override_key

CONFIG_NAME = "mixed_dataset_grpo"

ASYNC_MODES = ("mixed_colocate_async", "mixed_separate_async")
"""Values of `trainer.v1.trainer_mode` with rollouts of older weights."""

TRAINING_ENGINES = ("dp", "megatron", "torchtitan", "veomni")
"""The values of `model_engine`, each with a file in `config/training_engine/`."""

SHIPPED_EPOCHS = 1_000_000
"""`trainer.total_epochs` of config/mixed_dataset_grpo.yaml: no epochs are set, steps end a run."""

NO_SUCH_ENGINE = (
    "verl has trainer configs for dp, megatron, torchtitan and veomni only, so automodel, "
    "fsdp_turbo and mindspeed are not supported; choose one of the four"
)

REQUIRED: Mapping[str, str] = {
    "data.train_files": "~/data/rlhf/gsm8k/train.parquet",
    "data.val_files": "~/data/rlhf/gsm8k/test.parquet",
    "actor_rollout_ref.model.path": "~/models/deepseek-llm-7b-chat",
}
"""Key that every run must set -> verl's default. Merging `???` over the default keeps it, so the
default counts as unset."""


def _default_rollout_is(*, _root_: DictConfig) -> str | None:
    """`token` in the asynchronous modes, whose rollouts have older weights than the trainer.

    Null where the correction is not needed (`mixed_sync`, `bypass_mode`) or not possible: without
    state masking, tool tokens are trained, which have no log-prob in the rollout.
    """
    is_async = at(_root_, "trainer.v1.trainer_mode") in ASYNC_MODES
    masks = at(_root_, f"{TOOL_CONFIG}.state_masking")
    bypass = at(_root_, "algorithm.rollout_correction.bypass_mode")
    return "token" if is_async and masks and not bypass else None


def _trains_lora(*, _root_: DictConfig) -> bool:
    """Whether the model is trained with LoRA; without it a profile keeps verl's `lora.merge`."""
    return bool(at(_root_, "actor_rollout_ref.model.lora_rank"))


def _longer_calls(with_tags: int, otherwise: int, *, _root_: DictConfig) -> int:
    """The first number if the agents of all sources write tags, else the second: calls by name are
    longer."""
    sources = at(_root_, "mixed.sources") or {}
    agents = {source.get("agent") for source in sources.values() if isinstance(source, Mapping)}
    if agents & {"native_agent", "react_agent"}:
        return otherwise
    loops = {entry_of(_root_, agent).get("_target_") for agent in agents if agent}
    return otherwise if loops & {*NAMED_TOOLS_LOOPS} else with_tags


def _micro_batch(most: int, *, _root_: DictConfig) -> int:
    """The largest micro-batch up to `most` that divides what one rank trains in an update.

    Example: at most 10, and 16 prompts x 4 trajectories on one rank: 8 divides 64. A value of the
    config that is no number is reported by its own check.
    """
    prompts = at(_root_, "actor_rollout_ref.actor.ppo_mini_batch_size")
    n = at(_root_, "actor_rollout_ref.rollout.n")
    ranks = [at(_root_, f"trainer.{key}") for key in ("nnodes", "n_gpus_per_node")]
    if not all(type(number) is int and number > 0 for number in (prompts, n, *ranks)):
        return most
    share = prompts * n // (ranks[0] * ranks[1])
    return next((micro for micro in range(most, 1, -1) if share % micro == 0), 1)


OmegaConf.register_new_resolver("micro_batch", _micro_batch, replace=True)
OmegaConf.register_new_resolver("default_rollout_is", _default_rollout_is, replace=True)
OmegaConf.register_new_resolver("longer_calls", _longer_calls, replace=True)
OmegaConf.register_new_resolver("trains_lora", _trains_lora, replace=True)


def verl_folder() -> Path:
    """The folder of verl, found without importing verl, because the import takes seconds.

    Raises:
        ConfigError: verl is not installed.
    """
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        problem = (
            "verl is not installed in this Python; in a checkout, start run_mixed_training.sh "
            "once, else pip install 'verl-mixed-agent-loop[train]'"
        )
        raise ConfigError([problem])
    return Path(spec.origin).parent


def compose_config(overrides: Sequence[str]) -> DictConfig:
    """Compose the config; values may still be missing (`???`) and interpolations unresolved.

    Args:
        overrides: Hydra overrides; later ones win. Config files are searched in `config/`, then in
            all folders of all overrides of `hydra.searchpath`, then in verl's folder.

    Raises:
        ConfigError: an override or a config file is wrong.
    """
    return compose_with_choices(overrides)[0]


def compose_with_choices(overrides: Sequence[str]) -> tuple[DictConfig, dict[str, str]]:
    """As `compose_config`, with the file that was chosen of each group of files."""
    overrides = readable(overrides, lambda: flatten(without_profile("dp")))
    _refuse_engine_files(overrides)
    try:
        with initialize_config_dir(str(CONFIG_DIR), version_base=None):
            search_path, others = _search_path_of(overrides)
            given = [f"hydra.searchpath={search_path}", *others]
            config = compose(CONFIG_NAME, overrides=given, return_hydra_config=True)
            choices = {group: name for group, name in config.hydra.runtime.choices.items() if name}
            _keep_mixture(config, choices, given)
    except HydraException as error:
        if unknown := _unknown_keys(overrides):
            raise ConfigError(unknown) from error
        raise refused(error) from error
    if hidden := _hidden_files(search_path, choices):
        raise ConfigError(hidden)
    with open_dict(config):
        del config["hydra"]
        # null drops a source of the mixture, as ~mixed.sources.<name> does
        sources = at(cast(Any, OmegaConf.to_container(config, resolve=False)), "mixed.sources")
        for name, source in sources.items() if isinstance(sources, dict) else ():
            if source is None:
                del config.mixed.sources[name]
    if (engine := config.model_engine) != (chosen := choices["model_engine"]):
        raise ConfigError(
            [
                f"model_engine={engine} in a config file: the key chooses files, and a file cannot "
                f"change it by its value (the run would use {chosen}); write `override "
                f"/model_engine: {engine}` in the defaults of your profile, or give it on the "
                "command line"
            ]
        )
    return config, choices


_KEPT = {"sources", "prompts", "agent_loops"}
"""Sections of `mixed` that only a profile of the user's sets; what it sets there stays."""


def _keep_mixture(config: DictConfig, choices: Mapping[str, str], given: Sequence[str]) -> None:
    """Let what the files of prompts and mixture set win over the profile; `given[0]` is the search
    path.

    The profile comes last, because a file can choose only files of groups before its own, as
    profiles choose prompts.
    """
    chosen = {group: choices[group] for group in ("prompts", "mixture") if group in choices}
    shipped = [CONFIG_DIR / group / f"{name}.yaml" for group, name in chosen.items()]
    if all(file.is_file() and _KEPT.issuperset(OmegaConf.load(file)) for file in shipped):
        return
    chosen = {"model_engine": choices["model_engine"], **chosen}  # a mixture may have chosen it
    groups = [f"+{group}={name}" for group, name in chosen.items()]
    files = OmegaConf.to_container(compose(None, overrides=[given[0], *groups]), resolve=False)
    composed = flatten(OmegaConf.to_container(config, resolve=False))
    typed = [f"{override_key(override)}." for override in given]
    for key, value in flatten(files).items():
        if (
            value not in (MISSING, composed.get(key))
            and not key.startswith(tuple(f"mixed.{name}." for name in _KEPT))
            and not any(f"{key}.".startswith(each) or each.startswith(f"{key}.") for each in typed)
        ):
            OmegaConf.update(config, key, value, force_add=True)


def _hidden_files(search_path: Sequence[str], choices: Mapping[str, str]) -> list[str]:
    """A sentence for each chosen file that a folder of the user's has too, where it is not read."""
    chosen = [f"{CONFIG_NAME}.yaml", *(f"{group}/{name}.yaml" for group, name in choices.items())]
    folders = [
        Path(place.removeprefix("file://")) for place in search_path[:-1]
    ]  # the last is verl's
    return [
        f"{own}: this project has a file of this name, which is read instead; rename yours"
        for own, ours in (
            (folder / name, CONFIG_DIR / name) for name in chosen for folder in folders
        )
        if own.is_file() and ours.is_file() and own.read_bytes() != ours.read_bytes()
    ]


def refused(error: Exception) -> ConfigError:
    """Hydra's error in one line: its message repeats the override, and its cause has the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = str(error.__cause__ or "").splitlines()[:1]
    return ConfigError(["cannot compose the config: " + "; ".join([*lines, *cause])])


_of_a_source = re.compile(r"mixed\.sources\.[^.]+\.(\w+)")


def _unknown_keys(overrides: Sequence[str]) -> list[str]:
    """A sentence for each `key=value` whose key no part of the shipped config has."""
    known = [*flatten(without_profile("dp")), *VARIABLES]
    problems: list[str] = []
    for override in overrides:
        key = override.partition("=")[0]
        below = [name for name in known if name.startswith(f"{key}.")]
        is_ours = key == override_key(override) and not key.startswith("hydra.")
        if not is_ours or key in known or below or is_group(key):
            continue
        found = _of_a_source.match(key)
        is_open = isinstance(at(without_profile("dp"), key), Mapping)  # as agent_loops={}
        if is_open or (found and found[1] in SourceConfig.model_fields):
            problems.append(f"{override}: no config file sets this key yet; write +{override}")
            continue
        if why := why_removed(key):
            problems.append(f"{override}: {why}")
            continue
        near = nearest_key(key, known)
        hint = f"did you mean {near}? " if near else ""
        problems.append(
            f"unknown key {override}: {hint}`verl-mixed check` lists all; AgentFly's keys, as "
            "agent.max_steps or a file of --config, are in docs/configuration.md"
        )
    return problems


def nearest_key(key: str, known: Sequence[str]) -> str | None:
    """The known key that is spelled most like `key`, its last part too; else the only one with the
    same last part, or for a key without a section the first one."""
    last = {name: name.rpartition(".")[2] for name in (key, *known)}
    for near in get_close_matches(key, known, n=5, cutoff=0.75):
        if get_close_matches(last[key], [last[near]], cutoff=0.7):
            return near
    same = [name for name in known if last[name] == last[key]]
    return same[0] if len(same) == 1 or (same and "." not in key) else None


def is_group(key: str) -> bool:
    """Whether config files are chosen by this key, such as `profile`."""
    return any((folder / key).is_dir() for folder in (CONFIG_DIR, _verls()))


def _refuse_engine_files(overrides: Sequence[str]) -> None:
    """Refuse overrides of the training engine's files, of which Hydra would name its search path
    only, or take the file away in silence."""
    parser = OverridesParser.create()
    for override in overrides:
        try:
            given = parser.parse_override(override)
        except HydraException:
            continue  # Hydra says it better when it composes
        if given.key_or_group == "training_engine":
            raise ConfigError([f"{override}: it follows model_engine; set model_engine instead"])
        if given.key_or_group != "model_engine":
            continue
        if given.is_delete() or given.is_add() or given.is_force_add():
            raise ConfigError(
                [
                    f"{override}: it chooses files, which can be replaced only; write "
                    f"model_engine=NAME, one of {', '.join(TRAINING_ENGINES)}"
                ]
            )
        if given.value() not in TRAINING_ENGINES:
            raise ConfigError([f"{override}: {NO_SUCH_ENGINE}"])


@lru_cache(maxsize=len(TRAINING_ENGINES))
def without_profile(engine: str) -> Mapping[str, Any]:
    """The config that a profile is laid over, for a `model_engine`; interpolations unresolved."""
    config = compose_config([f"model_engine={engine}", "~profile"])
    return cast(dict[str, Any], OmegaConf.to_container(config, resolve=False))


def changed_keys(
    config: DictConfig, choices: Mapping[str, str]
) -> tuple[frozenset[str], frozenset[str]]:
    """The leaves of a composed config that have another value than this project ships; and of
    these the ones that it does not ship at all.

    A key that follows another key, by an interpolation, is not changed by a change of the other,
    nor by the value that it has anyway. A profile of the user's own may repeat values of any
    shipped profile.

    Args:
        config: as `compose_with_choices` returns it.
        choices: likewise; the shipped files among them are chosen here too.
    """
    shipped = {
        group: name
        for group, name in choices.items()
        if group.isidentifier() and group != "training_engine" and _is_shipped(group, name)
    }
    own_profile = "profile" in choices.keys() - shipped.keys()
    profiles = sorted(path.stem for path in CONFIG_DIR.glob("profile/*.yaml"))
    groups = tuple(f"{group}={name}" for group, name in shipped.items())
    more = [(f"profile={name}",) for name in profiles] if own_profile else [()]
    bases = [_shipped((*groups, *profile)) for profile in more]
    given = flatten(OmegaConf.to_container(config, resolve=False))
    changed = frozenset(
        key
        for key, value in given.items()
        if not any(key in base and _is_same(config, key, value, base[key]) for base in bases)
    )
    shipped_keys = {key for base in bases for key in base}
    # a section that is null now is a leaf, and the shipped config has the keys below it
    return changed, frozenset(
        key
        for key in changed - shipped_keys
        if not any(shipped_key.startswith(f"{key}.") for shipped_key in shipped_keys)
    )


def _is_same(config: DictConfig, key: str, value: Any, shipped: Any) -> bool:
    """Whether a leaf has the shipped value, as it is written or as it is in this config."""
    if value == shipped or not isinstance(shipped, str) or "${" not in shipped:
        return value == shipped
    trial = config.copy()
    OmegaConf.update(trial, key, shipped)
    try:
        return OmegaConf.select(trial, key) == OmegaConf.select(config, key)
    except OmegaConfBaseException:
        return False


def _is_shipped(group: str, name: str) -> bool:
    return any((folder / group / f"{name}.yaml").is_file() for folder in (CONFIG_DIR, _verls()))


@lru_cache(maxsize=8)
def _shipped(groups: tuple[str, ...]) -> Mapping[str, Any]:
    """The leaves of the config without anything of the user's, unresolved."""
    return flatten(OmegaConf.to_container(compose_config(groups), resolve=False))


def _verls() -> Path:
    return verl_folder() / "trainer" / "config"


def _search_path_of(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """The folders of all overrides of Hydra's search path, and verl's; and the other overrides."""
    parser = OverridesParser.create()
    folders, others = list[str](), list[str]()
    for override in overrides:
        if override.startswith("hydra.searchpath="):
            folders += map(str, cast(list[Any], parser.parse_override(override).value()))
        else:
            others.append(override)
    return [*folders, f"file://{_verls()}"], others


def unset_keys(config: Mapping[str, Any]) -> set[str]:
    """The keys of `REQUIRED` that have no value."""
    if isinstance(config, DictConfig):
        config = cast(dict[str, Any], OmegaConf.to_container(config, resolve=False))
    return {key for key, default in REQUIRED.items() if at(config, key) in (None, MISSING, default)}


def unset_problems(config: Mapping[str, Any]) -> list[str]:
    """A sentence for each of `unset_keys`."""
    return [f"{key}: no value; set {VARIABLES[key]}" for key in sorted(unset_keys(config))]


def resolve(config: DictConfig, *, complete: bool = True) -> dict[str, Any]:
    """The config as plain containers, every interpolation replaced.

    With `complete`, the keys of `REQUIRED` must have a value.

    Raises:
        ConfigError: values are missing, or an interpolation leads nowhere.
    """
    if complete and (problems := unset_problems(config)):
        raise ConfigError(problems)
    with resolving():
        return cast(dict[str, Any], OmegaConf.to_container(config, resolve=True))


@contextmanager
def resolving() -> Iterator[None]:
    """Raise a `ConfigError` for a value that is missing or an interpolation that leads nowhere."""
    try:
        yield
    except OmegaConfBaseException as error:
        raise ConfigError([f"cannot resolve the config: {' '.join(str(error).split())}"]) from error


def load_config(path: Path) -> dict[str, Any]:
    """`saved_config` without the keys that this release has not any more."""
    return without_removed(saved_config(path))


def saved_config(path: Path) -> dict[str, Any]:
    """The resolved config of a run's folder, as the release wrote it that began the run.

    Raises:
        ConfigError: there is none.
        BrokenFile: it is no YAML mapping.
        OSError: it cannot be read.
    """
    if not path.is_file():
        raise ConfigError([f"no {path}: not a run's folder; give runs/<experiment>"])
    try:
        text = plain_text(path)
        if any(isinstance(event, AliasEvent) for event in yaml.parse(text)):
            raise YAMLError("it has anchors, which a run does not write")
        # `config.yaml` is resolved, so a `${...}` in it is text
        config = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)
    except (YAMLError, OmegaConfBaseException, UnicodeError, RecursionError) as error:
        config, why = None, " ".join(str(error).split())
    else:
        why = "it is not a mapping"
    if not isinstance(config, dict) or not config:
        raise BrokenFile(
            f"cannot read {path}: {why}; put a whole copy there, or move the run's folder away and "
            "start the run again (command.txt in it has the command)"
        )
    return cast(dict[str, Any], config)


def save_config(config: Mapping[str, Any], path: Path) -> None:
    """Write a resolved config; readers see the old file or the new one."""
    draft = path.with_suffix(".tmp")
    OmegaConf.save(OmegaConf.create(dict(config)), draft)
    draft.replace(path)
