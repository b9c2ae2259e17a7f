"""What the pages name exists: commands, options, settings, config keys, files; and the reverse.

Decides from the code of a page: its spans and its blocks. What they say in words is not looked at.
"""

import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from pydantic import BaseModel

from config.gateway import GatewayOptions
from config.schema import TOOL_CONFIG
from docs.settings import PAGE, SECTIONS, keys, page
from docs.tree import PACKAGES
from samplers.rows.sources import KINDS
from verl_mixed.agentfly.keys import KEYS as AGENTFLY
from verl_mixed.agentfly.keys import TOOL_NAMES
from verl_mixed.checks.config.unread import READERS
from verl_mixed.cli import COMMANDS, main
from verl_mixed.run.compose import TRAINING_ENGINES, compose_config
from verl_mixed.run.settings import SETTINGS

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/*.md", "*/README.md")
    for path in ROOT.glob(pattern)
    if not path.relative_to(ROOT).as_posix().startswith(".")
)
SCRIPTS = (
    "run_mixed_training.sh",
    "setup_cluster.sh",
    "run_tests.sh",
    "requirements/renew.sh",
    "benchmarks/release_check.sh",
)
PREPARED = {*KINDS, "demo", "smollm", "corpus"}
PROFILES = sorted(path.stem for path in (ROOT / "config" / "profile").glob("*.yaml"))
ABBREVIATED = {"tool_config": TOOL_CONFIG, "multi_turn": "actor_rollout_ref.rollout.multi_turn"}
"""How pages shorten keys that say nothing new before this part."""

OF_A_ROW = "reward_model."
"""A column of the data, and the name of a section of verl's config."""

NOT_OURS = {
    "--no-deps",
    "--nodes",
    "--time",
    "--mem",
    "--ignoreexternal",
    "--verifytypes",
    "--submission-id",
    *("--network", "--pid", "--ipc", "--gpus", "--device", "--nv", "--security-opt", "--ulimit"),
}
"""Options of pip, Slurm, pyright, Ray and the container engines."""

FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
VARIABLE = re.compile(r"(?<![\w<$.{-])(?:[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+(?![\w>*-])|[A-Z]{2,}(?==))")
KEY = re.compile(r"(?:\+\+|\+|~)?((?:[a-z]\w*)(?:\.(?:\w+|<\w+>|\{[\w, ]+\}))+)(?:=.*)?")
FILE_ENDINGS = (".py", ".yaml", ".json", ".jsonl", ".pt", ".html", ".log", ".txt", ".parquet")


@dataclass(frozen=True, slots=True)
class Quote:
    """A span of code, or a line of a block."""

    page: str
    text: str
    is_block: bool


def quotes(page: str) -> Iterator[Quote]:
    text = (ROOT / page).read_text(encoding="utf-8")
    for block in FENCE.finditer(text):
        for line in block[2].replace("\\\n", " ").splitlines():
            yield Quote(page, line.strip(), True)
    for span in re.finditer(r"`([^`]+)`", FENCE.sub("", text)):
        yield Quote(page, " ".join(span[1].replace("\\|", "|").split()), False)


ALL = [quote for page in PAGES for quote in quotes(page)]


@cache
def help_of(program: str) -> str:
    """What `--help` prints; the program is a script, or `verl-mixed` and its words."""
    if program in SCRIPTS:
        header = (ROOT / program).read_text().split("\nset -euo", 1)[0]
        return "\n".join(line.removeprefix("# ") for line in header.splitlines())
    said = StringIO()
    with redirect_stdout(said), pytest.raises(SystemExit):
        main([*program.split()[1:], "--help"])
    return said.getvalue()


def options_of(program: str) -> set[str]:
    return set(OPTION.findall(help_of(program))) | {"--help"}


