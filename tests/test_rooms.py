"""What an import loads, in a fresh interpreter: lines of ours, and packages of others."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import grimp
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.import_alone import PACKAGES

REPO_ROOT = Path(__file__).resolve().parent.parent

LOADED = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps({name: getattr(module, "__file__", None) for name, module in sys.modules.items()}))
"""

CORE = ("mixture_plan", "replay_buffer", "ledger", "audit")
OF_VERL = (
    *("verl.trainer.ppo.v1.trainer_base", "verl.trainer.ppo.core_algos"),
    *("verl.workers.rollout.base", "verl.workers.rollout.replica"),
    *("verl.workers.engine.fsdp.transformer_impl", "verl.checkpoint_engine"),
    "transfer_queue.interface",
)
"""Modules of verl at whose import the plugin registers something."""

ROOMS = {
    "core": (tuple(f"samplers.{name}" for name in CORE), 5_000),
    "limiter": (("rate_limit.file_limiter",), 2_600),
    "plugin": (("agent_loop.plugin",), 500),
    "plugin, in a process that uses all of verl": (("verl", *OF_VERL), 500),
    "door": (("verl_mixed.recipe",), 5_500),
    "trainer": (("agent_loop.training.trainer",), 12_000),
}
"""Room -> what is imported, and how many lines of ours that may load."""


@cache
def loaded(modules: tuple[str, ...]) -> dict[str, str | None]:
    """Module -> its file, of all modules in an interpreter that has imported some."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOADED, *modules],
        cwd=REPO_ROOT,
        env={name: x for name, x in os.environ.items() if name != "VERL_MIXED_FOLDER"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def foreign(tops: Iterable[str]) -> set[str]:
    """Distributions of others that have these top-level modules."""
    owners = packages_distributions()
    others = {*tops} - {*PACKAGES} - sys.stdlib_module_names
    return {canonicalize_name(owner) for top in others for owner in owners.get(top, ())}


def imported_by(file: str) -> Iterator[str]:
    """Top-level names that a file imports, its functions included."""
    for node in ast.walk(ast.parse(Path(file).read_text())):
        if isinstance(node, ast.Import):
            yield from (each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def brought(*wanted: str) -> set[str]:
    """Distributions that requirements bring with them, as installed here."""
    found = set[str]()
    left = [Requirement(text) for text in wanted]
    seen = set[tuple[str, str]]()
    while left:
        one = left.pop()
        for extra in ("", *one.extras):
            if (one.name, extra) in seen:
                continue
            seen.add((one.name, extra))
            try:
                requires = distribution(one.name).requires or []
            except ModuleNotFoundError:  # of another machine
                continue
            found.add(canonicalize_name(one.name))
            texts = map(Requirement, requires)
            left += [r for r in texts if r.marker is None or r.marker.evaluate({"extra": extra})]
    return found


def of_ours(modules: dict[str, str | None]) -> set[str]:
    return {file for name, file in modules.items() if name.split(".")[0] in PACKAGES and file}


@pytest.mark.slow
@pytest.mark.parametrize("room", ROOMS)
def test_an_import_loads_no_more_of_ours_than_its_room_may(room: str) -> None:
    names, most = ROOMS[room]
    lines = {file: len(Path(file).read_text().splitlines()) for file in of_ours(loaded(names))}
    assert sum(lines.values()) <= most, json.dumps(lines, indent=1)


@pytest.mark.slow
@pytest.mark.parametrize("room", ["core", "door"])
def test_the_core_needs_nothing_that_verl_and_torch_do_not_bring(room: str) -> None:
    files = of_ours(loaded(ROOMS[room][0]))
    needed = foreign(name for file in files for name in imported_by(file))
    assert needed <= brought("verl[verl-core]", "torch")
    assert {"numpy", "msgspec", "verl"} <= needed


def test_the_file_limiter_needs_filelock_only() -> None:
    always = loaded(("json",))  # what an interpreter of this environment has from its start
    modules = loaded(ROOMS["limiter"][0])
    assert foreign(name.partition(".")[0] for name in modules.keys() - always.keys()) == {
        "filelock"
    }


MAY_IMPORT = {
    "agent_loop": (
        *("agent_loop", "tool_server.wire", "tool_server.isolation"),
        *("samplers", "rate_limit", "config", "cpu_engine"),
    ),
    "tool_server": ("tool_server", "rate_limit", "config"),
    "tool_server.wire": ("tool_server.wire", "config"),
    "tool_server.isolation": ("tool_server.isolation",),
    "samplers": ("samplers", "rate_limit", "config"),
    "rate_limit": ("rate_limit",),
    "config": ("config",),
    "cpu_engine": ("cpu_engine",),
}
"""Room -> the rooms that its modules may import; import-linter's layers know no parts of a room."""


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    graph = grimp.build_graph(*PACKAGES)
    inside = {name for name in graph.modules if f"{name}.".startswith(f"{room}.")}
    assert inside
    allowed = tuple(f"{each}." for each in MAY_IMPORT[room])
    wrong = {
        f"{name} -> {other}"
        for name in inside
        for other in graph.find_modules_directly_imported_by(name)
        if not f"{other}.".startswith(allowed)
    }
    assert wrong == set()


def test_no_two_modules_import_each_other() -> None:
    graph = grimp.build_graph(*PACKAGES)
    pairs = [
        (name, other)
        for name in graph.modules
        for other in graph.find_modules_directly_imported_by(name)
        if name < other and name in graph.find_modules_directly_imported_by(other)
    ]
    assert pairs == []
