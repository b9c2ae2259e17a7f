"""What a host has for isolated programs: an interpreter, packages, files, an environment."""

import fcntl
import importlib.metadata
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterable
from contextlib import ExitStack
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from packaging.requirements import Requirement

from tool_server.isolation.errors import PackageUnusable, SandboxUnavailable

ENVIRONMENT = {
    "HOME": "/box",
    "LANG": "C.UTF-8",
    "MALLOC_ARENA_MAX": "1",  # one arena per thread would reserve more address space than the limit
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "TMPDIR": "/tmp",
}
"""The whole environment of a program."""


def interpreter() -> str:
    """The Python of programs: this process's Python, without its virtual environment."""
    return os.path.realpath(sys.executable)


def readable_paths(packages: Iterable[Path] = ()) -> list[str]:
    """Host paths an interpreter needs to start: itself, its library, the system's libraries."""
    paths = [
        interpreter(),
        sysconfig.get_path("stdlib", vars={"base": sys.base_prefix}),
        str(Path(sys.base_prefix) / "lib"),
        "/usr/lib",
        "/usr/lib64",
        "/usr/bin",
        "/usr/include",
        "/usr/libexec",
        "/etc/alternatives",
        "/etc/ld.so.cache",
        *map(str, packages),
    ]
    return [path for path in dict.fromkeys(paths) if os.path.exists(path)]


def package_paths(names: Iterable[str]) -> list[Path]:
    """Paths that must be readable to import these distributions and their requirements.

    A requirement that is not installed is left out, because not every package that says that it
    requires another needs it; the packages themselves are imported before a server starts.

    Raises:
        PackageUnusable: one of them is not installed.
    """
    asked = [Requirement(name) for name in names]
    paths: dict[Path, None] = {}
    seen, waiting = set[tuple[str, str]](), list(asked)
    while waiting:
        wanted = waiting.pop()
        try:
            distribution = importlib.metadata.distribution(wanted.name)
        except importlib.metadata.PackageNotFoundError as error:
            if wanted not in asked:
                continue
            raise PackageUnusable(
                f"sandbox package={wanted.name!r} is not installed: install it where the tool "
                "server runs"
            ) from error
        for extra in ("", *wanted.extras):
            if (wanted.name, extra) in seen:
                continue
            seen.add((wanted.name, extra))
            for file in distribution.files or ():
                if ".." not in file.parts:  # scripts lie outside
                    paths[Path(str(distribution.locate_file(file.parts[0])))] = None
            for requirement in map(Requirement, distribution.requires or ()):
                if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                    waiting.append(requirement)
    return list(paths)


def import_names(package: str) -> list[str]:
    """Names under which a distribution is imported.

    If it has a module or package of its own name, this is the one; else all that are not private.
    Examples: sympy gives sympy and not isympy, scikit-learn gives sklearn, Pillow gives PIL.
    """
    own_name = Requirement(package).name
    distribution = importlib.metadata.distribution(own_name)
    files = [file.parts for file in distribution.files or ()]
    packages = {parts[0] for parts in files if len(parts) == 2 and parts[1] == "__init__.py"}
    modules = {parts[0].split(".")[0] for parts in files if _is_module(parts)}
    names = sorted(name for name in packages | modules if not name.startswith("_"))
    own = [name for name in names if name.lower() == own_name.replace("-", "_").lower()]
    return own or names


def _is_module(parts: tuple[str, ...]) -> bool:
    return len(parts) == 1 and parts[0].endswith((".py", *EXTENSION_SUFFIXES))


def program(name: str) -> str:
    """Path of a program on PATH, with links resolved.

    Raises:
        SandboxUnavailable: it is not on PATH.
    """
    path = shutil.which(name)
    if path is None:
        raise SandboxUnavailable(f"{name} is not on PATH")
    return os.path.realpath(path)


def memory_file(open_fds: ExitStack, content: bytes | None = None) -> int:
    """A memory file: read-only with `content`, or empty and writable; closed with `open_fds`."""
    fd = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    open_fds.callback(os.close, fd)
    if content is not None:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(fd, 0, os.SEEK_SET)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd
