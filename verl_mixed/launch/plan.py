"""What a run will do: its resolved config, folder and cluster, and what keeps it from starting.

Starts no process and writes no file, except for rows that are prepared from raw files of sources or
made by their kinds.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from agent_loop.rewards.custom import split_path
from agent_loop.rewards.judge_options import is_rubric_file
from cluster.placement import UNITS_KEY, storage_units
from cluster.ray_cluster import THIS_MACHINE
from config import environments
from config.agents import BLOCKS
from config.gateway import GATEWAY_LOOP, with_absolute_paths
from config.lookup import at, files_at
from config.removed import other_rules, without_removed
from config.schema import TOOL_CONFIG, ConfigError
from config.tool_entries import with_absolute_path
from samplers.rows.sources import makes_records
from samplers.rows.sources.demo import DEMO_SOURCES
from verl_mixed.checks.config.load import WORKERS_KEY, loop_workers
from verl_mixed.checks.config.prompts import chosen_format, is_unused_template
from verl_mixed.checks.config.reward_examples import Example, example_problems, reward_examples
from verl_mixed.checks.config.structure import structure_problems
from verl_mixed.checks.config.unknown import block_problems, is_unknown, unknown_problems
from verl_mixed.checks.config.unread import is_unread
from verl_mixed.checks.machine.ray_cluster import cluster_problems, shared_problems
from verl_mixed.checks.preflight import preflight, preflight_warnings, verls_problems
from verl_mixed.launch.generated import is_made, still_to_make, use_generated_data
from verl_mixed.launch.hidden import hidden_paths
from verl_mixed.launch.steps import settle_steps
from verl_mixed.prepare.generated_rows import rows_folder
from verl_mixed.prepare.source_files import PREPARED, add_files_of_sources
from verl_mixed.run.compose import (
    changed_keys,
    compose_with_choices,
    load_config,
    resolve,
    resolving,
    saved_config,
    unset_keys,
    without_profile,
)
from verl_mixed.run.name import display_name, holder_words, name_problems
from verl_mixed.run.next_start import NextStart, next_start
from verl_mixed.run.sections import (
    FORMAT_KEY,
    LOOPS_FILE,
    agent_loops,
    loop_of,
    sound_sources,
)
from verl_mixed.run.settings import ADDRESS_KEY, SERVER_URL_KEY, is_own_tool_server, overrides_from
from verl_mixed.run.state import RUNS, RunFolder, changes_of_resume
from verl_mixed.run.versions import REPOSITORY

ONLY_FOR_A_NEW_RAY = (
    "num_cpus",
    "num_gpus",
    "resources",
    "object_store_memory",
    "include_dashboard",
    "dashboard_host",
    "dashboard_port",
    "_temp_dir",
)
"""Keys of `ray_kwargs.ray_init` that `ray.init` refuses or ignores on a cluster that runs."""

_GONE = object()

_SCRIPTS_OWN = {"ray_kwargs.ray_init.dashboard_port", "ray_kwargs.ray_init._temp_dir"}
"""Keys that follow RAY_DASHBOARD_PORT and RAY_TEMP_DIR, which setup_cluster.sh reads too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run that can be started."""

    config: dict[str, Any]
    """Resolved."""

    folder: RunFolder
    own_tool_server: bool
    generated: Path | None
    """Folder of the generated data that the run uses, made or not; None for files of its own."""

    changed: frozenset[str]
    """Keys that have another value than this project ships, see `changed_keys`."""

    added: frozenset[str]
    """Those of `changed` that this project does not ship at all."""

    corpus: Path | None = None
    """`corpus.jsonl` beside the data, which the run's own tool server searches unless
    `mixed.tool_server` names an engine; a demo that is not made yet will have it."""

    epochs: int | None = None
    """Passes of the mixture that `total_steps` was computed of; None if the steps were set."""

    prepared: Path = PREPARED
    """Folder of the rows that are prepared; that of a dry run is removed again."""

    cluster: str | None = None
    """Address of the Ray cluster that the run joins; None if it starts its own Ray."""

    @property
    def total_steps(self) -> int:
        return int(at(self.config, "trainer.total_training_steps"))

    @property
    def length(self) -> str:
        """How long the run is, in words."""
        steps = f"{self.total_steps} step{'s' * (self.total_steps != 1)}"
        if self.epochs is None:
            return steps
        return f"{self.epochs} epoch{'s' * (self.epochs != 1)} = {steps}"

    @property
    def server_url(self) -> str:
        """Where agent loops reach their tools."""
        return str(at(self.config, SERVER_URL_KEY))

    def next_start(self) -> NextStart:
        """What a start does with what the run's folder has now."""
        return next_start(self.folder, self.config, self.total_steps)

    def has_rows(self) -> bool:
        """Whether the training files are there, as far as a start would make them."""
        return self.generated is None or is_made(self.generated)

    def still_to_make(self) -> list[str]:
        """What a start makes or downloads before it trains, a sentence each."""
        if self.generated is None:
            return []
        model = Path(str(at(self.config, "actor_rollout_ref.model.path")))
        return still_to_make(self.generated, model)

    def problems(self, *, data: bool = True, machine: bool = True) -> list[str]:
        """What keeps the run from starting, a sentence each; see `preflight`."""
        problems = preflight(
            self.config,
            own_tool_server=self.own_tool_server,
            corpus=self.corpus,
            data=data,
            machine=machine,
            changed=self.changed,
        )
        problems += unknown_problems(self.config, self.added)
        if self.cluster is not None:
            of_cluster = cluster_problems(self.config, self.cluster)
            nodes = at(self.config, "trainer.nnodes")
            if machine and not of_cluster and isinstance(nodes, int) and nodes > 1:
                # a start has made the first; a check makes nothing
                for folder in [path for path in (self.folder.path, RUNS) if path.exists()][:1]:
                    of_cluster = shared_problems(folder, self.cluster, os.environ)
            problems += of_cluster
            problems += [
                f"ray_kwargs.ray_init.{key}: only a Ray that the run starts reads it, and the run "
                f"joins {self.cluster}; remove it, and set it for setup_cluster.sh"
                for key in ONLY_FOR_A_NEW_RAY
                if f"ray_kwargs.ray_init.{key}" in self.changed - _SCRIPTS_OWN
            ]
        if self.generated is not None:
            problems += [
                f"no rows of source={name!r}: the demo has {', '.join(DEMO_SOURCES)}; name "
                f"its files (mixed.sources.{name}.files), or files and a model of your own "
                "(TRAIN_FILES, VAL_FILES, MODEL_PATH)"
                for name, source in sound_sources(self.config).items()
                if name not in DEMO_SOURCES and not source.files and not makes_records(source.kind)
            ]
        return problems

    def every_problem(self, *, machine: bool = True) -> list[str]:
        """What keeps a start from beginning, verl's own rules too; what is not made is not read.

        `machine=False` leaves out what another machine would not have.
        """
        found = self.problems(data=not self.still_to_make(), machine=machine)
        if machine:
            found += self.folder_problems()
            if holder := holder_words(self.folder):
                found.append(f"{self.folder.path} is being run by {holder}; see `verl-mixed stop`")
        return found or verls_problems(self.config)

    def folder_problems(self) -> list[str]:
        """What the run's folder has against a start, a sentence each."""
        problem = self.next_start().problem
        return [*([problem] if problem else []), *self.refused_changes()]

    def refused_changes(self) -> list[str]:
        """Changes of the config that would make a resumed run another run, a sentence each."""
        folder = self.folder
        if not folder.config.exists() or not folder.has_trained():
            return []
        saved = saved_config(folder.config)
        before = without_removed(saved)

        def has_no_effect(key: str) -> bool:
            # a release that did not refuse the key may have started the run with it
            is_gone = at(self.config, key, _GONE) is _GONE and is_unknown(key)
            is_prepared_again = key.endswith("files") and files_at(before, key) == [
                file.replace(os.path.abspath(self.prepared), os.path.abspath(PREPARED))
                for file in files_at(self.config, key)
            ]
            is_moved = key == LOOPS_FILE and _is_shipped_elsewhere(before, self.config)
            return (
                is_gone
                or is_moved
                or is_prepared_again
                or any(
                    all(is_idle(key, config) for config in (before, self.config))
                    for is_idle in (is_unread, is_unused_template)
                )
            )

        raw = " (the raw file, its kind and kind_options as they were)"
        return [
            f"{rule} in {folder.path}; the run learned by it: resume with the release that began "
            "it, or choose another EXPERIMENT_NAME"
            for rule in other_rules(saved)
        ] + [
            f"{change} in {folder.path}: the run was started with the old value; set it back"
            f"{raw * (f'/{PREPARED}/' in change)} to resume, or choose another EXPERIMENT_NAME (a "
            "changed mixture: mixed.on_change=continue)"
            for change in changes_of_resume(before, self.config, has_no_effect)
        ]

    def warnings(self) -> list[str]:
        """What the user should know about the run, a sentence each; see `preflight_warnings`."""
        found = [f"{each.words}; {each.remedy}" for each in preflight_warnings(self.config)]
        return [*found, *example_problems(self.reward_examples(), doubts=True)]

    def reward_examples(self, *, asks_judges: bool = False) -> list[Example]:
        """What right answers earn, if the rows are there; see `verl_mixed.checks.config`."""
        if self.still_to_make():
            return []
        own = self.own_tool_server
        return reward_examples(self.config, own_tool_server=own, asks_judges=asks_judges)


