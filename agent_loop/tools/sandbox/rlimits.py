"""No isolation but the kernel's limits on processes, for trusted programs and by name only.

A program reads what its user reads, and reaches the network. Refused to root. What a program leaves
behind is killed, unless it hides from its parent.
"""

import os
from contextlib import ExitStack

from agent_loop.tools.sandbox.landlock import FolderSandbox
from agent_loop.tools.sandbox.program import SandboxUnavailable
from agent_loop.tools.sandbox.zygote import Launch


class RlimitsSandbox(FolderSandbox):
    """Programs under limits and nothing else."""

    name = "rlimits"
    isolates = False
    has_processes = True

    def __init__(self, workers: int = 1, packages: tuple[str, ...] = ()) -> None:
        if os.geteuid() == 0:
            raise SandboxUnavailable("rlimits do not isolate, and root is refused: be another user")
        super().__init__(workers, packages)

    def launch(self, open_fds: ExitStack) -> Launch:
        return Launch(
            plan={
                "namespaces": False,
                "landlock": False,
                "filter": "",
                "uid": None,
                "uids": [],
                "packages": list(dict.fromkeys(str(path.parent) for path in self._paths)),
                "preload": self.preload(),
            },
            env=self.environment(),
        )
