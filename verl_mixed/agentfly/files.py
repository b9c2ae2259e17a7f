"""Translate config files in AgentFly's style into Hydra overrides of the run config.

`agent_config.yaml` and `training_config.yaml` describe one agent with its tools and its reward. A
run has a mixture of sources instead, so these values are set for every source. Keys of the run
config itself are passed on unchanged.
"""

import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from config.lookup import at, flatten
from config.schema import TOOL_CONFIG, ConfigError
from verl_mixed.agentfly.keys import (
    ACTOR,
    AGENTS,
    EVERY_SOURCE,
    KEYS,
    SECTIONS,
    TOOLS,
    TOOLS_OF,
    files,
    texts,
)
from verl_mixed.run.compose import compose_config
from verl_mixed.run.settings import absolute_if_local, override_key

PAGE = "docs/configuration.md"

OWN_SOURCE = "json"
"""Kind of raw files, and the name of their source if `data.source` gives none."""

_GROUPS = ("profile", "mixture", "prompts", "hydra.searchpath")
"""Overrides that decide which keys the run config has."""

_NAMED_BY_USER = ("mixed.sources", "mixed.prompts")
"""Sections whose keys are names that the user chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    overrides: list[str]
    """Hydra overrides, without the keys that the command line sets."""

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
        key = re.sub(r"^agent\.(init_config|run_config|generation_config)\.", "agent.", self.key)
        section, _, rest = key.partition(".")
        return f"{SECTIONS[section]}.{rest}" if section in SECTIONS and rest else key

    def __str__(self) -> str:
        return f"{self.key}={self.value!r} ({self.path})"


def translate_files(
    paths: Sequence[Path], given: Sequence[str], environ: Mapping[str, str]
) -> Translation:
    """Read config files and translate them for the run's profile and mixture.

    Args:
        paths: files of `--config`, which together are one config.
        given: overrides of the command line; they win.
        environ: PROFILE is used if neither files nor overrides name a profile.

    Raises:
        ConfigError: all mistakes in the files, a line each.
    """
    values: list[Value] = []
    problems: list[str] = []
    for path in paths:
        try:
            values += read(path)
        except ConfigError as error:
            problems += error.problems
    groups = [each for each in given if override_key(each) in _GROUPS]
    if not any(override_key(each) == "profile" for each in groups):
        key = "hardware.profile"
        named = [
            each.value for each in values if each.name == key and KEYS[key].accepts(each.value)
        ]
        if profile := (*named, environ.get("PROFILE", ""))[0]:
            groups.append(f"profile={hydra_text(profile)}")
    run = cast(dict[str, Any], OmegaConf.to_container(compose_config(groups), resolve=False))
    try:
        translation = translate(values, run, given)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error
    if problems:
        raise ConfigError(problems)
    return translation


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
    except (YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError([f"cannot read --config {path}: {reason}; correct the YAML"]) from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError([f"--config {path}: want sections with keys; see {PAGE}"])
    return [*values_of(path, cast(dict[str, Any], content))]


def translate(
    read_values: Sequence[Value], run: Mapping[str, Any], given: Sequence[str] = ()
) -> Translation:
    """Translate the values of config files.

    Args:
        read_values: of all files, which together are one config.
        run: the composed run config; its keys and sources are the known ones.
        given: overrides of the command line; they win.

    Raises:
        ConfigError: unknown keys, wrong types and contradictions, a line each. A value with a
            wrong type is left out of the search for contradictions.
    """
    values: list[Value] = []
    problems: list[str] = []
    for each in read_values:
        if (problem := _problem(each, run)) is None:
            values.append(each)
        else:
            problems.append(problem)
    of_mixture, active, mixture_problems = _mixture(values, run)
    of_agents, agent_problems = _agents(values, active)
    sets = [pair for each in values for pair in _sets(each, active)]
    sets += [*of_mixture, *_kl_loss(values), *of_agents]
    problems += mixture_problems + agent_problems + _contradictions(values, sets)
    if problems:
        raise ConfigError(problems)
    return _render(values, sets, run, given)


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
    known = [*KEYS, *flatten(run)]
    below = next((key for key in known if key.startswith(f"{given.name}.")), None)
    if below is not None:
        return f"{given}: it is a section; write keys below it, as {below}"
    near = get_close_matches(given.name, known, n=1, cutoff=0.75)
    same = [key for key in known if key.rpartition(".")[2] == given.name.rpartition(".")[2]]
    hint = f"did you mean {(near or same)[0]}?" if near or same else "remove it"
    return f"unknown key {given}: {_where_listed(given.name, run)}; {hint}"


def _where_listed(name: str, run: Mapping[str, Any]) -> str:
    """Which page or command lists the keys of this key's section."""
    own = ("mixed.", f"{TOOL_CONFIG}.", "algorithm.state_masked_grpo.")
    if name.startswith(own):
        return "docs/settings.md lists all"
    if name.partition(".")[0] in run:
        return f"{PAGE} and `verl-mixed check` list all"
    return f"{PAGE} lists all"


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