def make_plan(arguments: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """Compose the config of a run from the scripts' settings and the command line's overrides.

    Raises:
        ConfigError: settings, overrides or config files are wrong.
    """
    overrides = overrides_from(environ, arguments)
    return plan_of(*compose_with_choices(overrides), overrides)


@resolving()
def plan_of(
    config: DictConfig,
    choices: Mapping[str, str],
    overrides: Sequence[str],
    prepared: Path = PREPARED,
) -> Plan:
    """Fill in what a composed config leaves open: folder, absolute paths, data, display name.

    `config` is changed; `choices` are the files that it was composed of, `overrides` the overrides,
    and `prepared` the folder of rows that are made of raw files.

    Raises:
        ConfigError: settings are wrong.
    """
    given = cast(dict[str, Any], OmegaConf.to_container(config, resolve=False))
    problems = [*structure_problems(given, without_profile(choices["model_engine"]))]
    if problems := [*problems, *block_problems(given)]:
        raise ConfigError(problems)
    if problems := name_problems(OmegaConf.select(config, "mixed.experiment")):
        raise ConfigError(problems)
    if not isinstance(sources := config.mixed.sources, DictConfig):
        raise ConfigError(
            [f"mixed.sources={sources!r}: want source -> its settings; name at least one"]
        )
    changed, added = changed_keys(config, choices)
    folder = RunFolder(RUNS / config.mixed.experiment)
    config.mixed.run_dir = str(folder.path)
    _make_paths_absolute(config)
    before = folder.config.exists() and folder.has_trained() and load_config(folder.config)
    _give_agents_their_folders(config, before or {})
    address = _cluster_to_join(config)
    generated = use_generated_data(config)
    corpus = corpus_beside(config, generated)  # before raw files are replaced by prepared ones
    add_files_of_sources(config, prepared, before or None)
    has_rows = generated is None or is_made(generated)
    epochs = settle_steps(config, overrides, changed, has_rows=has_rows)
    if config.trainer.experiment_name is None:
        is_demo = generated not in (None, rows_folder(config.mixed.seed).absolute())
        config.trainer.experiment_name = display_name(config, overrides, is_demo=is_demo)
    resolved = resolve(config, complete=False)
    if before:
        _keep_templates(resolved, at(before, "mixed.prompts") or {}, changed)
    store, units = at(resolved, UNITS_KEY.rpartition(".")[0]), storage_units(resolved)
    if store and at(resolved, UNITS_KEY) is None and units:
        store["num_data_storage_units"] = units
    agent = at(resolved, WORKERS_KEY.rpartition(".")[0])
    if agent and at(resolved, WORKERS_KEY) is None and (workers := loop_workers(resolved)):
        agent["num_workers"] = workers
    turns = at(resolved, FORMAT_KEY.rpartition(".")[0])
    if turns and at(resolved, FORMAT_KEY) is None:
        turns["format"] = chosen_format(resolved)
    return Plan(
        generated=generated,
        corpus=corpus,
        prepared=prepared,
        epochs=epochs,
        changed=changed,
        added=added,
        config=resolved,
        folder=folder,
        own_tool_server=is_own_tool_server(str(OmegaConf.select(config, SERVER_URL_KEY))),
        cluster=address,
    )


def corpus_beside(config: DictConfig, generated: Path | None) -> Path | None:
    """The first `corpus.jsonl` in a folder of the training files, raw files of sources included."""
    files = [] if "data.train_files" in unset_keys(config) else files_at(config, "data.train_files")
    sources = OmegaConf.to_container(config.mixed.sources, resolve=True)
    for source in sound_sources({"mixed": {"sources": sources}}).values():
        files += source.files if source.takes_part else []
    for folder in dict.fromkeys(Path(file).absolute().parent for file in files):
        corpus = folder / "corpus.jsonl"
        if folder == generated or corpus.exists():
            return corpus
    return None


def _is_shipped_elsewhere(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether both configs have this project's file of agent loops, and the project has moved.

    `ray job submit` unpacks the project into another folder for each cluster and each change.
    """
    old, new = Path(str(at(before, LOOPS_FILE))), Path(str(at(now, LOOPS_FILE)))
    if not new.is_relative_to(REPOSITORY):
        return False
    name = new.relative_to(REPOSITORY).parts
    return old.parts[-len(name) :] == name


def _keep_templates(
    config: dict[str, Any], before: Mapping[str, Any], changed: Collection[str]
) -> None:
    """Remove shipped templates `<agent>_<task>` that a run of 1.1.0 began without, so its sources
    keep the prompts that they have.

    `before` are the templates that the run began with, and `changed` the keys that are the user's.
    """
    kept = [*before, *(source.prompt for source in sound_sources(config).values())]
    kept += [key.split(".")[2] for key in changed if key.startswith("mixed.prompts.")]
    for name in [*at(config, "mixed.prompts", {})]:
        if name.endswith(("_code", "_search", "_maths")) and name not in kept:
            for section in ("mixed", "data"):
                config[section]["prompts"].pop(name, None)


def _make_paths_absolute(config: DictConfig) -> None:
    """Make the paths of files absolute, because trainer and workers run in other folders."""
    agent = config.actor_rollout_ref.rollout.agent
    if path := agent.agent_loop_config_path:
        shipped = REPOSITORY / path
        chosen = shipped if shipped.is_file() and not Path(path).is_file() else Path(path)
        agent.agent_loop_config_path = str(chosen.absolute())
    key = f"{TOOL_CONFIG}.rate_limit_file"
    if path := OmegaConf.select(config, key):
        OmegaConf.update(config, key, os.path.abspath(str(path)))
    if isinstance(path := config.trainer.resume_from_path, str):
        config.trainer.resume_from_path = str(Path(path).expanduser().absolute())
    for source in config.mixed.sources.values():
        reward = source.get("reward") if isinstance(source, DictConfig) else None
        if isinstance(reward, str) and (parts := split_path(reward)):
            source.reward = f"{Path(parts[0]).expanduser().absolute()}:{parts[1]}"
        tools = source.get("tools") if isinstance(source, DictConfig) else None
        if isinstance(tools, ListConfig):
            given = cast(list[Any], OmegaConf.to_container(tools))
            source.tools = [with_absolute_path(tool) for tool in given]
        environment = source.get("environment") if isinstance(source, DictConfig) else None
        if environment is not None:
            given = cast(Any, OmegaConf.to_container(source).get("environment"))  # type: ignore[union-attr]
            source.environment = environments.with_absolute_paths(given)
        rubric = OmegaConf.select(source, "reward_options.rubric") if reward == "judge" else None
        if isinstance(rubric, str) and is_rubric_file(rubric):
            source.reward_options.rubric = str(Path(rubric).expanduser().absolute())


def _give_agents_their_folders(config: DictConfig, before: Mapping[str, Any]) -> None:
    """Make the paths of agents behind the gateway absolute, and name what is hidden from them.

    A run of 1.1.0 began with its start folder as their `cwd`, and keeps it: `before` is its config.
    """
    plain = cast(dict[str, Any], OmegaConf.to_container(config, resolve=False))
    for name, entry in (agent_loops(plain)[0] or {}).items():
        if loop_of(entry) != GATEWAY_LOOP:
            continue
        begun = at(before, f"{BLOCKS[-1]}.{name}", {})
        if begun.get("cwd") and "hidden" not in begun:
            entry = {**entry, "cwd": entry.get("cwd") or begun["cwd"]}
        if made := with_absolute_paths(entry, hidden_paths(config)):
            OmegaConf.update(config, f"{BLOCKS[-1]}.{name}", made, merge=True, force_add=True)


def _cluster_to_join(config: DictConfig) -> str | None:
    """The address of the cluster, if the run joins one; removes settings of a Ray of its own."""
    address = OmegaConf.select(config, ADDRESS_KEY)
    if not address:
        return None
    ray_init = config.ray_kwargs.ray_init
    if address == THIS_MACHINE:
        with open_dict(ray_init):
            ray_init.pop("address")
        return None
    with open_dict(ray_init):
        for key in ONLY_FOR_A_NEW_RAY:
            ray_init.pop(key, None)
    return str(address)
