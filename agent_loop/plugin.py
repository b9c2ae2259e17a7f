"""Registers this project's names with verl: the `verl.plugins` entry point of every Ray process.

verl adapter: `verl/__init__.py:55-76` at 0.9.1 imports this module while `import verl` runs, and
logs a failure at DEBUG only, so that `verl-mixed doctor` and the training process ask `is_loaded`.

| name | verl's registry | process that looks it up |
| --- | --- | --- |
| platform `cpu` | `PlatformRegistry` | all, while `import verl` runs |
| `mixed_sync` and the other trainers | `TRAINER_REGISTRY` | the trainer |
| `state_masked_grpo`, `state_masked_remax` | `ADV_ESTIMATOR_REGISTRY` | the trainer |
| `hf`, `vllm_cpu` | `RolloutReplicaRegistry` | the trainer |
| `hf`, `vllm_cpu` | `_ROLLOUT_REGISTRY` | training workers, checkpoint workers |
| `tcp_store` | `CheckpointEngineRegistry` | the trainer, training and checkpoint workers |
| FSDP2 on `cpu` | `EngineRegistry` | training workers |
| the run's own namespace | TransferQueue's `interface` | all that read or write rows |

Only the platform is registered at once. Importing all modules that hold the registries would add
one to three seconds to the start of every process, so each of the other names is registered right
after verl's module has run. A registration imports no module of ours that imports names from
another adapter of ours: otherwise the first import of that adapter would close a circle.
"""

import importlib.abc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from agent_loop.training.queue_namespace import give_own_namespace, has_own_namespace


def _refuse_agentflys_command(words: Sequence[str]) -> None:
    """End `python -m verl.trainer.main_ppo agent.agent_type=...` with the command that works.

    AgentFly's fork of verl has these keys. verl itself would say that `agent` is not in a struct.

    Args:
        words: the command line of the process, Python's own options included.
    """
    of_verl = ("verl.trainer.main_ppo", "-mverl.trainer.main_ppo")
    runs_verl = any(word in of_verl or word.endswith("trainer/main_ppo.py") for word in words)
    if runs_verl and (typed := next((word for word in words if word.startswith("agent.")), None)):
        print(
            f"error: {typed}: agent.* are keys of AgentFly's, which verl does not have; type "
            "`verl-mixed train` in place of `python -m verl.trainer.main_ppo`, with the same "
            "arguments",
            file=sys.stderr,
        )
        raise SystemExit(2)


_refuse_agentflys_command(sys.orig_argv)

_TRAINERS = {
    "mixed_sync": "agent_loop.training.trainer.MixedSyncTrainer",
    "mixed_colocate_async": "agent_loop.training.trainer.MixedColocateAsyncTrainer",
    "mixed_separate_async": "agent_loop.training.trainer.MixedSeparateAsyncTrainer",
}

_ESTIMATORS = {
    name: f"agent_loop.training.advantage.compute_{name}_advantage"
    for name in ("per_session", "state_masked_grpo", "state_masked_remax")
}
_CHECKPOINT_ENGINES = {"tcp_store": "cpu_engine.checkpoint_engine.TCPStoreCheckpointEngine"}
_ROLLOUTS = {
    ("hf", "async"): "cpu_engine.rollout.HFServerAdapter",
    ("vllm_cpu", "async"): "cpu_engine.vllm_cpu.ServerAdapter",
}


class ByName(dict[str, Any]):
    """A registry of verl's, which imports an object of ours when its name is looked up first."""

    def __init__(self, registry: Mapping[str, Any], ours: Mapping[str, str]) -> None:
        super().__init__(registry)
        self._ours = ours

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._ours

    def __missing__(self, name: str) -> Any:
        module, _, attribute = self._ours[name].rpartition(".")
        self[name] = found = getattr(import_module(module), attribute)
        return found


@dataclass(frozen=True, slots=True)
class Registration:
    register: Callable[[Any], object]
    """Takes verl's module. It runs again when the module is reloaded."""

    is_done: Callable[[Any], bool]
    """Takes verl's module; whether its registry has the names."""


