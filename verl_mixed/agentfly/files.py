"""Config files in AgentFly's style as overrides of the run config.

`agent_config.yaml` and `training_config.yaml` have sections (agent, data, algorithm, training,
hardware, monitoring) that name one agent, its tools and its reward; here a mixture of sources has
them. Every key that is unknown, of another type or set twice is said at once. What each key sets is
`verl_mixed.agentfly.keys`' table; sections and keys of the run config itself are taken as they are.
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
    KEYS,
    OF_SOURCES,
    SECTIONS,
    TOOLS,
    TOOLS_OF,
    absolute,
    files,
    texts,
)
from verl_mixed.run.compose import compose_config
from verl_mixed.run.settings import override_key

PAGE = "docs/configuration.md"

OWN_SOURCE = "json"
"""Name of the source of raw files, where `data.source` gives none; and their kind."""

_GROUPS = ("profile", "mixture", "prompts", "hydra.searchpath")
"""What decides which keys the run config has."""

_OPEN = ("mixed.sources", "mixed.prompts")
"""Where keys are names of the user's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A config file that was read."""

    path: Path
    content: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """What config files come to."""

    overrides: list[str]
    """Of Hydra; keys that the command line sets itself are left out."""

    lines: list[str]
    """`their.key = value -> our.key=value`, a file after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """A value of a file."""

    key: str
    """As the file has it."""

    value: Any
    path: Path

    @property
    def name(self) -> str:
        """The key as the table or the run config has it."""
        key = re.sub(r"^agent\.(init_config|run_config|generation_config)\.", "agent.", self.key)
        section, _, rest = key.partition(".")
        return f"{SECTIONS[section]}.{rest}" if section in SECTIONS and rest else key

    def __str__(self) -> str:
        return f"{self.key}={self.value!r} ({self.path})"


def translate_files(
    paths: Sequence[Path], given: Sequence[str], environ: Mapping[str, str]
) -> Translation:
    """Read config files and translate them for the profile and mixture that the run will have.

    Args:
        paths: files of `--config`, together one config.
        given: overrides of the command line; they win.
        environ: environment, for its PROFILE.

    Raises:
        ConfigError: everything that is wrong with the files, a line each.
    """
    documents: list[Document] = []
    problems: list[str] = []
    for path in paths:
        try:
            documents.append(read(path))
        except ConfigError as error:
            problems += error.problems
    groups = [each for each in given if override_key(each) in _GROUPS]
    if not any(override_key(each) == "profile" for each in groups):
        key = "hardware.profile"
        named = [
            each.value
            for document in documents
            for each in _values(document)
            if each.name == key and KEYS[key].accepts(each.value)
        ]
        if profile := (*named, environ.get("PROFILE", ""))[0]:
            groups.append(f"profile={hydra_text(profile)}")
    run = cast(dict[str, Any], OmegaConf.to_container(compose_config(groups), resolve=False))
    try:
        translation = translate(documents, run, given)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error
    if problems:
        raise ConfigError(problems)
    return translation


def read(path: Path) -> Document:
    """A config file; its interpolations (`${oc.env:HOME}`) are replaced.

    Raises:
        ConfigError: it cannot be read, or is no mapping of YAML.
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
    return Document(path=path, content=cast(dict[str, Any], content))


def translate(
    documents: Sequence[Document], run: Mapping[str, Any], given: Sequence[str] = ()
) -> Translation:
    """Say what each key of some config files sets.

    A value that cannot be taken is left out of what the others are held against.

    Args:
        documents: files that together are one config.
        run: the run config that they change, as composed, for the keys and sources that it has.
        given: overrides of the command line, which win.

    Raises:
        ConfigError: unknown keys, values of other types, keys that contradict one another: a line
            each.
    """
    found: list[_Given] = []
    problems: list[str] = []
    for each in (each for document in documents for each in _values(document)):
        if (problem := _problem(each, run)) is None:
            found.append(each)
        else:
            problems.append(problem)
    of_mixture, active, mixture_problems = _mixture(found, run)
    sets = [pair for each in found for pair in _sets(each, active)]
    sets += of_mixture
    sets += _kl_loss(found)
    agents, agent_problems = _agents(found, active)
    sets += agents
    problems += mixture_problems + agent_problems + _contradictions(found, sets)
    if problems:
        raise ConfigError(problems)
    return _written(found, sets, run, given)


