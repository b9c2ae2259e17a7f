"""Errors of what shuts a program in."""


class SandboxUnavailable(RuntimeError):
    """The sandbox cannot isolate a program, so the program is not run."""


class PackageUnusable(SandboxUnavailable):
    """A package that programs shall import does not import in the sandbox."""

    @classmethod
    def in_sandbox(cls, name: str, why: str) -> "PackageUnusable":
        """The error of the sandbox `name`; `why` names the module and the exception."""
        return cls(
            f"a package for programs is unusable in sandbox={name}: {why}; install what it "
            "requires where the tool server runs"
        )