def _register_trainers(trainer_base: Any) -> None:
    trainer_base.TRAINER_REGISTRY = ByName(trainer_base.TRAINER_REGISTRY, _TRAINERS)


def _register_estimators(core_algos: Any) -> None:
    core_algos.ADV_ESTIMATOR_REGISTRY = ByName(core_algos.ADV_ESTIMATOR_REGISTRY, _ESTIMATORS)


def _register_checkpoint_engine(checkpoint_engine: Any) -> None:
    registry = checkpoint_engine.CheckpointEngineRegistry
    registry._registry = ByName(registry._registry, _CHECKPOINT_ENGINES)


def _register_replicas(replica: Any) -> None:
    register = replica.RolloutReplicaRegistry.register
    register("hf", lambda: import_module("cpu_engine.rollout").HFReplica)
    register("vllm_cpu", lambda: import_module("cpu_engine.vllm_cpu").VLLMCPUReplica)


def _has_engines(transformer_impl: Any) -> bool:
    from verl.workers.engine.base import EngineRegistry

    engines = EngineRegistry._engines
    return all("cpu" in engines[kind]["fsdp2"] for kind in ("language_model", "value_model"))


REGISTRATIONS: Mapping[str, Registration] = {
    "verl.trainer.ppo.v1.trainer_base": Registration(
        _register_trainers, lambda module: isinstance(module.TRAINER_REGISTRY, ByName)
    ),
    "verl.trainer.ppo.core_algos": Registration(
        _register_estimators, lambda module: isinstance(module.ADV_ESTIMATOR_REGISTRY, ByName)
    ),
    "verl.workers.rollout.base": Registration(
        lambda module: module._ROLLOUT_REGISTRY.update(_ROLLOUTS),
        lambda module: _ROLLOUTS.keys() <= module._ROLLOUT_REGISTRY.keys(),
    ),
    "verl.workers.rollout.replica": Registration(
        _register_replicas,
        lambda module: {"hf", "vllm_cpu"} <= module.RolloutReplicaRegistry._registry.keys(),
    ),
    "verl.workers.engine.fsdp.transformer_impl": Registration(
        lambda module: import_module("cpu_engine.engine"), _has_engines
    ),
    "verl.checkpoint_engine": Registration(
        _register_checkpoint_engine,
        lambda module: isinstance(module.CheckpointEngineRegistry._registry, ByName),
    ),
    "transfer_queue.interface": Registration(give_own_namespace, has_own_namespace),
}
"""Module of verl -> what is registered once it has run."""


class AfterImport(importlib.abc.MetaPathFinder):
    """Runs a registration after each run of its module, however often the module is looked for.

    Where the module or the registration raises, the import fails, and the next import tries again.
    """

    def __init__(self, registrations: Mapping[str, Callable[[Any], object]]) -> None:
        self._registrations = registrations

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        register = self._registrations.get(fullname)
        if register is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                _register_after(spec, register)
                return spec
        return None


def _register_after(spec: ModuleSpec, register: Callable[[Any], object]) -> None:
    """Let the loader of a spec, which no other spec has, call `register` with its module."""
    loader: Any = spec.loader
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        run(module)
        register(module)

    loader.exec_module = exec_module


def is_loaded() -> bool:
    """Whether verl has all names of the table above. A module of verl that this process has not
    imported counts when its registration is waiting for it, so that nothing heavy is imported."""
    from verl.plugin.platform import PlatformRegistry

    if "cpu" not in PlatformRegistry.registered_names():
        return False
    waits = any(isinstance(finder, AfterImport) for finder in sys.meta_path)
    return all(
        registration.is_done(sys.modules[name]) if name in sys.modules else waits
        for name, registration in REGISTRATIONS.items()
    )


def _install() -> None:
    if folder := os.environ.get("VERL_MIXED_FOLDER"):  # this is a process of a run of ours
        from config.child import put_last

        put_last(folder)
    import cpu_engine.platform  # noqa: F401

    for name, registration in REGISTRATIONS.items():
        if name in sys.modules:
            registration.register(sys.modules[name])
    waiting = {name: registration.register for name, registration in REGISTRATIONS.items()}
    sys.meta_path.insert(0, AfterImport(waiting))


_install()