def programs_in(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """Program with its subcommand, what follows on the line, and the subcommands it is called
    with."""
    for found in re.finditer(
        r"(?<![\w/-])(verl-mixed|\./\w+\.sh|\w+/\w+\.sh)(?![\w-])([^&;]*)", text
    ):
        name, rest = found[1].removeprefix("./"), found[2]
        if name == "verl-mixed":
            words = re.findall(r"[^\s|`]+", re.split("[#`]", rest)[0])
            if words and words[0] == "prepare" and len(words) > 1 and words[1].islower():
                yield f"verl-mixed prepare {words[1]}", rest, words[:2]
            elif words and re.fullmatch(r"[a-z][a-z-]*", words[0]):
                yield f"verl-mixed {words[0]}", rest, words[:1]
            else:
                yield "verl-mixed", rest, []
        elif name in SCRIPTS:
            parts = [part.split() for part in rest.split("#")[0].split("|")]
            first = [part[0] for part in parts if part and re.fullmatch(r"[a-z-]+", part[0])]
            yield name, rest, [word for word in first if not word.startswith("-")]


def is_command(program: str, words: list[str]) -> bool:
    if program.startswith("verl-mixed prepare "):
        return words[1] in PREPARED or words[1].endswith(".py")
    if program.startswith("verl-mixed"):
        return not words or words[0] in COMMANDS
    return all(re.search(rf"^ *{word}\s", help_of(program), re.MULTILINE) for word in words)


def test_every_command_that_a_page_calls_exists() -> None:
    wrong = [
        f"{quote.page}: {quote.text}"
        for quote in ALL
        for program, _, words in programs_in(quote.text)
        if not is_command(program, words)
    ]
    assert wrong == []


def test_every_option_that_a_page_names_is_in_the_help_of_its_command() -> None:
    wrong = []
    for quote in ALL:
        called = [one for one in programs_in(quote.text) if is_command(one[0], one[2])]
        for program, rest, _ in called:
            unknown = set(OPTION.findall(rest)) - options_of(program) - NOT_OURS
            wrong += [f"{quote.page}: {program} {option}" for option in sorted(unknown)]
    assert wrong == []


@cache
def every_option() -> set[str]:
    kinds = {f"verl-mixed prepare {kind}" for kind in PREPARED}
    programs = {f"verl-mixed {name}" for name in COMMANDS} | kinds
    programs |= {script for script in SCRIPTS if (ROOT / script).exists()}
    measured = "\n".join(path.read_text() for path in (ROOT / "benchmarks").glob("*.py"))
    return set(re.findall(r'"(--[a-z-]+)"', measured)).union(*map(options_of, programs))


def test_every_option_that_stands_by_itself_is_one_of_some_command() -> None:
    wrong = []
    for quote in ALL:
        first, _, rest = quote.text.partition(" ")
        if first in COMMANDS:
            known = options_of(f"verl-mixed {first}") if first != "prepare" else every_option()
        elif first.startswith("--"):
            known, rest = every_option(), quote.text
        else:
            continue
        unknown = set(OPTION.findall(rest)) - known - NOT_OURS
        wrong += [f"{quote.page}: {quote.text}"] if unknown and not quote.is_block else []
    assert wrong == []


@cache
def code() -> str:
    """Everything that runs."""
    folders = (*PACKAGES, "benchmarks", "requirements", "tests")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    paths += [ROOT / script for script in SCRIPTS]
    return "\n".join(
        path.read_text(encoding="utf-8")
        for path in paths
        if path.suffix in {".py", ".sh", ".yaml", ".sbatch"} and path.is_file()
    )


def test_every_environment_variable_that_a_page_names_is_read_somewhere() -> None:
    known = set(re.findall(r"\b[A-Z][A-Z0-9_]+\b", code()))
    named = {
        (quote.page, name) for quote in ALL for name in VARIABLE.findall(quote.text.split(" # ")[0])
    }
    assert {(page, name) for page, name in named if name not in known} == set()


def fields(model: type[BaseModel], path: str) -> Iterator[str]:
    """Dotted paths of a model's fields in full; a key of a mapping is `*`."""
    for key, _, _ in keys(model, path):
        yield from expanded(key)


def tree(config: Any, path: str = "") -> Iterator[str]:
    if isinstance(config, dict):
        for name, value in config.items():
            yield f"{path}{name}"
            yield from tree(value, f"{path}{name}.")


@cache
def config_keys() -> set[str]:
    """Of every profile and engine, our own sections, what the settings set, and AgentFly's."""
    keys = {setting.key for setting in SETTINGS.values()}
    keys |= {key for path, model in SECTIONS.items() for key in fields(model, path)}
    keys |= {reader.key for reader in READERS}
    keys |= set(AGENTFLY) | {f"agent.{part}_config" for part in ("init", "run", "generation")}
    keys |= {"agent.init_args", "agent_loops.*._target_", *TOOL_NAMES.values()}
    keys |= {f"agent_loops.*.{name}" for name in GatewayOptions.model_fields}
    engines = [["profile=gpu", f"model_engine={name}"] for name in TRAINING_ENGINES]
    for chosen in (*([f"profile={name}"] for name in PROFILES), *engines):
        composed = compose_config(chosen)
        keys |= set(tree(OmegaConf.to_container(composed, resolve=False)))
    return keys


def expanded(key: str) -> Iterator[str]:
    """One key for each name in braces, with `*` for a placeholder, in full."""
    key = re.sub(r"<\w+>", "*", key)
    root, _, rest = key.partition(".")
    key = f"{ABBREVIATED.get(root, root)}.{rest}"
    if braces := re.search(r"\{([^}]*)\}", key):
        for name in braces[1].split(","):
            yield key.replace(braces[0], name.strip())
    else:
        yield key


def pattern(key: str) -> re.Pattern[str]:
    return re.compile(re.escape(key).replace(r"\*", r"[^.]+"))


@cache
def open_keys() -> list[re.Pattern[str]]:
    """Keys below a name of the user's, as of a source."""
    return [pattern(key) for key in config_keys() if "*" in key]


OF_A_RECIPE = {
    *("data.mixture", "data.mixture_base"),
    *(f"trainer.v1.sampler.sampler_kwargs.{name}" for name in ("max_wait_s", "max_replacements")),
}
"""Keys that a recipe of verl's adds to verl's."""


def is_key(key: str) -> bool:
    if key in OF_A_RECIPE or key in config_keys() or any(one.fullmatch(key) for one in open_keys()):
        return True
    return "*" in key and any(map(pattern(key).fullmatch, config_keys()))


def keys_in(quote: Quote) -> Iterator[str]:
    words = quote.text.split("#")[0].split() if quote.is_block else [quote.text]
    roots = {key.split(".")[0] for key in config_keys()} | set(ABBREVIATED)
    for word in words:
        found = KEY.fullmatch(word.strip("'\""))
        if found is None or (quote.is_block and "=" not in word):
            continue
        is_other = found[1].endswith(FILE_ENDINGS) or found[1].startswith(OF_A_ROW)
        if found[1].split(".")[0] in roots and not is_other:
            yield from expanded(found[1])


@pytest.mark.slow
def test_every_config_key_that_a_page_names_exists() -> None:
    wrong = [f"{quote.page}: {key}" for quote in ALL for key in keys_in(quote) if not is_key(key)]
    assert wrong == []


def anchor(heading: str) -> str:
    words = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return words.replace(" ", "-")


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text)):
        if re.match(r"\w+:", target):
            continue
        name, _, part = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        headings = (
            re.findall(r"^#+ (.*)$", path.read_text(), re.M) if part and path.exists() else []
        )
        if not path.exists() or (part and part not in map(anchor, headings)):
            wrong.append(target)
    assert wrong == []


