"""Sandbox for untrusted programs: the choice of a backend that isolates them from the host.

`choose_sandbox` runs a probe program in a backend before it returns the backend. If no backend
passes the probe, it raises an error and no program is run. Callers limit how many programs run at
once.
"""

from collections.abc import Sequence
from typing import Literal

from tool_server.isolation.errors import PackageUnusable, SandboxUnavailable
from tool_server.sandbox.bubblewrap import BubblewrapSandbox
from tool_server.sandbox.landlock import LandlockSandbox
from tool_server.sandbox.probe import prove
from tool_server.sandbox.program import (
    Limits,
    NotSupported,
    Program,
    RunResult,
    RunStatus,
)
from tool_server.sandbox.sandbox import WALL_FACTOR, Interpreter, Sandbox

__all__ = [
    "WALL_FACTOR",
    "Interpreter",
    "Limits",
    "NotSupported",
    "PackageUnusable",
    "Program",
    "RunResult",
    "RunStatus",
    "Sandbox",
    "SandboxKind",
    "SandboxUnavailable",
    "choose_sandbox",
]

SandboxKind = Literal["auto", "bubblewrap", "landlock"]

_BACKENDS: dict[str, type[Sandbox]] = {
    "bubblewrap": BubblewrapSandbox,
    "landlock": LandlockSandbox,
}
"""The strongest first."""


def choose_sandbox(
    kind: SandboxKind = "auto", *, workers: int = 1, packages: Sequence[str] = ()
) -> Sandbox:
    """The strongest sandbox that works on this machine, tested with a probe program.

    Blocks while the probe program runs in one or two backends; call it once, before serving.

    Args:
        kind: name of a backend, or `auto`, which tries bubblewrap, then Landlock.
        workers: zygotes, the processes from which programs are forked.
        packages: distributions that programs may import; zygotes load them before programs start.

    Returns:
        A sandbox; its `why` says why this backend was chosen and why others were not.

    Raises:
        ValueError: `kind` is not a backend.
        PackageUnusable: one of `packages` does not import.
        SandboxUnavailable: no backend isolates on this machine; the message has each reason.
    """
    if kind != "auto" and kind not in _BACKENDS:
        raise ValueError(f"unknown sandbox={kind!r}: expected auto, {', '.join(_BACKENDS)}")
    reasons = []
    for name in _BACKENDS if kind == "auto" else [kind]:
        try:
            sandbox = _BACKENDS[name](workers, tuple(packages))
            sandbox.why = "; ".join([*reasons, f"{name}: {prove(sandbox)}"])
            sandbox.start()
        except PackageUnusable:
            raise
        except SandboxUnavailable as error:
            reasons.append(f"{name}: {error}")
        else:
            return sandbox
    raise SandboxUnavailable(
        f"no sandbox for untrusted code with sandbox={kind!r} ({'; '.join(reasons)}): programs run "
        "isolated or not at all; install bubblewrap and allow user namespaces, or use a kernel "
        "with Landlock (5.13 or later)"
    )