def _sets(given: Value, active: Sequence[str]) -> Iterator[_Set]:
    """What one value sets, as far as this does not depend on other values."""
    if (key := KEYS.get(given.name)) is None:
        is_path = given.key.endswith(".path") and isinstance(given.value, str)
        yield given.name, absolute_if_local(given.value) if is_path else given.value, given
        return
    for ours in key.sets:
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
    raw = [each for each in given if not all(x.endswith(".parquet") for x in texts(each.value))]
    problems: list[str] = []
    if len(raw) == 1 and len(given) == 2:
        problems.append(
            f"{given[1]} is of another kind than {given[0]}: give parquet for both, or neither"
        )
    origin = ratios or named or next(iter(raw), None)
    if origin is None:
        rows = [(each.name, files(each.value), each) for each in given]
        active = [
            name for name, one in sources.items() if isinstance(one, dict) and one.get("ratio") != 0
        ]
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


def _agents(values: Sequence[Value], active: Sequence[str]) -> tuple[list[_Set], list[str]]:
    """The agent of each source, chosen by type and tools; and the mistakes."""
    kind, tools = _last(values, "agent.agent_type"), _last(values, "agent.tools")
    wanted = {TOOLS[name] for name in texts(tools.value)} - {""} if tools else set[str]()
    if kind is not None:
        agent = str(AGENTS.get(kind.value, kind.value))
        lacks = wanted - TOOLS_OF.get(agent, wanted)
        if tools is not None and lacks:
            return [], [f"{tools}: {agent} of {kind} has no {', '.join(sorted(lacks))}; take react"]
    elif wanted:
        fitting = [name for name, has in TOOLS_OF.items() if has == wanted]
        agent = fitting[0] if fitting else "react_agent"
    else:
        return [], []
    origin = cast(Value, kind or tools)
    return [(f"mixed.sources.{name}.agent", agent, origin) for name in active], []


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
    taken = {override_key(each) for each in given}
    known = {*flatten(run), *_GROUPS}
    overrides: dict[str, str] = {}
    lines: list[str] = []
    path: Path | None = None
    for each in values:
        if each.path != path:
            path = each.path
            lines.append(f"{path}:")
        key = KEYS.get(each.name)
        results = [(ours, value) for ours, value, origin in sets if origin is each]
        if not results:
            assert key is not None  # only keys of the table may set nothing
            lines.append(f"  {each.key} = {_shown(each.value)} -> nothing: {key.sets_nothing}")
        for ours, value in results:
            line = f"  {each.key} = {_shown(each.value)} -> {ours}={hydra_text(value)}"
            if ours in taken:
                line += " (the command line has another)"
            else:
                overrides[ours] = f"{'' if ours in known else '++'}{ours}={hydra_text(value)}"
            lines.append(line)
    return Translation(overrides=[*overrides.values()], lines=lines)


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
    escaped = re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
    return QuotedString(text=escaped, quote=Quote.single).with_quotes()


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
