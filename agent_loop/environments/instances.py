"""Makes instances of an environment's class, and calls their methods. Standard library only.

Also used in the interpreters of other environments, see `agent_loop.environments.episode`.
"""

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from samplers.module_file import named_in


def class_of(name: str) -> Any:
    """The class `path/to/file.py:Class` or `module:Class`.

    Raises:
        ValueError: there is no such file, module or class, it cannot be imported, or it has no
            `reset` and `step`.
    """
    place, _, kind = name.rpartition(":")
    failed = f"cannot load environment={name}"
    if place.endswith(".py"):
        found = named_in(name, "environment", inspect.isclass, "class")
    else:
        try:
            module = importlib.import_module(place)
            if (check := getattr(module, "_check_package", None)) is not None:
                check()  # a module of ours whose package is optional
            found = getattr(module, kind)
        except (Exception, SystemExit) as error:  # a package that it needs may raise anything
            words = f"{error}" if isinstance(error, ImportError) else repr(error)
            raise ValueError(f"{failed}: {words}") from error
    missing = [each for each in ("reset", "step") if not callable(getattr(found, each, None))]
    if missing:
        raise ValueError(
            f"{failed}: the class has no {' and no '.join(missing)}; docs/environments.md has what "
            "an environment needs"
        )
    return found


def made(kind: Any, options: Mapping[str, Any]) -> Any:
    """An instance with these options.

    Raises:
        ValueError: the class does not take them; or what the class raises.
    """
    try:
        inspect.signature(kind).bind(**options)
    except TypeError as error:
        raise ValueError(
            f"{kind.__qualname__} does not take options={dict(options)}: {error}; correct "
            "`options` of the environment"
        ) from error
    return kind(**options)