_Set = tuple[str, Any, _Given]
"""A key of the run config, its value, and where the value comes from."""


def _values(document: Document) -> Iterator[_Given]:
    """The values of a file: at keys of the table, and leaves elsewhere. None is no value there."""

    def below(prefix: str, mapping: Mapping[str, Any]) -> Iterator[_Given]:
        for key, value in mapping.items():
            one = _Given(key=f"{prefix}{key}", value=value, path=document.path)
            if isinstance(value, dict) and value and one.name not in KEYS:
                yield from below(f"{prefix}{key}.", cast(dict[str, Any], value))
            elif value is not None or (one.name not in KEYS and prefix):
                yield one

    return below("", document.content)


def _problem(given: _Given, run: Mapping[str, Any]) -> str | None:
    """Why a value cannot be taken; None where it can."""
    if (key := KEYS.get(given.name)) is not None:
        return None if key.accepts(given.value) else f"{given}: want {key.wants}; correct it"
    if _is_known(given.name, run):
        return None
    there = [*KEYS, *flatten(run)]
    below = next((key for key in there if key.startswith(f"{given.name}.")), None)
    if below is not None:
        return f"{given}: it is a section; write keys below it, as {below}"
    near = get_close_matches(given.name, there, n=1, cutoff=0.75)
    same = [key for key in there if key.rpartition(".")[2] == given.name.rpartition(".")[2]]
    hint = f"did you mean {(near or same)[0]}?" if near or same else "remove it"
    return f"unknown key {given}: {_listed(given.name, run)}; {hint}"


def _listed(name: str, run: Mapping[str, Any]) -> str:
    """Where the keys are listed that this one may have been meant to be."""
    own = ("mixed.", f"{TOOL_CONFIG}.", "algorithm.state_masked_grpo.")
    if name.startswith(own):
        return "docs/settings.md lists all"
    if name.partition(".")[0] in run:
        return f"{PAGE} and `verl-mixed check` list all"
    return f"{PAGE} lists all"


def _is_known(key: str, run: Mapping[str, Any]) -> bool:
    """Whether the run config has a value there, or takes names of the user's own."""
    if any(key.startswith(f"{place}.") for place in _OPEN):
        return True
    value: Any = run
    for part in key.split("."):
        if value in ({}, None):
            return True
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = value[part]
    return not isinstance(value, Mapping) or not value


def _sets(given: _Given, active: Sequence[str]) -> Iterator[_Set]:
    """What one value sets by itself."""
    if (key := KEYS.get(given.name)) is None:
        is_path = given.key.endswith(".path") and isinstance(given.value, str)
        yield given.name, absolute(given.value) if is_path else given.value, given
        return
    for ours in key.sets:
        if ours.startswith(OF_SOURCES):
            for name in active:
                yield ours.replace("*", name), key.turned(given.value), given
        else:
            yield ours, key.turned(given.value), given


def _of(found: Sequence[_Given], name: str) -> _Given | None:
    """The last value of a key."""
    return next((each for each in reversed(found) if each.name == name), None)


def _mixture(
    found: Sequence[_Given], run: Mapping[str, Any]
) -> tuple[list[_Set], list[str], list[str]]:
    """What the keys of `data` set, the sources that take part, and what is wrong.

    Raw files are one source of their own, and so are rows of `data.source`; else the mixture stays,
    with `data.ratios` where they are given.
    """
    sources = at(run, "mixed.sources") or {}
    named, ratios = _of(found, "data.source"), _of(found, "data.ratios")
    of_data = [_of(found, "data.train_files"), _of(found, "data.val_files")]
    given = [each for each in of_data if each is not None]
    raw = [each for each in given if not all(map(_is_parquet, texts(each.value)))]
    problems: list[str] = []
    if len(raw) == 1 and len(given) == 2:
        problems.append(
            f"{given[1]} is of another kind than {given[0]}: give parquet for both, or neither"
        )
    origin = ratios or named or next(iter(raw), None)
    if origin is None:
        rows = [(each.name, files(each.value), each) for each in given]
        return rows, [name for name, one in sources.items() if _takes_part(one)], problems
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


