"""Translate AgentFly's config files and command lines into Hydra overrides of the run config.

`agent_config.yaml`, `training_config.yaml` and `agent.max_steps=8` on the command line describe one
agent with its tools and its reward. A run has a mixture of sources instead, so these values are set
for every source. Keys of the run config itself are passed on unchanged. Where the command line and
a file set the same key, the command line wins.
"""

import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from config.lookup import at, flatten
from config.schema import TOOL_CONFIG, ConfigError
from verl_mixed.agentfly.keys import (
    ACTOR,
    AGENTS,
    BY_TOKENS,
    EVERY_SOURCE,
    KEYS,
    LOG_PROBS,
    MICRO_BATCH,
    NATIVE,
    REACT,
    SECTIONS,
    TOOL_NAMES,
    TOOLS,
    TOOLS_OF,
    files,
    texts,
)
from verl_mixed.run.compose import compose_config, is_group, nearest_key, without_profile
from verl_mixed.run.override import TAGS, quoted
from verl_mixed.run.sections import DEFAULT_FORMAT, FORMAT_KEY, MODEL_KEY
from verl_mixed.run.settings import absolute_if_local, override_key

PAGE = "docs/configuration.md"

OWN_SOURCE = "json"
"""Kind of raw files, and the name of their source if `data.source` gives none."""

_GROUPS = ("profile", "mixture", "prompts", "model_engine", "hydra.searchpath")
"""Overrides that decide which keys the run config has."""

_OWN_SECTIONS = ("agent", "training", "hardware", "monitoring", *SECTIONS)
"""Sections that AgentFly has and the run config does not."""

COMMAND_LINE = Path("command line")
"""Stands for the file of a value that was typed as `key=value`."""

_NAMED_BY_USER = ("mixed.sources", "mixed.prompts", "mixed.agent_loops", "agent_loops")
"""Sections whose keys are names that the user chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    overrides: list[str]
    """Hydra overrides. Those of the command line that only Hydra understands come last."""

    lines: list[str]
    """For each file its name, then a line `their.key = value -> our.key=value` for each value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A value of a config file."""

    key: str
    value: Any
    path: Path

    @property
    def name(self) -> str:
        """The key as the table of keys or the run config spells it."""
        inner = "init_args|init_config|run_config|generation_config"
        key = re.sub(rf"^agent\.({inner})\.", "agent.", self.key)
        section, _, rest = key.partition(".")
        return f"{SECTIONS[section]}.{rest}" if section in SECTIONS and rest else key

    def __str__(self) -> str:
        return f"{self.key}={self.value!r} ({self.path})"


def is_agentflys(override: str) -> bool:
    """Whether an override of the command line has a key or a value that only we understand."""
    if not (typed := _typed(override)):
        return False
    (value,) = typed
    section = value.key.partition(".")[0]
    if section in _OWN_SECTIONS or value.key.startswith("agent_loops."):
        return True
    if section not in without_profile("dp") and not is_group(value.key):
        return True  # an unknown key: the translation names the nearest of all keys
    if value.name in _OF_SOURCE:
        return KEYS[value.name].accepts(value.value) and not _are_rows(value)
    key = KEYS.get(value.name)
    if key is None or value.name.startswith("critic.") or value.name == MICRO_BATCH:
        return False  # a key of verl's; it has another meaning beside a key of AgentFly's only
    return key.sets != (value.name,) or key.convert(value.value) != value.value


def translate_files(
    paths: Sequence[Path], given: Sequence[str], environ: Mapping[str, str]
) -> Translation:
    """Translate config files and the command line for the run's profile and mixture.

    Args:
        paths: files of `--config`, which together are one config.
        given: overrides of the command line; they win.
        environ: PROFILE is used if neither files nor overrides name a profile.

    Raises:
        ConfigError: all mistakes in the files and on the command line, a line each.
    """
    values: list[Value] = []
    problems: list[str] = []
    for path in paths:
        try:
            values += read(path)
        except ConfigError as error:
            problems += error.problems
    typed: dict[str, Value] = {}  # by key: of one that is typed twice the last counts, as in Hydra
    others: list[str] = []
    for override in given:
        found = _typed(override)
        typed |= {one.key: one for one in found}
        others += [] if found else [override]
    values += typed.values()
    groups = [each for each in others if override_key(each) in _GROUPS]
    if not any(override_key(each) == "profile" for each in groups):
        key = "hardware.profile"
        named = [
            each.value for each in values if each.name == key and KEYS[key].accepts(each.value)
        ]
        if profile := (environ.get("PROFILE", ""), *named)[-1]:
            groups.append(f"profile={hydra_text(profile)}")
    run = cast(dict[str, Any], OmegaConf.to_container(compose_config(groups), resolve=False))
    try:
        translation = translate(values, run, others)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error
    if problems:
        raise ConfigError(problems)
    return translation


def _typed(override: str) -> list[Value]:
    """The value of `key=value`; none if only Hydra can read the override."""
    bare = override.lstrip("+")
    if bare.partition(".")[0] in _OWN_SECTIONS:
        override = bare  # Hydra wants the + before a key that its config lacks
    key, equals, text = override.partition("=")
    # a tag is a text whatever it looks like; `verl_mixed.run.override` quotes it
    is_hydras = key in (*_GROUPS, *TAGS) or key.startswith("hydra.") or "${" in text
    if not equals or key != override_key(override) or is_hydras:
        return []
    try:
        parsed = OverridesParser.create().parse_override(override)
        value = text if parsed.is_sweep_override() else _plain(parsed.value())
    except HydraException:
        value = text
    one = Value(key=key, value=value, path=COMMAND_LINE)
    known = KEYS.get(one.name)
    is_name = not isinstance(value, list | dict)
    if known and is_name and not known.accepts(value) and known.accepts(text):
        return [Value(key=key, value=text, path=COMMAND_LINE)]  # a name of digits is a name
    if (isinstance(value, dict) or value is None) and (known is None) is isinstance(value, dict):
        return []
    return [one]


def _plain(value: Any) -> Any:
    """A value of Hydra's parser as a JSON value."""
    if isinstance(value, list):
        return [_plain(each) for each in cast(list[Any], value)]
    if isinstance(value, dict):
        return {str(_plain(k)): _plain(v) for k, v in cast(dict[Any, Any], value).items()}
    return value.text if isinstance(value, QuotedString) else value


