"""verl's entry into this project: the `verl.plugins` entry point of every Ray process.

verl adapter: `verl/__init__.py:55-76` at 0.9.1 loads this module inside `import verl`, and
swallows its failures at DEBUG; `verl-mixed check` therefore asks `is_loaded`. Only the platform is
registered at once. Whatever needs a heavy module of verl is registered when that module is first
imported, so a process that never trains never pays for it.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_hooks: dict[str, Callable[[ModuleType], None]] = {}


class _HookedLoader(importlib.abc.Loader):
    """Runs the module's own loader, then our hook."""

    def __init__(self, inner: Any, hook: Callable[[ModuleType], None]) -> None:
        self.inner, self.hook = inner, hook

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        self.hook(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class _HookFinder(importlib.abc.MetaPathFinder):
    """Finds only modules with a hook, once each."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        hook = _hooks.pop(fullname, None)
        if hook is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _HookedLoader(spec.loader, hook)
        return spec


def _after_import(name: str, hook: Callable[[ModuleType], None]) -> None:
    if name in sys.modules:
        hook(sys.modules[name])
    else:
        _hooks[name] = hook


def _register_advantage(module: ModuleType) -> None:
    import agent_loop.training.advantage  # noqa: F401


def _register_rollout(module: ModuleType) -> None:
    module._ROLLOUT_REGISTRY[("hf", "async")] = "agent_loop.cpu.rollout.HFServerAdapter"
    module._ROLLOUT_REGISTRY[("vllm_cpu", "async")] = "agent_loop.cpu.vllm_cpu.ServerAdapter"


def _register_replica(module: ModuleType) -> None:
    def load() -> type:
        from agent_loop.cpu.rollout import HFReplica

        return HFReplica

    def load_vllm_cpu() -> type:
        from agent_loop.cpu.vllm_cpu import VLLMCPUReplica

        return VLLMCPUReplica

    module.RolloutReplicaRegistry.register("hf", load)
    module.RolloutReplicaRegistry.register("vllm_cpu", load_vllm_cpu)


def _register_engine(module: ModuleType) -> None:
    import agent_loop.cpu.engine  # noqa: F401


def _register_checkpoint_engine(module: ModuleType) -> None:
    import agent_loop.cpu.checkpoint_engine  # noqa: F401


def _register_trainer(module: ModuleType) -> None:
    import agent_loop.training.trainer  # noqa: F401


def is_loaded() -> bool:
    """Whether verl knows our platform: the sign that this module ran to its end."""
    from verl.plugin.platform import PlatformRegistry

    return "cpu" in PlatformRegistry.registered_names()


def _install() -> None:
    import agent_loop.cpu.platform  # noqa: F401

    sys.meta_path.insert(0, _HookFinder())
    _after_import("verl.trainer.ppo.core_algos", _register_advantage)
    _after_import("verl.workers.rollout.base", _register_rollout)
    _after_import("verl.workers.rollout.replica", _register_replica)
    _after_import("verl.workers.engine.fsdp.transformer_impl", _register_engine)
    _after_import("verl.checkpoint_engine", _register_checkpoint_engine)
    _after_import("verl.trainer.ppo.v1", _register_trainer)


_install()