def _is_parquet(name: str) -> bool:
    return name.endswith(".parquet")


def _takes_part(source: Any) -> bool:
    return isinstance(source, dict) and cast(dict[str, Any], source).get("ratio") != 0


def _agents(found: Sequence[_Given], active: Sequence[str]) -> tuple[list[_Set], list[str]]:
    """The agent of each source by type and tools; and what is wrong."""
    kind, tools = _of(found, "agent.agent_type"), _of(found, "agent.tools")
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
    origin = cast(_Given, kind or tools)
    return [(f"mixed.sources.{name}.agent", agent, origin) for name in active], []


def _kl_loss(found: Sequence[_Given]) -> list[_Set]:
    """`training.kl_coef` puts KL into the loss, unless `training.use_kl_loss` says otherwise."""
    coefficient = _of(found, "training.kl_coef")
    if coefficient is None or _of(found, "training.use_kl_loss") is not None:
        return []
    return [(f"{ACTOR}.use_kl_loss", coefficient.value > 0, coefficient)]


def _contradictions(found: Sequence[_Given], sets: Sequence[_Set]) -> list[str]:
    """Pairs of values that set one thing differently: two keys, or one key in two files."""
    together = [
        (each.name, each.value, each)
        for each in found
        if each.name in KEYS and KEYS[each.name].together
    ]
    problems: dict[tuple[int, int], str] = {}
    for group in (together, sets):
        first: dict[str, tuple[Any, _Given]] = {}
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


def _written(
    found: Sequence[_Given], sets: Sequence[_Set], run: Mapping[str, Any], given: Sequence[str]
) -> Translation:
    """The overrides, each key once, and the lines that say where they come from."""
    taken = {override_key(each) for each in given}
    known = {*flatten(run), *_GROUPS}
    overrides: dict[str, str] = {}
    lines: list[str] = []
    path: Path | None = None
    for each in found:
        if each.path != path:
            path = each.path
            lines.append(f"{path}:")
        key = KEYS.get(each.name)
        results = [(ours, value) for ours, value, origin in sets if origin is each]
        if not results:
            assert key is not None  # every other value sets something
            lines.append(f"  {each.key} = {_shown(each.value)} -> nothing: {key.without}")
        for ours, value in results:
            said = f"{ours}={hydra_text(value)}"
            is_left = ours in taken
            lines.append(
                f"  {each.key} = {_shown(each.value)} -> {said}"
                + (" (the command line has another)" if is_left else "")
            )
            if not is_left:
                overrides[ours] = f"{'' if ours in known else '++'}{said}"
    return Translation(overrides=[*overrides.values()], lines=lines)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else hydra_text(value)


def hydra_text(value: Any) -> str:
    """A value as Hydra's overrides have it; texts are quoted, and mean themselves.

    Args:
        value: None, a truth value, number or text, or lists and mappings of those.
    """
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
    if re.fullmatch(r"[A-Za-z_][\w.-]*", value) and value.lower() not in _OTHERWISE:
        return value
    escaped = re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value)
    return QuotedString(text=escaped, quote=Quote.single).with_quotes()


_OTHERWISE = ("null", "true", "false", "inf", "nan", "yes", "no", "on", "off", "y", "n")
"""Words that are something else than a text where they are not quoted."""


def keep_copies(paths: Sequence[Path], folder: Path) -> None:
    """Copy config files to `<time>-<name>`, so that a run says what it was started with."""
    now = time.strftime("%Y%m%dT%H%M%S")
    for path in paths:
        folder.mkdir(parents=True, exist_ok=True)
        name, number = f"{now}-{path.name}", 1
        while (folder / name).exists():
            number += 1
            name = f"{now}-{number}-{path.name}"
        shutil.copyfile(path, folder / name)
