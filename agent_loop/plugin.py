"""Registers this project's names with verl: the `verl.plugins` entry point of every Ray process.

verl adapter: `verl/__init__.py:55-76` at 0.9.1 imports this module while `import verl` runs, and
logs a failure at DEBUG only, so the training process and `verl-mixed doctor` ask `is_loaded`.

| name | verl's registry | process that looks it up |
| --- | --- | --- |
| platform `cpu` | `PlatformRegistry` | all, while `import verl` runs |
| `mixed_sync` and the other trainers | `TRAINER_REGISTRY` | the trainer |
| `state_masked_grpo`, `state_masked_remax` | `ADV_ESTIMATOR_REGISTRY` | the trainer |
| `hf`, `vllm_cpu` | `RolloutReplicaRegistry` | the trainer |
| `hf`, `vllm_cpu` | `_ROLLOUT_REGISTRY` | training workers, checkpoint workers |
| `tcp_store` | `CheckpointEngineRegistry` | the trainer, training and checkpoint workers |
| FSDP2 on `cpu` | `EngineRegistry` | training workers |
| on `cpu`: process group, saved weights | none: `_on_cpu` | training workers |
| the run's own namespace | TransferQueue's `interface` | all that read or write rows |

Only the platform is registered at once: importing the modules with the other registries would add
one to three seconds to the start of every process. A registration imports no module of ours that
imports names from another adapter of ours, because that would close a circle.
"""

import importlib.abc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce, wraps
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from agent_loop.training.queue_namespace import give_own_namespace, has_own_namespace


def _refuse_agentflys_command(words: Sequence[str]) -> None:
    """End a command of AgentFly's fork, whose keys verl does not know, with the one that works."""
    typed = next((word for word in words if word.startswith("agent.")), None)
    if typed and any(word.endswith(("trainer.main_ppo", "trainer/main_ppo.py")) for word in words):
        print(
            f"error: {typed}: agent.* are keys of AgentFly's, which verl does not have; type "
            "`verl-mixed train` in place of `python -m verl.trainer.main_ppo`, with the same "
            "arguments",
            file=sys.stderr,
        )
        raise SystemExit(2)


_refuse_agentflys_command(sys.orig_argv)

_TRAINERS = {
    name: f"agent_loop.training.by_name.{name}"
    for name in ("mixed_sync", "mixed_colocate_async", "mixed_separate_async")
}

_ESTIMATORS = {
    name: f"agent_loop.training.advantage.compute_{name}_advantage"
    for name in ("per_session", "state_masked_grpo", "state_masked_remax")
}
_CHECKPOINTS = {"tcp_store": "cpu_engine.checkpoint_engine.TCPStoreCheckpointEngine"}
_ROLLOUTS = {
    ("hf", "async"): "cpu_engine.rollout.HFServerAdapter",
    ("vllm_cpu", "async"): "cpu_engine.vllm_cpu.ServerAdapter",
}


def _found(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


class ByName(dict[str, Any]):
    """A registry of verl's, which imports an object of ours when its name is looked up first."""

    def __init__(self, registry: Mapping[str, Any], ours: Mapping[str, str]) -> None:
        super().__init__(registry)
        self._ours = ours

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._ours

    def __missing__(self, name: str) -> Any:
        self[name] = found = _found(self._ours[name])
        return found


@dataclass(frozen=True, slots=True)
class Registration:
    """Two functions of verl's module; the first runs again when the module is reloaded."""

    register: Callable[[Any], object]
    is_done: Callable[[Any], bool]


def _named(registry: str, ours: Mapping[str, str]) -> Registration:
    """Our names in a registry of verl's: a dotted path in its module."""
    *path, name = registry.split(".")

    def register(module: Any) -> None:
        holder = reduce(getattr, path, module)
        setattr(holder, name, ByName(getattr(holder, name), ours))

    return Registration(
        register, lambda module: isinstance(reduce(getattr, [*path, name], module), ByName)
    )


def _register_replicas(replica: Any) -> None:
    register = replica.RolloutReplicaRegistry.register
    register("hf", lambda: import_module("cpu_engine.rollout").HFReplica)
    register("vllm_cpu", lambda: import_module("cpu_engine.vllm_cpu").VLLMCPUReplica)


def _has_engines(transformer_impl: Any) -> bool:
    engines = transformer_impl.EngineRegistry._engines
    return all("cpu" in engines[kind]["fsdp2"] for kind in ("language_model", "value_model"))


def _on_cpu(name: str, ours: str) -> Registration:
    """In a process without an accelerator, call ours with verl's and its arguments."""

    def register(module: Any) -> None:
        from verl.utils.device import get_device_name

        if get_device_name() == "cpu":
            verls = getattr(module, name)
            call = wraps(verls)(lambda *given, **named: _found(ours)(verls, *given, **named))
            setattr(module, name, call)

    return Registration(register, lambda module: True)


REGISTRATIONS: Mapping[str, Registration] = {
    "verl.trainer.ppo.v1.trainer_base": _named("TRAINER_REGISTRY", _TRAINERS),
    "verl.trainer.ppo.core_algos": _named("ADV_ESTIMATOR_REGISTRY", _ESTIMATORS),
    "verl.checkpoint_engine": _named("CheckpointEngineRegistry._registry", _CHECKPOINTS),
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
    "verl.utils.distributed": _on_cpu(
        "initialize_global_process_group_ray", "cpu_engine.process_group.initialize"
    ),
    "verl.utils.fsdp_utils": _on_cpu(
        "fsdp2_sharded_save_to_cpu", "cpu_engine.saved_weights.save_copies"
    ),
    "transfer_queue.interface": Registration(give_own_namespace, has_own_namespace),
}
"""Module of verl -> what is registered once it has run."""


class AfterImport(importlib.abc.MetaPathFinder):
    """Runs a registration after each run of its module; where one raises, the import fails."""

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
    """Whether verl has all names of the table above, or a registration waits for its module."""
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
