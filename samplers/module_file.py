"""A user's Python file as a module. Standard library only."""

import importlib.util
import sys
from hashlib import sha1
from pathlib import Path
from types import ModuleType


def module_of(path: Path, prefix: str) -> ModuleType:
    """Load a file, once a process; it can import those beside it.

    Args:
        path: a file that ends in `.py`.
        prefix: of the module's name, which a digest of the place ends.

    Raises:
        ImportError: the file fails or exits; the text says with what.
    """
    path = path.resolve()
    name = f"{prefix}_{path.stem}_{sha1(str(path).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None, path
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # before it runs: dataclasses look themselves up
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))  # last, so that it hides nothing
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[name]
            if not isinstance(error, Exception | SystemExit):
                raise
            raise ImportError(f"{type(error).__name__}: {error}") from error
    return sys.modules[name]
