"""Resource limits without isolation, for trusted programs; never chosen by `auto`.

A program can read every file of its user and reach the network. Root may not use this backend.
Processes that a program leaves behind are killed, unless they hide from their parent.
"""

import os
from contextlib import ExitStack

from tool_server.isolation.errors import SandboxUnavailable
from tool_server.sandbox.landlock import FOLDER_ENVIRONMENT, FolderSandbox
from tool_server.sandbox.zygote import Launch


class RlimitsSandbox(FolderSandbox):
    """Sandbox with the kernel's resource limits only."""

    name = "rlimits"
    isolates = False
    has_processes = True

    def __init__(self, workers: int = 1, packages: tuple[str, ...] = ()) -> None:
        if os.geteuid() == 0:
            raise SandboxUnavailable("rlimits do not isolate, so root is refused: use another user")
        super().__init__(workers, packages)

    def launch(self, open_fds: ExitStack) -> Launch:
        return Launch(plan=self.plan(self._paths), env=FOLDER_ENVIRONMENT)
