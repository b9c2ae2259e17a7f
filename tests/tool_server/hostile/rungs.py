"""The four rungs of the sandbox: two backends, each as root and as an ordinary user.

Each rung is judged in a process of its own, which writes its verdicts line by line. The ordinary
user of a rung owns a copy of this Python and of the code, because an attacker who owns the files of
his interpreter can do more to them; and because root's Python is often not readable for others.
"""

import contextlib
import json
import os
import pwd
import secrets
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[3]
RUNGS = ("bubblewrap-root", "landlock-user", "bubblewrap-user", "landlock-root")
"""Neighbours in this order run at the same time: two different backends, two different users."""

JUDGE = "tests.tool_server.hostile"
_NOT_COPIED = (
    *("site-packages", "test", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip"),
    *("config-*", "pydoc_data", "unittest"),
)
_USERS = range(20_000, 60_000)
"""Numbers of users without an account. A random one, because the kernel counts processes by user
and other runs of these tests may be under way."""

_LIST_PACKAGES = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
for module in list(sys.modules.values()):
    if file := getattr(module, "__file__", None):
        print(module.__name__.partition(".")[0], file, sep="\\t")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Who runs a rung: the start of a command that becomes this user, and the environment."""

    command: Sequence[str]
    env: Mapping[str, str]


def sandbox_of(rung: str) -> str:
    return rung.partition("-")[0]


def missing(rung: str) -> str:
    """Why this process cannot judge a rung; empty if it can."""
    if rung.endswith("-root") and os.geteuid() != 0:
        return "only root can judge the rungs of root"
    return ""


@contextlib.contextmanager
def account(rung: str, *modules: str) -> Iterator[Account]:
    """The account of a rung, whose Python can import `modules`; closing it removes its files."""
    if rung.endswith("-root") or os.geteuid() != 0:
        path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        yield Account(command=[sys.executable], env={**os.environ, "PYTHONPATH": path})
        return
    # Not below /tmp: a run would then have the host's /tmp instead of its own.
    with tempfile.TemporaryDirectory(prefix="hostile-user-", dir="/var/tmp") as name:
        folder, uid = Path(name), _free_user()
        python = _copy_python(folder)
        _copy_packages(folder / "packages", modules)
        for own in ("home", "tmp"):
            (folder / own).mkdir()
        for above, folders, files in os.walk(folder):
            for each in (above, *(f"{above}/{one}" for one in (*folders, *files))):
                os.chown(each, uid, uid, follow_symlinks=False)
        yield Account(
            command=[
                *("setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups", "--"),
                str(python),
            ],
            env={
                "HOME": f"{folder}/home",
                "TMPDIR": f"{folder}/tmp",
                "PATH": os.environ["PATH"],
                "PYTHONPATH": f"{folder}/packages",
                "PYTHONDONTWRITEBYTECODE": "1",
                "OMP_NUM_THREADS": "1",
            },
        )


def _free_user() -> int:
    while True:
        uid = secrets.choice(_USERS)
        try:
            pwd.getpwuid(uid)
        except KeyError:
            return uid


def _copy_python(folder: Path) -> Path:
    """Copy the base interpreter and its library; returns the path of the copy."""
    base = Path(sys.base_prefix)
    library = Path(sysconfig.get_path("stdlib", vars={"base": sys.base_prefix}))
    shutil.copytree(
        library,
        folder / library.relative_to(base),
        ignore=shutil.ignore_patterns(*_NOT_COPIED),
        symlinks=True,
    )
    for path in (base / "lib").glob("libpython*.so*"):
        shutil.copy2(path, folder / "lib", follow_symlinks=False)
    own = Path(os.path.realpath(sys.executable))
    copy = folder / "bin" / own.name
    copy.parent.mkdir()
    # The program names the folder of its shared library, which the user cannot read.
    before, after = f"{base}/lib\0".encode(), b"$ORIGIN/../lib\0"
    content = own.read_bytes()
    if len(before) >= len(after):
        content = content.replace(before, after.ljust(len(before), b"\0"))
    copy.write_bytes(content)
    copy.chmod(0o755)
    return copy


def _copy_packages(folder: Path, modules: Sequence[str]) -> None:
    """Copy the packages that `modules` import, from the repository and from site-packages."""
    listed = subprocess.run(
        [sys.executable, "-c", _LIST_PACKAGES, *modules],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    installed = Path(sysconfig.get_path("purelib"))
    for line in sorted(set(listed.splitlines())):
        package, file = line.split("\t")
        root = installed if Path(file).is_relative_to(installed) else REPOSITORY
        if not Path(file).is_relative_to(root):
            continue
        if package == "tests":  # only what was imported
            target = folder / Path(file).relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, target)
        elif (root / package).is_dir():
            if not (folder / package).exists():
                shutil.copytree(root / package, folder / package)
                for info in root.glob(f"{package}-*.dist-info"):
                    shutil.copytree(info, folder / info.name)
        else:
            folder.mkdir(exist_ok=True)
            shutil.copy2(file, folder)


class RungUnavailable(RuntimeError):
    """The sandbox of a rung does not work on this machine."""


@dataclass(kw_only=True)
class JudgedRung:
    """The process that judges a rung, and the verdicts that it has written so far."""

    rung: str
    process: "subprocess.Popen[str]"
    log: Path
    lines: dict[str, dict[str, Any]] = field(default_factory=dict)

    def verdict(self, name: str) -> dict[str, Any]:
        """Wait for the verdict on a program: `findings`, `observed`.

        Raises:
            RungUnavailable: the sandbox does not work on this machine.
            RuntimeError: the process ended before its verdict.
        """
        assert self.process.stdout is not None
        while name not in self.lines:
            line = self.process.stdout.readline()
            if not line:
                raise RuntimeError(
                    f"no verdict on {name!r} from rung={self.rung}: {self.log.read_text()[-3000:]}"
                )
            parsed = json.loads(line)
            self.lines[parsed.get("program", "")] = parsed
            if why := parsed.get("unavailable"):
                raise RungUnavailable(
                    f"rung={self.rung} does not work on this machine: {why}; "
                    "install bubblewrap, and allow user namespaces and Landlock"
                )
        return self.lines[name]


@contextlib.contextmanager
def judged(rung: str, names: Sequence[str]) -> Iterator[JudgedRung]:
    """Start to judge programs on a rung."""
    with contextlib.ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.NamedTemporaryFile(suffix=".log")).name)
        own = stack.enter_context(account(rung, f"{JUDGE}.__main__"))
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [*own.command, "-m", JUDGE, sandbox_of(rung), json.dumps(names)],
                env=dict(own.env),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        try:
            yield JudgedRung(rung=rung, process=process, log=log)
        finally:
            process.terminate()
            process.communicate()
