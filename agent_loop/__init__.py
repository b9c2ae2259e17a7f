"""Agent loops, and everything that a trajectory passes on its way.

Modules that have moved are found under their old names, which runs' configs and users' code have.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    # named by the config of every run
    "agent_loop.dataset": "agent_loop.training.verl_adapters.dataset",
    "agent_loop.loop_worker": "agent_loop.training.verl_adapters.loop_worker",
    "agent_loop.multi_turn_config": "agent_loop.training.verl_adapters.multi_turn_config",
    # named by the documentation of releases 1.0 and 1.1, for functions, rewards and notebooks
    "agent_loop.tools.protocol": "tool_server.wire.protocol",
    "agent_loop.training.run_folder": "agent_loop.records.run_folder",
}
"""Old name of a module -> its name."""


class _Moved(MetaPathFinder, Loader):
    """Imports a module under its old name; it is the same object."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "agent_loop.tools":  # is empty but for a module that has moved
            return ModuleSpec(fullname, None, is_package=True)
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(MOVED[module.__name__])


sys.meta_path.insert(0, _Moved())  # before the one that would load a module a second time