def read(path: Path) -> list[Value]:
    """Read a config file and replace its interpolations (`${oc.env:HOME}`).

    Raises:
        ConfigError: it cannot be read, or is not a YAML mapping.
    """
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except OSError as error:
        raise ConfigError(
            [f"cannot read --config {path}: {error.strerror}; correct the name"]
        ) from error
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            [
                f"cannot read --config {path}: {error.full_key or 'its text'}: {reason}; set what "
                "${...} names there, or write the value itself"
            ]
        ) from error
    except (YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError([f"cannot read --config {path}: {reason}; correct the YAML"]) from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError([f"--config {path}: want sections with keys; see {PAGE}"])
    return [*values_of(path, cast(dict[str, Any], content))]


def translate(
    read_values: Sequence[Value], run: Mapping[str, Any], given: Sequence[str] = ()
) -> Translation:
    """Translate the values of config files and of the command line.

    Args:
        read_values: of all files, which together are one config, then of the command line.
        run: the composed run config; its keys and sources are the known ones.
        given: overrides that only Hydra understands; they win.

    Raises:
        ConfigError: unknown keys, wrong types and contradictions, a line each. A value with a
            wrong type is left out of the search for contradictions.
    """
    values: list[Value] = []
    problems: list[str] = []
    typed = {each.name for each in read_values if each.path == COMMAND_LINE}
    for each in read_values:
        if (problem := _problem(each, run)) is not None:
            problems.append(problem)
        elif each.path == COMMAND_LINE or each.name not in typed:
            values.append(each)
    of_mixture, active, mixture_problems = _mixture(values, run)
    of_agents, agent_problems = _agents(values, active)
    has_critic = _has_critic(values, run)
    sets = [pair for each in values for pair in _sets(each, active, has_critic=has_critic)]
    sets += [*of_mixture, *_kl_loss(values), *of_agents, *_micro_batches(values, run)]
    problems += mixture_problems + agent_problems
    for is_typed in (False, True):
        some = [each for each in values if (each.path == COMMAND_LINE) is is_typed]
        problems += _contradictions(some, [one for one in sets if one[2] in some])
    if problems:
        raise ConfigError(problems)
    return _render(read_values, sets, run, given)


_Set = tuple[str, Any, Value]
"""A key of the run config, its new value, and the value of a file that sets it."""


def values_of(path: Path, content: Mapping[str, Any], prefix: str = "") -> Iterator[Value]:
    """The values of a file: those of keys of the table whole, other mappings key by key.

    A null is left out where the table or a section of the run config has the key.
    """
    for key, value in content.items():
        one = Value(key=f"{prefix}{key}", value=value, path=path)
        if isinstance(value, dict) and value and one.name not in KEYS:
            yield from values_of(path, cast(dict[str, Any], value), f"{one.key}.")
        elif value is not None or (one.name not in KEYS and prefix):
            yield one


def _problem(given: Value, run: Mapping[str, Any]) -> str | None:
    """Why a value is refused; None if it is accepted."""
    if (key := KEYS.get(given.name)) is not None:
        return None if key.accepts(given.value) else f"{given}: want {key.wants}; correct it"
    if _is_known(given.name, run):
        return None
    known = [*KEYS, *flatten(run), *_GROUPS]
    below = next((key for key in known if key.startswith(f"{given.name}.")), None)
    if below is not None:
        return f"{given}: it is a section; write keys below it, as {below}"
    near = nearest_key(given.name, known)
    hint = f"did you mean {near}?" if near else "remove it"
    return f"unknown key {given}: {_where_listed(given.name, run)}; {hint}"


def _where_listed(name: str, run: Mapping[str, Any]) -> str:
    """Which page or command lists the keys of this key's section."""
    own = ("mixed.", f"{TOOL_CONFIG}.", "algorithm.state_masked_grpo.")
    if name.startswith(own):
        return "docs/settings.md lists all"
    if name.partition(".")[0] in run:
        return f"{PAGE} and `verl-mixed check` list all"
    return f"{PAGE} lists all keys of --config"


def _is_known(key: str, run: Mapping[str, Any]) -> bool:
    """Whether the run config has a value at this key, or the user chooses the key's name."""
    if any(key.startswith(f"{place}.") for place in _NAMED_BY_USER):
        return True
    value: Any = run
    for part in key.split("."):
        if value in ({}, None):
            return True
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = value[part]
    return not isinstance(value, Mapping) or not value


def _sets(given: Value, active: Sequence[str], *, has_critic: bool) -> Iterator[_Set]:
    """What one value sets, as far as this does not depend on other values."""
    if (key := KEYS.get(given.name)) is None:
        is_path = given.key.endswith(".path") and isinstance(given.value, str)
        yield given.name, absolute_if_local(given.value) if is_path else given.value, given
        return
    for ours in key.sets if has_critic or not key.only_with_critic else ():
        if ours.startswith(EVERY_SOURCE):
            for name in active:
                yield ours.replace("*", name), key.convert(given.value), given
        else:
            yield ours, key.convert(given.value), given


def _last(values: Sequence[Value], name: str) -> Value | None:
    return next((each for each in reversed(values) if each.name == name), None)


def _mixture(
    values: Sequence[Value], run: Mapping[str, Any]
) -> tuple[list[_Set], list[str], list[str]]:
    """(what the section `data` sets, the sources that take part, the mistakes)

    Raw files, or rows with `data.source`, are the only source. Otherwise the run's mixture is kept,
    with the ratios of `data.ratios` if these are given.
    """
    sources = at(run, "mixed.sources") or {}
    named, ratios = _last(values, "data.source"), _last(values, "data.ratios")
    of_data = [_last(values, "data.train_files"), _last(values, "data.val_files")]
    given = [each for each in of_data if each is not None]
    raw = [each for each in given if not _are_rows(each)]
    problems: list[str] = []
    if len(raw) == 1 and len(given) == 2:
        problems.append(
            f"{given[1]} is of another kind than {given[0]}: give parquet for both, or neither"
        )
    origin = ratios or named or next(iter(raw), None)
    if origin is None:
        rows = [(each.name, files(each.value), each) for each in given]
        ratios = {name: one.get("ratio") for name, one in sources.items() if isinstance(one, dict)}
        for each in values:  # sources that a file or the command line adds or leaves out
            if found := re.fullmatch(r"mixed\.sources\.([^.]+)(?:\.(\w+))?", each.name):
                name, key = found.groups()
                ratios.setdefault(name, 1.0)
                if key == "ratio" or (key is None and each.value is None):
                    ratios[name] = each.value or 0
        active = [name for name, ratio in ratios.items() if ratio != 0]
        return rows, active, problems
    own = named.value if named is not None else OWN_SOURCE
    if ratios is not None and (one := named or next(iter(raw), None)) is not None:
        problems.append(f"{ratios}: {one} is one source; remove one of them")
    shares = ratios.value if ratios is not None else {own: 1.0}
    if unknown := sorted(shares.keys() - sources.keys() - ({own} if raw else set())):
        problems.append(
            f"{origin}: no source {', '.join(unknown)}; the mixture has {', '.join(sources)}: name "
            "one of them, or take another mixture"
        )
    sets: list[_Set] = []
    for each in given:
        if raw:
            sets.append((f"mixed.sources.{own}.{_OF_SOURCE[each.name]}", files(each.value), each))
            sets.append((f"mixed.sources.{own}.kind", OWN_SOURCE, each))
        sets.append((each.name, [] if raw else files(each.value), each))
    for name in dict.fromkeys([*sources, *shares]):
        sets.append((f"mixed.sources.{name}.ratio", shares.get(name, 0), origin))
    return sets, [name for name, share in shares.items() if share], problems


_OF_SOURCE = {"data.train_files": "files", "data.val_files": "val_files"}


def _are_rows(files: Value) -> bool:
    """Whether all files of a value are parquet, so that they need no preparation."""
    return all(name.endswith(".parquet") for name in texts(files.value))


def _agents(values: Sequence[Value], active: Sequence[str]) -> tuple[list[_Set], list[str]]:
    """The agent of each source and its tools, chosen by type and tools; and the mistakes."""
    kind, tools = _last(values, "agent.agent_type"), _last(values, "agent.tools")
    if kind is None and tools is None:
        return [], []
    named = [TOOLS[name] for name in texts(tools.value)] if tools else []
    wanted = list(dict.fromkeys(name for name in named if name))
    fitting = next((name for name, has in TOOLS_OF.items() if has == {*wanted}), REACT)
    agent = fitting if kind is None else str(AGENTS.get(kind.value, kind.value))
    origin = cast(Value, kind or tools)
    sets: list[_Set] = [(f"mixed.sources.{name}.agent", agent, origin) for name in active]
    if agent == NATIVE and _is_format_open(values):
        sets.append((FORMAT_KEY, DEFAULT_FORMAT, origin))
    if tools is None:
        return sets, []
    if agent in TOOL_NAMES:
        return [*sets, (TOOL_NAMES[agent], wanted, tools)], []
    if agent not in TOOLS_OF:
        return [], [
            f"{tools}: {agent} of {kind} is an agent of your own: give it its tools as settings, "
            f"agent_loops.{agent}.<setting>, and remove agent.tools"
        ]
    if TOOLS_OF[agent] != {*wanted}:
        has = ", ".join(name for name, tool in TOOLS.items() if tool in TOOLS_OF[agent])
        return [], [
            f"{tools}: {agent} of {kind} has exactly one tool ({has}); name it alone, or take "
            "agent_type=react, whose tools are exactly those of the list"
        ]
    return sets, []


def _is_format_open(values: Sequence[Value]) -> bool:
    """Whether nobody says in which format a model of a hub writes its calls; the chat template of a
    local folder says it."""
    own = {FORMAT_KEY, "agent.tool_parser_name"}
    models = [each.value for each in values if MODEL_KEY in (each.name, *_keys_of(each))]
    is_local = not models or Path(str(models[-1])).expanduser().is_dir()
    return not is_local and not any(each.name in own for each in values)


def _keys_of(value: Value) -> tuple[str, ...]:
    return KEYS[value.name].sets if value.name in KEYS else ()


def _has_critic(values: Sequence[Value], run: Mapping[str, Any]) -> bool:
    """Whether the run trains a critic; verl has one with the estimator gae only."""
    named = [_last(values, key) for key in ("training.algorithm", "algorithm.adv_estimator")]
    estimators = [KEYS[each.name].convert(each.value) for each in named if each is not None]
    return [at(run, "algorithm.adv_estimator"), *estimators][-1] == "gae"


def _micro_batches(values: Sequence[Value], run: Mapping[str, Any]) -> list[_Set]:
    """A micro-batch of rows also turns off micro-batches by tokens, where the profile has these.

    verl then wants all sizes: one that is not given is as the first that is.
    """
    sizes = (MICRO_BATCH, *LOG_PROBS)
    given = {name: value for name in sizes if (value := _last(values, name)) is not None}
    if not given or not at(run, BY_TOKENS) or _last(values, BY_TOKENS) is not None:
        return []
    origin = next(iter(given.values()))
    switches = [_last(values, f"{ACTOR}.use_kl_loss"), _last(values, "training.use_kl_loss")]
    of_loss = [value for _, value, _ in _kl_loss(values)]
    has_reference = any([*(each.value for each in switches if each is not None), *of_loss])
    wanted = sizes if has_reference else sizes[:-1]
    missing = [(name, origin.value, origin) for name in wanted if name not in given]
    return [(BY_TOKENS, False, origin), *missing]


def _kl_loss(values: Sequence[Value]) -> list[_Set]:
    """`training.kl_coef` also switches the KL loss on or off, unless `use_kl_loss` is given."""
    coefficient = _last(values, "training.kl_coef")
    if coefficient is None or _last(values, "training.use_kl_loss") is not None:
        return []
    return [(f"{ACTOR}.use_kl_loss", coefficient.value > 0, coefficient)]


def _contradictions(values: Sequence[Value], sets: Sequence[_Set]) -> list[str]:
    """Pairs of values that set the same key differently: two keys, or one key in two files."""
    together = [
        (each.name, each.value, each)
        for each in values
        if each.name in KEYS and KEYS[each.name].sets_with_others
    ]
    problems: dict[tuple[int, int], str] = {}
    for group in (together, sets):
        first: dict[str, tuple[Any, Value]] = {}
        for place, value, given in group:
            before, origin = first.setdefault(place, (value, given))
            if before != value:
                is_same = given.name == origin.name and given.name in KEYS
                target = KEYS[given.name].target if is_same else place
                problems.setdefault(
                    (id(origin), id(given)),
                    f"{given} contradicts {origin}: both set {target}; remove one of them",
                )
    return [*problems.values()]


def _render(
    values: Sequence[Value], sets: Sequence[_Set], run: Mapping[str, Any], given: Sequence[str]
) -> Translation:
    """The overrides, each key once, and the lines that explain them."""
    typed_names = {each.name for each in values if each.path == COMMAND_LINE}
    typed = {ours for ours, _, origin in sets if origin.path == COMMAND_LINE}
    taken = {override_key(each) for each in given}
    known = {*flatten(run), *_GROUPS}
    overrides: dict[str, str] = {}
    lines: list[str] = []
    path: Path | None = None
    for each in values:
        is_typed = each.path == COMMAND_LINE
        key = KEYS.get(each.name)
        results = [(ours, value) for ours, value, origin in sets if origin is each]
        says_nothing = is_typed and results == [(each.key, each.value)]
        if each.path != path and not says_nothing:
            path = each.path
            lines.append(f"{path}:")
        if not results:
            if each.name in typed_names and not is_typed:
                why = "the command line has another"
            else:
                assert key is not None  # only keys of the table may set nothing
                why = "only gae has a critic" if key.only_with_critic else key.sets_nothing
            lines.append(f"  {each.key} = {_shown(each.value)} -> nothing: {why}")
        for ours, value in results:
            line = f"  {each.key} = {_shown(each.value)} -> {ours}={hydra_text(value)}"
            if ours in taken or (ours in typed and not is_typed):
                line += " (the command line has another)"
            else:
                overrides[ours] = f"{'' if ours in known else '++'}{ours}={hydra_text(value)}"
            if not says_nothing:
                lines.append(line)
    return Translation(overrides=[*overrides.values(), *given], lines=lines)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else hydra_text(value)


def hydra_text(value: Any) -> str:
    """A JSON value in the syntax of Hydra's overrides. Interpolations in texts are escaped."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(hydra_text, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{hydra_text(item)}" for key, item in value.items()) + "}"
    if not isinstance(value, str):
        return repr(value)
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", value) and value.lower() not in _NEED_QUOTES:
        return value
    return quoted(value)


_NEED_QUOTES = ("null", "true", "false", "inf", "nan", "yes", "no", "on", "off", "y", "n")
"""Words that Hydra or YAML reads as another type than text if they are not quoted."""


def keep_copies(paths: Sequence[Path], folder: Path) -> None:
    """Copy config files to `<time>-<name>` in a run's folder."""
    now = time.strftime("%Y%m%dT%H%M%S")
    for path in paths:
        folder.mkdir(parents=True, exist_ok=True)
        name, number = f"{now}-{path.name}", 1
        while (folder / name).exists():
            number += 1
            name = f"{now}-{number}-{path.name}"
        shutil.copyfile(path, folder / name)
