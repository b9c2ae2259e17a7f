"""Writes docs/settings.md: every environment variable of the scripts and every key of our sections.

python -m docs.settings
"""

import ast
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr
from pydantic_core import PydanticUndefined

from config.schema import TOOL_CONFIG, MixedConfig, StateMaskedGRPOConfig, ToolConfig
from tool_server.settings import OwnServerSettings
from verl_mixed.checks.config.unread import READERS, Reader, read_by
from verl_mixed.checks.preflight import SET_BY_THE_RUN
from verl_mixed.run.settings import SETTINGS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "settings.md"
SECTIONS: Mapping[str, type[BaseModel]] = {
    "mixed": MixedConfig,
    "tool_config": ToolConfig,
    "algorithm.state_masked_grpo": StateMaskedGRPOConfig,
    "mixed.tool_server": OwnServerSettings,
}
AS_ELSEWHERE = {"mixed.sources.<name>.prompt"}
"""Keys whose parts are described at another key, which their text names."""
REFUSED = {f"mixed.tool_server.{name}" for name in SET_BY_THE_RUN}
SCRIPTS = ("run_mixed_training.sh", "setup_cluster.sh")
OPENING = """\
# Settings

Written by `python -m docs.settings` from the code. Everything else is verl's own config;
`verl-mixed check` prints all of it, resolved.

A run's config is `config/mixed_dataset_grpo.yaml`, then a profile, then the variables below, then
`KEY=VALUE` of the command line. A profile may have other values than the defaults here: `PROFILE`
is one of {profiles}. `tool_config` is short for `{tool_config}`.
"""

READING = """\
Not every run reads every key. A key of this table, or a key below it, that a run does not read and
that has another value than the files of this project give it, is refused before the run starts. A
key with two conditions needs both. A key that is not here is not refused for this reason: most are
read by every run, and some have a check of their own. The agent loops of this project are those of
`config/agent_loops.yaml`; verl's are `tool_agent` and `single_turn_agent`.
"""


def docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Field -> the text under it, in the class or one that it is made from."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if not issubclass(base, BaseModel) or base is BaseModel:
            continue
        (tree,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in pairwise(tree.body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                words: str = ast.literal_eval(text.value) if isinstance(text, ast.Expr) else ""
                found[field.target.id] = " ".join(words.split())
    return found


def models_in(annotation: Any) -> Iterator[tuple[type[BaseModel], str]]:
    """Models that a value may be, and what stands before their fields: nothing, or `.<name>`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, ""
        return
    is_mapping = typing.get_origin(annotation) is dict
    for part in typing.get_args(annotation):
        for model, below in models_in(part):
            yield model, (".<name>" if is_mapping else "") + below


def keys(model: type[BaseModel], path: str) -> Iterator[tuple[str, Any, str]]:
    """Key, field and words of each setting; one with parts is followed by them."""
    words = docstrings(model)
    for name, field in model.model_fields.items():
        yield f"{path}.{name}", field, words.get(name, "")
        if f"{path}.{name}" in AS_ELSEWHERE:
            continue
        for part, below in models_in(field.annotation):
            yield from keys(part, f"{path}.{name}{below}")


def takes(annotation: Any) -> str:
    """Values of a type, in short."""
    arguments = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(dict.fromkeys(takes(part) for part in arguments))
    if origin is typing.Annotated:
        return takes(arguments[0])
    if origin is not None:
        return {dict: "mapping", list: "list", tuple: "list"}.get(origin, str(origin))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    known = {
        int: "whole number",
        float: "number",
        str: "text",
        SecretStr: "text",
        bool: "true, false",
    }
    known |= {types.NoneType: "null", Path: "path"}
    return known.get(annotation, "")


def default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.default if field.default is not PydanticUndefined else field.default_factory()
    if isinstance(value, BaseModel) or value in ({}, (), []):
        return ""
    words = {None: "null", True: "true", False: "false"}
    return f"`{words[value] if value is None or isinstance(value, bool) else value}`"


def table(*rows: tuple[str, ...]) -> Iterator[str]:
    """Rows of Markdown, the first one the heading."""
    for number, row in enumerate(rows):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
        if number == 0:
            yield "|" + " --- |" * len(row)


def settings_of(script: str) -> dict[str, str]:
    """Variable -> the words beside it, in a script's settings block."""
    text = (ROOT / script).read_text(encoding="utf-8")
    block = text.split("# --- settings;")[1].split("\n}")[0]
    found = re.findall(r"^  ([A-Z][A-Z0-9_]*)=(?:\"[^\"]*\"|\([^)]*\))(?: +# (.*))?$", block, re.M)
    return dict(found)


def reading(row: Reader) -> str:
    """Who reads the key of a row."""
    if not row.by:
        return f"by nobody: {row.instead}"
    words, remedy = read_by(row)
    return f"by {words}: `{remedy}`" if words == row.by else f"with `{words}`"


def page() -> str:
    """The page as it should be."""
    profiles = sorted(path.stem for path in (ROOT / "config" / "profile").glob("*.yaml"))
    lines = [
        OPENING.format(
            profiles=", ".join(f"`{name}`" for name in profiles), tool_config=TOOL_CONFIG
        )
    ]
    lines += ["## Environment variables", ""]
    for script in SCRIPTS:
        rows = []
        for name, words in settings_of(script).items():
            setting = SETTINGS.get(name)
            sets = f"`{setting.key}`" if setting else ""
            rows.append((f"`{name}`", sets, words or (setting.wants if setting else "")))
        lines += [f"In the block at the top of `{script}`:", ""]
        lines += [*table(("variable", "sets", "is"), *rows), ""]
    lines += ["## Who reads which key", "", READING]
    readers: dict[str, list[str]] = {}
    for row in READERS:
        readers.setdefault(f"`{row.key}`", []).append(reading(row))
    rows = [(key, " and ".join(by)) for key, by in readers.items()]
    lines += [*table(("key", "is read"), *rows), ""]
    for path, model in SECTIONS.items():
        rows = [
            (f"`{key}`", takes(field.annotation), default(field), words)
            for key, field, words in keys(model, path)
            if key not in REFUSED
        ]
        lines += [f"## {path}", "", *table(("key", "takes", "default", "is"), *rows), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {len(page().splitlines())} lines", file=sys.stderr)
