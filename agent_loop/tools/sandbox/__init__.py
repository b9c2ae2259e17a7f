"""Running untrusted programs, shut away from the host.

`choose_sandbox` proves the isolation before it hands a sandbox out; where no backend stands the
proof it raises, and nothing is executed. How many programs run at once is the caller's business.
"""

from collections.abc import Sequence
from typing import Literal

from agent_loop.tools.sandbox.bubblewrap import BubblewrapSandbox
from agent_loop.tools.sandbox.landlock import LandlockSandbox
from agent_loop.tools.sandbox.probe import prove
from agent_loop.tools.sandbox.program import (
    CellResult,
    Limits,
    NotSupported,
    Program,
    RunResult,
    RunStatus,
    SandboxUnavailable,
)
from agent_loop.tools.sandbox.rlimits import RlimitsSandbox
from agent_loop.tools.sandbox.sandbox import Sandbox, Session

__all__ = [
    "CellResult",
    "Limits",
    "NotSupported",
    "Program",
    "RunResult",
    "RunStatus",
    "Sandbox",
    "SandboxKind",
    "SandboxUnavailable",
    "Session",
    "choose_sandbox",
]

SandboxKind = Literal["auto", "bubblewrap", "landlock", "rlimits"]

_BACKENDS: dict[str, type[Sandbox]] = {
    "bubblewrap": BubblewrapSandbox,
    "landlock": LandlockSandbox,
    "rlimits": RlimitsSandbox,
}
_ISOLATING = ("bubblewrap", "landlock")
"""What `auto` chooses from, the strongest first."""


def choose_sandbox(
    kind: SandboxKind = "auto", *, workers: int = 1, packages: Sequence[str] = ()
) -> Sandbox:
    """The strongest sandbox that works on this machine, proven by a probe program.

    Blocks for one or two short programs; call it once, before serving.

    Args:
        kind: one backend by name, or `auto`: bubblewrap, else Landlock.
        workers: zygotes.
        packages: distributions that programs may import, loaded before they start.

    Returns:
        A sandbox whose `why` says what was chosen and what was passed over.

    Raises:
        ValueError: `kind` is no backend.
        SandboxUnavailable: no backend isolates here; the message names each reason.
    """
    if kind != "auto" and kind not in _BACKENDS:
        raise ValueError(f"unknown sandbox={kind!r}: expected auto, {', '.join(_BACKENDS)}")
    reasons = []
    for name in _ISOLATING if kind == "auto" else [kind]:
        try:
            sandbox = _BACKENDS[name](workers, tuple(packages))
            sandbox.why = "; ".join([*reasons, f"{name}: {prove(sandbox)}"])
        except SandboxUnavailable as error:
            reasons.append(f"{name}: {error}")
        else:
            return sandbox
    raise SandboxUnavailable(
        f"no sandbox for untrusted code with sandbox={kind!r} ({'; '.join(reasons)}): programs run "
        "isolated or not at all; install bubblewrap and allow user namespaces, or use a kernel "
        "with Landlock (5.13 or later)"
    )
