"""What this project requires, as the metadata of its package says, and what of it is installed.

Standard library only at the top, because an environment of a user may lack any package.
"""

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

PROJECT = "verl-mixed-agent-loop"
PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
ALL = "all"
"""The extra that the scripts install."""


class NotComplete(ValueError):
    """Packages of an extra are not installed; the message says which extra to install."""


def version_of(name: str) -> str | None:
    """The installed version of a package, None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def required(*extras: str) -> "list[Requirement]":
    """What applies here of the project's requirements, with those of extras.

    Raises:
        NotComplete: this project or `packaging` is not installed as a package.
    """
    try:
        requirements = {one.name: one for one in _required({"", *extras})}
    except (PackageNotFoundError, ModuleNotFoundError) as error:
        raise NotComplete(
            f"the package {error.name} is not installed: pip install '{PROJECT}[{ALL}]', or "
            f"`pip install -e '.[{ALL}]'` in a checkout"
        ) from error
    return list(requirements.values())


def _required(extras: set[str]) -> "Iterator[Requirement]":
    from packaging.requirements import Requirement

    for extra, text in _written():
        one = Requirement(text)
        if extra and extra not in extras:
            continue
        if one.marker is not None and not any(one.marker.evaluate({"extra": e}) for e in extras):
            continue
        if one.name == PROJECT:
            yield from _required(one.extras)
        else:
            yield one


def _written() -> Iterator[tuple[str, str]]:
    """(extra, or "" where the marker says it; requirement) of the metadata; of pyproject.toml in a
    checkout that is not installed."""
    try:
        yield from (("", text) for text in distribution(PROJECT).requires or ())
        return
    except PackageNotFoundError:
        if not PYPROJECT.exists():
            raise
    toml = import_module("tomllib" if sys.version_info >= (3, 11) else "pip._vendor.tomli")
    project = toml.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    yield from (("", text) for text in project["dependencies"])
    for extra, texts in project["optional-dependencies"].items():
        yield from ((extra, text) for text in texts)


def lacking(*extras: str) -> list[str]:
    """Names of packages that extras require and that are not installed.

    Raises:
        NotComplete: as `required`.
    """
    return [one.name for one in required(*extras) if version_of(one.name) is None]


def refuse_without(extra: str, what: str) -> None:
    """Refuse `what` if a package of its extra is not installed.

    Raises:
        NotComplete: it is not.
    """
    if names := lacking(extra):
        others = f" and {len(names) - 3} more packages" if len(names) > 3 else ""
        raise NotComplete(
            f"{what} needs the extra {extra!r}: pip install '{PROJECT}[{extra}]' "
            f"(not installed: {', '.join(names[:3])}{others})"
        )