MADE_LATER = ("runs/", "logs/", "data/", "artefacts/", "build/", "dist/", "wandb/")
"""Folders that a checkout does not have until something has run in it."""


def test_every_file_of_the_repository_that_a_page_names_exists() -> None:
    folders = "|".join(
        path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."
    )
    wrong = []
    for quote in ALL:
        for name in re.findall(rf"(?<![\w./~<>-])(?:{folders})/[\w./*-]*", quote.text):
            if name.startswith(MADE_LATER):
                continue
            if not list(ROOT.glob(name.rstrip("./").partition("::")[0] or name)):
                wrong.append(f"{quote.page}: {name}")
    assert wrong == []


def test_every_marker_that_is_left_out_or_taken_is_registered() -> None:
    registered = set(re.findall(r'^  "(\w+): ', (ROOT / "pyproject.toml").read_text(), re.M))
    script = (ROOT / "run_tests.sh").read_text()
    selections = re.findall(r'-m "([^"]+)"', script) + re.findall(r'^LONG="([^"]+)"', script, re.M)
    selections += [one for quote in ALL for one in re.findall(r"-m '([^']+)'", quote.text)]
    words = set(re.findall(r"[a-z]+", re.sub(r"\$\{\w+\}", "", " ".join(selections))))
    assert "slow" in words
    assert words - {"and", "or", "not"} <= registered


def named(pages: str = "*") -> str:
    return "\n".join(quote.text for quote in ALL if pages in ("*", quote.page))


def test_the_changelog_has_every_release() -> None:
    released = re.findall(r"^## (\S+) \(", (ROOT / "CHANGELOG.md").read_text(), re.M)
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version is not None and released[0] == version[1] and released[-1] == "1.0.0"


def test_every_command_is_in_the_table_of_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\|.*$", text, re.MULTILINE))
    table = "\n".join(row.split(" | ")[0] for row in rows)
    assert {name for name in COMMANDS if not re.search(rf"`{name}\b", table)} == set()


@pytest.mark.parametrize("script", ["run_mixed_training.sh", "setup_cluster.sh"])
def test_every_command_of_a_script_is_on_a_page(script: str) -> None:
    commands = re.findall(r"^  ([a-z][a-z-]*)(?: \[\w+\])?  +\S", help_of(script), re.MULTILINE)
    assert len(commands) > 5
    assert {name for name in commands if not re.search(rf"\b{name}\b", named())} == set()


def test_every_setting_is_on_a_page() -> None:
    assert {name for name in SETTINGS if not re.search(rf"\b{name}\b", named())} == set()


def test_every_profile_is_on_a_page() -> None:
    assert {name for name in PROFILES if not re.search(rf"\b{name}\b", named())} == set()


def test_the_page_of_settings_is_what_the_code_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "write it anew: python -m docs.settings"


def test_every_setting_has_words_on_the_page_of_settings() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|.*\| ([^|]*) \|$", page(), re.MULTILINE)
    assert len(rows) > 120
    assert [name for name, words in rows if not words.strip()] == []
