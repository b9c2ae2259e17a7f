"""The plugin registers each name once verl's module has run, and `is_loaded` notices a lost one."""

import importlib
import importlib.util
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import verl.checkpoint_engine
import verl.trainer.ppo.v1
import verl.workers.engine.fsdp.transformer_impl  # noqa: F401
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.plugin.platform import PlatformRegistry
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.v1 import trainer_base
from verl.workers.engine.base import EngineRegistry
from verl.workers.rollout import base, replica

from agent_loop.plugin import REGISTRATIONS, AfterImport, is_loaded

REPO_ROOT = Path(__file__).resolve().parents[2]

LOOK_THEN_IMPORT = """
import importlib, importlib.util, sys
from agent_loop.plugin import REGISTRATIONS, is_loaded

assert is_loaded()
for name in REGISTRATIONS:
    if name not in sys.modules:
        importlib.util.find_spec(name)
        importlib.util.find_spec(name)
for name in REGISTRATIONS:
    importlib.import_module(name)
    assert is_loaded(), name

from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class

get_adv_estimator_fn("state_masked_grpo")
get_rollout_class("hf")
get_rollout_replica_class("hf")
CheckpointEngineRegistry.get("tcp_store")
assert "agent_loop.training.trainer" not in sys.modules
get_trainer_cls("mixed_sync")
"""


@pytest.mark.slow
def test_all_names_are_registered_after_looks_at_the_modules_of_verl() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOOK_THEN_IMPORT],
        cwd=REPO_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# --- one module, and when its registration is called ----------------------------------------------


class Watched:
    """A module on the path, and the values of `state` at each of its registrations."""

    def __init__(self, path: Path) -> None:
        self.path, self.seen = path, list[str]()
        self.write("state = 'began'\nstate = 'ran'\n")

    def write(self, source: str) -> None:
        self.path.write_text(source)
        importlib.invalidate_caches()

    def register(self, module: Any) -> None:
        self.seen.append(module.state)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    module = Watched(tmp_path / "watched_module.py")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    finder = AfterImport({"watched_module": module.register})
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    yield module
    sys.modules.pop("watched_module", None)


def test_a_registration_is_called_once_when_the_module_has_run(watched: Watched) -> None:
    for _ in range(3):
        assert importlib.util.find_spec("watched_module") is not None
    assert watched.seen == []

    importlib.import_module("watched_module")
    importlib.import_module("watched_module")
    importlib.util.find_spec("watched_module")

    assert watched.seen == ["ran"]


def test_a_reloaded_module_is_registered_with_again(watched: Watched) -> None:
    module = importlib.import_module("watched_module")
    watched.write("state = 'ran again'\n")

    assert importlib.reload(module) is module
    assert watched.seen == ["ran", "ran again"]


def test_a_module_that_fails_is_registered_with_at_the_next_import(watched: Watched) -> None:
    watched.write("raise ImportError('no such device')\n")
    with pytest.raises(ImportError, match="no such device"):
        importlib.import_module("watched_module")
    assert watched.seen == []

    watched.write("state = 'mended'\n")
    importlib.import_module("watched_module")
    assert watched.seen == ["mended"]


def test_a_registration_that_fails_fails_the_import(watched: Watched) -> None:
    watched.write("")
    for _ in range(2):
        with pytest.raises(AttributeError, match="state"):
            importlib.import_module("watched_module")
    assert "watched_module" not in sys.modules


def test_the_source_of_a_watched_module_can_be_read(watched: Watched) -> None:
    module = importlib.import_module("watched_module")
    assert inspect.getsource(module) == watched.path.read_text()


def test_a_module_that_is_nowhere_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    finder = AfterImport({"no_such_module": print})
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    assert importlib.util.find_spec("no_such_module") is None


# --- is_loaded ------------------------------------------------------------------------------------

LOSSES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "platform": lambda patch: patch.delitem(PlatformRegistry._platforms, "cpu"),
    "trainers": lambda patch: patch.setattr(trainer_base, "TRAINER_REGISTRY", {}),
    "estimators": lambda patch: patch.setattr(core_algos, "ADV_ESTIMATOR_REGISTRY", {}),
    "rollouts": lambda patch: patch.delitem(base._ROLLOUT_REGISTRY, ("hf", "async")),
    "replicas": lambda patch: patch.delitem(replica.RolloutReplicaRegistry._registry, "vllm_cpu"),
    "engines": lambda patch: patch.delitem(EngineRegistry._engines["value_model"]["fsdp2"], "cpu"),
    "checkpoint engine": lambda patch: patch.setattr(CheckpointEngineRegistry, "_registry", {}),
}


@pytest.mark.parametrize("lost", LOSSES)
def test_is_loaded_notices_each_name_that_verl_does_not_have(
    lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_loaded()
    LOSSES[lost](monkeypatch)
    assert not is_loaded()


@pytest.mark.parametrize("name", REGISTRATIONS)
def test_is_loaded_takes_a_module_that_is_not_imported_only_while_its_registration_waits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, name)
    assert is_loaded()
    monkeypatch.setattr(
        sys, "meta_path", [each for each in sys.meta_path if not isinstance(each, AfterImport)]
    )
    assert not is_loaded()
